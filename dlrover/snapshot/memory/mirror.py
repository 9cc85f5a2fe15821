"""
Slots that come from another node: copies kept for it, and our own shards on their way back.

A mirror is a segment file like any other, with the geometry of the one it mirrors, so that the two slots of the original become two slots here
and the older copy stays whole while the newer one arrives. It has a name of its own (`copy-...`): no trainer and no saver ever takes it for a
segment of this node. The state word of a slot goes through the same states as in a save; bytes that do not match their sums
never become COMPLETE.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from dlrover.protocol.errors import Unavailable
from dlrover.snapshot.memory.checksum import CHUNK_BYTES, Corrupt, checksum_function
from dlrover.snapshot.memory.locks import ByteLocks
from dlrover.snapshot.memory.room import find_room
from dlrover.snapshot.memory.segment import SUFFIX, Segment, SlotName, boot_id, remove_segment, segment_paths
from dlrover.snapshot.memory.segment_format import (
    MAX_SLOTS,
    PAGE_BYTES,
    RECORD_BYTES,
    Geometry,
    Owner,
    Prelude,
    SegmentInvalid,
    SlotRecord,
    SlotState,
    Sums,
    decode_prelude,
    decode_record,
    decode_sums,
    encode_prelude,
    encode_record,
    encode_sums,
    make_word,
)

Fill = Callable[[memoryview], None]
"""Puts the next bytes of the transfer into a buffer, all of it."""


def copy_path(home: Path, shard: int, sequence: int) -> Path:
    return home / f"copy-{shard:05d}.{sequence:06d}{SUFFIX}"


def copy_paths(home: Path, shard: int | None = None) -> list[Path]:
    return sorted(home.glob(f"copy-{'*' if shard is None else f'{shard:05d}'}.*{SUFFIX}"))


def own_path(home: Path, shard: int) -> Path:
    """A name for a shard that comes back to the node whose trainer will go on with it: behind all that the trainer has."""
    sequences = [_sequence_of(path) for path in segment_paths(home, shard)]
    return home / f"rank-{shard:05d}.{1 + max(sequences, default=0):06d}{SUFFIX}"


def next_generation(home: Path, shard: int) -> int:
    """A slot that comes back is the newest of its shard here, whatever was tried before."""
    newest = 0
    for path in segment_paths(home, shard):
        try:
            with Segment(path) as segment:
                newest = max([newest, *(name.generation for name in segment.complete_slots())])
        except (SegmentInvalid, FileNotFoundError):
            continue
    return newest + 1


def read_transfer(record: bytes, sums: bytes, geometry: Geometry) -> tuple[SlotRecord, Sums]:
    """What the sender says of its slot, checked against the checksums that stand beside it. Raises Corrupt."""
    if not 1 <= geometry.num_slots <= MAX_SLOTS or min(geometry.meta_bytes, geometry.data_bytes) < 1:
        raise Corrupt("The snapshot from another node is damaged: its segment has a size or shape that cannot exist.")
    try:
        generation = int.from_bytes(record[:8], "little")
        found = decode_record(make_word(SlotState.COMPLETE, generation), record, geometry)
        values = None if found is None else decode_sums(sums, found.generation)
    except (struct.error, ValueError) as error:
        raise Corrupt(f"The snapshot from another node is damaged: its record cannot be read: {error}.") from error
    if found is None:
        raise Corrupt("The snapshot from another node is damaged: its record does not match its checksum.")
    if values is None or len(values.values) != -(-found.data_length // CHUNK_BYTES):
        raise Corrupt("The snapshot from another node is damaged: its checksums are incomplete.")
    return found, values


class ArrivingSlot:
    """One slot of a file, being filled from another node. Leaving the block without `complete` gives it up."""

    def __init__(self, path: Path, owner: Owner, sequence: int, geometry: Geometry, slot: int) -> None:
        """Makes the file if it is not there. Raises Unavailable when another process reads or writes the slot, ConfigError without room."""
        assert 0 <= slot < geometry.num_slots, f"slot {slot} of {geometry.num_slots}"
        self.path, self.slot = path, slot
        self._geometry = geometry
        self._is_open = False
        self.is_new = not path.exists()
        if self.is_new:
            _create(path, Prelude(geometry=geometry, sequence=sequence, boot_id=boot_id(), owner=owner))
        self._locks = ByteLocks(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(self._fd).st_size
            found = decode_prelude(os.pread(self._fd, PAGE_BYTES, 0), size, boot_id())
            if found.geometry != geometry:
                raise SegmentInvalid(f"{path} has a different shape from the snapshot that arrives")
            if not self._locks.try_own(1 + slot):
                raise Unavailable(f"another process still reads slot {slot} of {path.name}", 0.1)
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            self._locks.close()
            raise
        self._view = memoryview(self._map)
        self._set_word(make_word(SlotState.WRITING, 0))
        self._is_open = True

    def fill(self, record: SlotRecord, sums: Sums, fill: Fill) -> None:
        """Take metadata and data over, each piece checked as soon as it is here. Raises Corrupt, and what `fill` raises."""
        meta = self._part(self._geometry.meta_at(self.slot), record.meta_length)
        with meta:
            fill(meta)
            if zlib.crc32(meta) != record.meta_crc:
                raise Corrupt("The metadata are damaged: they arrived with a different checksum.")
        function = checksum_function(sums.algorithm)
        start = self._geometry.data_at(self.slot)
        for number, expected in enumerate(sums.values):
            offset = number * CHUNK_BYTES
            with self._part(start + offset, min(CHUNK_BYTES, record.data_length - offset)) as chunk:
                fill(chunk)
                if function(chunk) != expected:
                    raise Corrupt(
                        f"Chunk {number} of {len(sums.values)} is damaged: it arrived with a different checksum."
                    )

    def complete(self, record: SlotRecord, sums: Sums, generation: int | None = None) -> SlotName:
        """Publish it; `generation` where it gets another number here than it had."""
        kept = record if generation is None else replace(record, generation=generation)
        area = encode_sums(kept.generation, sums)
        os.pwrite(self._fd, area, self._geometry.sums_at(self.slot))
        os.pwrite(self._fd, encode_record(kept), self._geometry.record_at(self.slot) + 8)
        self._set_word(make_word(SlotState.COMPLETE, kept.generation))
        self._close()
        return SlotName(kept.generation, kept.step, kept.round, str(self.path), self.slot)

    def abandon(self) -> None:
        if self._is_open:
            self._set_word(make_word(SlotState.EMPTY, 0))
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abandon()

    def _part(self, start: int, length: int) -> memoryview:
        return self._view[start : start + length]

    def _set_word(self, word: int) -> None:
        with self._view[PAGE_BYTES : 2 * PAGE_BYTES].cast("Q") as words:
            words[self.slot * RECORD_BYTES // 8] = word

    def _close(self) -> None:
        self._is_open = False
        os.utime(self._fd)
        self._view.release()
        self._map.close()
        os.close(self._fd)
        self._locks.close()


def _create(path: Path, prelude: Prelude) -> None:
    """No process sees the file under its name before it has its room."""
    find_room(prelude.geometry.total_bytes, path.parent)
    unborn = path.with_name(f".{path.name}.unborn")
    unborn.unlink(missing_ok=True)
    fd = os.open(unborn, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, prelude.geometry.total_bytes)
        os.pwrite(fd, encode_prelude(prelude), 0)
    except OSError:
        unborn.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    os.rename(unborn, path)


def remove_copies(home: Path, shard: int, *, but: Path | None = None) -> None:
    for path in copy_paths(home, shard):
        if path != but:
            remove_segment(path)


def _sequence_of(path: Path) -> int:
    return int(path.name.removesuffix(SUFFIX).rsplit(".", 1)[1])
