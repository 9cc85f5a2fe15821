"""
What all nodes of a job together may ask for.

Absent, there is no limit of ours: the platform has its quotas. Given, it holds for the fleet as defined, for other numbers
and other sizes that people want, and for the memory that a node gets after it ran out of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlrover.core.fleet.fleet import Fleet
from dlrover.core.fleet.replicas import FleetNode
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.job_limits import excess


def excess_if_scaled(fleet: Fleet, node_type: NodeType, count: int) -> str:
    """With so many nodes of one type, and of the others as many as the job wants now."""
    counts = {kind: replicas.target for kind, replicas in fleet.replicas.items()} | {node_type: count}
    return excess(fleet.spec.limits, ((counts[kind], each.spec.resource) for kind, each in fleet.replicas.items()))


def excess_if_sized(fleet: Fleet, node_type: NodeType, resource: Resource) -> str:
    """With all nodes of one type of another size."""
    sizes = {kind: replicas.spec.resource for kind, replicas in fleet.replicas.items()} | {node_type: resource}
    return excess(fleet.spec.limits, ((each.target, sizes[kind]) for kind, each in fleet.replicas.items()))


def excess_if_resized(fleet: Fleet, node: FleetNode, resource: Resource) -> str:
    """With another size of this node. That both are there for a moment does not count."""
    return excess(fleet.spec.limits, ((1, each) for each in (*_others(fleet, node), resource)))


def memory_left_to(fleet: Fleet, node: FleetNode) -> int | None:
    """MiB that this node may have; None: there is no limit."""
    limit = fleet.spec.limits.memory_mb
    return max(0, limit - sum(each.memory_mb for each in _others(fleet, node))) if limit else None


def _others(fleet: Fleet, node: FleetNode) -> Iterable[Resource]:
    return [
        fleet.nodes[id_].resource
        for kind, replicas in fleet.replicas.items()
        for rank, id_ in replicas.holders.items()
        if (kind, rank) != (node.node_type, node.rank)
    ]
