"""
From an ElasticJob to what its master needs: the fleet that the job wants, and what its pods have in common.

Pure: the same job gives the same fleet in every life of the master. Each rule is that of the original (spec 08 §3.2),
unless a comment says why not.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, FaultyHosts, JobReplica
from dlrover.platforms.kubernetes.job.gangs import gang_of
from dlrover.platforms.kubernetes.pods import PodJob, PodType, requests_of
from dlrover.platforms.kubernetes.quantities import limits_of, resource_of
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Resource, Strategy

RELAUNCHES = 3
MOST_RELAUNCHES = 5
"""The original takes no greater `restartCount` either."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
OPTIMIZE_MODES = ("", "manual", "manunal", "mannual", "single-job", "cluster")
"""With the misspellings of published job files."""

_FORMER_TYPES = {"master": NodeType.CHIEF}


class MasterWishes(Struct, frozen=True, kw_only=True):
    """What the master's own options say about the fleet. None: not given."""

    pending_timeout: float | None = None
    pending_strategy: int | None = None
    group_affinity: dict[int, int] = {}
    relaunches_errors: bool = False


def fleet_of(job: ElasticJob, wishes: MasterWishes = MasterWishes()) -> FleetSpec:  # noqa: B008 (frozen)
    """Raises `ConfigError` with the field that cannot be used."""
    spec = job.spec
    if spec.optimize_mode not in OPTIMIZE_MODES:
        raise ConfigError(
            f"spec.optimizeMode {spec.optimize_mode!r} of the job {job.metadata.name} must be manual, single-job or cluster."
        )
    replicas = {node_type: _replica_spec(name, replica) for node_type, name, replica in training_types(job)}
    strategy = _strategy(job, replicas)
    workers = spec.replica_specs.get(NodeType.WORKER.value, JobReplica())
    patience = {"pending_timeout": wishes.pending_timeout, "pending_strategy": wishes.pending_strategy}
    return FleetSpec(
        replicas=replicas,
        strategy=strategy,
        standby=workers.standby,
        relaunch_always=strategy is Strategy.ALLREDUCE or wishes.relaunches_errors or _restarts_always(workers),
        limits=_limits(job),
        remove_exited=False,  # logs of failed pods stay readable
        cordon_faulty=spec.faulty_hosts is FaultyHosts.CORDON,
        group_affinity=wishes.group_affinity,
        **{name: value for name, value in patience.items() if value is not None},  # type: ignore[arg-type]
    )


def pod_job_of(
    job: ElasticJob,
    fleet: FleetSpec,
    *,
    master_addr: str = "",
    token_secret: str = "",
    namespace: str = "",
) -> PodJob:
    types = {
        node_type: PodType(
            template=replica.template, count=replica.replicas, priority_class=replica.priority_class_name
        )
        for node_type, _, replica in training_types(job)
        if replica.template
    }
    return PodJob(
        name=job.metadata.name,
        uid=job.metadata.uid,
        namespace=job.metadata.namespace or namespace,
        types=types,
        strategy=fleet.strategy,
        nnodes=_nnodes(job),
        envs=job.spec.envs,
        master_addr=master_addr,
        token_secret=token_secret,
        num_groups=len(fleet.group_affinity),
        avoids_hosts=job.spec.faulty_hosts is not FaultyHosts.IGNORE,
        queue=job.metadata.labels.get(QUEUE_LABEL, ""),
        gang=gang_of(job),
        tls_secret=job.spec.network.tls_secret_name,
    )


def scaled_types(job: ElasticJob) -> tuple[NodeType, ...]:
    """Whose number and size the job may change by itself (`autoScale`, true unless it says otherwise)."""
    return tuple(node_type for node_type, _, replica in training_types(job) if is_true_text(replica.auto_scale))


def is_true_text(value: bool | str) -> bool:
    """As the original reads it."""
    return value if isinstance(value, bool) else value.strip().lower() in ("true", "yes", "t", "y")


def training_types(job: ElasticJob) -> Iterator[tuple[NodeType, str, JobReplica]]:
    """Without the master's own template. Raises `ConfigError` for a type that does not exist."""
    seen: dict[NodeType, str] = {}
    for name, replica in job.spec.replica_specs.items():
        if name == names.MASTER_TYPE:
            continue
        node_type = _FORMER_TYPES.get(name)
        if node_type is None:
            try:
                node_type = NodeType(name)
            except ValueError as error:
                known = ", ".join((*(each.value for each in NodeType), *_FORMER_TYPES, names.MASTER_TYPE))
                raise ConfigError(f"spec.replicaSpecs.{name} is not a type of node. The types are {known}.") from error
        if node_type in seen:
            raise ConfigError(
                f"spec.replicaSpecs: {name} and {seen[node_type]} name the same type. Give only one of them."
            )
        seen[node_type] = name
        yield node_type, name, replica


def _replica_spec(name: str, replica: JobReplica) -> ReplicaSpec:
    try:
        resource = resource_of(requests_of(replica.template)) if replica.template else ReplicaSpec(count=0).resource
    except ConfigError as error:
        raise ConfigError(f"spec.replicaSpecs.{name}.template: {error}") from error
    budget = RELAUNCHES if replica.restart_count is None else replica.restart_count
    return ReplicaSpec(
        count=replica.replicas,
        resource=resource,
        max_relaunches=max(0, min(budget, MOST_RELAUNCHES)),
        critical=replica.critical_nodes,
        priority=replica.priority,
    )


def _strategy(job: ElasticJob, replicas: dict[NodeType, ReplicaSpec]) -> Strategy:
    """Absent: by the types. The original takes every such job for one with parameter servers, which then has none."""
    text = job.spec.distribution_strategy
    if not text:
        return Strategy.PS if NodeType.PS in replicas else Strategy.ALLREDUCE
    try:
        return Strategy(text)
    except ValueError as error:
        known = ", ".join(each.value for each in Strategy)
        raise ConfigError(f"spec.distributionStrategy {text!r} must be one of {known}.") from error


def _limits(job: ElasticJob) -> Resource:
    try:
        return limits_of(job.spec.resource_limits)
    except ConfigError as error:
        raise ConfigError(f"spec.resourceLimits of the job {job.metadata.name}: {error}") from error


def _restarts_always(replica: JobReplica) -> bool:
    spec = replica.template.get("spec")
    return isinstance(spec, dict) and spec.get("restartPolicy") == "Always"


def _nnodes(job: ElasticJob) -> str:
    workers = job.spec.replica_specs.get(NodeType.WORKER.value, JobReplica())
    if workers.min_replicas is None and workers.max_replicas is None:
        return ""
    least = workers.replicas if workers.min_replicas is None else workers.min_replicas
    most = workers.replicas if workers.max_replicas is None else workers.max_replicas
    return f"{least}:{most}"
