"""What an ensemble knows of itself. Plain data: its encoding is the snapshot, and its digest is compared after a replay."""

from __future__ import annotations

import enum

from msgspec import Struct, field

from dlrover.protocol.messages.identity import MICROS_PER_SECOND, Micros, micros
from dlrover.unified.core.messages import InstanceId, StageOfJob
from dlrover.unified.core.spec import EnsembleSpec, RoleSpec

RECOVERY = 3600 * MICROS_PER_SECOND
"""Without a failure for so long, a budget gets one restart back."""
LONGEST_PAUSE = 30 * MICROS_PER_SECOND
ENSEMBLE_DECISIONS = 1
"""Grows when the same commands would lead to another state: then only snapshots of a journal can be used."""
SAME_IN_A_ROW = 3
"""Deaths with the same traceback after which another restart of the same kind is no use."""


class InstanceLife(enum.StrEnum):
    ABSENT = "absent"
    """No process of it is there; it is made when its pause is over and what it needs is ready."""
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    ENDING = "ending"
    """It was asked to end; it starts again when it is gone, unless the job ends."""
    SUCCEEDED = "succeeded"
    """Its entry point returned; it still serves calls."""
    FINISHED = "finished"
    """The same, and its process is gone."""


ALIVE = (InstanceLife.STARTING, InstanceLife.READY, InstanceLife.RUNNING, InstanceLife.ENDING, InstanceLife.SUCCEEDED)
USABLE = (InstanceLife.READY, InstanceLife.RUNNING, InstanceLife.SUCCEEDED, InstanceLife.FINISHED)
"""Others may be made that need it."""


class Budget(Struct):
    """Restarts that were used, less those that came back."""

    used: int = 0
    since: Micros = Micros(0)
    """When the newest one was used or the last came back."""

    def take(self, limit: int, now: Micros) -> bool:
        """False: there is none left, and none is taken."""
        back = max(0, int(now - self.since)) // RECOVERY
        if back:
            self.used = max(0, self.used - back)
            self.since = now
        if self.used >= limit:
            return False
        self.used += 1
        self.since = now
        return True

    def pause(self, first: float = 1.0) -> Micros:
        """Before the restart that was just taken: 0, then the first, and twice as long each time, at most 30 s."""
        if self.used <= 1:
            return Micros(0)
        return Micros(min(LONGEST_PAUSE, micros(first) << min(self.used - 2, 10)))


class Instance(Struct):
    incarnation: int = 0
    life: InstanceLife = InstanceLife.ABSENT
    start_at: Micros = Micros(0)
    """Not before, if it is absent."""
    kill_at: Micros = Micros(0)
    """If it is ending."""
    is_killed: bool = False
    num_restarts: int = 0
    budget: Budget = field(default_factory=Budget)
    cause: str = ""
    """Of its last failure."""
    failed_at: Micros = Micros(0)
    """When that came; 0: it has not failed."""
    fingerprint: str = ""
    """Of the traceback of its last failure."""
    num_same: int = 0
    """Failures in a row with that fingerprint."""
    blame: str = ""
    """Why a diagnosis names it as the cause of what fails next; empty: none does."""
    num_failures_here: int = 0
    """Since its machine was last asked to be replaced."""
    awaits_machine: bool = False
    """It starts again when the cluster has answered whether its machine was replaced."""


class RoleState(Struct):
    spec: RoleSpec
    instances: list[Instance]
    budget: Budget = field(default_factory=Budget)
    is_gathering: bool = True
    """Its entry points start together, when all its instances are ready."""


class EnsembleState(Struct):
    decision_version: int = ENSEMBLE_DECISIONS
    spec: EnsembleSpec | None = None
    stage: StageOfJob = StageOfJob.INIT
    number: int = 0
    now: Micros = Micros(0)
    epoch: int = 0
    roles: dict[str, RoleState] = {}
    is_placed: bool = False
    place_until: Micros = Micros(0)
    budget: Budget = field(default_factory=Budget)
    """Of restarts of the whole job after failures."""
    num_job_restarts: int = 0
    num_machine_replacements: int = 0
    exit_code: int = 0
    reason: str = ""
    verdict: str = ""

    def find(self, instance: InstanceId) -> tuple[RoleState, Instance] | None:
        role = self.roles.get(instance.role)
        if role is None or not 0 <= instance.rank < len(role.instances):
            return None
        return role, role.instances[instance.rank]
