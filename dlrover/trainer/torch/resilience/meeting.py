"""
Workers of a state that is cut into pieces meet before they change it: no worker steps its optimizer before all have their gradients.

Otherwise a loss can leave all workers with one piece a step ahead of all workers with another, and no step is whole any more. A worker that waits here when a
worker is lost can still finish the step, if another worker has passed.

The workers of one node wait for words in the pages that they share with their agent. The wait is bounded: a worker that does not come is not waited for
again. Then a loss may cost the steps since the newest snapshot, as without the meeting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from dlrover.host.shared_page.breath_page import BreathPage
from dlrover.protocol.progress_page import DEATH_NOTICE_AT
from dlrover.trainer import environment

log = logging.getLogger("dlrover.trainer.resilience")

PATIENCE = 5.0
"""Seconds. A healthy worker comes within a fraction of a step."""


class Meeting:
    def __init__(self, own: BreathPage, peers: Sequence[BreathPage], patience: float = PATIENCE) -> None:
        self._own, self._peers = own, peers
        self.patience = patience
        self._is_over = False

    @classmethod
    def open(cls, own: BreathPage, models: Iterable[Any]) -> Meeting | None:
        """None: the state is not cut, no worker has a second copy of a piece, or the job has more nodes than this one."""
        where = environment.current()
        if where is None or len(where.node_pages) != dist.get_world_size() or not any(map(_is_cut_and_copied, models)):
            return None
        others = [path for rank, path in enumerate(where.node_pages) if rank != where.local_rank]
        try:
            return cls(own, [BreathPage.open(path, DEATH_NOTICE_AT) for path in others])
        except OSError as error:
            log.info("Workers do not wait for each other before a step: %s", error.strerror)
            return None

    def is_complete_after_wait(self, is_lost: Callable[[], bool]) -> bool:
        """This worker has its gradients. Whether all others have theirs, too; False: `is_lost` says that a worker is lost."""
        count = self._own.num_ready + 1
        self._own.num_ready = count
        until = time.monotonic() + self.patience
        for peer in self._peers:
            while not self._is_over and (seen := peer.num_ready) < count:
                if is_lost():
                    return False
                left = until - time.monotonic()
                if left <= 0:
                    self._give_up()
                    break
                peer.wait_while_ready(seen, left)
        return True

    def interrupt(self) -> None:
        """From another thread: a worker that waits looks again whether a worker is lost."""
        for peer in self._peers:
            peer.wake_peers()

    def _give_up(self) -> None:
        self._is_over = True
        log.warning(
            "A worker did not reach its optimizer step within %g s of this one. From now on workers do not "
            "wait for each other, and a lost worker may cost the steps since the newest snapshot.",
            self.patience,
        )


def _is_cut_and_copied(model: Any) -> bool:
    """Hybrid sharding: each piece is in more than one worker."""
    for parameter in model.parameters():
        placements = getattr(parameter, "placements", ())
        if any(each.is_shard() for each in placements) and any(each.is_replicate() for each in placements):
            return True
    return False
