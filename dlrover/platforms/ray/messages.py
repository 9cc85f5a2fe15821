"""
What host and node actors say to each other. As bytes: Ray would pickle anything else, and keep it where people can read it.

The token and the variables of the user travel in these calls alone, never in an actor's constructor, its environment or a key.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dlrover.protocol.messages.fleet import LaunchNode

MASTER_FILE = "master"
PREEMPTION_FILE = "preempted"
TOKEN_FILE = "token"


class JobSecrets(Struct, frozen=True, kw_only=True):
    """What the host needs and no store may hold. Every node actor has it, so that the next host finds it."""

    token: str
    environ: dict[str, str] = {}
    """Variables that the user gives all nodes."""


class NodeOrder(Struct, frozen=True, kw_only=True):
    """What a node actor shall run. It runs one order in its life."""

    host_epoch: int
    job_uid: str
    job_name: str
    intent: LaunchNode
    argv: tuple[str, ...]
    """Arguments of the machine's own Python."""
    script: str = ""
    """File that must be there; empty: what runs is no file."""
    environ: dict[str, str]
    """Of the job, without what only the machine knows."""
    secrets: JobSecrets
    master_address: str = ""
    orphan_grace: float = 3.0


class NodeOutput(Struct, frozen=True, kw_only=True):
    lines: tuple[tuple[bytes, bool], ...] = ()
    """Each with its end, and whether it is of stderr."""
    saving_for: float = 0.0
    """Seconds that the node may still write checkpoints."""
    is_over: bool = False
    """There will be no more."""


class ActorEnd(Struct, frozen=True, kw_only=True):
    exit_code: int
    is_out_of_memory: bool = False
    cause: str = ""


class ActorAccount(Struct, frozen=True, kw_only=True):
    """Of a node actor about itself, for a host that was started again."""

    order: NodeOrder | None
    """None: it has not been told what to run."""
    machine: str
    """Ray's id of it."""
    is_over: bool = False


ORDER = msgspec.msgpack.Decoder(NodeOrder)
OUTPUT = msgspec.msgpack.Decoder(NodeOutput)
END = msgspec.msgpack.Decoder(ActorEnd)
ACCOUNT = msgspec.msgpack.Decoder(ActorAccount)
pack = msgspec.msgpack.encode
