"""
Where the model and its data meet: a snapshot of a step is taken after the reports about it, and a restored step is told to the books.

Flash Checkpoint calls both functions; scripts that restore their models by other means call `restored` themselves, on one rank, before
anybody takes a shard.
"""

from __future__ import annotations

import atexit
import logging
import time
import weakref
from typing import TYPE_CHECKING

from dlrover.protocol.data_messages import RestoreAgreed
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages import Round
from dlrover.trainer import environment
from dlrover.trainer.stand_in import current_link

if TYPE_CHECKING:
    from dlrover.trainer.agent_link import Link
    from dlrover.trainer.shard_feed import ShardFeed

log = logging.getLogger("dlrover.trainer.data")

FLUSH = 0.2
"""Seconds that a save waits for the master to confirm what was consumed. Usually it has long done so."""
_TELL = 60.0

feeds: weakref.WeakSet[ShardFeed] = weakref.WeakSet()
"""Of this process."""


@atexit.register
def _say_last_words() -> None:
    for feed in list(feeds):
        feed.at_exit()


def confirm() -> bool:
    """
    Have everything confirmed that this rank consumed; whether it is. A snapshot of a model whose reports could still be lost must not be
    taken: its records would be read again by the model itself.
    """
    end_at = time.monotonic() + FLUSH
    is_confirmed = [feed.flush(timeout=max(0.0, end_at - time.monotonic())) for feed in list(feeds)]
    return all(is_confirmed)


def restored(step: int | None, *, data_state: str = "", is_explicit: bool = False, link: Link | None = None) -> None:
    """
    The ranks of this round go on with the model of this step; None: from scratch. One rank says it for all.

    `data_state` is what the manifest of its checkpoint says; with `is_explicit` the data go back to that in any case.
    """
    where = environment.current()
    told = RestoreAgreed(
        step=-1 if step is None else step,
        data_state=data_state,
        is_explicit=is_explicit,
        round=Round(0) if where is None else where.round,
        local_rank=0 if where is None else where.local_rank,
    )
    try:
        (current_link() if link is None else link).ask(told, timeout=_TELL)
    except (Rejected, Unavailable) as error:
        log.warning("the data cannot be set to step %s of the model: %s", step, error)
