"""
What this node could give to others: the snapshots of its own workers, and the copies it keeps for other nodes.

Read from the files each time, because trainers write them without telling us. Only what a slot says of itself is remembered, by its
generation, which never comes back.
"""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec import Struct

from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.peers import Held
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.mirror import copy_paths
from dlrover.snapshot.memory.segment import PinnedSlot, Segment, SlotName, segment_paths
from dlrover.snapshot.memory.segment_format import SegmentInvalid
from dlrover.snapshot.storage.persist import (
    SaveRequest,
    of_present_history,
    pin_newest,
    read_request,
    release,
    sum_slot,
)

log = logging.getLogger("dlrover.agent")

_MOST_REMEMBERED = 1024


class Holding(Struct, frozen=True):
    name: SlotName
    request: SaveRequest
    num_bytes: int
    is_copy: bool

    def told(self) -> Held:
        return Held(
            shard=self.request.shard,
            attempt=self.request.attempt,
            step=self.name.step,
            round=self.name.round,
            num_shards=self.request.num_shards,
            num_bytes=self.num_bytes,
            is_copy=self.is_copy,
        )


class Holdings:
    """Of one home. Used by several threads; what they may lose in a race is a little work."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._known: dict[tuple[str, int, int], tuple[SaveRequest, int] | None] = {}

    def all(self) -> list[Holding]:
        """Own ones first. A past that training has gone back behind is left out."""
        own: dict[int, list[SlotName]] = {}
        for path in segment_paths(self.home):
            shard, names = _look(path)
            own.setdefault(shard, []).extend(names)
        copies = [name for path in copy_paths(self.home) for name in _look(path)[1]]
        found = [self._read(name, is_copy=False) for names in own.values() for name in of_present_history(names)]
        found += [self._read(name, is_copy=True) for name in copies]
        return [holding for holding in found if holding is not None]

    def pin(self, shard: int, attempt: str) -> tuple[PinnedSlot, SaveRequest] | None:
        """With its sums; `release` it afterwards."""
        for holding in self.all():
            if (holding.request.shard, holding.request.attempt) != (shard, attempt):
                continue
            name = holding.name
            sum_slot(name)
            pinned = pin_newest(name.path, name.slot, name.generation)
            if pinned is not None:
                return pinned, holding.request
        return None

    def newest_copy(self, shard: int) -> SlotName | None:
        """The newest of the newest round."""
        names = [name for path in copy_paths(self.home, shard) for name in _look(path)[1]]
        return max(names, key=lambda name: (name.round, name.generation), default=None)

    def _read(self, name: SlotName, *, is_copy: bool) -> Holding | None:
        key = (name.path, name.slot, name.generation)
        if key not in self._known:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            pinned = pin_newest(name.path, name.slot, name.generation)
            if pinned is None:
                return None  # being written again just now
            try:
                request = read_request(decode_contents(pinned.sections()))
                self._known[key] = None if request is None else (request, pinned.record.data_length)
            except DLRoverError as error:
                log.warning("this node does not offer a snapshot of step %d to other nodes: %s", name.step, error)
                self._known[key] = None
            finally:
                release(pinned)
        known = self._known[key]
        return None if known is None else Holding(name, known[0], known[1], is_copy)


def _look(path: Path) -> tuple[int, list[SlotName]]:
    try:
        with Segment(path) as segment:
            return segment.owner.global_rank, segment.complete_slots()
    except (SegmentInvalid, FileNotFoundError):
        return -1, []
