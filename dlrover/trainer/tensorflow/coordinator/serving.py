"""Workers of a coordinator: they serve, whatever it sends them, and know nothing of the program."""

from __future__ import annotations

import logging
import os

from dlrover.protocol.messages.cluster import ClusterPhase, ProcessParked, ServerBound, VersionView
from dlrover.trainer.tensorflow.link import ClusterLink
from dlrover.trainer.tensorflow.server import TaskServer

log = logging.getLogger("dlrover.trainer.tensorflow")

PARKED = (ClusterPhase.PARKING, ClusterPhase.SAVING)


def serve_worker(link: ClusterLink) -> None:
    """To the end of the training. Where a process before it in this version listened, this one does: there the coordinator finds it again."""
    where = link.where
    link.start()
    former = link.wait_for(lambda view: True).workers.get(where.task_rank, "")
    port = int(former.rpartition(":")[2]) if former else 0
    server = TaskServer(where.task_type, where.task_rank, where.node_host, port)
    log.info(
        "worker-%d serves version %d at %s (pid %d)",
        where.task_rank,
        where.cluster_version,
        server.address,
        os.getpid(),
    )
    link.tell(ServerBound(address=server.address))
    view = _next_order(link, 0)
    while not view.is_over:
        link.tell(ProcessParked(step=0))  # it steps when the coordinator says so, and that one parks by itself
        view = _next_order(link, view.num_parks)


def _next_order(link: ClusterLink, parked_for: int) -> VersionView:
    return link.wait_for(lambda view: view.is_over or (view.phase in PARKED and view.num_parks > parked_for))
