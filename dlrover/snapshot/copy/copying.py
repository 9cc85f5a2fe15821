"""
Moving many blocks of memory at the speed of memory.

A state is some hundreds of tensors, a few of them huge and most of them tiny. Huge blocks are cut into pieces so that several threads can
share them. The threads hold no interpreter lock while they copy, nor do they need it between two blocks, so the trainer can prepare the rest of a
snapshot meanwhile, or go on training.

Addresses are plain integers: the caller keeps the memory behind them alive until the copy has ended.
"""

from __future__ import annotations

import abc
import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dlrover.host.edges import handed_over
from dlrover.snapshot.copy.streaming import BUILT_LIBRARY, LINE_BYTES, Stream, load_streaming_copy

PIECE_BYTES = 8 * 1024 * 1024
"""Unit of work of a thread. Measured: 1 to 64 MiB make no difference, below that fetching work begins to count."""
STREAMING_FROM_BYTES = 64 * 1024
"""From here on the cache is bypassed; a smaller block is faster through it."""
MAX_THREADS = 4
"""One or two threads saturate the memory of a socket; more only take processors from the training."""

HELPERS_PATIENCE = 0.002
"""Seconds for a thread to wake up. On a machine that has no processor for it, it would not copy either."""


class CopySpan(NamedTuple):
    """Copy `num_bytes` from one address to another."""

    target: int
    source: int
    num_bytes: int


class Blocks:
    """
    Spans made ready to be copied, as often as one likes: of a state that is saved again and again from and to the same places this is done once.
    """

    def __init__(self, spans: Iterable[CopySpan], stream: Stream | None) -> None:
        self.stream = stream
        self.bundles: _Bundles = () if stream is not None else _bundles(spans)
        numbers = _blocks(spans) if stream is not None else []
        self.table = (ctypes.c_uint64 * len(numbers))(*numbers)
        self.num_blocks = len(numbers) // 3 if stream is not None else len(self.bundles)


class Copier:
    """Threads that copy spans, for one user at a time; `close` ends them. `library`: of the loop; None copies without it."""

    def __init__(self, num_threads: int | None = None, *, library: Path | None = BUILT_LIBRARY) -> None:
        available = len(os.sched_getaffinity(0)) if num_threads is None else num_threads
        self.num_threads = max(1, min(MAX_THREADS, available))
        self._stream = None if library is None else load_streaming_copy(library)
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="dlrover-copy")
        self._pid = os.getpid()

    @property
    def is_streaming(self) -> bool:
        return self._stream is not None

    def copy(self, spans: Iterable[CopySpan]) -> None:
        """Copy everything before returning; the calling thread takes part."""
        work = self._work_for(spans)
        self._start(work, work.num_blocks - 1)
        work.run()
        work.wait()

    def blocks(self, spans: Iterable[CopySpan]) -> Blocks:
        """For `copy_now` and `start`."""
        return Blocks(list(spans), self._stream)

    def copy_now(self, blocks: Blocks) -> None:
        """Copy a little, in this thread alone."""
        work = self._work_for(blocks)
        work.run()
        work.wait()

    def start(self, spans: Iterable[CopySpan] | Blocks, num_helpers: int | None = None) -> CopyInProgress:
        """
        Copy in the background, by as many threads as there are or by `num_helpers`, which may be 0: then nothing happens before
        `CopyInProgress.finish`. The memory must stay as it is until then.
        """
        work = self._work_for(spans)
        num_started = self._start(work, work.num_blocks if num_helpers is None else num_helpers)
        if num_helpers is None:
            work.wait_for_helpers(num_started)
        return CopyInProgress(self, work)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _work_for(self, spans: Iterable[CopySpan] | Blocks) -> _Work:
        blocks = spans if isinstance(spans, Blocks) else self.blocks(spans)
        if blocks.stream is not None:
            return _StreamedWork(blocks, blocks.stream)
        return _BundledWork(blocks.bundles, self._copy_one)

    def _start(self, work: _Work, num_helpers: int) -> int:
        """How many threads will come."""
        if os.getpid() != self._pid:  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="dlrover-copy")
            self._pid = os.getpid()
        num_started = max(0, min(num_helpers, self.num_threads))
        for _ in range(num_started):
            self._pool.submit(work.help)
        return num_started

    def _copy_one(self, target: int, source: int, num_bytes: int) -> None:
        """Only where the loop cannot run."""
        ctypes.memmove(target, source, num_bytes)


class CopyInProgress:
    """A copy that runs in the background."""

    def __init__(self, copier: Copier, work: _Work) -> None:
        self._copier, self._work = copier, work

    def is_done(self) -> bool:
        return self._work.is_done()

    def add_helpers(self, num_helpers: int) -> None:
        """So many threads more."""
        if not self.is_done():
            self._copier._start(self._work, num_helpers)

    def finish(self) -> None:
        """Help with what is left, then wait for the rest. Several threads may do so at a time."""
        self._work.run()
        self._work.wait()


