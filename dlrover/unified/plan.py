"""
A multi-role job as the cluster's store keeps it: what the core decides about, and what its instances are made of.

The variables of roles are part of it, so they are no place for secrets.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.cli.ray.messages import RayJobPlan
from dlrover.unified.core.spec import EnsembleSpec
from dlrover.unified.entry import EntryPoint
from dlrover.unified.layout import BundleLayout


class RoleKind(enum.StrEnum):
    SIMPLE = "simple"
    """Each instance is one actor, which runs the entry point in a thread."""
    ELASTIC = "elastic"
    """One elastic job with a master of its own; its ranks are forked below node actors."""
    STREAM = "stream"
    """One actor that hands items from one role to another."""


class RankHome(enum.StrEnum):
    """Where the ranks of an elastic role live."""

    FORKED = "forked"
    """Below a node actor, by the zygote of an agent."""
    ACTOR = "actor"
    """Each in an actor of its own. The role starts again as a whole."""


class GroupRule(Struct, frozen=True, kw_only=True):
    """When a machine of an instance is not replaced in time, all that have the same value of this label are."""

    label: str = ""
    """Empty: no rule."""
    timeout: float = 300.0


class ProcessGroup(Struct, frozen=True, kw_only=True):
    """Of a role whose instances train together in actors."""

    is_set_up: bool = True
    """False: only the variables that torch needs are set."""
    backend: str = "auto"
    timeout: int = 0
    """Seconds; 0: torch's own."""
    is_checked: bool = True
    """Before the entry point runs, all instances multiply and sum once. A failure is a failure of the role."""


class RolePlan(Struct, frozen=True, kw_only=True):
    kind: RoleKind
    entry: EntryPoint | None = None
    """Of a simple role."""
    num_ranks: int = 1
    """That calls can reach."""
    local_world_size: int = 1
    """Ranks of one group instance."""
    environ: dict[str, str] = {}
    job: RayJobPlan | None = None
    """Of an elastic role."""
    batch: int = 0
    """Of a stream: keys of one step."""
    lease: float = 0.0
    """Of a stream: seconds that a feeder has for one key."""
    takes_calls: bool = True
    """False: a script of an elastic role that never serves. Calls to it are refused at once."""
    process_group: ProcessGroup | None = None
    machine_group: GroupRule = GroupRule()
    is_device_by_rank: bool = False
    """Instances of a group share its GPUs: local rank N uses the device N. Otherwise Ray says which one."""
    is_named_as_of_old: bool = False
    """The instances see the variables of the historical interface."""


class EnsemblePlan(Struct, frozen=True, kw_only=True):
    job_uid: str
    spec: EnsembleSpec
    roles: dict[str, RolePlan]
    layout: BundleLayout
    config: bytes = b""
    """The user's object, as the user pickled it. Opened by the instances alone."""
    environ: dict[str, str] = {}
    runtime_env: dict[str, Any] = {}

    @property
    def is_of_old(self) -> bool:
        """It comes from the historical interface."""
        return any(role.is_named_as_of_old for role in self.roles.values())

    def silent_roles(self) -> tuple[str, ...]:
        """Those that take no calls."""
        return tuple(name for name, role in self.roles.items() if not role.takes_calls)


PLAN = msgspec.msgpack.Decoder(EnsemblePlan)
pack = msgspec.msgpack.encode
