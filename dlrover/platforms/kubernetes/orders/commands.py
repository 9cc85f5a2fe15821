"""
What people write into a job's objects, as commands of the job: pure, so that each row has a test without a cluster.

`spec.suspend` and `replicas` are levels: the newest value counts, whatever was between. A plan is one change, carried out
once. The annotation `elasticjob.dlrover/stop` ends the job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, JobReplica
from dlrover.platforms.kubernetes.job.fleet import training_types
from dlrover.platforms.kubernetes.quantities import resource_of
from dlrover.platforms.kubernetes.scale_plan import PlannedPod, PlanObject, PlanPhase
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.fleet import (
    MigrateNode,
    NodeType,
    Resource,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    SizeReplicas,
    Strategy,
    SuspendJob,
)
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.job import StopJob
from dlrover.protocol.messages.scaling import ScaleTo

OrderCommand = SuspendJob | ResumeJob | ScaleJob | ScaleTo | ScaleReplicas | SizeReplicas | MigrateNode | StopJob
MANUAL = "manual"
_LEAST, _MOST = "worker/min", "worker/max"
"""Names of the workers' bounds beside the numbers of the types."""
_ENDED = (PlanPhase.SUCCEEDED.value, PlanPhase.FAILED.value)


class PlanCommands(Struct, frozen=True, kw_only=True):
    """A plan that can be carried out."""

    commands: tuple[OrderCommand, ...]
    note: str = ""
    """What of it has no effect on nodes that are there; for its status."""


def suspension_of(job: ElasticJob) -> SuspendJob | ResumeJob:
    if job.spec.suspend:
        return SuspendJob(reason="spec.suspend is true", is_releasing=True)
    return ResumeJob()


def stop_of(job: ElasticJob) -> StopJob | None:
    """None: the job is not to end."""
    reason = job.metadata.annotations.get(names.STOP)
    return None if reason is None else StopJob(message=reason)


def sizes_of(job: ElasticJob) -> dict[str, int]:
    """Type to number, as the job's object says, and the workers' bounds. Raises `ConfigError` for an unknown type."""
    sizes = {node_type.value: replica.replicas for node_type, _, replica in training_types(job)}
    workers = job.spec.replica_specs.get(NodeType.WORKER.value, JobReplica())
    bounds = {_LEAST: workers.min_replicas, _MOST: workers.max_replicas}
    return sizes | {name: bound for name, bound in bounds.items() if bound is not None}


def resizes(job: ElasticJob, known: Mapping[str, int], strategy: Strategy) -> Iterator[OrderCommand]:
    """
    For each type whose number is another one than that which was carried out last.

    A number is a target: it moves the bounds of the job only if it lies outside. Bounds that a person changes are told first.
    """
    wanted = sizes_of(job)
    are_bounds_new = any(known.get(name) != wanted.get(name) for name in (_LEAST, _MOST))
    workers = wanted.get(NodeType.WORKER.value, 0)
    if NodeType.WORKER.value in known and are_bounds_new and strategy is Strategy.ALLREDUCE:
        least, most = wanted.get(_LEAST, workers), wanted.get(_MOST, workers)
        yield ScaleJob(min_nodes=least, max_nodes=most)
        known = {**known, NodeType.WORKER.value: most}  # that is what it asks for
    for name, count in wanted.items():
        if name not in (_LEAST, _MOST) and name in known and known[name] != count:
            yield _resize(NodeType(name), count, strategy)


def is_for(plan: PlanObject, job: str) -> bool:
    """Whether a person wrote the plan for this job, and it has not ended."""
    labels = plan.metadata.labels
    owner = labels.get(names.JOB_NAME) or labels.get(names.OLD_JOB_NAME) or plan.spec.owner_job
    return owner == job and labels.get(names.SCALE_TYPE) == MANUAL and plan.status.phase not in _ENDED


def plan_of(plan: PlanObject, job: ElasticJob, strategy: Strategy) -> PlanCommands:
    """Raises `ConfigError` with why the plan cannot be carried out."""
    spec = plan.spec
    if spec.create_pods or spec.remove_pods:
        raise ConfigError("A manual plan names no pods to create or remove. Give replicas of a type instead.")
    commands: list[OrderCommand] = []
    sized = []
    types = {name: node_type for node_type, name, _ in training_types(job)}
    for name, planned in spec.replica_resource_specs.items():
        if name not in types:
            raise ConfigError(f"The job {job.metadata.name} has no nodes of type {name}. It has {', '.join(types)}.")
        if planned.resource:  # first, so that nodes that the plan adds have it
            commands.append(SizeReplicas(node_type=types[name], resource=_resource(planned.resource, f"{name}: ")))
            sized.append(name)
        if planned.replicas is not None:
            commands.append(_resize(types[name], planned.replicas, strategy))
    commands += [_migration(each) for each in spec.migrate_pods]
    if not commands:
        raise ConfigError("The plan changes nothing. Give replicas or a resource of a type, or migratePods.")
    note = (
        f"The resource of {', '.join(sized)} applies only to later nodes. Use migratePods to change a running node."
        if sized
        else ""
    )
    return PlanCommands(commands=tuple(commands), note=note)


def is_being_done(command: OrderCommand, refusal: Rejected) -> bool:
    """Whether the job refuses an exchange because it is under way. Numbers are absolute: the job takes them again."""
    return isinstance(command, MigrateNode) and "is being exchanged already" in str(refusal)


def _resize(node_type: NodeType, count: int, strategy: Strategy) -> OrderCommand:
    if node_type is NodeType.WORKER and strategy is Strategy.ALLREDUCE:
        return ScaleTo(nodes=count, reason="the ElasticJob or a ScalePlan asks for it")
    return ScaleReplicas(node_type=node_type, count=count)


_NODE = re.compile(r"-(\d+)$")


def _migration(pod: PlannedPod) -> MigrateNode:
    found = _NODE.search(pod.name)
    node = pod.id if pod.id is not None else int(found[1]) if found else None
    if node is None:
        raise ConfigError(
            f"migratePods: {pod.name or 'an entry'} is not a node of the job. Give the name of a pod, or its id."
        )
    resource = _resource(pod.resource, f"migratePods: {pod.name or node}: ") if pod.resource else Resource()
    return MigrateNode(node=PlatformId(node), resource=resource)


def _resource(written: Mapping[str, object], whose: str) -> Resource:
    try:
        return resource_of(written)
    except ConfigError as error:
        raise ConfigError(f"{whose}{error}") from error
