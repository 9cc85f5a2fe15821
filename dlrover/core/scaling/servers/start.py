"""
What a job with parameter servers begins with where its description gives no sizes (spec 07 §9.1, §9.2).
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.scaling import rules
from dlrover.core.scaling.rules import Sized
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Resource
from dlrover.protocol.messages.job_limits import excess
from dlrover.protocol.messages.scaling import ScaleTerms


def first_sizes(terms: ScaleTerms, spec: FleetSpec) -> dict[NodeType, ReplicaSpec]:
    """The types as described, with sizes where there were none. Within the limits of the job, or nothing is changed."""
    plan = rules.first_plan(spec.limits)
    found = dict(spec.replicas)
    for kind, replica in spec.replicas.items():
        source = NodeType.PS if kind is NodeType.PS else NodeType.WORKER
        user = Sized(replica.count, replica.resource.cpu, replica.resource.memory_mb)
        if (
            source in terms.types
            and replica.count
            and kind is not NodeType.EVALUATOR
            and not (user.cpu or user.memory_mb)
        ):
            wanted = rules.clamped(source, rules.overridden(source, plan[source], user), terms)
            found[kind] = _with_size(replica, wanted)
    if (
        NodeType.EVALUATOR in found
        and NodeType.WORKER in terms.types
        and found[NodeType.WORKER] != spec.replicas[NodeType.WORKER]
    ):
        evaluator, worker = found[NodeType.EVALUATOR], found[NodeType.WORKER]
        size = rules.evaluator_size(_size_of(evaluator), _size_of(worker))
        found[NodeType.EVALUATOR] = _with_size(evaluator, size)
    wanted_in_all = ((replica.count, replica.resource) for replica in found.values())
    return dict(spec.replicas) if excess(spec.limits, wanted_in_all) else found


def _size_of(replica: ReplicaSpec) -> Sized:
    return Sized(replica.count, replica.resource.cpu, replica.resource.memory_mb)


def _with_size(replica: ReplicaSpec, size: Sized) -> ReplicaSpec:
    resource = Resource(cpu=float(size.cpu), memory_mb=size.memory_mb, gpus=replica.resource.gpus)
    return replace(replica, resource=resource)
