"""What a driver and the host of its job say to each other, and the plan that a host finds again after its death."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dlrover.master.config import MasterConfig
from dlrover.platforms.ray.starter import RayNodes
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.messages.fleet import NodeChanged

HOST = "host"
"""Name of the host actor in the namespace of its job."""


class RayJobPlan(Struct, frozen=True, kw_only=True):
    """The job as the cluster's store keeps it: without secrets."""

    job_uid: str
    job_name: str
    nodes: RayNodes
    master: MasterConfig | None
    """Without what only the host's machine knows. None: no master, for tests of the platform alone."""
    summary: str = ""
    """For people: how many nodes of what."""
    journal: str = ""
    """Shared directory for the journal; empty: on the machine of the host."""
    has_variables: bool = False
    """The user gave variables, which only a living node or the driver can tell a new host."""
    host_machine: str = ""
    """Ray's id of the machine for the host, if it is there; empty: the head's."""
    capacity: int = 0
    grace: float = 30.0
    shutdown_timeout: float = 30.0
    master_grace: float = 600.0
    is_exit_code_of_worker: bool = False
    tls: TlsConfig | None = None


class ShownLine(Struct, tag=True, frozen=True):
    """One line of a node's output with its end."""

    node: str
    line: bytes
    is_error: bool


class Said(Struct, tag=True, frozen=True):
    """The host's own line for people."""

    text: str


class JobOver(Struct, frozen=True):
    exit_code: int
    report: str


class HostNews(Struct, frozen=True, kw_only=True):
    host_epoch: int
    """A new host begins to count anew."""
    next: int
    items: tuple[ShownLine | Said | NodeChanged, ...] = ()
    num_lost: int = 0
    """Items before these that are not kept any more."""
    over: JobOver | None = None
    address: str = ""
    """Of the master; empty: it does not run."""


class HostAccount(Struct, frozen=True, kw_only=True):
    """How the job's master is reached."""

    job_name: str
    address: str
    token: str
    tls: TlsConfig | None
    host: str
    """Machine that the host and the master run on."""
    host_epoch: int
    summary: str
    pid: int
    master_pid: int
    socket: str
    """Of the host, for processes of its own machine and user."""


PLAN = msgspec.json.Decoder(RayJobPlan)
NEWS = msgspec.msgpack.Decoder(HostNews)
ACCOUNT = msgspec.msgpack.Decoder(HostAccount)
pack = msgspec.msgpack.encode
