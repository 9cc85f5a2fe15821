"""
Where the model and its data meet: a snapshot of a step is taken after the reports about it, and a restored step is told to the books.

Flash Checkpoint calls these functions; scripts that restore their models by other means call `restored` themselves, on one rank, and `loaded`
on all others, before they take a shard.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.data import (
    AskDataCheckpoint,
    Claim,
    DataCheckpoint,
    DatasetSpec,
    RestoreAgreed,
    last_shared,
)
from dlrover.protocol.messages.job import Round
from dlrover.trainer import environment
from dlrover.trainer.agent_link import Link, current_link

log = logging.getLogger("dlrover.trainer.data")

FLUSH = 0.2
"""Seconds that a save waits for the master to confirm what was consumed. Usually it has long done so."""
STORAGE_FLUSH = 5.0
"""The same for a storage save, which cannot be made without: a master that is only busy, after a restart, must not cost a checkpoint."""
_GLANCE = 0.005
_TELL = 3600.0
"""Seconds: as long as readers wait for a master that is away. Without this word no shard is theirs, or the wrong ones are."""


class ReadingFeed(Protocol):
    """A `ShardFeed`, as far as a snapshot needs it."""

    @property
    def spec(self) -> DatasetSpec: ...

    @property
    def is_late(self) -> bool: ...

    def flush(self, timeout: float) -> bool: ...

    def unanswered(self) -> Iterable[Claim]: ...

    def at_exit(self) -> None: ...


feeds: weakref.WeakSet[ReadingFeed] = weakref.WeakSet()
"""Of this process."""
model_loaded = threading.Event()
"""This process has a model of which one rank tells the master: no shards are wanted before that word is there."""

_postponed: list[Callable[[], None]] = []
"""At most one: what is said of the newest restored model."""


@atexit.register
def _say_last_words() -> None:
    for feed in list(feeds):
        feed.at_exit()


def confirm(patience: float = FLUSH) -> bool:
    """
    Have everything confirmed that this rank consumed; whether it is. A snapshot of a model whose reports could still be lost must say itself
    what it contains (`unconfirmed`): else its records would be read again by the model itself. While the master is known to be away no rank
    waits for it.
    """
    end_at = time.monotonic() + patience
    is_confirmed = []
    for feed in list(feeds):
        left = _GLANCE if feed.is_late else max(0.0, end_at - time.monotonic())
        is_confirmed.append(feed.flush(timeout=left))
    return all(is_confirmed)


def unconfirmed(step: int) -> dict[str, list[Claim]]:
    """By dataset: what the model of this step contains, as far as this rank read it and the master may not know."""
    found: dict[str, list[Claim]] = {}
    for feed in list(feeds):
        ranges = found.setdefault(feed.spec.name, [])
        for claim in sorted(feed.unanswered(), key=_in_order):
            last = ranges[-1] if ranges else None
            if claim.step > step:
                continue
            if last is not None and _key(last) == _key(claim) and last.end == claim.start:
                # Neighbours: a model of this step contains both.
                step_of_both = max(last.step, claim.step)
                ranges[-1] = Claim(last.epoch, last.start, claim.end, step_of_both, last.partition, last.listing)
            else:
                ranges.append(claim)
    return {name: ranges for name, ranges in found.items() if ranges}


def rest_of_data(step: int) -> str:
    """
    What a model of this step has not seen of any training dataset, as the books say now; empty: they do not answer. Everything that was read for the
    step has been confirmed.
    """
    try:
        return _ask_rest(step, FLUSH)
    except (Rejected, Unavailable) as error:
        log.info(
            "The master did not answer which data the model of step %d has not read yet. The commit of the "
            "checkpoint records it instead: %s",
            step,
            error,
        )
        return ""


def is_known(step: int) -> bool:
    """Whether the books know what a model of this step has read; not so if the journal was lost."""
    try:
        content = _ask_rest(step, _TELL)
    except (Rejected, Unavailable):
        return False
    return bool(content) and any(each["num_consumed"] for each in msgspec.json.decode(content)["datasets"].values())


def _ask_rest(step: int, timeout: float) -> str:
    where = environment.current()
    question = AskDataCheckpoint(dataset="", step=step, round=Round(0) if where is None else where.round)
    reply = current_link().ask(question, timeout=timeout)
    assert isinstance(reply, DataCheckpoint), reply
    return reply.content


def has_turns() -> bool:
    """Whether any rank ever went on with a model and its data: else nothing can have been given up. The same on all ranks."""
    where = environment.current()
    return where is not None and bool(where.turns)


def is_given_up(step: int, round_: int) -> bool:
    """
    Whether a model of that step, trained in that round, is of a history that others did not go on with: they took up an older model, and
    read again what this one contains. It may lie in the memory of a node that was cut off meanwhile.
    """
    where = environment.current()
    return where is not None and last_shared(step, round_, where.turns) < step


def postpone(tell: Callable[[], None]) -> None:
    """
    For a model that is restored before the script has imported anything that reads shards, as `import dlrover` makes it usual: said when the first
    feed begins. Never said, the readers of the next round would wait for it.
    """
    _postponed[:] = [tell]


def tell_postponed() -> None:
    """Before a feed asks for anything."""
    while _postponed:
        _postponed.pop()()


def loaded() -> None:
    """
    This rank has loaded the model that one rank tells of (`restored`), which may be slower: what this rank asks for waits until that word has come,
    for records that the model has seen must not come to any rank.
    """
    model_loaded.set()


def restored(
    step: int | None,
    *,
    claims: dict[str, tuple[Claim, ...]] | None = None,
    data_state: str = "",
    is_explicit: bool = False,
    link: Link | None = None,
) -> None:
    """
    The ranks of this round go on with the model of this step; None: from scratch. One rank says it for all.

    `claims` are what the ranks could not have confirmed when the snapshot was taken.

    `data_state` is what the manifest of its checkpoint says; with `is_explicit` the data go back to that in any case.
    """
    where = environment.current()
    told = RestoreAgreed(
        step=-1 if step is None else step,
        claims=claims or {},
        data_state=data_state,
        is_explicit=is_explicit,
        round=Round(0) if where is None else where.round,
        local_rank=0 if where is None else where.local_rank,
    )
    try:
        (current_link() if link is None else link).ask(told, timeout=_TELL)
    except (Rejected, Unavailable) as error:
        log.warning(
            "The master did not set the datasets back to step %s of the model, so records may be skipped or "
            "read twice: %s",
            step,
            error,
        )


def _key(claim: Claim) -> tuple[int, str, int]:
    return claim.epoch, claim.partition, claim.listing


def _in_order(claim: Claim) -> tuple[int, str, int, int]:
    return claim.epoch, claim.partition, claim.listing, claim.start
