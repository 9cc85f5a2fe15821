"""
Early stop: when waiting for nodes cannot help any more, or has taken too long.

Five rules, first hit wins, on the state and the clock alone. Each rule that depends on time also names its deadline, and
only while its condition holds; so a deadline that has passed always ends the job, and none is left standing.

Until then the job waits: it says how many workers run, whom it waits for and until when, and goes on by itself when they
have come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dlrover.core.fleet.fleet import Fleet
from dlrover.core.fleet.parameter_servers import WAIT_FOR_PS
from dlrover.core.fleet.relaunch import smaller
from dlrover.core.fleet.replicas import FleetNode
from dlrover.core.outcome import Deadline
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodePhase, NodeType, Resource, Strategy
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, micros
from dlrover.protocol.messages.job import DeadlineKind, ExitReason, Limits, Micros

MIN_PENDING_TIMEOUT = 600.0
DEFAULT_PENDING_TIMEOUT = 600.0
"""For a parameter server that waits for more memory, where the user allows to wait for ever."""
MIN_GROUP_TIMEOUT = 300.0
MIN_SHORTAGE, MAX_SHORTAGE = 600.0, 3600.0
SHORTAGE_FACTOR = 1.5
MIN_NODES_FOR_CHECK = 4
"""Fewer workers may all fail the node check by chance."""
NECESSARY = 1
"""Of `FleetSpec.pending_strategy`."""
_AT_WORK = (NodeType.CHIEF, NodeType.WORKER, NodeType.EVALUATOR)


class Stop(NamedTuple):
    reason: ExitReason
    sentence: str


class OverlongWait(NamedTuple):
    """A node that has waited too long at that time."""

    at: Micros
    node: FleetNode


def judge(state: JobState, now: Micros) -> Stop | None:
    """Whether the job should end for lack of nodes."""
    fleet = state.fleet
    if fleet is None or state.end is not None or not fleet.is_listed:
        return None
    if _have_all_checks_failed(fleet):
        return Stop(
            ExitReason.NODE_CHECK_FAILED,
            f"The first nodes of all {fleet.workers.spec.count} workers failed the node check. Look for what they have in "
            "common: the network between them, the driver, the image.",
        )
    for wait in _too_long(state):
        if wait.at <= now:
            return Stop(ExitReason.PENDING_TIMEOUT, _explain_wait(wait.node, now))
    ends_at = shortage_ends_at(state)
    if ends_at is not None and ends_at <= now:
        assert fleet.short_since is not None, "a shortage without a beginning"
        seconds = (now - fleet.short_since) / MICROS_PER_SECOND
        return Stop(
            ExitReason.NOT_ENOUGH_NODES,
            f"For {seconds:.0f} s {_alive(fleet)} workers have been alive or done, and the job needs "
            f"{_limits(state).min_nodes}. See why the others were not relaunched, or allow fewer.",
        )
    return None


def deadlines(state: JobState) -> list[Deadline]:
    """All that are running, of these rules and of what is tried before them."""
    fleet = state.fleet
    if fleet is None or state.end is not None or not fleet.is_listed:
        return []
    found: list[Deadline] = []
    oldest = min(_too_long(state), key=lambda wait: wait.at, default=None)
    if oldest is not None:
        found.append(Deadline(oldest.at, DeadlineKind.NODE_PENDING, oldest.node.id))
    ends_at = shortage_ends_at(state)
    if ends_at is not None:
        found.append(Deadline(ends_at, DeadlineKind.TOO_FEW_ALIVE, 0))
    if not fleet.is_suspended:
        found.extend(
            Deadline(wait.at, DeadlineKind.SMALLER_NODE, wait.node.id) for wait in to_make_smaller(state, fleet)
        )
        found.extend(Deadline(wait.at, DeadlineKind.GROUP_PENDING, wait.node.id) for wait in groups_to_move(fleet))
        found.extend(Deadline(wait.at, DeadlineKind.PS_WAIT, wait.node.id) for wait in unseen_servers(fleet))
    return found


def note_shortage(state: JobState, now: Micros) -> None:
    """Keep the clock of the last rule: it runs while some workers are alive, but fewer than a world needs."""
    fleet = state.fleet
    if fleet is None:
        return
    is_short = (
        state.terms is not None
        and not fleet.is_suspended
        and fleet.spec.strategy is Strategy.ALLREDUCE
        and fleet.workers.num_live > 0
        and _alive(fleet) < state.terms.limits.min_nodes
    )
    if not is_short:
        fleet.short_since = None
    elif fleet.short_since is None:
        fleet.short_since = now


def note_idleness(fleet: Fleet, now: Micros) -> None:
    """Keep the clock of those that are left over: it runs while no worker works, after one did."""
    groups = [fleet.replicas[kind] for kind in _AT_WORK if kind in fleet.replicas]
    is_idle = (
        bool(_left_over(fleet))
        and any(replicas.finished or replicas.abandoned for replicas in groups)
        and all(fleet.nodes[node].is_finished for replicas in groups for node in replicas.running)
    )
    if not is_idle:
        fleet.idle_since = None
    elif fleet.idle_since is None:
        fleet.idle_since = now


def shortage_ends_at(state: JobState) -> Micros | None:
    fleet = state.fleet
    if fleet is None or fleet.short_since is None or state.terms is None:
        return None
    patience = SHORTAGE_FACTOR * state.terms.limits.join_timeout
    return Micros(fleet.short_since + micros(min(max(patience, MIN_SHORTAGE), MAX_SHORTAGE)))


def describe(state: JobState) -> str:
    """Whether enough workers run, in a sentence that changes only with what it tells."""
    fleet = state.fleet
    if fleet is None or state.terms is None or fleet.spec.strategy is not Strategy.ALLREDUCE:
        return ""
    if fleet.is_released:
        return "The job is suspended and has released its nodes. It goes on from its checkpoint when it is resumed."
    workers, min_nodes = fleet.workers, state.terms.limits.min_nodes
    num_running = num_there(state, fleet)
    if num_running >= min_nodes:
        return ""
    waiting = next((fleet.nodes[node] for node in workers.pending), None)
    if waiting is None:
        return f"{num_running} of at least {min_nodes} workers run, and no other is on its way."
    why = f": {waiting.message}" if waiting.message else ""
    is_limited = fleet.spec.pending_strategy > 0 and fleet.spec.pending_timeout > 0
    patience = max(fleet.spec.pending_timeout, MIN_PENDING_TIMEOUT)
    limit = f" It gives up after {patience:g} s." if is_limited else ""
    held = " It is suspended and launches nothing." if fleet.is_suspended else limit
    return (
        f"{num_running} of at least {min_nodes} workers run; the job waits for {len(workers.pending)} that the platform "
        f"has to bring, first {waiting.label}{why}.{held}"
    )


def num_there(state: JobState, fleet: Fleet) -> int:
    """Workers that the platform need not bring. Who has finished is not missed, but can be none of a world that is to form."""
    workers = fleet.workers
    if state.rendezvous.opening is None:
        return len(workers.running) + workers.num_done
    num_finished_there = len(workers.finished) - workers.num_done
    return len(workers.running) - num_finished_there


def to_make_smaller(state: JobState, fleet: Fleet) -> list[OverlongWait]:
    """Nodes of a parameter-server job that may come sooner if they ask for less. More memory was asked for on purpose."""
    if fleet.spec.strategy is not Strategy.PS:
        return []
    timeout = fleet.spec.pending_timeout if fleet.spec.pending_timeout > 0 else DEFAULT_PENDING_TIMEOUT
    candidates = [
        node
        for node in _all_pending(fleet)
        if node.phase is NodePhase.PENDING and not node.is_oom_replacement and not _is_exchange(fleet, node)
    ]
    return _waits([node for node in candidates if smaller_resource(state, fleet, node) is not None], timeout)


def groups_to_move(fleet: Fleet) -> list[OverlongWait]:
    """Relaunched nodes that wait for room in a group where there may be none."""
    spec = fleet.spec
    is_judged = spec.strategy is Strategy.ALLREDUCE and spec.pending_strategy > 0
    if not is_judged or not spec.group_affinity or len(fleet.relaunched_groups) >= spec.max_group_relaunches:
        return []
    stuck = [
        node
        for node in _all_pending(fleet)
        if node.is_replacement and node.group >= 0 and node.group not in fleet.relaunched_groups
    ]
    return _waits(stuck, max(spec.group_pending_timeout, MIN_GROUP_TIMEOUT))


def unseen_servers(fleet: Fleet) -> list[OverlongWait]:
    """Parameter servers that the platform does not even show; the workers wait for them only so long."""
    replicas = fleet.replicas.get(NodeType.PS)
    nodes = [fleet.nodes[node] for node in (() if replicas is None else replicas.pending)]
    return _waits([node for node in nodes if node.phase is NodePhase.INITIAL and not node.is_wait_over], WAIT_FOR_PS)


def _too_long(state: JobState) -> list[OverlongWait]:
    """Who must not wait for ever, in the order of the rules; only while the job really cannot do without."""
    fleet = state.fleet
    if fleet is None or not fleet.is_listed or fleet.is_suspended:
        return []
    spec = fleet.spec
    raw = spec.pending_timeout if spec.pending_timeout > 0 else DEFAULT_PENDING_TIMEOUT
    pending = [node for node in fleet.live_nodes(NodeType.PS) if node.is_pending]
    servers = [node for node in pending if not _is_exchange(fleet, node)]
    found = _waits([node for node in servers if node.is_oom_replacement and node.phase is NodePhase.PENDING], raw)
    if spec.pending_strategy <= 0 or spec.pending_timeout <= 0:
        return found
    timeout = max(spec.pending_timeout, MIN_PENDING_TIMEOUT)
    # Whoever can still ask for less has another try first.
    found += _waits([node for node in servers if not _will_be_smaller(state, fleet, node)], timeout)
    found += _waits(_needed_workers(state, fleet), timeout)
    if fleet.idle_since is not None:
        # Where the others worked there may be room now, so they have the whole time from then on.
        left_over = [node for node in _left_over(fleet) if not _will_be_smaller(state, fleet, node)]
        found += [
            OverlongWait(max(wait.at, Micros(fleet.idle_since + micros(timeout))), wait.node)
            for wait in _waits(left_over, timeout)
        ]
    return found


def _needed_workers(state: JobState, fleet: Fleet) -> Iterable[FleetNode]:
    """The workers whose wait ends the job; none, while the job goes on without those that wait."""
    spec, workers = fleet.spec, fleet.workers
    waiting = (fleet.nodes[node] for node in workers.pending)
    oldest = next((node for node in waiting if not _is_exchange(fleet, node)), None)
    is_nobody_running = not workers.running and not workers.finished
    if spec.strategy is not Strategy.ALLREDUCE and spec.pending_strategy == NECESSARY:
        first = fleet.holder(NodeType.CHIEF, 0) or fleet.holder(NodeType.WORKER, 0)
        needed = [first] if first is not None and first.is_pending and not _is_exchange(fleet, first) else []
    else:
        is_short = is_nobody_running or (
            state.terms is not None and num_there(state, fleet) < state.terms.limits.min_nodes
        )
        needed = [oldest] if oldest is not None and is_short else []
        if spec.strategy is not Strategy.ALLREDUCE:  # however many workers there are, without a chief they cannot begin
            needed += [node for node in fleet.live_nodes(NodeType.CHIEF) if node.is_pending]
    return [node for node in needed if not _will_be_smaller(state, fleet, node)]


def _left_over(fleet: Fleet) -> list[FleetNode]:
    """Chiefs and evaluators that wait. Others can work without them for now, but the job cannot end well."""
    replicas = [fleet.replicas[kind] for kind in (NodeType.CHIEF, NodeType.EVALUATOR) if kind in fleet.replicas]
    return [fleet.nodes[node] for each in replicas for node in each.pending]


def _is_exchange(fleet: Fleet, node: FleetNode) -> bool:
    """Whether another node works in its place until it comes: then the job does not wait for it."""
    return any(new == node.id for new in fleet.migrations.values())


def _will_be_smaller(state: JobState, fleet: Fleet, node: FleetNode) -> bool:
    is_tried = fleet.spec.strategy is Strategy.PS and node.phase is NodePhase.PENDING and not node.is_oom_replacement
    return is_tried and smaller_resource(state, fleet, node) is not None


def smaller_resource(state: JobState, fleet: Fleet, node: FleetNode) -> Resource | None:
    """What a node that waits may ask for instead; None: it cannot ask for less, or its type may not be changed (`autoScale`)."""
    changeable = NodeType.PS if node.node_type is NodeType.PS else NodeType.WORKER
    if changeable not in state.scaling.terms.types:
        return None
    described = fleet.spec.replicas.get(node.node_type) or fleet.spec.replicas.get(NodeType.WORKER)
    return smaller(node.resource, Resource() if described is None else described.resource)


def _have_all_checks_failed(fleet: Fleet) -> bool:
    count = fleet.workers.spec.count
    is_judged = fleet.spec.strategy is Strategy.ALLREDUCE and count >= MIN_NODES_FOR_CHECK
    return is_judged and len(fleet.checks_failed) >= count


def _alive(fleet: Fleet) -> int:
    """Workers that are there or will be, and those whose work is done."""
    return len(fleet.workers.holders) + fleet.workers.num_done


def _all_pending(fleet: Fleet) -> list[FleetNode]:
    return [fleet.nodes[node] for replicas in fleet.replicas.values() for node in replicas.pending]


def _waits(nodes: Iterable[FleetNode], timeout: float) -> list[OverlongWait]:
    """One that was never asked for does not wait yet."""
    return [OverlongWait(Micros(node.asked_at + micros(timeout)), node) for node in nodes if node.asked_at is not None]


def _explain_wait(node: FleetNode, now: Micros) -> str:
    assert node.asked_at is not None, f"{node.label} was never asked for"
    seconds = (now - node.asked_at) / MICROS_PER_SECOND
    said = f" The platform says: {node.message.rstrip('.')}." if node.message else ""
    return (
        f"{node.label[0].upper()}{node.label[1:]} has waited for its resources for {seconds:.0f} s, and the job cannot go "
        f"on without it.{said} Ask for less per node or for fewer nodes, or allow a longer pending timeout."
    )


def _limits(state: JobState) -> Limits:
    return Limits() if state.terms is None else state.terms.limits
