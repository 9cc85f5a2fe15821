"""Objects as JSON, as the original's messages, resources and plans are rendered for logs and files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dlrover.snapshot.storage.class_meta import ClassMeta as ClassMeta


def to_dict(value: Any) -> Any:
    """An object's own `to_dict()`, else its attributes, else nothing."""
    return value.to_dict() if hasattr(value, "to_dict") else getattr(value, "__dict__", {})


class JsonSerializable:
    def to_json(self, indent: int | None = None) -> Any:
        """Text with sorted keys."""
        return json.dumps(self, default=to_dict, sort_keys=True, indent=indent)


@dataclass
class ProcessError(JsonSerializable):
    """How one worker failed, as the original's agents report it."""

    local_rank: int
    exitcode: int
    message: str
    datetime: Any
