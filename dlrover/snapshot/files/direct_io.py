"""
Writing large files at the speed of the disk, from the memory where the bytes lie.

The page cache is in the way here: it copies every byte once more, evicts what the training needs, and is slow to empty. Direct I/O
wants whole blocks at both ends, so a file is written in two passes. First the large pieces that lie on pages in memory and in the
file, straight from where they are, by several threads. Then everything else (headers, small tensors, tails), put together
in aligned buffers. Headers come last because they may contain checksums of what follows them. Between two large tensors there is often but one
page with a header; hundreds of such writes, each waiting for the disk, would cost more than they bring, so short ranges do go
through the page cache, and the final sync sends them all at once.

Each byte is summed on its way (CRC-32, in the same thread, while the disk is busy with another one's piece), and the sums of the parts are combined
to one of the file.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from dlrover.host.edges import handed_over
from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.memory.checksum import combine_crc32, crc32
from dlrover.snapshot.memory.segment_format import round_up

BLOCK_BYTES = 4096
UNIT_BYTES = 8 * 1024 * 1024
DIRECT_FROM_BYTES = 1024 * 1024
CACHED_UP_TO_BYTES = 128 * 1024
"""Ranges between large pieces up to this size go through the page cache."""
_LONGEST_PAUSE = 0.5
"""A thread cannot wait for two events at once, so a pause is cut for a look whether there is hurry."""


class WriteStopped(DLRoverError):
    """The write was given up: its deadline passed or the caller stopped it. The file is incomplete."""


class WriteOptions(Struct, frozen=True, kw_only=True):
    num_threads: int = 2
    """Two keep a local disk busy; network file systems may want more."""
    direct: bool = True
    """Bypass the page cache where the file system allows it."""
    bytes_per_second: float | None = None
    """Limit of this file's bandwidth; None: as fast as it goes."""
    hurry: threading.Event | None = None
    """Once set, the limit counts no more: the training that it protects has ended. Seen within half a second."""
    deadline_at: float | None = None
    """On the monotonic clock; checked between units of 8 MiB."""
    is_synced: bool = True
    """False: the caller syncs the file, perhaps with others."""
    nice: int = 0
    """Added to the writing threads' niceness, so that they leave the processors to the training."""


class FilePiece(NamedTuple):
    offset: int
    """In the file."""
    content: memoryview | bytes


class WrittenFile(Struct, frozen=True):
    size_bytes: int
    crc32: int


Late = Callable[[list[int]], Sequence[FilePiece]]
"""From the CRC-32 of each given piece to the pieces that could not be known before: headers, directory."""


