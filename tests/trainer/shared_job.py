"""The books of one job for several ranks, which may be processes: each has a link of its own to it."""

from __future__ import annotations

import threading
from multiprocessing.managers import BaseManager
from typing import Any

from msgspec.structs import replace

from dlrover.core.job import Job
from dlrover.core.outcome import NotYet
from dlrover.protocol.messages.data import DataCommand
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    JobTerms,
    Limits,
    MasterStarted,
    Micros,
    Reply,
    Round,
    WorkerRequest,
)


class SharedJob:
    def __init__(self, num_ranks: int) -> None:
        self._job = Job()
        self._lock = threading.Lock()
        self._apply(MasterStarted(1, "shared"))
        self._nodes = [self._attached(rank) for rank in range(num_ranks)]

    def ask(self, rank: int, request: WorkerRequest) -> Reply:
        with self._lock:
            if isinstance(request, DataCommand):
                node = self._nodes[rank]
                return self._apply(replace(request, node=node.node, incarnation=node.incarnation, round=Round(0)))
            answer = self._job.ask(request)  # type: ignore[arg-type]  # a query about data
            assert not isinstance(answer, NotYet)
            return answer

    def _attached(self, rank: int) -> Attached:
        terms = JobTerms(limits=Limits(max_nodes=8))
        attached = self._apply(Attach(launch=f"rank-{rank}", host=f"host-{rank}", terms=terms, local_world_size=1))
        assert isinstance(attached, Attached), attached
        return attached

    def _apply(self, command: Any) -> Reply:
        return self._job.apply(command, Micros(self._job.now + 1)).reply


class RankLink:
    """Implements `Link`, for one rank."""

    def __init__(self, job: Any, rank: int) -> None:
        self._job, self._rank = job, rank

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        reply: Reply = self._job.ask(self._rank, request)
        return reply


class JobManager(BaseManager):
    """Serves a job to other processes."""


JobManager.register("SharedJob", SharedJob)
