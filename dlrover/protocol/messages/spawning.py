"""
What an agent and its zygote say to each other over their socket pair.

Byte strings where the operating system has byte strings: an environment or an argument need not be valid text, and a
worker must get exactly what a plain `exec` would have given it.
"""

from __future__ import annotations

from msgspec import Struct


class ForkWorker(Struct, tag=True, frozen=True, kw_only=True):
    """
    Start one worker. Four descriptors come along: its stdin, stdout, stderr and its leash.

    The leash is a socket whose other end the agent holds. The worker, once forked, waits for one byte on it; end of
    file instead means that no agent knows of this worker and it ends without having run anything. A request that is
    repeated after a zygote's death brings a new leash and the agent drops the old one, so it never starts a worker
    twice. Afterwards the worker closes the leash (it runs) or writes why it cannot.
    """

    id: int
    agent_pid: int
    kind: str
    """An `EntryKind` of the agent's configuration."""
    target: bytes
    args: tuple[bytes, ...]
    environ: dict[bytes, bytes]
    cwd: bytes
    umask: int
    interpreter: bytes
    """Runs scripts where the zygote cannot: cold start, another Python."""
    is_warm: bool


class CountDevices(Struct, tag=True, frozen=True, kw_only=True):
    id: int
    kind: str
    """torchrun's words: auto, cpu, gpu, xpu or the name of a custom device."""


ToZygote = ForkWorker | CountDevices


class Prepared(Struct, tag=True, frozen=True, kw_only=True):
    """Sent once, when all imports are done."""

    is_warm: bool
    seconds: float
    note: str = ""
    """For people: why it is not warm although it should be, or without some modules."""
    left_out: tuple[str, ...] = ()
    """Modules that should have been imported, too, and could not: see the note."""


class Forked(Struct, tag=True, frozen=True, kw_only=True):
    """The worker exists, is the agent's child by now and waits on its leash."""

    id: int
    pid: int


class Spares(Struct, tag=True, frozen=True, kw_only=True):
    """All workers that are forked ahead and wait for an order, children of the agent already. Told at each change."""

    pids: tuple[int, ...]


class Counted(Struct, tag=True, frozen=True, kw_only=True):
    id: int
    count: int
    device: str


class SpawnRefused(Struct, tag=True, frozen=True, kw_only=True):
    id: int
    message: str


FromZygote = Prepared | Forked | Spares | Counted | SpawnRefused

__all__ = [
    "CountDevices",
    "Counted",
    "ForkWorker",
    "Forked",
    "FromZygote",
    "Prepared",
    "Spares",
    "SpawnRefused",
    "ToZygote",
]
