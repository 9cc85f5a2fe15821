"""
The copying behind `WorkerOutput`: pipes from workers, and where their bytes go. One thread does all of it.

Bytes are never reordered within a stream. Files get them at once; a console may have to wait for those that are held back, and gets
them in any case unless the agent says that they are the consequence of another worker's failure.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from dlrover.host.console import write_all
from dlrover.host.edges import logged
from dlrover.protocol.messages.job import MAX_FAILURE_BYTES

_log = logging.getLogger(__name__)

TAIL_BYTES = MAX_FAILURE_BYTES
LONGEST_HELD = 15.0
"""Seconds for the agent to find out who failed first: longer than the master needs to give up a node that is silent."""
MAX_HELD_BYTES = 1024 * 1024
_CHUNK = 65536


@dataclass
class Sink:
    """A log file that stops taking bytes after its first error instead of ending the job."""

    path: str
    file: BinaryIO | None
    is_continued: bool = False
    """Another process writes to it until we do: opened when there is something to add."""

    @classmethod
    def open(cls, path: str) -> Sink:
        return cls(path, open(path, "wb", buffering=0))

    def write(self, data: bytes) -> None:
        if self.is_continued:
            self.is_continued = False
            with contextlib.suppress(OSError):  # what came before is there, and so is the report of the failure
                self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # until `close`
        if self.file is None:
            return
        try:
            write_all(self.file.fileno(), data)
        except OSError as error:
            _log.warning(
                "%s can no longer be written (%s). Training continues without this log.", self.path, error.strerror
            )
            file, self.file = self.file, None
            with contextlib.suppress(OSError):  # for the same reason, which has been told
                file.close()

    def close(self) -> None:
        """A network file system may refuse only now what its cache has taken before (quota, full server)."""
        file, self.file = self.file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:
            _log.warning("%s may lack its last lines (%s).", self.path, error.strerror)


@dataclass(eq=False)
class HeldWords:
    """The last words of a worker, until it is known whether they are news."""

    global_rank: int
    kept_at: str
    """File for what the console does not get; empty: another file has it already, or none is wanted."""
    max_bytes: int = MAX_HELD_BYTES
    text: bytearray = field(default_factory=bytearray)
    since: float = 0.0
    """On the monotonic clock, when it began to speak; 0: it has not."""


@dataclass(eq=False)
class Copy:
    """One pipe from a worker and where its bytes go. Belongs to the pump's thread once added."""

    number: int
    console: int | None
    prefix: bytes
    """Before each line on the console; empty: bytes are passed on as they come."""
    file: Sink | None
    filtered: Sink | None
    needles: tuple[bytes, ...]
    descriptor: int = -1
    tail: bytearray = field(default_factory=bytearray)
    line: bytearray = field(default_factory=bytearray)
    """The unfinished line of a prefixed stream."""
    has_begun_line: bool = False
    """Part of an overlong line is out already."""
    is_broken: bool = False
    """A bug of ours keeps its bytes from being passed on."""
    held: HeldWords | None = None
    """None: the console gets everything at once."""
    before: Copy | None = None
    """The stream that this one goes on with."""

    def take(self, data: bytes) -> None:
        self.tail += data
        if len(self.tail) > 2 * TAIL_BYTES:
            del self.tail[:-TAIL_BYTES]
        if self.file is not None:
            self.file.write(data)
        if not self.prefix:
            self._show(data)
            return
        self.line += data
        *lines, rest = self.line.split(b"\n")
        out = bytearray()
        for line in lines:
            out += self._finished(bytes(line) + b"\n")
            self.has_begun_line = False
        if len(rest) > _CHUNK:
            out += self._finished(bytes(rest))
            self.has_begun_line, rest = True, bytearray()
        self.line = bytearray(rest)
        self._show(bytes(out))

    def finish(self) -> None:
        if self.line:
            self._show(self._finished(bytes(self.line)))
            self.line = bytearray()
        if self.file is not None:
            self.file.close()

    def _finished(self, line: bytes) -> bytes:
        shown = line if self.has_begun_line else self.prefix + line
        if self.filtered is not None and any(needle in line for needle in self.needles):
            self.filtered.write(shown)
        return shown

    def _show(self, data: bytes) -> None:
        if self.console is None or not data:
            return
        if self.held is not None:
            self.held.since = self.held.since or time.monotonic()
            self.held.text += data
            if len(self.held.text) > self.held.max_bytes:
                self.settle(is_shown=True)
            return
        try:
            write_all(self.console, data)
        except OSError:
            self.console = None  # whoever read our console has gone; there is nobody left to tell

    def settle(self, *, is_shown: bool) -> None:
        """What was held goes to the console, and so does what follows; or neither does."""
        held, self.held = self.held, None
        if held is None:
            return
        if is_shown:
            self._show(bytes(held.text))
            return
        self.console = None
        if held.kept_at and held.text:
            with contextlib.suppress(OSError):  # a full disk; the job's events have the error itself
                with open(held.kept_at, "ab") as file:
                    file.write(held.text)


