"""
How events are exported: defaults, then an optional JSON file, then `DLROVER_EVENT_*`. A wrong value is ignored, and said once in the event
system's own log; a training must not fail because of its events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dlrover.host.ownership import open_checked

EXPORTERS = ("TEXT_FILE", "CONSOLE", "OTLP")
FORMATS = ("LOG", "JSON")
TRUE = ("true", "1", "yes", "y", "on", "enable", "enabled")
FALSE = ("false", "0", "no", "n", "off", "disable", "disabled")
_PREFIX = "DLROVER_EVENT_"


@dataclass(frozen=True)
class EventSettings:
    event_exporter: str = "TEXT_FILE"
    async_exporter: bool = False
    queue_size: int = 1024
    file_dir: str = "/tmp/dlrover"
    text_formatter: str = "LOG"
    enable: bool = True
    hook_error: bool = False
    debug_mode: bool = False
    max_file_bytes: int = 64 * 1024 * 1024
    """A file that grows beyond becomes `.1`, the one before it is removed."""
    rank: str = "0"
    troubles: tuple[str, ...] = field(default=(), compare=False)
    """What could not be used, a sentence each."""


def read_settings(environ: Mapping[str, str] | None = None) -> EventSettings:
    environ = os.environ if environ is None else environ
    troubles: list[str] = []
    settings = EventSettings()
    path = environ.get("DLROVER_EVENT_CONFIG_PATH", "")
    if path:
        settings = _merged(settings, _read_file(path, troubles), troubles)
    named = {key.removeprefix(_PREFIX).lower(): value for key, value in environ.items() if key.startswith(_PREFIX)}
    named.pop("config_path", None)
    settings = _merged(settings, named, troubles)
    rank = environ.get("RANK", "0") or "empty"
    return replace(settings, rank=_safe(rank), troubles=tuple(troubles))


def _read_file(path: str, troubles: list[str]) -> dict[str, object]:
    try:
        with open(open_checked(path, os.O_RDONLY), encoding="utf-8") as file:
            values = json.load(file)
        if isinstance(values, dict):
            return {str(key).lower(): value for key, value in values.items()}
        troubles.append(f"{path} is ignored, because it does not contain a JSON object.")
    except (OSError, ValueError) as error:
        troubles.append(f"{path}: {error}; ignored.")
    return {}


def _merged(settings: EventSettings, values: Mapping[str, object], troubles: list[str]) -> EventSettings:
    for key, value in values.items():
        try:
            settings = replace(settings, **{key: _parsed(key, value)})  # type: ignore[arg-type]
        except (KeyError, ValueError, TypeError):
            troubles.append(
                f"{key}={value!r} is ignored, because events have no such setting or the value is not valid."
            )
    return settings


def _parsed(key: str, value: object) -> object:
    kind = type(getattr(EventSettings, key)) if key in _KEYS else None
    if kind is None:
        raise KeyError(key)
    text = str(value).strip()
    if kind is bool:
        if text.lower() not in TRUE + FALSE:
            raise ValueError(text)
        return text.lower() in TRUE
    if kind is int:
        number = int(text)
        if number < 1:
            raise ValueError(text)
        return number
    choices = {"event_exporter": EXPORTERS, "text_formatter": FORMATS}.get(key)
    if choices is not None:
        if text.upper() not in choices:
            raise ValueError(text)
        return text.upper()
    if not text:
        raise ValueError("empty")
    return text


def _safe(text: str) -> str:
    """As a part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in text)[:64]


_KEYS = (
    "event_exporter",
    "async_exporter",
    "queue_size",
    "file_dir",
    "text_formatter",
    "enable",
    "hook_error",
    "debug_mode",
    "max_file_bytes",
)
