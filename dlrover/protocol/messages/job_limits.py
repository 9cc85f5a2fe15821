"""
Whether nodes fit into a job's limits: asked by the operator before a master exists, and by the core whenever it changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlrover.protocol.messages.fleet import FleetSpec, NodeType, Resource, Strategy

Wanted = Iterable[tuple[int, Resource]]
"""Numbers of nodes with the size of each."""


def excess(limits: Resource, wanted: Wanted) -> str:
    """Both numbers of the first limit that these nodes exceed; empty: they fit."""
    wanted = tuple(wanted)
    asked = (
        (sum(count * each.cpu for count, each in wanted), limits.cpu, "cores"),
        (sum(count * each.memory_mb for count, each in wanted), limits.memory_mb, "MiB"),
        (sum(count * each.gpus for count, each in wanted), limits.gpus, "accelerators"),
    )
    for amount, limit, unit in asked:
        if limit and amount > limit:
            return f"its nodes ask for {amount:g} {unit}, and the job's limit is {limit:g}"
    return ""


def excess_as_defined(spec: FleetSpec) -> str:
    standby = spec.standby if spec.strategy is Strategy.ALLREDUCE else 0
    return excess(
        spec.limits,
        (
            (replica.count + (standby if kind is NodeType.WORKER else 0), replica.resource)
            for kind, replica in spec.replicas.items()
        ),
    )
