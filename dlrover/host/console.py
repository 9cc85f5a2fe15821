"""
Writing to a console that may take no bytes for a while: a paused pager, a frozen terminal, a log driver that blocks.

Whoever logs there from an event loop would stand still with it, and everything that the loop serves: so a thread writes, and
who logs only leaves the text behind. It can hold a mebibyte; what comes then is dropped and counted. Where no thread can be had, text is worth the wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import sys
import threading
from collections import deque

HELD_BYTES = 1024 * 1024
PATIENCE = 2.0
"""Seconds without any progress after which the end of the process waits no longer for its last lines."""


class ConsoleHandler(logging.Handler):
    """Log lines to a descriptor, by a thread that begins with the first line."""

    def __init__(self, descriptor: int = 2, *, held_bytes: int = HELD_BYTES, patience: float = PATIENCE) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._encoding = sys.stderr.encoding if sys.stderr is not None else "utf-8"
        self._max_held_bytes = held_bytes
        self._patience = patience
        self._changed = threading.Condition()
        """Guards all that follows."""
        self._texts: deque[bytes] = deque()
        self._held_bytes = 0
        """Of the texts, and of the one that is being written."""
        self._num_lost = 0
        self._num_written = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self._encode(record)
        except Exception:  # as the handlers of the standard library do it: arguments that do not fit the text
            self.handleError(record)
            return
        with self._changed:
            # One text is held in any case, however long it is.
            if self._held_bytes and self._held_bytes + len(text) > self._max_held_bytes:
                self._num_lost += 1
                return
            text = self._take_loss() + text
            self._texts.append(text)
            self._held_bytes += len(text)
            self._changed.notify_all()
            if self._thread is None:
                self._begin()

    def flush(self) -> None:
        """Until all is written, or the console has taken nothing for a while."""
        with self._changed:
            if self._texts and self._thread is None:
                self._begin()
            while self._held_bytes and self._has_progress():
                pass

    def _has_progress(self) -> bool:
        """Whether a text is written in time."""
        num_written = self._num_written
        return self._changed.wait_for(lambda: self._num_written > num_written, self._patience)

    def _begin(self) -> None:
        thread = threading.Thread(target=self._write_for_ever, name="console-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._write_here()  # no thread can be started now: the next line tries again
            return
        self._thread = thread

    def _write_here(self) -> None:
        while self._texts:
            self._write(self._texts.popleft())
        self._held_bytes = 0

    def _write_for_ever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts)
                text = self._texts.popleft()
            self._write(text)
            with self._changed:
                loss = b"" if self._texts else self._take_loss()
            self._write(loss)
            with self._changed:
                self._held_bytes -= len(text)
                self._num_written += 1
                self._changed.notify_all()

    def _take_loss(self) -> bytes:
        """What is to be said about lines that were dropped before this place in the log."""
        num_lost, self._num_lost = self._num_lost, 0
        if not num_lost:
            return b""
        text = "lines of the log dropped here because the console took no bytes for too long: %d"
        return self._encode(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (num_lost,), None))

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more, or a disk is full: there is nobody to tell
            write_all(self._descriptor, text)

    def _encode(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(self._encoding, "backslashreplace")


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
