"""
What the other rooms know that a decision about the size of the job needs, read from the state in one place.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.core.scaling.evidence import measured_speed
from dlrover.core.scaling.fit.model import median
from dlrover.core.scaling.state import Scaling
from dlrover.core.state import JobState
from dlrover.protocol.messages.cluster import ClusterPhase
from dlrover.protocol.messages.fleet import NodeType, Strategy
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, Micros
from dlrover.protocol.messages.job import Limits
from dlrover.protocol.messages.scaling import Configuration, RunMeasured, ScaleMode

FIRST_COST = 2.0
"""Seconds that a change is assumed to pause training, before one was measured."""
NUM_COSTS = 5
LONGEST_HORIZON = 3600.0
UNBOUNDED = 1_000_000


class ScaleFacts(Struct, frozen=True, kw_only=True):
    now: Micros
    limits: Limits
    """The bounds that the user gave."""
    nodes: int
    """That train now."""
    standby: int
    most_by_limits: int
    """Nodes that train, as far as the job's resource limits go."""
    room: int | None
    """The same by the room of the platform; None: unknown."""
    cost: float
    """Seconds that a change pauses training."""
    horizon: float
    """Seconds for which a gain counts."""
    off: str
    """Why nothing can be planned at all; empty: it can."""
    under_way: str
    """What is changing already; empty: nothing is."""
    configuration: Configuration | None
    """What runs now, if it was seen for long enough since the last change."""
    unseen: str
    """Why not; empty: it was."""
    speed: float
    """Of it; 0: not known."""
    slow_start: str = ""
    """Why the set of servers is left alone: each change of it would be as slow as the start was. Empty: it was quick."""

    @property
    def most(self) -> int:
        """Nodes that the job may have now, by everything that is known; at least its minimum."""
        unit = self.limits.node_unit
        most = min(self.limits.max_nodes, self.most_by_limits, UNBOUNDED if self.room is None else self.room)
        return max(self.limits.min_nodes, most - most % unit)


def gather(state: JobState, now: Micros) -> ScaleFacts:
    scaling = state.scaling
    limits = Limits() if state.terms is None else state.terms.limits
    standby = 0 if state.terms is None else state.terms.standby
    nodes = num_training(state)
    configuration, unseen = _seen(scaling, nodes)
    return ScaleFacts(
        now=now,
        limits=limits,
        nodes=nodes,
        standby=standby,
        most_by_limits=_most_by_limits(state, standby),
        room=_room(state, standby, now),
        cost=cost_of_change(state),
        horizon=_horizon(state, now),
        off=_why_off(state),
        under_way=_under_way(state),
        configuration=configuration,
        unseen=unseen,
        speed=0.0 if configuration is None else measured_speed(scaling, configuration),
        slow_start=_slow_start(state),
    )


def is_world(state: JobState) -> bool:
    return state.fleet is not None and state.fleet.spec.strategy is Strategy.ALLREDUCE


def num_training(state: JobState) -> int:
    world, fleet = state.rendezvous.world, state.fleet
    if fleet is not None and fleet.spec.strategy is not Strategy.ALLREDUCE:
        kinds = [fleet.replicas[kind] for kind in (NodeType.CHIEF, NodeType.WORKER) if kind in fleet.replicas]
        return sum(len(replicas.running) for replicas in kinds)
    return 0 if world is None else len(world.members)


def cost_of_change(state: JobState) -> float:
    """Seconds of training that the last changes of membership cost each node, as the accountant booked them; of servers, as the cluster saw them."""
    if state.cluster is not None:
        return median(state.cluster.pauses) if state.cluster.pauses else FIRST_COST
    changes = [fault for fault in state.goodput.faults if fault.kind == "membership" and fault.recovered_at is not None]
    nodes = max(1, num_training(state))
    costs = [sum(fault.micros.values()) / MICROS_PER_SECOND / nodes for fault in changes[-NUM_COSTS:]]
    return median(costs) if costs else FIRST_COST


def is_stable(scaling: Scaling, run: RunMeasured) -> bool:
    return run.seconds >= scaling.terms.stable_for and run.steps >= scaling.terms.stable_steps


def is_since_change(scaling: Scaling, run: RunMeasured) -> bool:
    return run.number > scaling.number_at_change


def _seen(scaling: Scaling, nodes: int) -> tuple[Configuration | None, str]:
    newest = scaling.newest
    if newest is None or not is_since_change(scaling, newest) or newest.configuration.num_workers != nodes:
        return None, f"{of_nodes(nodes)} not measured yet"
    if newest.is_disturbed:
        return None, "faults disturb the newest run"
    if not is_stable(scaling, newest):
        terms = scaling.terms
        return None, (
            f"the newest run lasts {newest.seconds:.0f} s and {newest.steps} steps so far, and {terms.stable_for:.0f} s and "
            f"{terms.stable_steps} steps are needed"
        )
    return newest.configuration, ""