class Pump:
    """
    The thread that copies. It starts with the first pipe and ends with `close`, and with nothing else: without it workers
    would soon wait for ever in the middle of a line. A stream that cannot be passed on is given up alone.
    """

    def __init__(self, *, longest_held: float = LONGEST_HELD) -> None:
        self._longest_held = longest_held
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        """
        Guards `_calls`, the only thing both threads touch; a queue could not be waited for together with the pipes.
        """
        self._calls: list[Callable[[], object]] = []
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._held: list[Copy] = []
        """With words that await a decision, the oldest first. Of the pump's thread."""
        self._passing_on: tuple[float, float | None] = (0.0, None)
        """For how long, and since when just now, bytes are passed on. The other thread only reads it."""

    def seconds_passing_on(self) -> float:
        """How much of its time consoles and disks have taken so far."""
        seconds, since = self._passing_on
        return seconds if since is None else seconds + time.monotonic() - since

    def add(self, copy: Copy) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="worker-output", daemon=True)
            self._thread.start()
        self._call(lambda: self._selector.register(copy.descriptor, selectors.EVENT_READ, copy))

    def drain(self, copies: Sequence[Copy], then: Callable[[], None]) -> None:
        def now() -> None:
            for copy in copies:
                self._copy(copy)
            then()

        self._call(now)

    def drop(self, copies: Sequence[Copy], sinks: Sequence[Sink], then: Callable[[], None]) -> None:
        """Copy what is there and forget these pipes."""

        def now() -> None:
            for copy in copies:
                self._copy(copy)
                self._end(copy)
            for sink in sinks:
                sink.close()
            then()

        if copies or sinks:
            self._call(now)

    def settle_held(self, is_shown: Callable[[int], bool]) -> None:
        def now() -> None:
            ended = [copy for copy in self._held if copy.descriptor < 0]
            self._held = [copy for copy in self._held if copy.descriptor >= 0]
            for copy in ended:
                self._settle(copy, is_shown=copy.held is not None and is_shown(copy.held.global_rank))

        self._call(now)

    def close(self) -> None:
        if self._thread is not None:
            self._call(self._stop)
            self._thread.join(timeout=2.0)  # a blocked console must not keep the agent from leaving
            if self._thread.is_alive():
                return
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _stop(self) -> None:
        self._show_held(time.monotonic() + self._longest_held)  # nobody will decide any more, and nothing is lost
        self._is_closing = True

    def _note_held(self, copy: Copy) -> None:
        if copy.held is not None and copy.held.since and copy not in self._held:
            self._held.append(copy)

    def _show_held(self, now: float) -> None:
        """What was held for too long."""
        while self._held and (self._held[0].held is None or now >= self._held[0].held.since + self._longest_held):
            self._settle(self._held.pop(0), is_shown=True)

    def _settle(self, copy: Copy, *, is_shown: bool) -> None:
        with self._timed():
            copy.settle(is_shown=is_shown)

    def _call(self, function: Callable[[], object]) -> None:
        if self._thread is None:
            function()  # nothing has been copied yet, so there is nobody to share with
            return
        with self._lock:
            self._calls.append(function)
        with contextlib.suppress(BlockingIOError):  # full of wake-ups already
            os.write(self._wake_writer, b".")

    def _run(self) -> None:
        while not self._is_closing:
            overdue_at = self._held[0].held.since + self._longest_held if self._held and self._held[0].held else None
            for key, _events in self._selector.select(None if overdue_at is None else overdue_at - time.monotonic()):
                if key.data is None:
                    os.read(self._wake_reader, 4096)
                else:
                    self._copy(key.data, at_most=1)
            self._work_off()
            self._show_held(time.monotonic())

    def _work_off(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            text = (
                "Copying the workers' output failed because of a bug in DLRover. Lines may be missing from their logs."
            )
            with logged(_log, text):  # a bug in one request must not end the thread
                call()

    def _copy(self, copy: Copy, at_most: int = 64) -> None:
        with logged(_log, "the output of a worker cannot be read any more"):
            self._read(copy, at_most)
            return
        self._end(copy)

    def _read(self, copy: Copy, at_most: int) -> None:
        """Until nothing is there now. Bounded, so that one who prints without end does not starve the others."""
        for _ in range(at_most):
            if copy.descriptor < 0:
                return
            try:
                data = os.read(copy.descriptor, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._end(copy)
                return
            self._pass_on(copy, data)

    def _pass_on(self, copy: Copy, data: bytes) -> None:
        if copy.is_broken:
            return  # still read: the worker would end by a closed pipe
        if copy.before is not None:
            self._copy(copy.before)  # what it had written before it changed over
        with logged(_log, "The rest of a worker's output is not shown because of a bug in DLRover."):
            with self._timed():
                copy.take(data)
            self._note_held(copy)
            return
        copy.is_broken = True

    def _end(self, copy: Copy) -> None:
        if copy.descriptor < 0:
            return
        with contextlib.suppress(KeyError):  # dropped before it was ever registered
            self._selector.unregister(copy.descriptor)
        os.close(copy.descriptor)
        copy.descriptor = -1
        with logged(_log, "bug in DLRover at the end of a worker's output"), self._timed():
            copy.finish()
        self._note_held(copy)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        seconds, since = self._passing_on[0], time.monotonic()
        self._passing_on = seconds, since
        try:
            yield
        finally:
            self._passing_on = seconds + time.monotonic() - since, None