class _Work(abc.ABC):
    """Blocks that any number of threads take from, until none is left; it has ended when the last of them has been copied."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_left = num_blocks
        self._lock = threading.Lock()
        """Guards the number: a thread that found nothing more to take must still wait for those that copy."""
        self._helpers = threading.Semaphore(0)
        """How many have come and were not waited for."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        if not num_blocks:
            self._ended.set()

    @abc.abstractmethod
    def run(self) -> None:
        """Copy blocks until none is left to take."""

    def help(self) -> None:
        """The same, in a thread that a caller may wait for."""
        self._helpers.release()
        self.run()

    def wait_for_helpers(self, num_helpers: int) -> None:
        """
        Until so many threads have come, for an instant. Who goes on with Python at once keeps the interpreter's lock, and they
        could not begin for 5 ms each.
        """
        for _ in range(num_helpers):
            if not self._helpers.acquire(timeout=HELPERS_PATIENCE):
                return

    def is_done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Memory is all that it waits for, so it needs no deadline."""
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def _count(self, num_copied: int) -> None:
        with self._lock:
            self._num_left -= num_copied
            is_last = num_copied > 0 and self._num_left == 0
        if is_last:
            self._ended.set()


class _StreamedWork(_Work):
    """By the loop, which needs no interpreter between two blocks."""

    def __init__(self, blocks: Blocks, stream: Stream) -> None:
        super().__init__(blocks.num_blocks)
        self._stream, self._table = stream, blocks.table
        self._counter = ctypes.c_uint64(0)

    def run(self) -> None:
        if not self.is_done():
            self._count(self._stream(ctypes.addressof(self._table), self.num_blocks, ctypes.addressof(self._counter)))


class _BundledWork(_Work):
    def __init__(self, bundles: _Bundles, copy_one: Callable[[int, int, int], None]) -> None:
        super().__init__(len(bundles))
        self._bundles, self._copy_one = bundles, copy_one
        self._ticket = itertools.count()

    def run(self) -> None:
        """`next` of a count is one step of the interpreter, so no two threads get the same bundle."""
        while (index := next(self._ticket)) < len(self._bundles):
            with handed_over(self._keep_error):
                for span in self._bundles[index]:
                    self._copy_one(*span)
            self._count(1)

    def _keep_error(self, error: BaseException) -> None:
        self._error = error


def _blocks(spans: Iterable[CopySpan]) -> list[int]:
    """
    What the loop is given: three numbers for each block. Large spans are cut into pieces, and what does not fit lines at their ends
    is apart; the small come last, so that no thread ends late.
    """
    pieces: list[int] = []
    crumbs: list[int] = []
    for target, source, num_bytes in spans:
        if num_bytes < STREAMING_FROM_BYTES:
            if num_bytes:
                crumbs += (target, source, num_bytes)
            continue
        head = -target % LINE_BYTES
        end = head + (num_bytes - head) // LINE_BYTES * LINE_BYTES
        if head:
            crumbs += (target, source, head)
        for start in range(head, end, PIECE_BYTES):
            pieces += (target + start, source + start, min(PIECE_BYTES, end - start))
        if end < num_bytes:
            crumbs += (target + end, source + end, num_bytes - end)
    return pieces + crumbs


_Bundles = Sequence[Sequence[CopySpan]]


def _bundles(spans: Iterable[CopySpan]) -> _Bundles:
    """Work of about `PIECE_BYTES` each: huge spans cut, tiny ones together; the largest first, so that no thread ends late."""
    pieces: list[list[CopySpan]] = []
    crumbs: list[list[CopySpan]] = []
    room = 0
    for target, source, num_bytes in spans:
        if num_bytes >= PIECE_BYTES:
            for start in range(0, num_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, num_bytes - start)
                pieces.append([CopySpan(target + start, source + start, length)])
        elif num_bytes:
            if room < num_bytes:
                crumbs.append([])
                room = PIECE_BYTES
            crumbs[-1].append(CopySpan(target, source, num_bytes))
            room -= num_bytes
    return pieces + crumbs


def address_of(buffer: memoryview, offset: int = 0) -> int:
    """Where a writable buffer lies. The caller keeps the buffer alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer, offset))


_POPULATE_READ = 22
_POPULATE_WRITE = 23
"""madvise: give every page of the range a frame, without changing it. Linux 5.14."""
_FAULT_STEP_BYTES = 4 * 1024 * 1024
"""The kernel holds the lock of the address space for one step, and an allocation of the training waits for it: a millisecond or two."""
_PAGE_BYTES = 4096


def prefault(buffer: memoryview, stop: threading.Event | None = None, *, for_reading: bool = False) -> bool:
    """
    Touch every page now, so that the first copy does not have to (first touch costs several times the copy).
    `for_reading` leaves the pages of a private mapping shared.

    Meant for a thread of its own: the kernel works without the interpreter lock, in steps, and `stop` ends it between two.
    Nothing is changed in the buffer, so a copy may already run. False when stopped early.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    length = buffer.nbytes
    if not length:
        return True
    advice = _POPULATE_READ if for_reading else _POPULATE_WRITE
    start = address_of(buffer)
    skip = -start % _PAGE_BYTES
    for offset in range(skip, length, _FAULT_STEP_BYTES):
        if stop is not None and stop.is_set():
            return False
        step = min(_FAULT_STEP_BYTES, length - offset)
        answer = libc.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(step), advice)
        if answer != 0 and ctypes.get_errno() != errno.EINVAL:
            return False  # there is no memory for it after all
        if answer != 0:  # an older kernel: reading a byte of each page maps what was reserved before
            bytes(buffer[offset : offset + step : _PAGE_BYTES])
    return True
