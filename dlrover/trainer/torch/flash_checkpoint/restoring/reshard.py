"""
Pieces of a state that were saved by other ranks than those that need them now.

After a change of the world's size, or of the order of its ranks, a rank needs pieces that lie in other ranks' snapshots. It finds them by the
tensor's name and place, never by who saved them, so nothing foreign can be loaded: a piece is what its table says or it is
not there. Several saves may lie in memory at the same time, some of them cut for another number of ranks; the pieces of one state
all come from one save, which is told by its attempt.

Where pieces can be had from is a `ShardSource`. The one here reads the memory of this node; another may ask other nodes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.files.dcp_file import DcpItem, decode_table
from dlrover.snapshot.memory.checksum import CHUNK_BYTES, Corrupt, checksum_function
from dlrover.snapshot.memory.contents import DISTCP, Contents, FileEntry, decode_contents
from dlrover.snapshot.memory.mirror import copy_paths
from dlrover.snapshot.memory.segment import PinnedSlot, Segment, SlotName, remove_segment, segment_paths
from dlrover.snapshot.memory.segment_format import SegmentInvalid
from dlrover.snapshot.storage.persist import SaveRequest, of_present_history, read_request
from dlrover.trainer.torch.flash_checkpoint.restoring.early_look import EarlyLook, close_behind

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

_NUM_SUMMERS = 4


class ShareHolding(Struct, frozen=True, kw_only=True):
    """One rank's share of one save, that a source can give."""

    step: int
    round: int
    attempt: str
    shard: int
    num_shards: int
    generation: int
    items: tuple[DcpItem, ...]


class ShardSource(Protocol):
    def holdings(self, directory: str) -> list[ShareHolding]:
        """What there is of the checkpoints of a directory."""

    def fetch(self, holding: ShareHolding, items: Sequence[DcpItem]) -> list[memoryview]:
        """
        The bytes of these items, which lie in a storage, checked; readable until `close`.

        Raises DLRoverError when they are damaged or not there any more.
        """

    def close(self) -> None: ...


class SavedState(Struct, frozen=True, kw_only=True):
    """One save, as far as it can be found."""

    step: int
    round: int
    attempt: str
    num_shards: int
    shards: dict[int, tuple[ShareHolding, ShardSource]]

    @property
    def is_whole(self) -> bool:
        """Every rank's share is here."""
        return len(self.shards) == self.num_shards


def find_saves(sources: Iterable[ShardSource], directory: str) -> dict[str, SavedState]:
    """By attempt. Nearer sources come first."""
    saves: dict[str, dict[int, tuple[ShareHolding, ShardSource]]] = {}
    for source in sources:
        for holding in source.holdings(directory):
            saves.setdefault(holding.attempt, {}).setdefault(holding.shard, (holding, source))
    states = {}
    for attempt, shards in saves.items():
        first = next(iter(shards.values()))[0]
        states[attempt] = SavedState(
            step=first.step, round=first.round, attempt=attempt, num_shards=first.num_shards, shards=shards
        )
    return states


