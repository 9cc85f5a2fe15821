"""
What plans about servers have in common: which servers were measured, what the limits of the job say, and how a plan is carried on.
"""

from __future__ import annotations

from dlrover.core.scaling import brakes, rules
from dlrover.core.scaling.brakes import SERVERS, HeldBack, Promise
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.fit.model import Fit
from dlrover.core.scaling.verdict import TOLERANCE, ScaleVerdict
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.job_limits import excess
from dlrover.protocol.messages.scaling import NodeUse, PlannedGroup, ScaleCandidate, ScaleOutcome, SizePlan


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


def back_of(state: JobState, plan: SizePlan) -> SizePlan:
    """What takes a plan back: the numbers as they are now. An exchanged node stays exchanged."""
    fleet = state.fleet
    groups = []
    for group in plan.groups:
        replicas = None if fleet is None else fleet.replicas.get(group.node_type)
        if replicas is not None and group.count is not None:
            groups.append(PlannedGroup(node_type=group.node_type, count=replicas.target))
    return SizePlan(groups=tuple(groups))


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
    state: JobState, known: ScaleFacts, plan: SizePlan, gain: float, why: str, fit: Fit | None = None
) -> ScaleVerdict:
    """A plan that others made: carried out if no brake holds it."""
    direction = -1 if _is_smaller(state, plan) else 1
    promise = Promise(plan, SERVERS, direction, gain, 0.0, excess_of(state, plan))
    brake = brakes.of_plan(state.scaling, known, promise)
    text = ", ".join(f"{group.count or 'other'} {group.node_type.value}" for group in plan.groups) or "other servers"
    if brake is not None:
        return held(brake, f"{text} would be next ({why}), but {brake.why}.", fit)
    return watched(
        state, known, plan, f"The job gets {text}: {why or 'no reason is given'}.", direction=direction, fit=fit
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
) -> ScaleVerdict:
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
        least_ratio=TOLERANCE,
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
