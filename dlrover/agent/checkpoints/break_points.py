"""
What is left in memory when the workers of a node have ended, held until it is decided what of it is written.

The pins are taken before new workers start, so no worker waits for the decision and nothing is overwritten before it. The master hears of
everything that is held, also of copies that another node would write; it names what is to be written, and the rest is let go. If it
does not answer soon, each node writes whatever it has to write of it: the files will show which step is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from dlrover.agent.checkpoints.duties import DutyLine
from dlrover.protocol.messages.checkpoint import HeldSnapshot, PersistSnapshot, SnapshotsHeld
from dlrover.protocol.messages.job import Round
from dlrover.snapshot.memory.mirror import copy_paths
from dlrover.snapshot.memory.segment import PinnedSlot, Segment, SlotName
from dlrover.snapshot.memory.segment_format import SegmentInvalid
from dlrover.snapshot.storage.persist import SaveRequest, of_present_history, pin_newest, release

DECISION = 15.0
"""Seconds that snapshots are held for the master to say which are worth writing."""

Held = list[tuple[PinnedSlot, SaveRequest]]


def pin_held(
    slots: Iterable[SlotName],
    read: Callable[[PinnedSlot], SaveRequest | None],
    is_written: Callable[[SaveRequest], bool],
) -> Held:
    """Everything that is not being written anyway, oldest first."""
    held: Held = []
    for name in slots:
        pinned = pin_newest(name.path, name.slot, name.generation)
        if pinned is None:
            continue
        request = read(pinned)
        if request is None or is_written(request):
            release(pinned)
        else:
            held.append((pinned, request))
    return in_order(held)


def in_order(held: Held) -> Held:
    return sorted(held, key=lambda each: (each[0].record.round, each[1].step))


def copied_slots(home: Path) -> list[SlotName]:
    """Complete snapshots of other nodes that are kept here."""
    found: list[SlotName] = []
    for path in copy_paths(home):
        try:
            with Segment(path) as segment:
                found += of_present_history(segment.complete_slots())
        except (SegmentInvalid, FileNotFoundError):
            continue  # given up meanwhile
    return found


def describe(held: Held) -> tuple[HeldSnapshot, ...]:
    return tuple(
        HeldSnapshot(
            directory=request.directory,
            attempt=request.attempt,
            step=request.step,
            shard=request.shard,
            num_shards=request.num_shards,
            round=Round(pinned.record.round),
        )
        for pinned, request in held
    )


class BreakPointSaves:
    def __init__(self) -> None:
        self._asked_round = Round(0)
        """Newest round after which the master was asked what to write."""
        self._decision: asyncio.Future[tuple[PersistSnapshot, ...] | None] | None = None

    def hear(self, persists: tuple[PersistSnapshot, ...]) -> None:
        meant = tuple(each for each in persists if each.round == self._asked_round)
        if meant and self._decision is not None and not self._decision.done():
            self._decision.set_result(meant)

    def lose(self) -> None:
        """No word of the master is to be expected."""
        if self._decision is not None and not self._decision.done():
            self._decision.set_result(None)

    async def choose(self, line: DutyLine | None, round_: Round, held: Held) -> Held:
        """What to write, in order; the rest is let go."""
        wanted = None
        if line is not None and line.is_up and round_ > self._asked_round:
            self._asked_round = round_
            wanted = await self._ask(line, round_, held)
        chosen: Held = []
        for pinned, request in held:
            if wanted is None and request.is_writer:
                chosen.append((pinned, request))  # the older first: it is more likely to be complete elsewhere
            elif wanted is not None and _is_named(request, wanted):
                chosen.append((pinned, replace(request, is_writer=True)))
            else:
                release(pinned)
        return chosen

    async def _ask(self, line: DutyLine, round_: Round, held: Held) -> tuple[PersistSnapshot, ...] | None:
        decision = self._decision = asyncio.get_running_loop().create_future()
        if not await line.tell(SnapshotsHeld(round=round_, held=describe(held)), timeout=DECISION):
            return None
        await asyncio.wait([decision], timeout=DECISION)
        return decision.result() if decision.done() else None


def _is_named(request: SaveRequest, wanted: tuple[PersistSnapshot, ...]) -> bool:
    return any(
        (each.directory, each.attempt) == (request.directory, request.attempt) and request.shard in each.shards
        for each in wanted
    )
