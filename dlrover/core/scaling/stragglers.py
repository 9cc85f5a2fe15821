"""
A node for which the others wait in each step is exchanged for another one, elsewhere, if that pays.

The price is that of any change: what the pause costs, against what the others wait until the horizon. Each rank is exchanged once, and at most two in an hour, because a
job whose nodes are slow one after the other has another trouble than its nodes.
"""

from __future__ import annotations

from dlrover.core.scaling import brakes
from dlrover.core.scaling.brakes import HOUR, WORKERS, Promise
from dlrover.core.scaling.facts import ScaleFacts, is_world
from dlrover.core.scaling.state import Scaling
from dlrover.core.scaling.verdict import ScaleVerdict
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodePhase, NodeType
from dlrover.protocol.messages.identity import Micros, micros
from dlrover.protocol.messages.scaling import NodeUse, PlannedNode, ScaleOutcome, SizePlan

MOST_EXCHANGES = 2
"""In an hour."""
MOST_REMEMBERED = 256
LEAST_SECONDS = 60.0
"""A node that was slow for less may have had one bad moment."""


def decide(state: JobState, known: ScaleFacts) -> ScaleVerdict | None:
    """None: no node is slow enough, or a brake holds its exchange."""
    scaling = state.scaling
    slow = slowest(state)
    if slow is None or brakes.of_job(scaling, known, WORKERS) is not None or allowed_at(scaling, known.now) > known.now:
        return None
    newest = scaling.newest
    assert newest is not None, "a slow node is one of the newest run"
    plan = SizePlan(nodes=(PlannedNode(platform_node=slow.platform_node, is_elsewhere=True),))
    gain = newest.step_time / max(newest.step_time - slow.wait_per_step, 0.01 * newest.step_time) - 1
    if brakes.of_plan(scaling, known, Promise(plan, WORKERS, 0, gain)) is not None:
        return None
    return ScaleVerdict(
        outcome=ScaleOutcome.PLANNED,
        sentence=(
            f"Node rank {slow.rank} is exchanged for one on another machine. The others wait {slow.wait_per_step:.3g} s for it in each "
            f"step of {newest.step_time:.3g} s ({gain:+.0%} speed is expected, and the change costs {known.cost:.1f} s)."
        ),
        plan=plan,
        nodes=known.nodes,
        expected_speed=known.speed * (1 + gain),
        least_ratio=0.0,
    )


def slowest(state: JobState) -> NodeUse | None:
    """For which the others wait longest, of those that may be exchanged."""
    newest, fleet = state.scaling.newest, state.fleet
    if newest is None or fleet is None or not is_world(state) or newest.seconds < LEAST_SECONDS:
        return None
    may_go = [
        use
        for use in newest.nodes
        if use.node_type is NodeType.WORKER
        and use.wait_per_step > 0
        and (node := fleet.nodes.get(use.platform_node)) is not None
        and node.phase is NodePhase.RUNNING
        and not node.is_finished
        and not node.is_critical
        and str(node.rank) not in state.scaling.exchanged
    ]
    return max(may_go, key=lambda use: use.wait_per_step, default=None)


def allowed_at(scaling: Scaling, now: Micros) -> Micros:
    """When the next exchange may be made."""
    recent = sorted(at for at in scaling.exchanged.values() if at > now - micros(HOUR))
    return now if len(recent) < MOST_EXCHANGES else Micros(recent[-MOST_EXCHANGES] + micros(HOUR))


def note(scaling: Scaling, rank: int, now: Micros) -> None:
    scaling.exchanged[str(rank)] = now
    while len(scaling.exchanged) > MOST_REMEMBERED:
        del scaling.exchanged[next(iter(scaling.exchanged))]
