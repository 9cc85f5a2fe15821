"""
Writing to a console that may take no bytes for a while: a paused pager, a frozen terminal, a log driver that blocks.

A program that writes there from an event loop would stand still with it, and everything that the loop serves: so a thread writes, and
others only leave the text behind. Where no thread can be had, text is worth the wait.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import sys
import threading
from collections import deque
from collections.abc import Callable

from dlrover.host.edges import contained
from dlrover.host.plain_text import printable

HELD_BYTES = 1024 * 1024
PATIENCE = 2.0
"""Seconds without any progress after which the end of the process waits no longer for its last lines."""


def _say_nothing(num_lost: int) -> bytes:
    return b""


class ConsoleWriter:
    """
    Texts for descriptors, written in order by a thread that begins with the first one. For callers in any thread.

    It holds so many bytes; what comes then is dropped and counted, and `describe_loss` puts it into words for that place.
    """

    def __init__(
        self, *, max_held_bytes: float = math.inf, describe_loss: Callable[[int], bytes] = _say_nothing
    ) -> None:
        self._max_held_bytes = max_held_bytes
        self._describe_loss = describe_loss
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._texts: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        """Of the texts, and of the one that is being written."""
        self._num_lost = 0
        self._num_written = 0
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        self._thread: threading.Thread | None = None

    @property
    def held_bytes(self) -> int:
        with self._changed:
            return self._held_bytes

    @property
    def num_written(self) -> int:
        """Texts: it grows as long as the console takes any."""
        with self._changed:
            return self._num_written

    def write(self, descriptor: int, text: bytes) -> None:
        with self._changed:
            # One text is held in any case, however long it is.
            if self._held_bytes and self._held_bytes + len(text) > self._max_held_bytes:
                self._num_lost += 1
                return
            text = self._take_loss() + text
            self._texts.append((descriptor, text))
            self._held_bytes += len(text)
            self._changed.notify_all()
            if self._thread is None:
                self._begin()

    def when_held(self, max_bytes: int, then: Callable[[], object]) -> None:
        """Call `then` once, in whichever thread, as soon as no more than so many bytes are held. It must not wait, nor call us."""
        with self._changed:
            self._waiting.append((max_bytes, then))
            self._tell()

    def flush(self, patience: float) -> None:
        """Until all is written, or the console has taken nothing for a while."""
        with self._changed:
            while self._held_bytes and self._has_progress(patience):
                pass

    def _has_progress(self, patience: float) -> bool:
        """Whether a text is written in time."""
        num_written = self._num_written
        return self._changed.wait_for(lambda: self._num_written > num_written, patience)

    def _begin(self) -> None:
        thread = threading.Thread(target=self._write_for_ever, name="console", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._write_here()  # no thread can be started now: the next text tries again
            return
        self._thread = thread

    def _write_here(self) -> None:
        while self._texts:
            _write(*self._texts.popleft())
        self._held_bytes = 0

    def _write_for_ever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                descriptor, text = self._texts.popleft()
            _write(descriptor, text)
            with self._changed:
                loss = b"" if self._texts else self._take_loss()
            _write(descriptor, loss)
            with self._changed:
                self._held_bytes -= len(text)
                self._num_written += 1
                self._changed.notify_all()
                self._tell()

    def _take_loss(self) -> bytes:
        """What is to be said about texts that were dropped before this place."""
        num_lost, self._num_lost = self._num_lost, 0
        return self._describe_loss(num_lost) if num_lost else b""

    def _tell(self) -> None:
        told = [then for max_bytes, then in self._waiting if max_bytes >= self._held_bytes]
        self._waiting = [entry for entry in self._waiting if entry[0] < self._held_bytes]
        for then in told:
            then()


class ConsoleHandler(logging.Handler):
    """Log lines to a descriptor. A mebibyte of them can wait."""

    def __init__(self, descriptor: int = 2, *, held_bytes: int = HELD_BYTES, patience: float = PATIENCE) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._encoding = sys.stderr.encoding if sys.stderr is not None else "utf-8"
        self._patience = patience
        self._writer = ConsoleWriter(max_held_bytes=held_bytes, describe_loss=self._describe_loss)

    def emit(self, record: logging.LogRecord) -> None:
        # As the handlers of the standard library do it: arguments may not fit the text.
        with contained(lambda _error: self.handleError(record)):
            self._writer.write(self._descriptor, self._encode(record))

    def flush(self) -> None:
        self._writer.flush(self._patience)

    def _describe_loss(self, num_lost: int) -> bytes:
        text = "lines of the log are missing here, because the console accepted no output for too long: %d"
        return self._encode(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (num_lost,), None))

    def _encode(self, record: logging.LogRecord) -> bytes:
        return f"{printable(self.format(record))}\n".encode(self._encoding, "backslashreplace")


def _write(descriptor: int, text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads any more, or a disk is full: there is nobody to tell
        write_all(descriptor, text)


def write_all(descriptor: int, data: bytes) -> None:
    """For a thread that may wait."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # Somebody made our console non-blocking (a terminal is shared with whoever started us): wait until it
            # takes more.
            with selectors.DefaultSelector() as selector:
                selector.register(descriptor, selectors.EVENT_WRITE)
                selector.select(timeout=1.0)
