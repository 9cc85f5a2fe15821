"""
Where events go: a file per process, the console, or OpenTelemetry; at once, or by a thread with a bounded queue.

The file of a process is `events_<rank>_<pid>.log`; `events_<rank>.log` is a link to that of the newest process of the rank, which is what followers
look for. A process that was forked begins a file of its own with its first event.

A signal handler may tell an event in the middle of another one of its thread: it finds no lock that only the code below it could give back.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from io import TextIOWrapper
from typing import IO, Protocol

from dlrover.host.edges import contained
from dlrover.host.ownership import make_directory, open_checked
from dlrover.trainer.events.event import Event
from dlrover.trainer.events.settings import EventSettings

CLOSE_TIMEOUT = 10.0
TELL_DROPS_EVERY = 60.0
OWN_LOG = "dlrover.events"
"""The event system's own log; it never reaches the user's."""


class Exporter(Protocol):
    def export(self, event: Event) -> None: ...

    def close(self) -> None: ...


class TextFileExporter:
    def __init__(self, settings: EventSettings, form: Callable[[Event], str]) -> None:
        self._settings = settings
        self._form = form
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # guards the file, which all threads of the process write to
        self._file: IO[bytes] | None = None
        self._size = 0

    @property
    def path(self) -> str:
        return os.path.join(self._settings.file_dir, f"events_{self._settings.rank}_{os.getpid()}.log")

    def export(self, event: Event) -> None:
        data = self._form(event).encode(errors="backslashreplace") + b"\n"
        if self._pid != os.getpid():
            self._begin()  # a thread that had the lock did not survive the fork
        with self._lock:
            if self._file is None:
                self._open()
            assert self._file is not None
            if self._size and self._size + len(data) > self._settings.max_file_bytes:
                self._rotate()
            self._file.write(data)
            self._size += len(data)

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # nothing of ours was written
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _open(self) -> None:
        make_directory(self._settings.file_dir)
        path = self.path
        self._file = _appending(path)
        self._size = os.fstat(self._file.fileno()).st_size
        link = os.path.join(self._settings.file_dir, f"events_{self._settings.rank}.log")
        fresh = f"{link}.{self._pid}"
        try:
            os.symlink(os.path.basename(path), fresh)
            os.replace(fresh, link)
        except OSError:
            pass  # a convenience only

    def _rotate(self) -> None:
        assert self._file is not None
        self._file.close()
        os.replace(self.path, f"{self.path}.1")
        self._file = _appending(self.path)
        self._size = 0


def _appending(path: str) -> IO[bytes]:
    """Without a buffer: a line is one write, also when the process is killed in the next moment. Raises NotOurs."""
    return open(open_checked(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), "ab", buffering=0)


class ConsoleExporter:
    def __init__(self, form: Callable[[Event], str]) -> None:
        self._form = form

    def export(self, event: Event) -> None:
        sys.stdout.write(self._form(event) + "\n")

    def close(self) -> None:
        """The console is not ours."""


class AsyncExporter:
    """A thread writes; who reports never waits. What does not fit into the queue is dropped and counted."""

    def __init__(self, inner: Exporter, size: int) -> None:
        self._inner = inner
        self._size = size
        self.num_dropped = 0
        self.num_errors = 0
        self._told_at = 0.0
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # the other kind has a lock
        self._thread = threading.Thread(target=self._work, name="dlrover-events", daemon=True)
        self._thread.start()

    def export(self, event: Event) -> None:
        if self._pid != os.getpid():
            self._start()  # threads do not survive a fork
        if self._queue.qsize() < self._size:
            self._queue.put(event)
        else:
            self.num_dropped += 1
            if time.monotonic() - self._told_at >= TELL_DROPS_EVERY:
                self._told_at = time.monotonic()
                own_log().warning("events lost so far: %d (the queue of %d is full)", self.num_dropped, self._size)

    @property
    def metrics(self) -> dict[str, int]:
        return {
            "queue_size": self._queue.qsize(),
            "queue_capacity": self._size,
            "dropped": self.num_dropped,
            "errors": self.num_errors,
        }

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        if self._pid == os.getpid():
            self._queue.put(None)
            self._thread.join(timeout)
            lost = max(0, self._queue.qsize() - 1)  # not the word that ends the thread
            self.num_dropped += lost
            if self.num_dropped or self.num_errors:
                own_log().warning("events lost when the process ended: %d, %s", lost, self.metrics)
        self._inner.close()

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            with contained(self._note_error):  # the next event may do better
                self._inner.export(event)

    def _note_error(self, error: Exception) -> None:
        self.num_errors += 1
        own_log().warning("An event could not be exported: %r", error)


def build_exporter(settings: EventSettings) -> Exporter:
    form = Event.as_json if settings.text_formatter == "JSON" else Event.as_line
    exporter: Exporter
    if settings.event_exporter == "CONSOLE":
        exporter = ConsoleExporter(form)
    elif settings.event_exporter == "OTLP":
        from dlrover.trainer.events.opentelemetry import OpenTelemetryExporter

        exporter = OpenTelemetryExporter()
    else:
        exporter = TextFileExporter(settings, form)
    return AsyncExporter(exporter, settings.queue_size) if settings.async_exporter else exporter


def own_log() -> logging.Logger:
    return logging.getLogger(OWN_LOG)


def configure_own_log(settings: EventSettings) -> None:
    log = own_log()
    log.propagate = False
    if log.handlers:
        return
    name = f"events_sys_{settings.rank}_{os.getpid()}.log"
    path = os.path.join(settings.file_dir, name)
    handler = _CheckedFileHandler(path, encoding="utf-8", delay=True, errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if settings.debug_mode else logging.INFO)


class _CheckedFileHandler(logging.FileHandler):
    """Writes only to a file that is ours."""

    def _open(self) -> TextIOWrapper:
        descriptor = open_checked(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)
