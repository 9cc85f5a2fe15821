"""
Plans of history as a running job takes them (`SizePlan`), and in the historical form of the HTTP door (spec 07 §12, §13.2).

As it always was: cores of a group are rounded up, cores of a single node are cut to a whole number, memory is in whole MiB.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from dlrover.core.scaling.history.seen import GroupWish, HistoryPlan
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.scaling import PlannedGroup, PlannedNode, ScaleTerms, SizePlan
from dlrover.protocol.units import in_bytes


def size_plan(plan: HistoryPlan, *, num_chiefs: int = 0) -> SizePlan:
    """None stays None, and 0 becomes it: 0 is never a wish."""
    groups = tuple(_group(wish, num_chiefs) for wish in plan.groups)
    nodes = tuple(
        PlannedNode(
            platform_node=PlatformId(wish.id),
            cpu=_cores(None if wish.cpu is None else math.floor(wish.cpu)),
            memory_mb=_mib(wish.memory_mb),
        )
        for wish in plan.nodes
        if wish.id >= 0
    )
    return SizePlan(
        groups=tuple(group for group in groups if group != PlannedGroup(node_type=group.node_type)),
        nodes=tuple(node for node in nodes if node.cpu is not None or node.memory_mb is not None),
    )


def within(plan: HistoryPlan, terms: ScaleTerms, limits: Resource, *, max_workers: int = 0) -> HistoryPlan:
    """The plan inside the bounds of a node, of a type, and of the whole job. Workers are the first that must go."""
    groups = tuple(_clamped(wish, terms, max_workers) for wish in plan.groups)
    while (excess := _excess(groups, limits)) and any((group.count or 0) > 1 for group in groups):
        largest = max(groups, key=lambda group: ((group.count or 0) > 1, (group.count or 0) * _part(group, excess)))
        groups = tuple(replace(group, count=(group.count or 2) - 1) if group is largest else group for group in groups)
    return replace(plan, groups=groups)


def historical_form(plan: HistoryPlan) -> dict[str, object]:
    """`job_resource` of an answer of `/optimize`. Memory in bytes; 0 means keep."""
    groups = {
        wish.node_type.value: {"count": wish.count or 0, "resource": _resource(wish.cpu, wish.memory_mb, math.ceil)}
        for wish in plan.groups
    }
    nodes = {
        f"{wish.node_type.value}-{wish.id}": _resource(wish.cpu, wish.memory_mb, math.floor) for wish in plan.nodes
    }
    return {"node_group_resources": groups, "node_resources": nodes}


def _group(wish: GroupWish, num_chiefs: int) -> PlannedGroup:
    count = wish.count
    if count is not None and wish.node_type is NodeType.WORKER:
        count -= num_chiefs
    return PlannedGroup(
        node_type=wish.node_type,
        count=count if count is not None and count > 0 else None,
        cpu=_cores(None if wish.cpu is None else math.ceil(wish.cpu)),
        memory_mb=_mib(wish.memory_mb),
    )


def _cores(cpu: float | None) -> float | None:
    return float(cpu) if cpu is not None and cpu > 0 else None


def _mib(memory: float | None) -> int | None:
    return int(memory) if memory is not None and memory >= 1 else None


def _clamped(wish: GroupWish, terms: ScaleTerms, max_workers: int) -> GroupWish:
    most = {NodeType.WORKER: max_workers or terms.most_workers, NodeType.PS: terms.most_servers}.get(wish.node_type)
    count = wish.count if wish.count is None or most is None else min(wish.count, most)
    cpu = None if wish.cpu is None else min(max(wish.cpu, terms.smallest.cpu), terms.largest.cpu)
    memory = (
        None
        if wish.memory_mb is None
        else min(max(wish.memory_mb, float(terms.smallest.memory_mb)), float(terms.largest.memory_mb))
    )
    return replace(wish, count=count, cpu=cpu, memory_mb=memory)


def _excess(groups: tuple[GroupWish, ...], limits: Resource) -> str:
    for name in ("cpu", "memory_mb"):
        limit = getattr(limits, name)
        if limit and sum((group.count or 0) * _part(group, name) for group in groups) > limit:
            return name
    return ""


def _part(group: GroupWish, name: str) -> float:
    return (group.cpu if name == "cpu" else group.memory_mb) or 0.0


def _resource(cpu: float | None, memory: float | None, whole: object) -> dict[str, object]:
    cores = math.ceil(cpu or 0.0) if whole is math.ceil else math.floor(cpu or 0.0)
    return {"memory": in_bytes(int(memory or 0)), "cpu": cores, "gpu": 0, "gpu_type": "", "priority": ""}
