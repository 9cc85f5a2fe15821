"""
Moving many blocks of memory at the speed of memory.

A state is some hundreds of tensors, a few of them huge and most of them tiny. Huge blocks are cut into pieces so that several threads can
share them; tiny ones are bundled so that a thread fetches work seldom. The threads hold no interpreter lock while they copy,
so the trainer can prepare the rest of a snapshot meanwhile.

Addresses are plain integers: whoever calls keeps the memory behind them alive until the copy has ended.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from dlrover.snapshot.streaming import LINE_BYTES, load_streaming_copy

PIECE_BYTES = 8 * 1024 * 1024
"""Unit of work of a thread. Measured: 1 to 64 MiB make no difference, below that fetching work begins to count."""
STREAMING_FROM_BYTES = 64 * 1024
"""From here on the cache is bypassed; a smaller block is faster through it."""
MAX_THREADS = 4
"""One or two threads saturate the memory of a socket; more only take processors from the training."""


class Span(NamedTuple):
    """Copy `num_bytes` from one address to another."""

    target: int
    source: int
    num_bytes: int


class Copier:
    """Threads that copy spans, for one user at a time; `close` ends them."""

    def __init__(self, num_threads: int | None = None, *, streaming: bool = True) -> None:
        available = len(os.sched_getaffinity(0)) if num_threads is None else num_threads
        self.num_threads = max(1, min(MAX_THREADS, available))
        self._stream = load_streaming_copy() if streaming else None
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="dlrover-copy")
        self._pid = os.getpid()

    @property
    def is_streaming(self) -> bool:
        return self._stream is not None

    def copy(self, spans: Iterable[Span]) -> None:
        """Copy everything before returning; the calling thread takes part."""
        work = _Work(_bundles(spans))
        self._start(work, work.num_bundles - 1)
        work.run(self._copy_one)
        work.wait()

    def start(self, spans: Iterable[Span], num_helpers: int | None = None) -> CopyInProgress:
        """
        Copy in the background, by as many threads as there are or by `num_helpers`, which may be 0: then nothing happens before
        `CopyInProgress.finish`. The memory must stay as it is until then.
        """
        work = _Work(_bundles(spans))
        self._start(work, work.num_bundles if num_helpers is None else num_helpers)
        return CopyInProgress(self, work)

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    def _start(self, work: _Work, num_helpers: int) -> None:
        if os.getpid() != self._pid:  # threads do not survive a fork
            self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="dlrover-copy")
            self._pid = os.getpid()
        for _ in range(min(num_helpers, self.num_threads)):
            self._pool.submit(work.run, self._copy_one)

    def _copy_one(self, target: int, source: int, num_bytes: int) -> None:
        if self._stream is None or num_bytes < STREAMING_FROM_BYTES:
            ctypes.memmove(target, source, num_bytes)
            return
        head = -target % LINE_BYTES
        body = (num_bytes - head) // LINE_BYTES * LINE_BYTES
        if head:
            ctypes.memmove(target, source, head)
        self._stream(target + head, source + head, body)
        if tail := num_bytes - head - body:
            ctypes.memmove(target + head + body, source + head + body, tail)


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
        self._work.run(self._copier._copy_one)
        self._work.wait()


class _Work:
    """Bundles that any number of threads take from, until none is left; it has ended when the last of them has been copied."""

    def __init__(self, bundles: _Bundles) -> None:
        self._bundles = bundles
        self._ticket = itertools.count()
        self._num_left = len(bundles)
        self._lock = threading.Lock()
        """Guards the number: a thread that found nothing more to take must still wait for those that copy."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        if not bundles:
            self._ended.set()

    @property
    def num_bundles(self) -> int:
        return len(self._bundles)

    def is_done(self) -> bool:
        return self._ended.is_set()

    def run(self, copy_one: Callable[[int, int, int], None]) -> None:
        """`next` of a count is one step of the interpreter, so no two threads get the same bundle."""
        while (index := next(self._ticket)) < len(self._bundles):
            try:
                for span in self._bundles[index]:
                    copy_one(*span)
            except BaseException as error:  # told to whoever waits, in whatever thread
                self._error = error
            with self._lock:
                self._num_left -= 1
                is_last = self._num_left == 0
            if is_last:
                self._ended.set()

    def wait(self) -> None:
        """Memory is all that it waits for, so it needs no deadline."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


_Bundles = Sequence[Sequence[Span]]


def _bundles(spans: Iterable[Span]) -> _Bundles:
    """Work of about `PIECE_BYTES` each: huge spans cut, tiny ones together; the largest first, so that nobody ends late."""
    pieces: list[list[Span]] = []
    crumbs: list[list[Span]] = []
    room = 0
    for target, source, num_bytes in spans:
        if num_bytes >= PIECE_BYTES:
            for start in range(0, num_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, num_bytes - start)
                pieces.append([Span(target + start, source + start, length)])
        elif num_bytes:
            if room < num_bytes:
                crumbs.append([])
                room = PIECE_BYTES
            crumbs[-1].append(Span(target, source, num_bytes))
            room -= num_bytes
    return pieces + crumbs


def address_of(buffer: memoryview, offset: int = 0) -> int:
    """Where a writable buffer lies. The caller keeps the buffer alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer, offset))


_POPULATE_READ = 22
_POPULATE_WRITE = 23
"""madvise: give every page of the range a frame, without changing it. Linux 5.14."""
_FAULT_STEP_BYTES = 64 * 1024 * 1024
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
        if answer != 0:  # an older kernel: reading a byte of each page maps what was reserved before
            bytes(buffer[offset : offset + step : _PAGE_BYTES])
    return True
