"""
Snapshot segments: the memory of a rank's last states, which outlives the trainer and the agent.

One trainer writes, the agent and later trainers read. A save goes into a slot that is not needed, so that at every instant
at least one earlier state is whole. The order of the stores of a save:

    1  lock the slot (the kernel's lock: gone with its holder)
    2  state word: WRITING            what the slot held is given up from here on
    3  data, then metadata
    4  the slot's record with its checksum
    5  state word: COMPLETE           the save counts from here on
    6  unlock

A kill between any two of these leaves the other slots as they were and this one recognisably incomplete. A record torn in the middle
fails its checksum. Readers *pin* a slot by a shared lock on it, so that a trainer never overwrites what is being persisted: it takes
another slot or is told that all are busy. The locks also order the memory: what was stored before an unlock is seen after the next lock.

A state that outgrows its file gets a new file with the next sequence number. The old one keeps its name until the new one
holds a complete slot.

The kernel clears each page that it gives, which takes longer than a copy. So a file is born with the room of its first slot, and the others get theirs before
they are written to, at best by a thread that has the time: a first save never waits for memory that it does not need.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec import Struct

from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.snapshot.copy.copying import address_of
from dlrover.snapshot.memory.checksum import Corrupt, best_algorithm, chunk_checksums, find_corrupt_chunks
from dlrover.snapshot.memory.locks import ByteLocks
from dlrover.snapshot.memory.room import find_room
from dlrover.snapshot.memory.segment_format import (
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
    decode_sections,
    decode_sums,
    encode_prelude,
    encode_record,
    encode_sections,
    encode_sums,
    geometry_for,
    make_word,
    split_word,
)

SUFFIX = ".segment"
META_SLACK = 2
"""Metadata grows a little from save to save (numbers get longer); with this factor a new file is seldom needed for it."""
MIN_META_BYTES = 64 * 1024

_UNBORN = ".unborn"
"""Suffix of a file that has not got its room and its name yet."""
_WRITER_BYTE = 0
"""Locked as long as a writer lives. Slot i is locked at byte 1 + i."""
_LAST_MOMENT = 0.2
"""Seconds between the files of a process and its locks, on a busy machine."""


class SlotName(Struct, frozen=True, order=True):
    """One complete slot, of whatever file of a rank."""

    generation: int
    step: int
    round: int
    path: str
    slot: int


class Segment:
    """A segment file opened for reading: by the agent, or by a trainer that restores."""

    def __init__(self, path: str | os.PathLike[str], *, private: bool = False, any_boot: bool = False) -> None:
        """`private` maps a copy-on-write view, which has an address for fast copies and still can never change the segment."""
        self.path = Path(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(self._fd).st_size
            page = os.pread(self._fd, PAGE_BYTES, 0)
            try:
                self.prelude = decode_prelude(page, size, None if any_boot else boot_id())
            except SegmentInvalid as error:
                raise SegmentInvalid(f"{path} is not a usable segment: {error}.") from error
            access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
            self._map = mmap.mmap(self._fd, size, access=access)
        except BaseException:
            os.close(self._fd)
            raise
        self.view = memoryview(self._map)

    @property
    def owner(self) -> Owner:
        return self.prelude.owner

    @property
    def geometry(self) -> Geometry:
        return self.prelude.geometry

    def complete_slots(self) -> list[SlotName]:
        """A look without a lock: what was complete an instant ago, oldest first. Pin a slot before using it."""
        return _complete_slots(self._fd, self.geometry, self.path)

    def pin(self, slot: int, generation: int | None = None) -> PinnedSlot | None:
        """Keep a slot from being overwritten while it is read. None when it is being written or holds another generation."""
        locks = ByteLocks.of_descriptor(self._fd)
        if locks.try_share(1 + slot):
            record = read_record(self._fd, self.geometry, slot)
            if record is not None and generation in (None, record.generation):
                return PinnedSlot(self, slot, record, locks)
        locks.close()
        return None

    def has_live_writer(self) -> bool:
        locks = ByteLocks.of_descriptor(self._fd)
        try:
            return not locks.try_share(_WRITER_BYTE)
        finally:
            locks.close()

    def close(self) -> None:
        """Views that were handed out keep the mapping alive until they are gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _close_map(self._map, self.view)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class PinnedSlot:
    """A complete slot that stays as it is until `close`."""

    def __init__(self, segment: Segment, slot: int, record: SlotRecord, locks: ByteLocks) -> None:
        self.segment, self.slot, self.record, self._locks = segment, slot, record, locks

    @property
    def data(self) -> memoryview:
        start = self.segment.geometry.data_at(self.slot)
        return self.segment.view[start : start + self.record.data_length]

    def sections(self) -> dict[str, bytes]:
        """The metadata, checked against the record."""
        start = self.segment.geometry.meta_at(self.slot)
        area = bytes(self.segment.view[start : start + self.record.meta_length])
        if zlib.crc32(area) != self.record.meta_crc:
            raise Corrupt(
                f"{self} is damaged: its metadata changed after they were written. This snapshot cannot be used."
            )
        return decode_sections(area)

    def sums(self) -> Sums | None:
        """What `store_sums` wrote for this generation, by whatever process."""
        geometry = self.segment.geometry
        area = os.pread(self.segment._fd, geometry.sums_bytes, geometry.sums_at(self.slot))
        return decode_sums(area, self.record.generation)

    def store_sums(self, pool: Executor | None = None) -> Sums:
        """Compute the checksums and keep them in the segment, so that a restarted agent has them too."""
        algorithm = best_algorithm()
        sums = Sums(algorithm, tuple(chunk_checksums(self.data, algorithm, pool)))
        area = encode_sums(self.record.generation, sums)
        os.pwrite(self.segment._fd, area, self.segment.geometry.sums_at(self.slot))
        return sums

    def verify(self, pool: Executor | None = None) -> bool:
        """Raise Corrupt when a byte has changed since the sums were made. False: there are no sums yet."""
        self.sections()
        sums = self.sums()
        if sums is None:
            return False
        if bad := find_corrupt_chunks(self.data, sums.values, sums.algorithm, pool):
            raise Corrupt(
                f"{self} is damaged: {len(bad)} of {len(sums.values)} chunks differ from their checksum, the "
                f"first is chunk {bad[0]}."
            )
        return True

    def close(self) -> None:
        self._locks.close()

    def __str__(self) -> str:
        return f"Snapshot of step {self.record.step} (generation {self.record.generation}) in {self.segment.path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class SegmentWriter:
    """The trainer's side: the one writer of a rank's segments."""

    def __init__(
        self,
        home: str | os.PathLike[str],
        owner: Owner,
        *,
        num_slots: int = 2,
        fallback: str | os.PathLike[str] | None = None,
        after_store: Callable[[str], None] | None = None,
    ) -> None:
        """
        `home` is a private directory in shared memory, `fallback` one on disk for what does not fit there. One slot saves memory,
        and a kill during a save then loses the snapshot. `after_store` is told the name of each store: there tests kill us.
        """
        self.home = Path(home)
        self.owner = owner
        self._num_slots = num_slots
        self._fallback = None if fallback is None else Path(fallback)
        self._after_store = after_store or (lambda name: None)
        self._files: list[_OpenFile] = []  # by sequence; the last one is written to
        self._is_closed = False
        for path in segment_paths(self.home, owner.global_rank):
            self._adopt(path)
        for directory in filter(None, (self.home, self._fallback)):
            for unborn in directory.glob(f".*rank-{owner.global_rank:05d}.*{_UNBORN}"):
                if directory == self.home or unborn.name.startswith(f".{self.home.name}."):
                    unborn.unlink(missing_ok=True)  # a former trainer was killed while it created a file

    def reserve(self, data_bytes: int, meta_bytes: int = MIN_META_BYTES) -> memoryview:
        """
        Have a file whose slots hold this much; return the data area of the first, with memory behind every byte, to be pre-faulted.

        Raises ConfigError when there is no room anywhere.
        """
        if not self._files or not self._files[-1].holds(data_bytes, meta_bytes):
            self._create(data_bytes, max(MIN_META_BYTES, META_SLACK * meta_bytes))
        newest = self._files[-1]
        geometry = newest.prelude.geometry
        return newest.view[geometry.data_at(0) : geometry.data_at(1)]

    def room_of(self, slot: int) -> SlotRoom | None:
        """Of the newest file; None: it has no such slot."""
        newest = self._files[-1] if self._files else None
        return None if newest is None or slot >= self._slots_of(newest) else SlotRoom(newest, slot)

    def begin(self, data_bytes: int, meta_bytes: int) -> SlotInWriting | None:
        """A slot to copy into, or None when readers have pinned every slot that may be overwritten."""
        assert not self._is_closed, "this writer is closed"
        self.reserve(data_bytes, meta_bytes)
        newest = self._files[-1]
        for slot in self._expendable_slots():
            if newest.locks.try_own(1 + slot):
                if not newest.make_room(slot):
                    newest.locks.release(1 + slot)
                    return self.begin(data_bytes, meta_bytes)  # in another file, which is put where there is room
                generation = 1 + max(file.highest_generation() for file in self._files)
                newest.set_word(slot, make_word(SlotState.WRITING, generation))
                self._after_store("writing")
                return SlotInWriting(self, newest, slot, generation)
        return None

    def complete_slots(self) -> list[SlotName]:
        """Of all files, oldest first."""
        return sorted(name for file in self._files for name in file.complete_slots())

    def discard(self, name: SlotName) -> bool:
        """Give up a complete slot. False: another process reads it, or it holds another state by now."""
        for file in self._files:
            if str(file.path) != name.path or not file.locks.try_own(1 + name.slot):
                continue
            record = read_record(file.fd, file.prelude.geometry, name.slot)
            is_it = record is not None and record.generation == name.generation
            if is_it:
                file.set_word(name.slot, make_word(SlotState.EMPTY, name.generation))
            file.locks.release(1 + name.slot)
            return is_it
        return False

    def close(self) -> None:
        """Give up the writing; the segments stay."""
        self._is_closed = True
        for file in self._files:
            file.close()
        self._files = []

    def _adopt(self, path: Path) -> None:
        try:
            file = _OpenFile(path)
        except (SegmentInvalid, FileNotFoundError):
            return  # of another boot or another version: whoever cleans the directory removes it
        if not file.locks.try_own(_WRITER_BYTE):
            waiting = file.locks.own_when_free(_WRITER_BYTE)
            if not file.locks.is_held_by_dead(_WRITER_BYTE):
                # The last moment of a process shows no files any more, and the lock may still be there.
                waiting.join(_LAST_MOMENT)
                if waiting.is_alive():
                    file.close()
                    self.close()
                    raise Unavailable(
                        f"The snapshot segment {path} is still in use by another trainer of rank "
                        f"{self.owner.global_rank}. A new trainer can save only after that one has ended."
                    )
        self._files.append(file)

    def _expendable_slots(self) -> list[int]:
        """Which slots may be overwritten, the least valuable first: never the only complete state that there is."""
        newest = self._files[-1]
        complete = self.complete_slots()
        last_good = complete[-1] if complete else None
        held = {name.slot: name for name in complete if name.path == str(newest.path)}
        order = sorted(range(self._slots_of(newest)), key=lambda slot: held[slot].generation if slot in held else -1)
        if self._slots_of(newest) == 1 and len(self._files) == 1:
            return order
        return [slot for slot in order if held.get(slot) != last_good or last_good is None]

    def _slots_of(self, file: _OpenFile) -> int:
        return file.prelude.geometry.num_slots

    def _create(self, data_bytes: int, meta_bytes: int) -> None:
        sequence = 1 + max((file.prelude.sequence for file in self._files), default=0)
        for file in [file for file in self._files if not file.complete_slots()]:  # outgrown before anything was saved
            self._files.remove(file)
            file.remove()
        geometry = geometry_for(self._num_slots, meta_bytes, data_bytes)
        held = sum(file.prelude.geometry.total_bytes for file in self._files)
        room = find_room(geometry.total_bytes, self.home, self._fallback, reclaimable_bytes=held)
        name = f"rank-{self.owner.global_rank:05d}.{sequence:06d}{SUFFIX}"
        prelude = Prelude(geometry=geometry, sequence=sequence, boot_id=boot_id(), owner=self.owner)
        self._files.append(_create_file(self.home / name, Path(room.directory), prelude, self._after_store))

    def _completed(self) -> None:
        """The newest file has a complete state: the older ones have had their time."""
        while len(self._files) > 1:
            self._files.pop(0).remove()
            self._after_store("old file removed")


