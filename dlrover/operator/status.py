"""
The operator's part of a job's status.

Three readers: people (`phase`, `reason`, columns), programs (`conditions` in Kubernetes' own form), and programs of the
original (`status.status`). The operator and the master write disjoint fields by server-side apply, each with its own
field manager, so neither ever retries because of the other.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.operator.timestamps import instant_of, text_of
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import (
    API_VERSION,
    KIND,
    ElasticJob,
    ElasticJobStatus,
    JobCondition,
    JsonObject,
    MasterRecord,
    OldJobStatus,
    ReplicaCounts,
)
from dlrover.platforms.kubernetes.objects import Pod

FIELD_MANAGER = "dlrover-operator"
COUNTERS_EVERY = 2.0
"""Seconds between two writes that change nothing but numbers of pods: a job of 1,000 pods starts with few writes."""
_MASTERS_FIELDS = ("round", "goodput", "lastStep", "scalePlan", "cordonHosts")
"""The master writes these."""


class JobPhase(enum.StrEnum):
    CREATED = "Created"
    PENDING = "Pending"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Truth(Struct, frozen=True, kw_only=True):
    """What a condition shall say."""

    is_true: bool
    reason: str
    message: str = ""


class JobCourse(Struct, frozen=True, kw_only=True):
    """What `decide` concluded about the job."""

    phase: JobPhase
    reason: str
    message: str = ""
    conditions: Mapping[str, Truth] = {}
    """Conditions that are not named here stay as they are."""
    master: MasterRecord | None = None
    start_time: str = ""
    completion_time: str = ""


def condition_of(job: ElasticJob, kind: str) -> JobCondition | None:
    return next((each for each in job.status.conditions if each.type == kind), None)


def is_true(job: ElasticJob, kind: str) -> bool:
    condition = condition_of(job, kind)
    return condition is not None and condition.status == "True"


def next_status(job: ElasticJob, course: JobCourse, pods: Iterable[Pod], now: float) -> ElasticJobStatus:
    """The status that says what `course` says; fields of the master are left as they are."""
    old = job.status
    counts = _count(job, pods)
    workers = counts.get("worker", ReplicaCounts())
    start_time = course.start_time or old.start_time
    completion_time = course.completion_time or old.completion_time
    worker = job.spec.replica_specs.get("worker")
    return replace(
        old,
        phase=course.phase.value,
        reason=course.reason,
        conditions=_conditions(job, course, now),
        observed_generation=job.metadata.generation,
        master=course.master,
        restarts=course.master.index if course.master else 0,
        start_time=start_time,
        completion_time=completion_time,
        replica_statuses=counts,
        worker_replicas=workers.pending + workers.active,
        selector=f"{names.selector_of(job.metadata.uid)},{names.REPLICA_TYPE}=worker",
        ready=f"{workers.active}/{worker.replicas if worker else 0}",
        status=OldJobStatus(
            conditions=_old_conditions(old.status.conditions, course, now),
            replica_statuses=counts,
            start_time=start_time,
            completion_time=completion_time,
            last_reconcile_time=text_of(now),
        ),
    )


def write_at(job: ElasticJob, new: ElasticJobStatus, now: float) -> float | None:
    """When to write it: now, or later if only numbers changed. None: it says what the job's status says already."""
    old = job.status
    if _words(old) != _words(new):
        return now
    if _without_time(old) == _without_time(new):
        return None
    written_at = instant_of(old.status.last_reconcile_time)
    return now if written_at is None else max(now, written_at + COUNTERS_EVERY)


def status_body(job: ElasticJob, status: ElasticJobStatus) -> JsonObject:
    """
    For server-side apply. Fields of the master are left out, else the operator would own them.

    The uid makes the API server refuse it if the job was deleted and made anew under this name.
    """
    fields = _given(msgspec.to_builtins(status))
    metadata = {"name": job.metadata.name, "namespace": job.metadata.namespace, "uid": job.metadata.uid}
    own = {name: value for name, value in fields.items() if name not in _MASTERS_FIELDS}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": own}