def _slow_start(state: JobState) -> str:
    """Spec 07 §8.6. The script may have told what it measured itself."""
    scaling, cluster = state.scaling, state.cluster
    told = _number(scaling.facts.custom.get("init_training_time", ""))
    seconds = told if told or cluster is None else cluster.start_seconds
    if not scaling.terms.slow_start or seconds <= scaling.terms.slow_start:
        return ""
    return f"training took {seconds:.0f} s to begin, and with another set of servers it begins anew"


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 <= number < 10**9 else 0.0


def of_nodes(nodes: int) -> str:
    return "1 node is" if nodes == 1 else f"{nodes} nodes are"


def _why_off(state: JobState) -> str:
    scaling, fleet = state.scaling, state.fleet
    if scaling.mode is ScaleMode.OFF:
        return "scaling is off (`dlrover scale --auto on` switches it on)"
    if state.end is not None or state.rendezvous.finished:
        return "the job ends"
    if fleet is None:
        return "no platform launches the nodes of this job"
    if fleet.is_suspended:
        return "the job is suspended"
    if state.cluster is not None and state.cluster.finished_at is not None:
        return "the training is over"
    return ""


def _under_way(state: JobState) -> str:
    rdzv, fleet = state.rendezvous, state.fleet
    if fleet is None:
        return ""
    num_pending = sum(len(replicas.pending) for replicas in fleet.replicas.values())
    if num_pending:
        return f"{num_pending} node{'' if num_pending == 1 else 's'} of the platform are pending"
    if fleet.migrations:
        return f"{len(fleet.migrations)} nodes are being exchanged"
    if fleet.servers.dropped:
        return "the workers have not switched to the next set of parameter servers"
    if state.cluster is not None:
        is_training = state.cluster.phase is ClusterPhase.TRAINING
        return "" if is_training else f"the cluster is {state.cluster.phase.value}"
    if fleet.spec.strategy is not Strategy.ALLREDUCE:
        return ""
    if rdzv.world is None or rdzv.opening is not None:
        return f"round {rdzv.next_round} is open"
    if rdzv.is_held:
        return "the rendezvous is blocked"
    if state.check.cycle is not None or state.check.needed:
        return "nodes are being checked"
    # Nodes from which nobody has come yet, and nodes that came and wait for the round that takes them in.
    is_short = len(rdzv.world.members) < state.limits.max_nodes
    if rdzv.expected or rdzv.absent or fleet.coming_ranks() or (is_short and rdzv.waiting):
        return "nodes are starting"
    return ""


def _most_by_limits(state: JobState, standby: int) -> int:
    fleet = state.fleet
    if fleet is None or NodeType.WORKER not in fleet.replicas:
        return UNBOUNDED
    limits, size = fleet.spec.limits, fleet.replicas[NodeType.WORKER].spec.resource
    most = UNBOUNDED
    for name in ("cpu", "memory_mb", "gpus"):
        limit, each = getattr(limits, name), getattr(size, name)
        if limit and each:
            others = sum(
                replicas.target * getattr(replicas.spec.resource, name)
                for kind, replicas in fleet.replicas.items()
                if kind is not NodeType.WORKER
            )
            most = min(most, max(0, int((limit - others) / each)))
    return most if most == UNBOUNDED else most - standby


def _room(state: JobState, standby: int, now: Micros) -> int | None:
    scaling = state.scaling
    seen = scaling.room.get(NodeType.WORKER)
    told = None if seen is None or seen.most is None else max(0, seen.most - standby)
    if scaling.no_room_until is not None and now < scaling.no_room_until:
        return scaling.no_room_beyond if told is None else min(told, scaling.no_room_beyond)
    return told


def _horizon(state: JobState, now: Micros) -> float:
    """Seconds that are left; where that is unknown, as many as the job has been as it is, at most an hour."""
    scaling = state.scaling
    left = seconds_left(scaling)
    if left is not None:
        return left
    began_at = state.rendezvous.began_at if state.rendezvous.began_at is not None else Micros(0)
    since = began_at if scaling.changed_at is None else max(began_at, scaling.changed_at)
    return min(LONGEST_HORIZON, max(0.0, (now - since) / MICROS_PER_SECOND))


def seconds_left(scaling: Scaling) -> float | None:
    """Until the job's last step, if both are known."""
    newest, last = scaling.newest, scaling.facts.max_steps
    if newest is None or newest.last_step is None or not last:
        return None
    return max(0, last - newest.last_step) * newest.step_time
