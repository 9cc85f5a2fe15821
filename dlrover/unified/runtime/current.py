"""
Who this process is in its multi-role job, and its way to the others. Set once by what started the user's code, read by the user's code.
"""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

from msgspec import Struct, field

from dlrover.protocol.errors import ConfigError
from dlrover.unified.runtime.wire import Wire


class Current(Struct, kw_only=True):
    job: str
    job_uid: str
    role: str
    rank: int
    world_size: int
    incarnation: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    config_data: bytes = b""
    wire: Wire
    ending: threading.Event = field(default_factory=threading.Event)
    """Set when the instance was asked to end."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"

    @property
    def config(self) -> Any:
        """What was given to `Ensemble(config=…)`."""
        return pickle.loads(self.config_data) if self.config_data else None


_PROCESS: list[Current] = []
"""At most one: a process is one instance."""
_JOINING = threading.Lock()
"""Two threads of a worker may ask at once, and only one may join."""


def enter(current: Current) -> None:
    assert not _PROCESS, f"this process is {_PROCESS[0].name} already"
    _PROCESS.append(current)


def leave() -> None:
    """The process is no instance any more: for another life in the same process."""
    _PROCESS.clear()


def current() -> Current:
    """Raises `ConfigError` outside a multi-role job."""
    with _JOINING:
        if not _PROCESS:
            enter(_join())
    return _PROCESS[0]


def is_inside() -> bool:
    """Whether this process is an instance."""
    try:
        current()
    except ConfigError:
        return False
    return True


def _join() -> Current:
    """As a forked worker of an elastic role."""
    from dlrover.unified.runtime.relay_client import wire_from_environment

    wire = wire_from_environment()
    if wire is None:
        raise ConfigError("This process is not an instance of a multi-role job. Start it as a role of an Ensemble.")
    return Current(
        job=wire.welcome.job,
        job_uid=wire.welcome.job_uid,
        role=wire.welcome.role,
        rank=wire.rank,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        config_data=wire.config_data,
        wire=wire,
    )
