"""
Plans that a master of mode `k8s` writes: what pods the operator shall create and delete for it, and what came of it.

Such a master has no right to create or delete pods. It puts what it would have sent to the API server into a ScalePlan, the operator
sends it, and the answers come back in the plan's status. Both ends are here, without a request: the master's and the operator's.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.answers import (
    ApiRefusal,
    Conflict,
    ConflictReason,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
)
from dlrover.platforms.kubernetes.elastic_job import API_VERSION, JsonObject
from dlrover.platforms.kubernetes.scale_plan import PlanObject, PlanPhase, PlanResult
from dlrover.protocol.messages.fleet import LaunchNode, Resource

AUTO = "auto"
MOST_WORK = 200
"""Pods in one plan: an object has at most 256 KiB of annotations."""
KEPT = 10
"""Plans that were carried out and stay, the newest."""
ENDED = (PlanPhase.SUCCEEDED.value, PlanPhase.FAILED.value)
_STALE = "Stale"


class PodCreation(Struct, frozen=True, tag="create"):
    intent: LaunchNode
    pod: str


class PodDeletion(Struct, frozen=True, tag="delete"):
    pod: str
    uid: str
    grace: int


PodWork = PodCreation | PodDeletion


def plan_body(job: str, job_uid: str, namespace: str, *, epoch: int, number: int, work: list[PodWork]) -> JsonObject:
    creations = [each for each in work if isinstance(each, PodCreation)]
    return {
        "apiVersion": API_VERSION,
        "kind": "ScalePlan",
        "metadata": {
            "name": names.plan_name(job, epoch, number),
            "namespace": namespace,
            "labels": {names.JOB_NAME: job, names.JOB_UID: job_uid, names.SCALE_TYPE: AUTO},
            "annotations": {names.WORK: msgspec.json.encode(work).decode(), names.MASTER_EPOCH: str(epoch)},
            "ownerReferences": [names.owner_reference(job, job_uid)],
        },
        "spec": {
            "ownerJob": job,
            "createPods": [_planned(each) for each in creations],
            "removePods": [{"name": each.pod} for each in work if isinstance(each, PodDeletion)],
        },
    }


def _planned(creation: PodCreation) -> JsonObject:
    intent = creation.intent
    return {
        "name": creation.pod,
        "id": int(intent.id),
        "type": intent.node_type.value,
        "rankIndex": intent.rank,
        "resource": _amounts(intent.resource),
    }


def _amounts(resource: Resource) -> JsonObject:
    amounts: JsonObject = {}
    if resource.cpu:
        amounts["cpu"] = f"{resource.cpu:g}"
    if resource.memory_mb:
        amounts["memory"] = f"{resource.memory_mb}Mi"
    if resource.gpu_type and resource.gpus:
        amounts[resource.gpu_type] = str(resource.gpus)
    return amounts


# The operator's end.


def is_open_for(plan: PlanObject, job_uid: str) -> bool:
    labels = plan.metadata.labels
    is_ours = labels.get(names.SCALE_TYPE) == AUTO and labels.get(names.JOB_UID) == job_uid
    return is_ours and plan.status.phase not in ENDED and plan.metadata.deletion_timestamp is None


def work_of(plan: PlanObject) -> tuple[int, list[PodWork]]:
    """The epoch of the master that wrote it, and the work. Raises `ValueError` for a plan that no master wrote."""
    try:
        work = msgspec.json.decode(plan.metadata.annotations.get(names.WORK, ""), type=list[PodWork])
    except msgspec.MsgspecError as error:
        raise ValueError(f"The annotation {names.WORK} cannot be read: {error}.") from error
    return int(plan.metadata.annotations.get(names.MASTER_EPOCH, "")), work


def result_of(pod: str, answer: ApiRefusal) -> PlanResult:
    """What the API server refused."""
    match answer:
        case Forbidden(is_quota=True):
            reason = "Quota"
        case Forbidden():
            reason = "Forbidden"
        case Conflict():
            reason = "AlreadyExists" if answer.reason is ConflictReason.ALREADY_EXISTS else "Conflict"
        case _:
            reason = type(answer).__name__
    return PlanResult(name=pod, reason=reason, message=answer.message)


# The master's end.


def answer_of(result: PlanResult) -> ApiRefusal:
    """As if the API server had said it to the master."""
    match result.reason:
        case "Quota":
            return Forbidden(result.message, is_quota=True)
        case "Forbidden":
            return Forbidden(result.message)
        case "AlreadyExists":
            return Conflict(ConflictReason.ALREADY_EXISTS, result.message)
        case "NotFound":
            return NotFound(result.message)
        case "Invalid":
            return Invalid(result.message)
        case "Conflict":
            return Conflict(ConflictReason.OLD_VERSION, result.message)
        case _:
            return Gone(result.message)
