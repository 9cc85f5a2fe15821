"""
What a job begins with: the numbers of the user, unless former jobs know better.

A plan that is offered before the fleet is defined is a start plan. It is kept, and it counts where the user lets the job change itself: for the types that
may be changed, within what one node and all nodes together may have. A job that finds its own size begins with `nodes_start` otherwise.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.scaling.servers.start import first_sizes
from dlrover.core.scaling.state import Scaling
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Resource, Strategy
from dlrover.protocol.messages.job_limits import excess
from dlrover.protocol.messages.scaling import PlannedGroup, ScaleMode, ScaleTerms


def first_replicas(scaling: Scaling, spec: FleetSpec) -> dict[NodeType, ReplicaSpec]:
    """The types with the numbers and sizes that they begin with."""
    if scaling.mode is not ScaleMode.ON:
        return dict(spec.replicas)
    planned = _planned(scaling, spec)
    if spec.strategy is Strategy.PS and scaling.terms.gives_sizes:
        return first_sizes(scaling.terms, replace(spec, replicas=planned))
    return planned


def first_nodes(scaling: Scaling) -> int:
    """Workers that a world which finds its own size begins with; 0: as many as the fleet has."""
    if scaling.mode is not ScaleMode.ON or NodeType.WORKER not in scaling.terms.types:
        return 0
    group = None if scaling.start is None else scaling.start.group(NodeType.WORKER)
    return scaling.terms.nodes_start if group is None or not group.count else group.count


def _planned(scaling: Scaling, spec: FleetSpec) -> dict[NodeType, ReplicaSpec]:
    found = dict(spec.replicas)
    for group in () if scaling.start is None else scaling.start.groups:
        if group.node_type in scaling.terms.types and group.node_type in found:
            replica = found[group.node_type]
            found[group.node_type] = (
                _server_job_group(scaling.terms, group, replica)
                if spec.strategy is Strategy.PS
                else replace(replica, resource=_world_size(scaling.terms, group, replica.resource))
            )
    wanted = ((replica.count, replica.resource) for replica in found.values())
    return dict(spec.replicas) if excess(spec.limits, wanted) else found


def _server_job_group(terms: ScaleTerms, group: PlannedGroup, replica: ReplicaSpec) -> ReplicaSpec:
    """The user's number of workers is a cap, and so is what the user gave a server that deserves the name of a size (spec 07 §9.2)."""
    user = replica.resource
    most = replica.count if group.node_type is NodeType.WORKER else terms.most_servers
    count = replica.count if group.count is None else max(1, min(group.count, most))
    cpu = user.cpu if group.cpu is None else _within(group.cpu, terms.smallest.cpu, terms.largest.cpu)
    memory = user.memory_mb
    if group.memory_mb is not None:
        memory = round(_within(group.memory_mb, terms.smallest.memory_mb, terms.largest.memory_mb))
    if group.node_type is NodeType.PS:
        cpu = user.cpu if user.cpu >= _LEAST_CPU else cpu
        memory = user.memory_mb if user.memory_mb >= _LEAST_MEMORY else memory
    return replace(replica, count=count, resource=replace(user, cpu=cpu, memory_mb=memory))


_LEAST_CPU, _LEAST_MEMORY = 2.0, 1024
"""Below these a number of the user counts as none."""


def _world_size(terms: ScaleTerms, group: PlannedGroup, user: Resource) -> Resource:
    """Only a size that the user limited is exchanged for another limit; a node of a world may be small if the user's are."""
    cpu, memory = user.cpu, user.memory_mb
    if cpu and group.cpu is not None:
        cpu = _within(group.cpu, min(cpu, terms.smallest.cpu), max(cpu, terms.largest.cpu))
    if memory and group.memory_mb is not None:
        least, most = min(memory, terms.smallest.memory_mb), max(memory, terms.largest.memory_mb)
        memory = round(_within(group.memory_mb, least, most))
    return replace(user, cpu=cpu, memory_mb=memory)


def _within(number: float, least: float, most: float) -> float:
    return min(max(number, least), most)
