"""
What plans about servers have in common: which servers were measured, what the limits of the job say, and how a plan is carried on.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.scaling import brakes, rules
from dlrover.core.scaling.brakes import SERVERS, HeldBack, Promise
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.fit.model import Fit, median
from dlrover.core.scaling.state import Probation
from dlrover.core.scaling.verdict import TOLERANCE, ScaleVerdict
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.job_limits import excess
from dlrover.protocol.messages.scaling import NodeUse, PlannedGroup, PlannedNode, ScaleCandidate, ScaleOutcome, SizePlan


def measured_servers(state: JobState) -> list[NodeUse]:
    """Those of the newest run that are still there."""
    newest, fleet = state.scaling.newest, state.fleet
    if newest is None or fleet is None:
        return []
    there = {node.id: None for node in fleet.live_nodes(NodeType.PS) if node.id not in fleet.migrations}
    return [node for node in newest.nodes if node.node_type is NodeType.PS and node.platform_node in there]


def cores_given(state: JobState, node: NodeUse) -> float:
    assert state.fleet is not None, "servers are of a fleet"
    return state.fleet.nodes[node.platform_node].resource.cpu


def total_cores(state: JobState) -> float:
    """Of all servers that the job wants now."""
    fleet = state.fleet
    if fleet is None or NodeType.PS not in fleet.replicas:
        return 0.0
    replicas = fleet.replicas[NodeType.PS]
    held = [fleet.nodes[id_].resource.cpu for id_ in replicas.holders.values()]
    return sum(held) + (replicas.target - len(held)) * replicas.spec.resource.cpu


def is_small_change(state: JobState, cores: float) -> bool:
    """A total of servers' cores so near to the present one is not worth a change (spec 07 §8.6)."""
    now = total_cores(state)
    return now > 0 and rules.is_in_dead_band(cores, now)


def cores_before(state: JobState, plan: SizePlan) -> dict[NodeType, dict[int, float]]:
    """Of the nodes to which the plan gives other ones. By rank, which outlives its nodes."""
    fleet = state.fleet
    found: dict[NodeType, dict[int, float]] = {}
    for planned in plan.nodes:
        node = None if fleet is None else fleet.nodes.get(planned.platform_node)
        if node is not None and planned.cpu is not None:
            found.setdefault(node.node_type, {})[node.rank] = node.resource.cpu
    return found


def back_of(state: JobState, plan: SizePlan) -> SizePlan:
    """What takes a plan back: numbers, and cores of nodes that come later. `with_nodes` completes it when it is carried out."""
    fleet = state.fleet
    if fleet is None:
        return SizePlan()
    before = cores_before(state, plan)
    groups = []
    for kind, replicas in fleet.replicas.items():
        group = plan.group(kind)
        if group is None:
            continue
        cpu = None
        if group.cpu is not None:
            exchanged = list(before.get(kind, {}).values())
            cpu = (median(exchanged) if exchanged else replicas.spec.resource.cpu) or None
        groups.append(PlannedGroup(node_type=kind, count=None if group.count is None else replicas.target, cpu=cpu))
    return SizePlan(groups=tuple(groups))


def with_nodes(state: JobState, watched: Probation) -> SizePlan:
    """Nodes whose cores the change touched get back what their rank had, and no others; critical ones are never exchanged."""
    fleet = state.fleet
    if fleet is None:
        return watched.back
    nodes = [
        PlannedNode(platform_node=node.id, cpu=cpu)
        for kind, ranks in watched.cores_before.items()
        for rank, cpu in ranks.items()
        if (node := fleet.holder(kind, rank)) is not None
        if node.resource.cpu != cpu and not node.is_finished and node.id not in fleet.migrations
        if kind is NodeType.PS or not node.is_critical
    ]
    return replace(watched.back, nodes=tuple(nodes))


