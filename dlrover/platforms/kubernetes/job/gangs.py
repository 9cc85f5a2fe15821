"""
Gangs: all pods of a job start together, or none. A scheduler beside the cluster's own sees to it.

Each such scheduler has its own `PodGroup`, and its own way in which a pod says that it belongs to one. The operator makes the
group with the job, and every pod of a training type names it. A pod that replaces a lost one joins the same group: the other
members run, so it is placed alone. The master is no member: it must run before it can ask for pods.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.answers import ApiResource
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, JsonObject

QUEUE_ANNOTATION = "scheduling.volcano.sh/queue-name"
"""Of the job: the queue of Volcano that admits it."""


class GangScheduler(enum.StrEnum):
    VOLCANO = "volcano"
    COSCHEDULING = "coscheduling"


class _GangTerms(Struct, frozen=True, kw_only=True):
    resource: ApiResource
    scheduler_name: str
    label: str = ""
    annotation: str = ""
    """One of the two names the group on a pod."""


_TERMS = {
    GangScheduler.VOLCANO: _GangTerms(
        resource=ApiResource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup"),
        scheduler_name="volcano",
        annotation="scheduling.k8s.io/group-name",
    ),
    GangScheduler.COSCHEDULING: _GangTerms(
        resource=ApiResource("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup"),
        scheduler_name="scheduler-plugins-scheduler",
        label="scheduling.x-k8s.io/pod-group",
    ),
}


def groups_of(scheduler: GangScheduler) -> ApiResource:
    return _TERMS[scheduler].resource


def scheduler_name(scheduler: GangScheduler) -> str:
    """Where the template names no scheduler: that of the scheduler's own installation."""
    return _TERMS[scheduler].scheduler_name


def group_marks(scheduler: GangScheduler, job: str) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations of a member."""
    terms = _TERMS[scheduler]
    labels = {terms.label: names.group_name(job)} if terms.label else {}
    annotations = {terms.annotation: names.group_name(job)} if terms.annotation else {}
    return labels, annotations


def gang_of(job: ElasticJob) -> str:
    """Name of the scheduler; empty: there is no gang. `batchScheduler` of any type is the original's way to ask for one."""
    if job.spec.gang is not None:
        return job.spec.gang.scheduler
    for replica in job.spec.replica_specs.values():
        old = replica.batch_scheduler or replica.old_batch_scheduler
        if old not in ("", "default"):
            return old
    return ""


def min_member(job: ElasticJob) -> int:
    """As given, else the pods without which the job does not train."""
    if job.spec.gang is not None and job.spec.gang.min_member is not None:
        return job.spec.gang.min_member
    needed = (
        replica.replicas if replica.min_replicas is None else min(replica.min_replicas, replica.replicas)
        for type_name, replica in job.spec.replica_specs.items()
        if type_name != names.MASTER_TYPE
    )
    return max(1, sum(needed))


def group_spec(job: ElasticJob) -> JsonObject:
    spec: JsonObject = {"minMember": min_member(job)}
    if gang_of(job) == GangScheduler.VOLCANO:
        worker = job.spec.replica_specs.get("worker")
        if worker is not None and worker.priority_class_name:
            spec["priorityClassName"] = worker.priority_class_name
        if queue := job.metadata.annotations.get(QUEUE_ANNOTATION):
            spec["queue"] = queue
    return spec