class LocalMemory:
    """The snapshots of all ranks of this node, and copies that it keeps for others, pinned from `holdings` to `close`."""

    def __init__(self, home: Path, look: EarlyLook | None = None) -> None:
        """`look` has perhaps compared one of them with its sums already."""
        self._home, self._look = home, look
        self._checked: SlotName | None = None
        self._open: dict[tuple[str, int], tuple[PinnedSlot, Contents, FileEntry]] = {}
        """By attempt and shard."""
        self._segments: list[Segment] = []

    def holdings(self, directory: str) -> list[ShareHolding]:
        by_rank: dict[tuple[int, str], list[tuple[SlotName, Segment]]] = {}
        seen = None if self._look is None else self._look.take_newest()
        if seen is not None:
            self._checked, segment = seen
            self._segments.append(segment)
        for path in (*segment_paths(self._home), *copy_paths(self._home)):
            if seen is not None and str(path) == seen[0].path:
                segment = seen[1]
            else:
                try:
                    segment = Segment(path, private=True)
                except (SegmentInvalid, FileNotFoundError):
                    continue
                self._segments.append(segment)
            own = by_rank.setdefault((segment.owner.global_rank, path.name.split("-")[0]), [])
            own.extend((name, segment) for name in segment.complete_slots())
        found = []
        for names in by_rank.values():
            present = set(of_present_history(name for name, _ in names)) if names else set()
            for name, segment in names:
                holding = self._hold(segment, name, directory) if name in present else None
                if holding is not None:
                    found.append(holding)
        return found

    def fetch(self, holding: ShareHolding, items: Sequence[DcpItem]) -> list[memoryview]:
        pinned, contents, entry = self._open[(holding.attempt, holding.shard)]
        data = pinned.data
        ranges = [_range_of(item, contents, entry, data.nbytes) for item in items]
        if self._checked is None or not _is_in(pinned, self._checked):
            _verify(pinned, data, ranges)
        return [data[start : start + num_bytes] for start, num_bytes in ranges]

    def close(self) -> None:
        for pinned, _contents, _entry in self._open.values():
            pinned.close()
        for segment in self._segments:
            close_behind(segment)
        self._open, self._segments = {}, []

    def _hold(self, segment: Segment, name: SlotName, directory: str) -> ShareHolding | None:
        pinned = segment.pin(name.slot, name.generation)
        if pinned is None:
            return None
        try:
            contents = decode_contents(pinned.sections())
            request = read_request(contents)
            entry = next((entry for entry in contents.files if entry.kind == DISTCP), None)
            is_new = request is not None and (request.attempt, request.shard) not in self._open
            if request is not None and entry is not None and request.directory == directory and is_new:
                holding = _holding(name, request, decode_table(contents.pickles[entry.name]))
                self._open[(request.attempt, request.shard)] = (pinned, contents, entry)
                return holding
        except DLRoverError as error:
            log.warning("The snapshot of step %d is not used for restoring: %s", name.step, error)
        pinned.close()
        return None


def remove_abandoned(home: Path, ranks_here: Collection[int]) -> list[Path]:
    """
    Segments of ranks that this node does not have any more; returns what was removed.

    For the time when every rank has saved in the new world: until then they may hold the only pieces of a state.
    """
    removed = []
    for path in segment_paths(home):
        try:
            with Segment(path) as segment:
                if segment.owner.global_rank in ranks_here or segment.has_live_writer():
                    continue
        except (SegmentInvalid, FileNotFoundError):
            continue
        remove_segment(path)
        removed.append(path)
    return removed


def _holding(name: SlotName, request: SaveRequest, items: list[DcpItem]) -> ShareHolding:
    return ShareHolding(
        step=name.step,
        round=name.round,
        attempt=request.attempt,
        shard=request.shard,
        num_shards=request.num_shards,
        generation=name.generation,
        items=tuple(items),
    )


def _range_of(item: DcpItem, contents: Contents, entry: FileEntry, data_bytes: int) -> tuple[int, int]:
    """Where an item lies in the slot's data."""
    try:
        storage = contents.layout.storages[entry.storages[item.storage]]
    except IndexError as error:
        raise SegmentInvalid(
            f"The snapshot is damaged: its tensor table places {item.name} in a storage that does not exist."
        ) from error
    start = storage.offset + item.start
    if item.start + item.num_bytes > storage.num_bytes or start + item.num_bytes > data_bytes:
        raise SegmentInvalid(f"The snapshot is damaged: in its tensor table, {item.name} ends after its storage.")
    return start, item.num_bytes


def _is_in(pinned: PinnedSlot, name: SlotName) -> bool:
    return (str(pinned.segment.path), pinned.slot, pinned.record.generation) == (name.path, name.slot, name.generation)


def _verify(pinned: PinnedSlot, data: memoryview, ranges: Iterable[tuple[int, int]]) -> None:
    """Only the chunks that are read: many ranks read a little from each other. Without sums (yet) there is nothing to compare with."""
    sums = pinned.sums()
    if sums is None:
        return
    chunks = sorted(
        {
            chunk
            for start, num_bytes in ranges
            if num_bytes
            for chunk in range(start // CHUNK_BYTES, (start + num_bytes - 1) // CHUNK_BYTES + 1)
        }
    )
    function = checksum_function(sums.algorithm)

    def is_damaged(chunk: int) -> bool:
        return function(data[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]) != sums.values[chunk]

    num_threads = min(_NUM_SUMMERS, len(os.sched_getaffinity(0)), max(1, len(chunks)))
    with ThreadPoolExecutor(num_threads, "dlrover-verify") as pool:
        damaged = [chunk for chunk, is_bad in zip(chunks, pool.map(is_damaged, chunks), strict=True) if is_bad]
    if damaged:
        raise Corrupt(
            f"{pinned} is damaged: {len(damaged)} of {len(chunks)} chunks differ from their checksum, the first "
            f"is chunk {damaged[0]}."
        )