def write_file(
    path: str | os.PathLike[str],
    pieces: Sequence[FilePiece],
    late: Late,
    total_bytes: int,
    *,
    options: WriteOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> WrittenFile:
    """
    Write a file that consists of the pieces, with zeros between them, and sync it.

    `on_progress` gets the number of bytes written so far, from the writing threads. After an error the file is whatever it is: the
    caller writes into a staging directory and removes that.
    """
    options = options or WriteOptions()
    with _Target(path, total_bytes, options.direct) as target:
        work = _UnitWork(target, options, on_progress, stop or threading.Event())
        direct, parts_of = _direct_units(pieces)
        small = [number for number, parts in enumerate(parts_of) if not parts]
        work.run([*_sum_units(pieces, small), *(_Unit(start, content) for start, content in direct)])
        sums = [
            work.small_sums[number] if not parts else _sum_of_piece(piece, parts, work.sums)
            for number, (piece, parts) in enumerate(zip(pieces, parts_of, strict=True))
        ]
        everything = sorted([*pieces, *late(sums)], key=lambda piece: piece.offset)
        gaps = _gaps([(start, len(content)) for start, content in direct], total_bytes)
        work.run([_Unit(start, _Gather(everything, start, length)) for start, length in gaps])
        target.end(is_synced=options.is_synced)
    return WrittenFile(total_bytes, work.combined_sum())


def image_chunks(pieces: Sequence[FilePiece], late: Late, total_bytes: int) -> tuple[WrittenFile, list[memoryview]]:
    """The same file as a list of chunks in order, for storages that only take a stream."""
    sums = [crc32(piece.content) for piece in pieces]
    chunks: list[memoryview] = []
    at = 0
    crc = 0
    for offset, content in sorted([*pieces, *late(sums)], key=lambda piece: piece.offset):
        for part in (memoryview(bytes(offset - at)), memoryview(content)):
            if part.nbytes:
                chunks.append(part)
                crc = crc32(part, crc)
        at = offset + len(content)
    assert at == total_bytes, f"the pieces end at {at}, not at {total_bytes}"
    return WrittenFile(total_bytes, crc), chunks


def file_crc32(path: str | os.PathLike[str], num_threads: int = 2) -> WrittenFile:
    """Size and sum of a file as it is now; several parts at a time."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size

        starts = range(0, size, UNIT_BYTES)
        ticket = itertools.count()
        sums: dict[int, tuple[int, int]] = {}

        def sum_units() -> None:
            while (index := next(ticket)) < len(starts):
                content = os.pread(fd, UNIT_BYTES, starts[index])
                sums[starts[index]] = (crc32(content), len(content))

        run_in_threads(sum_units, num_threads)
        return WrittenFile(size, combine_sums(sums))
    finally:
        os.close(fd)


def combine_sums(sums: Mapping[int, tuple[int, int]]) -> int:
    """The sum of all parts, given by where they start with sum and length."""
    crc = 0
    for _, (part, length) in sorted(sums.items()):
        crc = combine_crc32(crc, part, length)
    return crc


def run_in_threads(task: Callable[[], None], num_threads: int) -> None:
    """
    Run the task in so many threads at a time; raises the first error.

    Not by an executor: those take no more work once the main thread has ended, and the last checkpoint of a training
    is often written just then.
    """
    errors: list[BaseException] = []

    def run() -> None:
        with handed_over(errors.append):
            task()

    threads = [threading.Thread(target=run, name=f"dlrover-write-{index}") for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class _Gather(NamedTuple):
    """A range of the file that is put together from several pieces."""

    pieces: Sequence[FilePiece]
    start: int
    length: int

    def fill(self, buffer: memoryview) -> None:
        """Write over all of the buffer: zeros where no piece is, and behind the range."""
        end = self.start + self.length
        first = max(0, bisect_right(self.pieces, self.start, key=lambda piece: piece.offset) - 1)
        at = self.start
        for offset, content in itertools.islice(self.pieces, first, None):
            if offset >= end:
                break
            low, high = max(offset, self.start), min(offset + len(content), end)
            if low < high:
                buffer[at - self.start : low - self.start] = bytes(low - at)
                buffer[low - self.start : high - self.start] = memoryview(content)[low - offset : high - offset]
                at = high
        buffer[at - self.start :] = bytes(len(buffer) - (at - self.start))


class _Sums(NamedTuple):
    """Small pieces that only have to be summed for now; they are written later, together with their headers."""

    pieces: Sequence[FilePiece]
    numbers: Sequence[int]


class _Unit(NamedTuple):
    start: int
    content: memoryview | _Gather | _Sums


class _UnitWork:
    """Threads that sum and write units, within the limits that were given."""

    def __init__(
        self,
        target: _Target,
        options: WriteOptions,
        on_progress: Callable[[int], None] | None,
        stop: threading.Event,
    ) -> None:
        self._target, self._options, self._on_progress, self._stop = target, options, on_progress, stop
        self._lock = threading.Lock()  # guards the count of written bytes; an addition is not worth a queue
        self._num_written = 0
        self._started_at = time.monotonic()
        self.sums: dict[int, tuple[int, int]] = {}
        """Start of a unit to its sum and length."""
        self.small_sums: dict[int, int] = {}
        """Number of a small piece to its sum."""

    def run(self, units: Sequence[_Unit]) -> None:
        ticket = itertools.count()
        run_in_threads(lambda: self._write_units(units, ticket), self._options.num_threads)

    def combined_sum(self) -> int:
        return combine_sums(self.sums)

    def _write_units(self, units: Sequence[_Unit], ticket: itertools.count[int]) -> None:
        if self._options.nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._options.nice)
        try:
            with _Buffer() as buffer:
                while (index := next(ticket)) < len(units):
                    self._do(units[index], buffer)
        except BaseException:
            next(itertools.islice(ticket, len(units), None))  # the others find no more work
            raise

    def _do(self, unit: _Unit, buffer: _Buffer) -> None:
        content = unit.content
        if isinstance(content, _Sums):
            for number in content.numbers:
                self.small_sums[number] = crc32(content.pieces[number].content)
            return
        self._admit()
        if isinstance(content, _Gather):
            length = content.length
            with buffer.view(round_up(length, BLOCK_BYTES)) as view:
                content.fill(view)
                self.sums[unit.start] = (crc32(view[:length]), length)
                self._target.write(view, unit.start, is_short=length <= CACHED_UP_TO_BYTES)
        else:
            length = len(content)
            self.sums[unit.start] = (crc32(content), length)
            self._target.write(content, unit.start)
        with self._lock:
            self._num_written += length
            num_written = self._num_written
        if self._on_progress is not None:
            self._on_progress(num_written)

    def _admit(self) -> None:
        """Wait for the bandwidth limit; end at the deadline."""
        deadline = self._options.deadline_at
        while True:
            pause = self._pause()
            if deadline is not None and time.monotonic() + pause > deadline:
                raise WriteStopped(
                    f"Writing stopped after {self._num_written} bytes, because the rest could not be written "
                    "before the deadline."
                )
            if self._stop.wait(min(pause, _LONGEST_PAUSE)):
                raise WriteStopped(f"Writing was stopped after {self._num_written} bytes.")
            if pause <= _LONGEST_PAUSE:
                return

    def _pause(self) -> float:
        """Seconds for which we are ahead of the limit."""
        rate, hurry = self._options.bytes_per_second, self._options.hurry
        if rate is None or (hurry is not None and hurry.is_set()):
            return 0.0
        return max(0.0, self._started_at + self._num_written / rate - time.monotonic())


class _Buffer:
    """A thread's memory for what it puts together, on pages and touched once. Made when it is first asked for."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def view(self, num_bytes: int) -> memoryview:
        if self._memory is None:
            self._memory = mmap.mmap(-1, UNIT_BYTES)
        return memoryview(self._memory)[:num_bytes]

    def __enter__(self) -> _Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._memory is not None:
            self._memory.close()


class _Target:
    """The file being written, with or without the page cache."""

    def __init__(self, path: str | os.PathLike[str], total_bytes: int, direct: bool) -> None:
        self._path, self._total_bytes = path, total_bytes
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._is_direct = direct
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o644)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            self._is_direct = False
            self._fd = os.open(path, flags, 0o644)
        try:
            _allocate(self._fd, round_up(total_bytes, BLOCK_BYTES))
            self._cached_fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self._fd)
            raise

    def write(self, content: memoryview, offset: int, *, is_short: bool = False) -> None:
        """Short ranges may wait in the page cache for the sync; they share no page with the others."""
        while is_short and content.nbytes:
            written = os.pwrite(self._cached_fd, content, offset)
            content, offset = content[written:], offset + written
        while content.nbytes:
            try:
                written = os.pwrite(self._fd, content, offset)
            except OSError as error:
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._leave_direct()  # it opened, but does not want our blocks
                continue
            content, offset = content[written:], offset + written

    def end(self, *, is_synced: bool) -> None:
        os.ftruncate(self._fd, self._total_bytes)
        if is_synced:
            os.fsync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _leave_direct(self) -> None:
        """Same descriptor number, so that other threads go on."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(fd, self._fd, inheritable=False)
        os.close(fd)
        self._is_direct = False

    def __enter__(self) -> _Target:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        os.close(self._cached_fd)


def _direct_units(pieces: Sequence[FilePiece]) -> tuple[list[tuple[int, memoryview]], list[list[int]]]:
    """What can go to the disk from where it lies; and for each piece where its units start."""
    units: list[tuple[int, memoryview]] = []
    starts: list[list[int]] = []
    for offset, content in pieces:
        own: list[int] = []
        if len(content) >= DIRECT_FROM_BYTES and offset % BLOCK_BYTES == 0 and isinstance(content, memoryview):
            body = len(content) // BLOCK_BYTES * BLOCK_BYTES
            for start in range(0, body, UNIT_BYTES):
                units.append((offset + start, content[start : min(start + UNIT_BYTES, body)]))
                own.append(offset + start)
        starts.append(own)
    return units, starts


def _sum_units(pieces: Sequence[FilePiece], small: Sequence[int]) -> list[_Unit]:
    """Bundles of about one unit: summing is work for all threads, before the disk has anything to wait for."""
    units: list[_Unit] = []
    bundle: list[int] = []
    size = 0
    for number in small:
        bundle.append(number)
        size += len(pieces[number].content)
        if size >= UNIT_BYTES:
            units.append(_Unit(pieces[bundle[0]].offset, _Sums(pieces, bundle)))
            bundle, size = [], 0
    return [*units, _Unit(pieces[bundle[0]].offset, _Sums(pieces, bundle))] if bundle else units


def _sum_of_piece(piece: FilePiece, starts: list[int], sums: dict[int, tuple[int, int]]) -> int:
    crc, summed = 0, 0
    for start in starts:
        part, length = sums[start]
        crc = combine_crc32(crc, part, length) if summed else part
        summed += length
    rest = memoryview(piece.content)[summed:]
    return crc32(rest, crc)


def _gaps(direct: list[tuple[int, int]], total_bytes: int) -> list[tuple[int, int]]:
    """Ranges (start, length) between the direct units, cut into units; they begin and end at blocks but for the file's end."""
    gaps = []
    at = 0
    for start, length in [*sorted(direct), (total_bytes, 0)]:
        while at < start:
            size = min(UNIT_BYTES, start - at)
            gaps.append((at, size))
            at += size
        at = max(at, start + length)
    return gaps


def _allocate(fd: int, num_bytes: int) -> None:
    """Room for the whole file, where the file system can reserve it. `posix_fallocate` would write zeros where it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    while num_bytes and libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
