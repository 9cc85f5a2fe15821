"""
Who is told of a job's events besides the people who ask: the log, a file, a web hook, or a class of the user's.

Reporting never fails and never waits for long: it runs in the thread of the events; a web hook and a class of the user's have a thread of their own
behind a bounded queue, a web hook few attempts for each event, and what is left out is counted.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import queue
import re
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dlrover.host.edges import exit_contained
from dlrover.host.extensions import UnusableExtension, build
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.goodput import JobEvent

log = logging.getLogger(__name__)

HOOK_TIMEOUT = 5.0
HOOK_ATTEMPTS = 3
HOOK_PAUSE = 1.0
"""Seconds before the second attempt; twice as long before the third."""
MAX_QUEUED = 1000
"""Events that wait for one reporter."""
USER_TIMEOUT = 5.0
"""Seconds that a class of the user's has at the end, for what waits and for its `close`."""


class EventReporter(Protocol):
    """A class of the user's is made without arguments; its `report` may raise, which is logged once, and may take its time."""

    def report(self, event: JobEvent) -> None: ...

    def close(self) -> None: ...


class LogReporter:
    """A line of the master's log for each: `[time][type][instance][action][text][labels]`."""

    def report(self, event: JobEvent) -> None:
        log.log(_LEVELS.get(event.level, logging.INFO), "%s", as_line(event))

    def close(self) -> None:
        """Nothing is kept."""


class FileReporter:
    """JSON lines, for a tool that follows a file. The program that reads it rotates it."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"event reporter file:{path}: {error.strerror}. Give a file that you can write to."
            ) from error

    def report(self, event: JobEvent) -> None:
        try:
            self._file.write(msgspec.json.encode(event) + b"\n")
        except OSError as error:
            log.warning("an event could not be written file=%s reason=%s", self._file.name, error.strerror)

    def close(self) -> None:
        self._file.close()


class _Apart:
    """In a thread of its own, which ends with the process if it does not come back."""

    def __init__(self, name: str, timeout: float) -> None:
        self._timeout = timeout
        self._queue: queue.Queue[JobEvent | None] = queue.Queue(MAX_QUEUED)
        self._closing = threading.Event()
        self.num_lost = 0
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def report(self, event: JobEvent) -> None:
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._lose("its queue is full")

    def close(self) -> None:
        """Gives what waits a moment."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # it has not kept up for long, and does not now
            self._queue.put(None, timeout=self._timeout)
        self._thread.join(self._timeout)

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            self._send(event)

    def _send(self, event: JobEvent) -> None:
        raise NotImplementedError

    def _lose(self, why: str) -> None:
        self.num_lost += 1
        if self.num_lost & (self.num_lost - 1) == 0:  # the first, the second, the fourth, ...
            self._warn(why)

    def _warn(self, why: str) -> None:
        raise NotImplementedError


class WebhookReporter(_Apart):
    """Each event as JSON by POST. At the end what waits is sent without pauses, for as long as one attempt may take."""

    def __init__(self, url: str, *, timeout: float = HOOK_TIMEOUT, pause: float = HOOK_PAUSE) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"event reporter {_receiver(url)}: give a URL that begins with http:// or https://.")
        super().__init__("event-webhook", timeout)
        self._url = url
        self._pause = pause
        self._thread.start()

    def _send(self, event: JobEvent) -> None:
        from http.client import HTTPException
        from urllib.request import Request, urlopen

        why = ""
        for attempt in range(HOOK_ATTEMPTS):
            try:
                body = msgspec.json.encode(event)
                request = Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
                with urlopen(request, timeout=self._timeout):
                    return
            except (OSError, HTTPException, ValueError) as error:
                why = _reason(error)
            if attempt + 1 < HOOK_ATTEMPTS:
                self._closing.wait(self._pause * 2**attempt)
        self._lose(why)

    def _warn(self, why: str) -> None:
        log.warning("event hook lost num_events=%d receiver=%s reason=%s", self.num_lost, _receiver(self._url), why)


def _receiver(url: str) -> str:
    """Scheme and host. The rest is often what opens the hook, and people who may not act can read the log."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://{re.split('[/?#]', rest, maxsplit=1)[0].rpartition('@')[2]}" if separator else url


def _reason(error: Exception) -> str:
    """Without the words of those who quote the URL in them."""
    from urllib.error import HTTPError, URLError

    if isinstance(error, HTTPError):
        return f"it answered {error.code}"
    cause = error.reason if isinstance(error, URLError) else error
    name = type(cause if isinstance(cause, Exception) else error).__name__
    return f"{name}: {cause.strerror}" if isinstance(cause, OSError) and cause.strerror else name


class _Guarded(_Apart):
    """A reporter of the user's: what it raises is its own matter, and so is for how long it is busy."""

    def __init__(self, reporter: EventReporter, name: str, user_timeout: float) -> None:
        super().__init__("event-reporter", user_timeout)
        self._reporter = reporter
        self._name = name
        self._has_failed = False
        self._thread.start()

    def close(self) -> None:
        super().close()
        if self._thread.is_alive():
            log.warning("an event reporter did not return in time and is not called again name=%s", self._name)

    def _work(self) -> None:
        super()._work()
        with exit_contained(lambda _error: log.exception("an event reporter could not be closed name=%s", self._name)):
            self._reporter.close()

    def _warn(self, why: str) -> None:
        log.warning("event reporter lost num_events=%d name=%s reason=%s", self.num_lost, self._name, why)

    def _send(self, event: JobEvent) -> None:
        with exit_contained(self._note_failure):
            self._reporter.report(event)

    def _note_failure(self, _error: object) -> None:
        if not self._has_failed:
            log.exception("an event reporter failed name=%s; further failures are not logged", self._name)
        self._has_failed = True


class _Historical:
    """A reporter of the original's: `report(event_type, instance, action, msg, labels)`, and no end."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    def report(self, event: JobEvent) -> None:
        self._reporter.report(event.level, instance_of(event), event.name, event.text, dict(event.labels))

    def close(self) -> None:
        """It was never told."""


def _translated(reporter: Any) -> EventReporter:
    is_historical = len(inspect.signature(reporter.report).parameters) == 5
    return _Historical(reporter) if is_historical else reporter


def build_reporters(names: Sequence[str], *, user_timeout: float = USER_TIMEOUT) -> list[EventReporter]:
    """`log`, `file:PATH`, `http://...`, `https://...` or `module::Class`. Raises ConfigError."""
    return [_build(name, user_timeout) for name in names]


def _build(name: str, user_timeout: float) -> EventReporter:
    if name == "log":
        return LogReporter()
    if name.startswith("file:"):
        return FileReporter(Path(name.removeprefix("file:")))
    if name.startswith(("http://", "https://")):
        return WebhookReporter(name)
    if "::" not in name:
        raise ConfigError(f"event reporter {_receiver(name)!r}: give log, file:PATH, a URL, or module::Class.")
    try:
        return _Guarded(_translated(build(name, method="report")), name, user_timeout)
    except (UnusableExtension, TypeError, ValueError) as error:  # the last two: a method without a signature
        raise ConfigError(f"event reporter {name}: {error}") from error


def instance_of(event: JobEvent) -> str:
    return "job" if event.node is None else f"node-{event.node}"


def as_line(event: JobEvent) -> str:
    at = datetime.fromtimestamp(event.at / 1e6, UTC).isoformat(timespec="milliseconds")
    text = event.text.replace("\n", " ")
    return f"[{at}][{event.level}][{instance_of(event)}][{event.name}][{text}][{json.dumps(event.labels)}]"


_LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
