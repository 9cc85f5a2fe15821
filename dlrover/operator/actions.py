"""
What the operator does to a cluster, as values.

`decide` returns these and `carry_out` sends them. Each action is safe to repeat: an object that exists already, a pod
that is gone already and a status that is the same already are no failures.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from dlrover.platforms.kubernetes.elastic_job import ElasticJobStatus, JsonObject
from dlrover.platforms.kubernetes.scale_plan import PlanObject


class ObjectKind(enum.StrEnum):
    """Kinds of objects that the operator makes or deletes."""

    ELASTIC_JOB = "ElasticJob"
    POD = "Pod"
    SERVICE = "Service"
    SECRET = "Secret"
    CONFIG_MAP = "ConfigMap"
    SERVICE_ACCOUNT = "ServiceAccount"
    ROLE = "Role"
    ROLE_BINDING = "RoleBinding"
    CLAIM = "PersistentVolumeClaim"
    DISRUPTION_BUDGET = "PodDisruptionBudget"
    NETWORK_POLICY = "NetworkPolicy"
    SCALE_PLAN = "ScalePlan"
    VOLCANO_GROUP = "PodGroup.scheduling.volcano.sh"
    COSCHEDULING_GROUP = "PodGroup.scheduling.x-k8s.io"
    """The two kinds of groups of gang schedulers: a cluster has one of them, or none."""


class CheckTemplates(Struct, frozen=True, kw_only=True):
    """Let the API server judge the first pod of each type, without creating it. The result comes back as an observation."""

    generation: int
    pods: tuple[JsonObject, ...]


class CreateObject(Struct, frozen=True, kw_only=True):
    kind: ObjectKind
    name: str
    body: JsonObject


class AdjustObject(Struct, frozen=True, kw_only=True):
    """Change an object with a merge patch: one that follows the job's numbers, or a plan that shall go with the job."""

    kind: ObjectKind
    name: str
    patch: JsonObject


class CordonMachine(Struct, frozen=True, kw_only=True):
    """Mark a machine unschedulable for all pods, once for each job: a person who takes the mark away is not contradicted."""

    name: str


class CarryOutPlan(Struct, frozen=True, kw_only=True):
    """Create and delete the pods that a master of mode `k8s` asks for, and write the answers into its plan."""

    plan: PlanObject


class CreateToken(Struct, frozen=True, kw_only=True):
    """Create the Secret with the job's token. The token is random, so it is made when the action is carried out."""

    name: str
    body: JsonObject


class DeleteObject(Struct, frozen=True, kw_only=True):
    kind: ObjectKind
    name: str
    uid: str
    grace: int | None = None
    """Seconds. None: as the object says. 0: the object is gone at once, without an answer of its machine."""


class EmitEvent(Struct, frozen=True, kw_only=True):
    """Tell people who run `kubectl describe`. The name follows from the content, so a repetition adds nothing."""

    name: str
    is_warning: bool
    reason: str
    message: str


class ApplyStatus(Struct, frozen=True, kw_only=True):
    status: ElasticJobStatus


Action = (
    CheckTemplates
    | CreateObject
    | AdjustObject
    | CordonMachine
    | CarryOutPlan
    | CreateToken
    | DeleteObject
    | EmitEvent
    | ApplyStatus
)


class OperatorDecision(Struct, frozen=True, kw_only=True):
    actions: tuple[Action, ...] = ()
    """In this order. The first that fails ends the series."""
    wake_at: float | None = None
    """Decide again then, even if nothing changes. None: only a change can lead to another decision."""