def _given(value: Any) -> Any:
    """Without fields that say nothing: a client in Go does not take an empty text for a time."""
    if isinstance(value, dict):
        return {name: _given(each) for name, each in value.items() if each is not None and each != ""}
    return [_given(each) for each in value] if isinstance(value, list | tuple) else value


def _conditions(job: ElasticJob, course: JobCourse, now: float) -> tuple[JobCondition, ...]:
    conditions = {each.type: each for each in job.status.conditions}
    for kind, truth in course.conditions.items():
        old = conditions.get(kind)
        status = "True" if truth.is_true else "False"
        since = old.last_transition_time if old is not None and old.status == status else text_of(now)
        conditions[kind] = JobCondition(
            type=kind,
            status=status,
            reason=truth.reason,
            message=truth.message,
            last_transition_time=since,
            observed_generation=job.metadata.generation,
        )
    return tuple(conditions.values())


_REPLACES = {JobPhase.RUNNING: JobPhase.RESTARTING, JobPhase.RESTARTING: JobPhase.RUNNING}


def _old_conditions(old: tuple[JobCondition, ...], course: JobCourse, now: float) -> tuple[JobCondition, ...]:
    """As the original keeps them (spec 08 §4.3): one per phase that the job has been in."""
    conditions = {each.type: each for each in old}
    failed = conditions.get(JobPhase.FAILED.value)
    if failed is not None and failed.status == "True":
        return old
    phase, reason = course.phase, f"Job{course.phase.value}"
    same = conditions.get(phase.value)
    if same is not None and same.status == "True" and same.reason == reason:
        return old
    conditions.pop(phase.value, None)
    if phase in _REPLACES:
        conditions.pop(_REPLACES[phase].value, None)
    running = conditions.get(JobPhase.RUNNING.value)
    if phase in (JobPhase.SUCCEEDED, JobPhase.FAILED) and running is not None:
        conditions[running.type] = _old_condition(running.type, "False", running.reason, running.message, now)
    conditions[phase.value] = _old_condition(phase.value, "True", reason, course.message, now)
    return tuple(conditions.values())


def _old_condition(kind: str, status: str, reason: str, message: str, now: float) -> JobCondition:
    at = text_of(now)
    return JobCondition(
        type=kind, status=status, reason=reason, message=message, last_transition_time=at, last_update_time=at
    )


_COUNTED = {"Pending": "pending", "Running": "active", "Succeeded": "succeeded", "Failed": "failed"}


def _count(job: ElasticJob, pods: Iterable[Pod]) -> dict[str, ReplicaCounts]:
    numbers = {type_name: dict.fromkeys(_COUNTED.values(), 0) for type_name in job.spec.replica_specs}
    numbers.setdefault(names.MASTER_TYPE, dict.fromkeys(_COUNTED.values(), 0))
    for pod in pods:
        counted = _COUNTED.get(pod.status.phase)
        if counted and pod.metadata.deletion_timestamp is None:
            type_name = pod.metadata.labels.get(names.REPLICA_TYPE, "")
            numbers.setdefault(type_name, dict.fromkeys(_COUNTED.values(), 0))[counted] += 1
    return {
        type_name: ReplicaCounts(
            **counts,
            label_selector=f"{names.selector_of(job.metadata.uid)},{names.REPLICA_TYPE}={type_name}",
        )
        for type_name, counts in numbers.items()
    }


def _without_time(status: ElasticJobStatus) -> ElasticJobStatus:
    return replace(status, status=replace(status.status, last_reconcile_time=""))


def _words(status: ElasticJobStatus) -> ElasticJobStatus:
    """Without numbers of pods."""
    return replace(
        status,
        replica_statuses={},
        worker_replicas=0,
        ready="",
        status=replace(status.status, replica_statuses={}, last_reconcile_time=""),
    )
