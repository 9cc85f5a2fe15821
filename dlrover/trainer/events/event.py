"""
One event, and its two forms: a line for people (and for tools that follow files), and JSON.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

MAX_CONTENT = 64 * 1024
"""Characters of the content of one event; more is cut, and marked so."""


class EventType(StrEnum):
    BEGIN = "BEGIN"
    END = "END"
    INSTANT = "INSTANT"


@dataclass(frozen=True)
class Event:
    event_id: str
    target: str
    name: str
    event_type: EventType
    content: dict[str, object]
    event_time: datetime = field(default_factory=datetime.now)
    pid: int = field(default_factory=os.getpid)

    def as_line(self) -> str:
        """`[time] [pid] [event_id] [target] [name] [TYPE] {content}`"""
        head = "] [".join(
            (
                self.event_time.isoformat(),
                str(self.pid),
                self.event_id,
                _plain(self.target),
                _plain(self.name),
                self.event_type.value,
            )
        )
        return f"[{head}] {content_as_json(self.content)}"

    def as_json(self) -> str:
        fields = {
            "event_time": self.event_time.isoformat(),
            "pid": self.pid,
            "event_id": self.event_id,
            "target": self.target,
            "name": self.name,
            "event_type": self.event_type.value,
        }
        return f'{json.dumps(fields)[:-1]}, "content": {content_as_json(self.content)}}}'


def new_id() -> str:
    return secrets.token_hex(4)


def content_as_json(content: dict[str, object]) -> str:
    try:
        text = json.dumps(content, default=_told, skipkeys=True)
    except (ValueError, RecursionError):
        text = json.dumps({"unreadable": "the content refers to itself"})
    if len(text) > MAX_CONTENT:
        text = json.dumps({"cut": True, "size": len(text), "content": text[: MAX_CONTENT // 2]})
    return text


def _told(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return f"<not serialisable: {type(value).__name__}>"


def _plain(text: str) -> str:
    """A field of a line must not end it, nor close its bracket."""
    return text.replace("\n", " ").replace("\r", " ").replace("]", ")")