def excess_of(state: JobState, plan: SizePlan) -> str:
    """Which limit of the job the plan breaks; empty: none."""
    fleet = state.fleet
    if fleet is None:
        return ""
    sizes = {node.platform_node: node for node in plan.nodes}
    wanted = []
    for kind, replicas in fleet.replicas.items():
        group = plan.group(kind)
        count = replicas.target if group is None or group.count is None else group.count
        for id_ in replicas.holders.values():
            node, other = fleet.nodes[id_], sizes.get(id_)
            cpu = node.resource.cpu if other is None or other.cpu is None else other.cpu
            mib = node.resource.memory_mb if other is None or other.memory_mb is None else other.memory_mb
            wanted.append((1, type(node.resource)(cpu=cpu, memory_mb=mib, gpus=node.resource.gpus)))
        wanted.append((count - len(replicas.holders), replicas.spec.resource))
    return excess(fleet.spec.limits, wanted)


def judged(
    state: JobState,
    known: ScaleFacts,
    plan: SizePlan,
    gain: float,
    why: str,
    fit: Fit | None = None,
    *,
    least_gain: float = 0.0,
) -> ScaleVerdict:
    """A plan that others made: carried out if no brake holds it."""
    direction = -1 if _is_smaller(state, plan) else 1
    promise = Promise(plan, SERVERS, direction, gain, 0.0, excess_of(state, plan))
    brake = brakes.of_plan(state.scaling, known, promise)
    text = ", ".join(f"{group.count or 'other'} {group.node_type.value}" for group in plan.groups) or "other servers"
    if brake is not None:
        return held(brake, f"{text} would be next ({why}), but {brake.why}.", fit)
    return watched(
        state,
        known,
        plan,
        f"The job gets {text}: {why or 'no reason is given'}.",
        direction=direction,
        fit=fit,
        least_gain=least_gain,
    )


def _is_smaller(state: JobState, plan: SizePlan) -> bool:
    fleet = state.fleet
    known = {} if fleet is None else fleet.replicas
    counts = [
        (group.count, known[group.node_type].target)
        for group in plan.groups
        if group.count is not None and group.node_type in known
    ]
    return any(wanted < now for wanted, now in counts) and all(wanted <= now for wanted, now in counts)


def watched(
    state: JobState,
    known: ScaleFacts,
    plan: SizePlan,
    sentence: str,
    *,
    direction: int,
    candidates: tuple[ScaleCandidate, ...] = (),
    fit: Fit | None = None,
    expected_speed: float = 0.0,
    least_gain: float = 0.0,
) -> ScaleVerdict:
    """`least_gain`: what the objective demands of it, below 0 what a shrink may lose; the change is taken back if it brings less."""
    group = plan.group(NodeType.WORKER)
    fleet = state.fleet
    change = 0
    if group is not None and group.count is not None and fleet is not None:
        change = group.count - fleet.replicas[NodeType.WORKER].target
    return ScaleVerdict(
        outcome=ScaleOutcome.PLANNED,
        sentence=sentence,
        plan=plan,
        kind=SERVERS,
        direction=direction,
        nodes=known.nodes + change,
        expected_speed=expected_speed,
        least_ratio=TOLERANCE * (1 + least_gain) if least_gain > 0 else min(TOLERANCE, 1 + least_gain),
        candidates=candidates,
        fit=fit,
    )


def repair(sentence: str, plan: SizePlan) -> ScaleVerdict:
    """An exchange that is not judged by speed."""
    return ScaleVerdict(outcome=ScaleOutcome.PLANNED, sentence=sentence, plan=plan, kind=SERVERS, least_ratio=0.0)


def held(brake: HeldBack, sentence: str, fit: Fit | None = None) -> ScaleVerdict:
    return ScaleVerdict(
        outcome=ScaleOutcome.HELD,
        sentence=sentence,
        brake=brake.brake,
        opens_at=brake.opens_at,
        kind=SERVERS,
        fit=fit,
    )
