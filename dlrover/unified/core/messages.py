"""
What a conductor tells the core of its ensemble, and what the core wants done.

An instance is named by role, rank and incarnation. A report about an incarnation that is not the newest is `Rejected`.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from dlrover.protocol.messages.identity import Micros
from dlrover.unified.core.spec import EnsembleSpec


class InstanceId(Struct, frozen=True, order=True):
    role: str
    rank: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.role}-{self.rank}"


class StageOfJob(enum.StrEnum):
    INIT = "INIT"
    READY = "READY"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


class EnsembleWait(enum.StrEnum):
    """What time alone changes."""

    PAUSE = "pause"
    """An instance that failed may start again."""
    PLACEMENT = "placement"
    GRACE = "grace"
    """Of an instance that was asked to end."""


class BeginEnsemble(Struct, tag=True, frozen=True):
    spec: EnsembleSpec


class ConductorTook(Struct, tag=True, frozen=True):
    """Another life of the conductor. Nothing restarts for that; what was under way is asked for again."""

    epoch: int


class BundlesPlaced(Struct, tag=True, frozen=True):
    pass


class InstanceReady(Struct, tag=True, frozen=True):
    """It was made, its entry point is imported, and it serves calls."""

    instance: InstanceId


class InstanceSucceeded(Struct, tag=True, frozen=True):
    """Its entry point returned."""

    instance: InstanceId


class InstanceFailed(Struct, tag=True, frozen=True):
    """Its entry point raised, or it could not be made. Its process may still be there."""

    instance: InstanceId
    cause: str
    """For people, one line."""
    traceback: str = ""
    """Or what else tells one failure from another."""


class InstanceGone(Struct, tag=True, frozen=True):
    """Its process is not there any more. Wanted, or not: then it died."""

    instance: InstanceId
    cause: str = ""


class InstanceBlamed(Struct, tag=True, frozen=True):
    """A diagnosis names it as the cause of a failure: of the next one that is reported, whichever instance that hits."""

    instance: InstanceId
    reason: str


class MachineReplaced(Struct, tag=True, frozen=True):
    """The answer to `ReplaceMachine`."""

    instance: InstanceId
    is_replaced: bool
    """False: the machine is the same, because nothing here can replace it or it took too long."""


class StopEnsemble(Struct, tag=True, frozen=True):
    reason: str
    exit_code: int = 0


class RestartEnsemble(Struct, tag=True, frozen=True):
    """By a person: every instance starts again; no budget is used."""

    reason: str


class TimePassed(Struct, tag=True, frozen=True):
    what: EnsembleWait
    instance: InstanceId | None = None


Command = (
    BeginEnsemble
    | ConductorTook
    | BundlesPlaced
    | InstanceReady
    | InstanceSucceeded
    | InstanceFailed
    | InstanceGone
    | InstanceBlamed
    | MachineReplaced
    | StopEnsemble
    | RestartEnsemble
    | TimePassed
)


class PlaceBundles(Struct, tag=True, frozen=True):
    pass


class CreateInstance(Struct, tag=True, frozen=True):
    instance: InstanceId


class RunInstance(Struct, tag=True, frozen=True):
    """Start its entry point."""

    instance: InstanceId


class EndInstance(Struct, tag=True, frozen=True):
    """Ask it to end; at once if it had its time."""

    instance: InstanceId
    is_kill: bool = False


class ReplaceMachine(Struct, tag=True, frozen=True):
    """Exchange the machine on which this instance ran, if the cluster can. The instance waits for the answer."""

    instance: InstanceId


class FinishEnsemble(Struct, tag=True, frozen=True):
    """Nothing of the job runs any more."""

    exit_code: int
    reason: str


Effect = PlaceBundles | CreateInstance | RunInstance | EndInstance | ReplaceMachine | FinishEnsemble


class EnsembleOutcome(Struct, frozen=True):
    effects: tuple[Effect, ...] = ()
    verdicts: tuple[str, ...] = ()


class EnsembleDeadline(Struct, frozen=True):
    at: Micros
    command: TimePassed


class InstanceStatus(Struct, frozen=True, kw_only=True):
    name: str
    incarnation: int
    state: str
    num_restarts: int
    cause: str
    """Of its last failure."""
    failed_at: Micros
    """When that came; 0: it has not failed."""
    is_usable: bool
    """It serves calls, or has ended well."""


class RoleStatus(Struct, frozen=True, kw_only=True):
    name: str
    instances: tuple[InstanceStatus, ...]


class EnsembleStatus(Struct, frozen=True, kw_only=True):
    name: str
    stage: StageOfJob
    exit_code: int
    num_job_restarts: int
    verdict: str
    roles: tuple[RoleStatus, ...]
