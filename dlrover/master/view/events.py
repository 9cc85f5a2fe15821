"""
The job's events: the newest in memory, all of them in a file of JSON lines beside the journal, and on to those that asked to be told.

Volatile as far as the job is concerned: nothing is decided by them, and a file that cannot be written is said once and missed by people
only. Decisions always become events. What nodes send of their own accord may be a flood; beyond a rate it is counted and left out.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec.structs import replace

from dlrover.core.goodput.events import WARN, event
from dlrover.master.view.event_reporters import EventReporter
from dlrover.protocol.messages.goodput import MAX_EVENTS_PER_ANSWER, AskEvents, Events, JobEvent
from dlrover.protocol.messages.job import Micros
from dlrover.protocol.messages.kv import MAX_WAIT

log = logging.getLogger(__name__)

NUM_KEPT = 5000
BURST, PER_SECOND = 500, 50
"""Of events from nodes."""
MAX_FILE_BYTES = 16 * 1024 * 1024
NUM_OLD_FILES = 2
FAREWELL = 10.0
"""Seconds for what is still to be written and told when the master ends."""
_TAIL_BYTES = 1024 * 1024
"""Of the file that a new master reads, to count on and to have something to show."""


class EventLog:
    """`run` is its task; without it events are kept in memory only."""

    def __init__(
        self,
        path: Path | None = None,
        reporters: Sequence[EventReporter] = (),
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        farewell: float = FAREWELL,
    ) -> None:
        self._path = path
        self._max_file_bytes, self._farewell = max_file_bytes, farewell
        self._reporters = list(reporters)
        self._kept: deque[JobEvent] = deque(_read_tail(path) if path is not None else (), maxlen=NUM_KEPT)
        self._number = self._kept[-1].number if self._kept else 0
        self._unwritten: list[JobEvent] = []
        self._room = float(BURST)
        self._room_at: Micros | None = None
        self._num_dropped = 0
        self._num_untold = 0
        self._waiting = 0  # questions
        self._news = asyncio.Condition()
        self._wake = asyncio.Event()
        self._is_broken = False
        self._has_written = False
        self._notice: asyncio.Task[None] | None = None

    def add(self, told: JobEvent) -> JobEvent:
        """Gives it its number."""
        self._number += 1
        numbered = replace(told, number=self._number)
        self._kept.append(numbered)
        if self._path is not None or self._reporters:
            self._unwritten.append(numbered)
            del self._unwritten[:-NUM_KEPT]
            self._wake.set()
        if self._waiting:
            self._notify()
        return numbered

    def add_from_node(self, told: JobEvent) -> JobEvent | None:
        """None: too many of them came at once."""
        passed = 0 if self._room_at is None else told.at - self._room_at
        self._room = min(float(BURST), self._room + passed / 1e6 * PER_SECOND)
        self._room_at = told.at
        if self._room < 1:
            self._num_dropped += 1
            self._num_untold += 1
            return None
        self._room -= 1
        if self._num_untold:
            text = f"{self._num_untold} events of nodes are missing, because too many came at once."
            self._num_untold = 0
            self.add(event(told.at, WARN, "events-dropped", text))
        return self.add(told)

    def after(self, number: int, limit: int) -> Events:
        limit = max(1, min(limit, MAX_EVENTS_PER_ANSWER))
        num_new = min(max(0, self._number - number), len(self._kept))
        first = len(self._kept) - num_new
        if not number:
            first = max(first, len(self._kept) - limit)
        found = tuple(self._kept[index] for index in range(first, min(len(self._kept), first + limit)))
        return Events(events=found, newest=self._number, num_dropped=self._num_dropped)

    async def answer(self, ask: AskEvents) -> Events:
        """Waits for the first one, if wished."""
        if ask.wait > 0 and self._number <= ask.after:
            self._waiting += 1
            try:
                async with asyncio.timeout(min(ask.wait, MAX_WAIT)), self._news:
                    await self._news.wait_for(lambda: self._number > ask.after)
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
        return self.after(ask.after, ask.limit)

    async def run(self) -> None:
        """Until cancelled: writes what gathers, in a thread."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="events")
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.shield(asyncio.wrap_future(thread.submit(self._deliver, self._take())))
        finally:
            # What it has begun is a few lines; but a disk may hang, and somebody's reporter, and the master ends all the same.
            last = asyncio.wrap_future(thread.submit(self._finish, self._take()))
            thread.shutdown(wait=False)
            await asyncio.wait([last], timeout=self._farewell)
            if not last.done():
                log.warning("the last events could not be written within %g s", self._farewell)

    def _notify(self) -> None:
        if self._notice is None or self._notice.done():
            self._notice = asyncio.get_running_loop().create_task(self._wake_waiting())

    async def _wake_waiting(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _take(self) -> list[JobEvent]:
        taken, self._unwritten = self._unwritten, []
        return taken

    def _finish(self, events: list[JobEvent]) -> None:
        self._deliver(events)
        for reporter in self._reporters:
            reporter.close()

    def _deliver(self, events: list[JobEvent]) -> None:
        if self._path is not None and events:
            try:
                _append(self._path, events, is_first=not self._has_written, max_bytes=self._max_file_bytes)
                self._has_written = True
                self._is_broken = False
            except OSError as error:
                if not self._is_broken:
                    log.warning("events could not be written file=%s reason=%s", self._path, error.strerror)
                self._is_broken = True
        for reporter in self._reporters:
            for each in events:
                reporter.report(each)


def read_events(path: Path) -> list[JobEvent]:
    """All that a file has, the rotated ones first; lines that are no events (a torn end) are left out."""
    found: list[JobEvent] = []
    for part in (*(path.with_name(f"{path.name}.{age}") for age in range(NUM_OLD_FILES, 0, -1)), path):
        try:
            with part.open("rb") as file:
                found += _decode(file.read().splitlines())
        except FileNotFoundError:
            continue
    return found


def events_file(journal: Path) -> Path:
    return journal.with_suffix(".events.jsonl")


def _read_tail(path: Path) -> list[JobEvent]:
    for part in (path, path.with_name(f"{path.name}.1")):  # it may have been rotated a moment ago
        try:
            with part.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _TAIL_BYTES))
                found = _decode(file.read().splitlines())
        except OSError:
            continue
        if found:
            return found[-NUM_KEPT:]
    return []


def _decode(lines: Sequence[bytes]) -> list[JobEvent]:
    found = []
    for line in lines:
        try:
            found.append(_DECODER.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return found


def _append(path: Path, events: list[JobEvent], *, is_first: bool, max_bytes: int) -> None:
    data = b"".join(_ENCODER.encode(each) + b"\n" for each in events)
    if is_first:
        data = b"\n" + data  # a former master may have been killed in the middle of a line
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
    if size + len(data) > max_bytes:
        for age in range(NUM_OLD_FILES, 1, -1):
            older = path.with_name(f"{path.name}.{age - 1}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{age}"))
        path.replace(path.with_name(f"{path.name}.1"))


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(JobEvent)