class SlotRoom:
    """Room that a slot has or gets. Any thread may take it, also while the writer is in use."""

    def __init__(self, file: _OpenFile, slot: int) -> None:
        self._file, self._slot = file, slot
        self._fd = os.dup(file.fd)  # the file may be outgrown and closed meanwhile

    def take(self) -> memoryview:
        """The slot's data area, with memory behind every byte; empty: there is none."""
        geometry = self._file.prelude.geometry
        start = geometry.data_at(self._slot)
        try:
            if self._slot >= self._file.num_roomy:
                os.posix_fallocate(self._fd, start, geometry.data_bytes)
                self._file.num_roomy = max(self._file.num_roomy, self._slot + 1)
            return self._file.view[start : start + geometry.data_bytes]
        except (OSError, ValueError):  # no room, or closed; a save that needs the slot will find out
            return memoryview(b"")
        finally:
            os.close(self._fd)


class SlotInWriting:
    """A slot between WRITING and COMPLETE. Leaving the block without `complete` gives it up."""

    def __init__(self, writer: SegmentWriter, file: _OpenFile, slot: int, generation: int) -> None:
        self._writer, self._file, self.slot, self.generation = writer, file, slot, generation
        self._is_open = True

    @property
    def data(self) -> memoryview:
        geometry = self._file.prelude.geometry
        start = geometry.data_at(self.slot)
        return self._file.view[start : start + geometry.data_bytes]

    @property
    def address(self) -> int:
        return address_of(self._file.view, self._file.prelude.geometry.data_at(self.slot))

    @property
    def capacity_bytes(self) -> int:
        """Of the data area."""
        return self._file.prelude.geometry.data_bytes

    @property
    def meta_capacity_bytes(self) -> int:
        return self._file.prelude.geometry.meta_bytes

    def complete(
        self, *, step: int, round_: int, data_length: int, layout_hash: bytes, sections: Mapping[str, bytes]
    ) -> SlotName:
        """The data is copied: publish it."""
        assert self._is_open, "this slot was completed or given up before"
        geometry, file = self._file.prelude.geometry, self._file
        meta = encode_sections(sections)
        if len(meta) > geometry.meta_bytes or data_length > geometry.data_bytes:
            self.abandon()
            raise ConfigError(
                f"The snapshot has {data_length} bytes and {len(meta)} bytes of metadata, but its slot has room for only "
                f"{geometry.data_bytes} and {geometry.meta_bytes}. Give `begin` the full size of the snapshot."
            )
        file.store(geometry.meta_at(self.slot), meta)
        self._writer._after_store("metadata")
        record = SlotRecord(
            generation=self.generation,
            step=step,
            round=round_,
            saved_at=time.time(),
            meta_length=len(meta),
            data_length=data_length,
            meta_crc=zlib.crc32(meta),
            pid=os.getpid(),
            layout_hash=layout_hash,
        )
        file.store(geometry.record_at(self.slot) + 8, encode_record(record))
        self._writer._after_store("record")
        file.set_word(self.slot, make_word(SlotState.COMPLETE, self.generation))
        self._writer._after_store("complete")
        self._is_open = False
        file.locks.release(1 + self.slot)
        os.utime(file.fd)  # stores through a mapping leave no trace in the file's times; the reaper looks at them
        self._writer._completed()
        return SlotName(self.generation, step, round_, str(file.path), self.slot)

    def abandon(self) -> None:
        """The slot is empty again."""
        if self._is_open:
            self._is_open = False
            self._file.set_word(self.slot, make_word(SlotState.EMPTY, self.generation))
            self._file.locks.release(1 + self.slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abandon()


class _OpenFile:
    """A segment file mapped for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.locks = ByteLocks(path)
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(self.fd).st_size
            self.prelude = decode_prelude(os.pread(self.fd, PAGE_BYTES, 0), size, boot_id())
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            self.locks.close()
            raise
        self.view = memoryview(self._map)
        self._words = self.view[PAGE_BYTES : 2 * PAGE_BYTES].cast("Q")
        used = [slot for slot in range(self.prelude.geometry.num_slots) if self._generation_of(slot)]
        self.num_roomy = 1 + max(used, default=0)
        """So many slots, from the first on, have memory behind every byte: what was written to has."""
        self._is_too_large = False
        """There was no room for all of it."""

    def holds(self, data_bytes: int, meta_bytes: int) -> bool:
        geometry = self.prelude.geometry
        is_enough = geometry.data_bytes >= data_bytes and geometry.meta_bytes >= meta_bytes
        return is_enough and not self._is_too_large

    def make_room(self, slot: int) -> bool:
        """Before a slot is written to. False: there is none, and this file is of no further use."""
        geometry = self.prelude.geometry
        if slot >= self.num_roomy:
            start = geometry.data_at(self.num_roomy)
            try:
                os.posix_fallocate(self.fd, start, geometry.data_at(slot + 1) - start)
            except OSError:
                self._is_too_large = True
                return False
            self.num_roomy = slot + 1
        return True

    def set_word(self, slot: int, word: int) -> None:
        """One aligned store of eight bytes: seen whole or not at all."""
        self._words[slot * RECORD_BYTES // 8] = word

    def store(self, offset: int, content: bytes) -> None:
        self.view[offset : offset + len(content)] = content

    def highest_generation(self) -> int:
        return max(map(self._generation_of, range(self.prelude.geometry.num_slots)))

    def _generation_of(self, slot: int) -> int:
        """0: it was never written to."""
        return split_word(self._words[slot * RECORD_BYTES // 8])[1]

    def complete_slots(self) -> list[SlotName]:
        return _complete_slots(self.fd, self.prelude.geometry, self.path)

    def remove(self) -> None:
        """Take the name away; readers that have it open go on with it."""
        remove_segment(self.path)
        self.close()

    def close(self) -> None:
        self.locks.close()
        os.close(self.fd)
        self._words.release()
        _close_map(self._map, self.view)


def read_record(fd: int, geometry: Geometry, slot: int) -> SlotRecord | None:
    """The record of a complete slot; None for anything else, also when it changed while we read it."""
    at = geometry.record_at(slot)
    before = os.pread(fd, RECORD_BYTES, at)
    word = int.from_bytes(before[:8], "little")
    record = decode_record(word, before[8:], geometry)
    after = int.from_bytes(os.pread(fd, 8, at), "little")
    return record if after == word else None


def _complete_slots(fd: int, geometry: Geometry, path: Path) -> list[SlotName]:
    records = [(slot, read_record(fd, geometry, slot)) for slot in range(geometry.num_slots)]
    return sorted(
        SlotName(record.generation, record.step, record.round, str(path), slot)
        for slot, record in records
        if record is not None
    )


def segment_paths(home: str | os.PathLike[str], global_rank: int | None = None) -> list[Path]:
    """Segment files of a directory, of one rank or of all, by rank and sequence."""
    pattern = f"rank-{'*' if global_rank is None else f'{global_rank:05d}'}.*{SUFFIX}"
    return sorted(Path(home).glob(pattern))


def remove_segment(path: Path) -> None:
    """Also the file on disk, when the name is a link to it."""
    target = path.resolve() if path.is_symlink() else None
    path.unlink(missing_ok=True)
    if target is not None:
        target.unlink(missing_ok=True)


@cache
def boot_id() -> bytes:
    """Tells one start of the machine from the next."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def _create_file(path: Path, directory: Path, prelude: Prelude, after_store: Callable[[str], None]) -> _OpenFile:
    """No process sees the file under its name before it has its room and its prelude."""
    is_elsewhere = directory != path.parent
    real = directory / f"{path.parent.name}.{path.name}" if is_elsewhere else path
    unborn = real.with_name(f".{real.name}{_UNBORN}")
    unborn.unlink(missing_ok=True)
    fd = os.open(unborn, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, prelude.geometry.data_at(1))
        os.ftruncate(fd, prelude.geometry.total_bytes)
        after_store("room")
        os.pwrite(fd, encode_prelude(prelude), 0)
        after_store("prelude")
    except OSError as error:
        unborn.unlink(missing_ok=True)
        raise ConfigError(
            f"No room for a snapshot segment of {prelude.geometry.total_bytes} bytes in {directory}: {error.strerror}. "
            "Free some memory or disk space there, or name another directory for segments."
        ) from error
    finally:
        os.close(fd)
    os.rename(unborn, real)
    if is_elsewhere:
        link = path.with_name(f".{path.name}{_UNBORN}")
        link.unlink(missing_ok=True)
        link.symlink_to(real)
        os.rename(link, path)
    after_store("name")
    file = _OpenFile(path)
    assert file.locks.try_own(_WRITER_BYTE), f"another process writes to the new file {path}"
    return file


def _close_map(mapping: mmap.mmap, view: memoryview) -> None:
    try:
        view.release()
        mapping.close()
    except BufferError:
        return  # views were handed out: the mapping goes with the last of them
