"""
Where events go and how that is configured, by the original's names: `training_event.config` and `.exporter`.

The exporters are ours (`dlrover.trainer.events`) under the constructors that scripts call. The default one is made with the first
event, from the environment alone.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import os
from typing import Any

from dlrover.compat.events.training_events import Event
from dlrover.compat.tools.singleton import Singleton
from dlrover.trainer.events import exporters
from dlrover.trainer.events.process import OUTLET
from dlrover.trainer.events.settings import FALSE, TRUE, EventSettings, read_settings

ENV_PREFIX = "DLROVER_EVENT"
DEFAULT_EVENT_EXPORTER = EventSettings.event_exporter
DEFAULT_FILE_DIR = EventSettings.file_dir
DEFAULT_TEXT_FORMATTER = EventSettings.text_formatter

log = logging.getLogger(__name__)

# training_event.config


def parse_bool(val: object) -> bool | None:
    if isinstance(val, bool):
        return val
    text = val.lower() if isinstance(val, str) else ""
    return True if text in TRUE else False if text in FALSE else None


def parse_int(val: object) -> int | None:
    return int(val) if isinstance(val, int | str) else None


def parse_str(val: object) -> str | None:
    return val if isinstance(val, str) else None


def get_env_key(key: str) -> str:
    return f"{ENV_PREFIX}_{key.upper()}"


def get_pid() -> str:
    return str(os.getpid())


def get_rank() -> str:
    return os.environ.get("RANK", "0") or "empty"


class Config(Singleton):
    """The settings of events as the environment and the file give them. Changing one here changes no exporter."""

    event_exporter: str
    async_exporter: bool
    queue_size: int
    file_dir: str
    text_formatter: str
    hook_error: bool
    enable: bool
    debug_mode: bool

    def __init__(self, config_file: str | None = None) -> None:
        named = {"DLROVER_EVENT_CONFIG_PATH": config_file} if config_file else {}
        settings = dataclasses.asdict(read_settings({**os.environ, **named}))
        self.__dict__.update(settings, rank=get_rank(), pid=get_pid())

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ and value != self.__dict__[name]:
            log.warning("Config.%s=%r has no effect on events: set %s.", name, value, get_env_key(name))
        super().__setattr__(name, value)

    def init_logger(self) -> logging.Logger:
        return get_default_logger()


def is_dlrover_event_enabled() -> bool:
    return bool(Config.singleton_instance().enable)


def get_default_logger() -> logging.Logger:
    """The event system's own log."""
    return exporters.own_log()


# training_event.exporter


class EventExporter:
    """Derive from it to send events elsewhere: `Process(target, exporter)`."""

    def export(self, event: Event) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no export()")

    def start(self) -> None:
        """Nothing by default."""

    def close(self) -> None:
        """Nothing by default."""


class Formater(abc.ABC):
    """The published spelling."""

    @abc.abstractmethod
    def format(self, event: Any) -> str: ...


class LogFormatter(Formater):
    def format(self, event: Any) -> str:
        return str(event.as_line())


class JsonFormatter(Formater):
    def format(self, event: Any) -> str:
        return str(event.as_json())


class TextFileExporter(exporters.TextFileExporter, EventExporter):
    def __init__(self, file_dir: str, formatter: Formater) -> None:
        super().__init__(EventSettings(file_dir=file_dir, rank=get_rank()), formatter.format)


class ConsoleExporter(exporters.ConsoleExporter, EventExporter):
    def __init__(self, formatter: Formater) -> None:
        super().__init__(formatter.format)


class AsyncExporter(exporters.AsyncExporter, EventExporter):
    def __init__(self, exporter: EventExporter, max_queue_size: int = EventSettings.queue_size) -> None:
        exporter.start()
        super().__init__(exporter, max_queue_size)  # type: ignore[arg-type]  # an Event of the original is one of ours

    def get_metrics(self) -> dict[str, int]:
        told = self.metrics
        return {
            "queue_size": told["queue_size"],
            "queue_maxsize": told["queue_capacity"],
            "dropped_events": told["dropped"],
            "error_events": told["errors"],
        }


def init_default_exporter() -> None:
    OUTLET.begin()


def get_default_exporter() -> object:
    """None before the first event, and where events are off."""
    return OUTLET.exporter


def close_default_exporter() -> None:
    """What comes after it begins anew."""
    OUTLET.close()
