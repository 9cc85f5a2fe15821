"""
What a program calls: a process that has instants and spans.

Every public method swallows its own errors and gives an object that accepts any call, attribute or `with`, so that no chain of calls can break a
training, whatever it is called with.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from dlrover.host.edges import contained
from dlrover.host.ownership import NotOurs, make_directory
from dlrover.trainer.events.event import Event, EventType, new_id
from dlrover.trainer.events.exporters import Exporter, build_exporter, configure_own_log, own_log
from dlrover.trainer.events.settings import EventSettings, read_settings

log = logging.getLogger("dlrover.trainer.events")

MAX_TRACEBACK = 8192
Method = TypeVar("Method", bound=Callable[..., Any])


class Nothing:
    """Accepts everything and does nothing."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):  # copying, pickling and inspection ask for these and mean it
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: object, **named: object) -> Nothing:
        return self

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        return None


def safe(method: Method) -> Method:
    """An edge to the user's program: nothing gets out, the event system's own log is told."""

    @functools.wraps(method)
    def guarded(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Exception as error:
            with contained(lambda _error: None):  # a full disk, perhaps
                own_log().warning("%s failed: %r", method.__qualname__, error)
            return Nothing()

    return guarded  # type: ignore[return-value]


class Harmless:
    """What derives from it is an edge to the user's program as well: all its public methods are safe."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_") and not hasattr(method, "__wrapped__"):
                setattr(cls, name, safe(method))


class Outlet:
    """The exporter of this process, made with the first event."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards the making of the exporter
        self._exporter: Exporter | None = None
        self._settings: EventSettings | None = None
        self._is_closed = False

    def send(self, event: Event) -> None:
        settings = self._begun()
        if settings.enable and self._exporter is not None:
            self._exporter.export(event)

    @property
    def exporter(self) -> Exporter | None:
        """None before the first event, and where events are off."""
        return self._exporter

    def begin(self) -> None:
        self._begun()

    def close(self) -> None:
        with self._lock:
            exporter, self._exporter, self._settings = self._exporter, None, None
        if exporter is not None:
            exporter.close()

    def _begun(self) -> EventSettings:
        if self._settings is None:
            with self._lock:
                if self._settings is None:
                    settings = read_settings()
                    if settings.enable:
                        settings = _with_directory(settings)
                    if settings.enable:
                        configure_own_log(settings)
                        for trouble in settings.troubles:
                            own_log().warning("%s", trouble)
                        self._exporter = build_exporter(settings)
                        atexit.register(self.close)
                    self._settings = settings
                    if settings.enable and settings.hook_error:
                        from dlrover.trainer.events.error_hook import hook_errors

                        hook_errors(Process("ErrorReporter", self))
        return self._settings


def _with_directory(settings: EventSettings) -> EventSettings:
    """Without events, and said once, where the directory is another user's."""
    try:
        make_directory(settings.file_dir)
    except NotOurs as error:
        log.error(
            "No events are written: %s. Set DLROVER_EVENT_FILE_DIR to a directory that belongs to you.", error.strerror
        )
        return replace(settings, enable=False)
    return settings


OUTLET = Outlet()
"""One per process, as a process has one event file."""


class Process(Harmless):
    """Something that has events, named by its target."""

    def __init__(self, target: str, outlet: Outlet = OUTLET) -> None:
        self._target = str(target)
        self._outlet = outlet

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("_"):
            raise AttributeError(name)
        return Nothing()

    @safe
    def instant(self, name: str, content: dict[str, object] | None = None) -> None:
        self.emit(new_id(), name, EventType.INSTANT, dict(content or {}))

    @safe
    def duration(self, name: str, content: dict[str, object] | None = None) -> DurationSpan:
        return DurationSpan(self, name, dict(content or {}))

    @safe
    def custom_duration(
        self, cls: type[DurationSpan], name: str, content: dict[str, object] | None = None
    ) -> DurationSpan:
        return cls(self, name, dict(content or {}))

    @safe
    def error(self, msg: str, *arguments: object) -> None:
        self._outlet.begin()
        own_log().error(msg, *arguments)

    @safe
    def info(self, msg: str, *arguments: object) -> None:
        self._outlet.begin()
        own_log().info(msg, *arguments)

    def emit(self, event_id: str, name: str, kind: EventType, content: dict[str, object]) -> None:
        """For spans; may raise."""
        self._outlet.send(Event(event_id, self._target, str(name), kind, content))


class DurationSpan(Harmless):
    """Something that takes time. Begins once, ends once, the first way to end wins."""

    def __init__(
        self, process: Process, name: str, content: dict[str, object], parent: DurationSpan | None = None
    ) -> None:
        self._process = process
        self._name = name
        self._content = content
        self._parent = parent
        self.event_id = new_id()
        self._began_at: float | None = None
        self._is_ended = False

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("_"):
            raise AttributeError(name)
        return Nothing()

    @property
    def is_open(self) -> bool:
        return self._began_at is not None and not self._is_ended

    @safe
    def begin(self) -> DurationSpan:
        if self._began_at is None:
            self._began_at = time.monotonic()
            content = dict(self._content)
            if self._parent is not None:
                content["parent_id"] = self._parent.event_id
            self._process.emit(self.event_id, self._name, EventType.BEGIN, content)
        return self

    @safe
    def end(self, **extra: object) -> None:
        self._end(extra)

    @safe
    def success(self, **extra: object) -> None:
        self._end({**extra, "success": True})

    @safe
    def fail(self, error: object = "", **extra: object) -> None:
        self._end({**extra, "success": False, "error": str(error)[:MAX_TRACEBACK]})

    @safe
    def extra_args(self, **extra: object) -> DurationSpan:
        self._content.update(extra)
        return self

    @safe
    def extra_dict(self, extra: dict[str, object]) -> DurationSpan:
        self._content.update(extra)
        return self

    @safe
    def stage(
        self, name: str, content: dict[str, object] | None = None, cls: type[DurationSpan] | None = None
    ) -> DurationSpan | Nothing:
        """A part of this span; there is none before it begins or after it ended."""
        if not self.is_open:
            return Nothing()
        return (DurationSpan if cls is None else cls)(
            self._process, f"{self._name}#{name.lstrip('#')}", {**self._content, **(content or {})}, self
        )

    @safe
    def __enter__(self) -> DurationSpan:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None:
            self.success()
        else:
            text = "".join(traceback.format_exception(kind, error, where))
            self.fail(f"{error!r}\n{text[-MAX_TRACEBACK:]}")

    def _end(self, extra: dict[str, object]) -> None:
        if self._began_at is None or self._is_ended:
            return
        self._is_ended = True
        seconds = time.monotonic() - self._began_at
        self._process.emit(
            self.event_id, self._name, EventType.END, {**self._content, **extra, "duration": round(seconds, 6)}
        )
