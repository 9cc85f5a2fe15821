"""What driver, conductor and instances say to each other. Bytes: Ray would pickle anything else, and keep it where people can read it."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dlrover.unified.core.messages import EnsembleStatus
from dlrover.unified.entry import EntryPoint
from dlrover.unified.plan import ProcessGroup

CONDUCTOR = "conductor"
"""Name of its actor in the namespace of the job."""


class InstanceOrder(Struct, frozen=True, kw_only=True):
    """What an instance shall be. It is that for life."""

    job: str
    job_uid: str
    role: str
    rank: int
    incarnation: int
    actor: str
    entry: EntryPoint
    environ: dict[str, str]
    num_ranks: dict[str, int]
    """By role."""
    silent_roles: tuple[str, ...] = ()
    """They take no calls."""
    local_world_size: int = 1
    config: bytes = b""
    batch: int = 0
    """Of a stream."""
    lease: float = 0.0
    is_driver: bool = False
    process_group: ProcessGroup | None = None
    is_named_as_of_old: bool = False
    is_device_by_rank: bool = False


class InstanceEnd(Struct, frozen=True, kw_only=True):
    """Of an entry point."""

    cause: str = ""
    """One line; empty: it returned."""
    traceback: str = ""
    machine: str = ""
    """Ray's id of it; told with the answer to `begin`."""


class EnsembleAccount(Struct, frozen=True, kw_only=True):
    """How the job is, for a driver."""

    status: EnsembleStatus
    pid: int
    epoch: int
    pids: dict[str, int] = {}
    """Of the actors of instances, by their name; of an elastic role: of its host."""
    hosts: dict[str, str] = {}
    """By elastic role: the namespace of its host."""


ORDER = msgspec.msgpack.Decoder(InstanceOrder)
END = msgspec.msgpack.Decoder(InstanceEnd)
ACCOUNT = msgspec.msgpack.Decoder(EnsembleAccount)
pack = msgspec.msgpack.encode
