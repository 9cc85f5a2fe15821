"""
The life of a platform's nodes: what follows when one is seen, runs, ends, is lost, or is not wanted any more.

Three tell about the same node: the platform (it exists, it ended), the agent on it (attached, finished, gone), and people
(scale, exchange, restart). Whoever tells first that it is over decides; whoever comes later is heard, and changes
nothing but the bill. One function for each thing that can happen to a node says what follows, in order.

What is decided here only changes the state. `settle`, once at the end of each command, asks the platform for what is
wanted now, and ends the job if it has no future.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover.core import early_stop, parameter_servers, relaunch
from dlrover.core.fleet import MAX_MESSAGE, REMOVAL_GRACE, Fleet, FleetNode, Removal, Replicas, group_of
from dlrover.core.nodes import Node, NodeLife, after_outage
from dlrover.core.relaunch import ENDED, LIVE
from dlrover.core.turn import MICROS_PER_SECOND, micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.fleet_messages import (
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodeType,
    PlatformNode,
    RemoveNode,
    Resource,
    Strategy,
    exit_reason_of,
)
from dlrover.protocol.messages import (
    Attach,
    DeadlineKind,
    DeadlinePassed,
    ExitReason,
    Leave,
    LeaveReason,
    Micros,
    NodeRank,
    PlatformId,
    Stage,
)

if TYPE_CHECKING:  # a course calls us when an agent is lost
    from dlrover.core.course import Course
    from dlrover.core.state import JobState

TRAINING_BEGINS = 60.0
"""Seconds: a worker that has run so long has got beyond what a wrong script does, where nobody reports steps."""
_EXIT_REPLACED = 1
_FAULTY_HOST = (NodeExit.HARDWARE, NodeExit.CHECK_FAILED, NodeExit.DIAGNOSED)
_WORKERS = (NodeType.CHIEF, NodeType.WORKER, NodeType.EVALUATOR)
"""Types whose end is the end of the job; parameter servers would serve for ever."""


# What the platform tells.


def hear_list(course: Course, shown: tuple[PlatformNode, ...]) -> None:
    """Everything that exists. What we know and it does not show is gone."""
    fleet = _fleet(course)
    listed = {node.id: None for node in shown}
    is_first = not fleet.was_ever_listed
    for node in sorted(shown, key=lambda node: node.id):
        kind = NodeEventKind.DELETED if node.phase is NodePhase.DELETED else NodeEventKind.MODIFIED
        hear_change(course, kind, node)
        if is_first and node.id in fleet.nodes:
            _trust_count(fleet, node)
    for known in [node for node in fleet.nodes.values() if node.id not in listed]:
        _hear_absence(course, known)
    if is_first and shown:
        _renumber_unseen(course, fleet)
    fleet.is_listed = fleet.was_ever_listed = True
    for node_id in [node.id for node in fleet.nodes.values() if node.is_live and node.phase is NodePhase.INITIAL]:
        fleet.to_launch[node_id] = None  # asking again is harmless, and heals what was lost on the way
    for node_id in [node.id for node in fleet.nodes.values() if node.removal is not None]:
        fleet.to_remove[node_id] = None


def hear_change(course: Course, kind: NodeEventKind, shown: PlatformNode) -> None:
    """One node as the platform sees it. Whatever it says, nothing here can fail."""
    fleet = _fleet(course)
    node = fleet.nodes.get(shown.id)
    if node is None:
        node = _meet_stranger(course, fleet, kind, shown)
        if node is None:
            return
    node.host = shown.host or node.host
    node.message = (shown.message or node.message)[:MAX_MESSAGE]
    node.group = shown.group if shown.group >= 0 else node.group
    if kind is NodeEventKind.DELETED:
        fleet.gone(node)
    elif shown.phase in ENDED:
        node.is_over = True
    phase = relaunch.next_phase(node.phase, kind, shown.phase)
    if phase is None or node.is_released:
        _hear_late_word(fleet, node, shown)
        return
    match phase:
        case NodePhase.SUCCEEDED:
            _succeeded(course, node)
        case NodePhase.FAILED:
            _end(course, node, phase, _exit_of(shown, NodeExit.UNKNOWN))
        case NodePhase.DELETED if node.phase in LIVE:
            _end(course, node, phase, _exit_of(shown, NodeExit.KILLED))
        case NodePhase.RUNNING:
            _started(course, node)
        case _:
            fleet.enter(node, phase, course.now)


def hear_refusal(course: Course, node_id: PlatformId, reason: str) -> None:
    """The platform has no room now. The shell goes on trying; the node waits meanwhile, and the pending timeout counts."""
    node = _fleet(course).nodes.get(node_id)
    if node is not None and node.is_pending and node.message != reason:
        node.message = reason[:MAX_MESSAGE]
        course.say(f"The platform does not launch {node.label} now: {node.message}")


def _meet_stranger(course: Course, fleet: Fleet, kind: NodeEventKind, shown: PlatformNode) -> FleetNode | None:
    """A node that we do not know: one that we have given up, or one of a life whose journal was lost."""
    is_there = kind is not NodeEventKind.DELETED and shown.phase in LIVE
    if fleet.is_forgotten(shown.id) or shown.node_type not in fleet.replicas:
        if is_there:
            name = shown.name or f"{fleet.job_name}-{shown.node_type.value}-{shown.id}"
            reason = "the job does not know it, or no longer"
            course.effects.append(
                RemoveNode(id=shown.id, name=name, reason=reason, master_epoch=course.state.master_epoch)
            )
        return None
    fleet.next_id = max(fleet.next_id, PlatformId(shown.id + 1))
    if not is_there:
        return None
    return _adopt(course, fleet, shown)


def _adopt(course: Course, fleet: Fleet, shown: PlatformNode) -> FleetNode:
    replicas = fleet.replicas[shown.node_type]
    holder = fleet.holder(shown.node_type, shown.rank)
    like = replicas.spec
    node = fleet.want(
        shown.node_type,
        shown.rank,
        resource=like.resource if holder is None else holder.resource,
        group=shown.group,
        priority="" if holder is None else holder.priority,
        service_address="" if holder is None else holder.service_address,
        is_critical=_is_critical(fleet, shown.node_type, shown.rank),
        id_=shown.id,
        name=shown.name,
    )
    fleet.to_launch.pop(node.id, None)
    node.asked_at = course.now
    node.agent = next((agent for agent, on in fleet.agents.items() if on == node.id), None)
    if not fleet.was_ever_listed:
        replicas.target = max(replicas.target, shown.rank + 1)  # it had been scaled before the journal was lost
    course.say(f"The platform has {node.label}, which is taken over.")
    if holder is not None and holder.id < node.id:
        holder.exit_reason = NodeExit.RELAUNCHED
        _let_go(course, holder, "a newer node has its rank")
        if holder.id in fleet.servers.current:
            fleet.servers.replaced(holder.id, node.id)
    elif holder is not None:
        replicas.holders[holder.rank] = holder.id
        node.exit_reason = NodeExit.RELAUNCHED
        _let_go(course, node, "a newer node has its rank")
    return node


def _trust_count(fleet: Fleet, shown: PlatformNode) -> None:
    """Our own counters win, unless we have none because this is the first that we hear."""
    replicas = fleet.replicas[shown.node_type]
    known = replicas.spent.get(shown.rank, 0)
    if shown.relaunch_count > known:
        replicas.spent[shown.rank] = min(shown.relaunch_count, replicas.budget(shown.rank))


def _hear_absence(course: Course, node: FleetNode) -> None:
    fleet = _fleet(course)
    if node.is_released:
        fleet.gone(node)
        return
    if node.phase is not NodePhase.INITIAL:
        fleet.gone(node)
    if node.phase in (NodePhase.PENDING, NodePhase.RUNNING):
        node.message = "the platform does not have it any more"
        _end(course, node, NodePhase.DELETED, NodeExit.KILLED)
    elif node.phase in (NodePhase.FAILED, NodePhase.SUCCEEDED):
        fleet.enter(node, NodePhase.DELETED, course.now)


def _renumber_unseen(course: Course, fleet: Fleet) -> None:
    """Ids below those that exist were used by a life whose journal was lost; a platform would not launch them again."""
    for node in [node for node in fleet.nodes.values() if node.phase is NodePhase.INITIAL and node.is_live]:
        if node.asked_at is None:
            fleet.release(node, course.now)
            new = fleet.want_like(node, node.resource)
            if node.id in fleet.servers.current:
                fleet.servers.replaced(node.id, new.id)
            del fleet.nodes[node.id]


def _hear_late_word(fleet: Fleet, node: FleetNode, shown: PlatformNode) -> None:
    """We took it for gone, free of charge; now the platform says that it had failed."""
    if node.is_presumed and shown.phase is NodePhase.FAILED:
        node.is_presumed = False
        node.exit_reason = _exit_of(shown, NodeExit.UNKNOWN)
        if relaunch.is_failure(node.exit_reason):
            fleet.charge(node)


# What happens to a node.


def _started(course: Course, node: FleetNode) -> None:
    fleet = _fleet(course)
    fleet.enter(node, NodePhase.RUNNING, course.now)
    node.message = ""
    if node.node_type is NodeType.PS:
        node.is_wait_over = False
        if node.id not in fleet.servers.current:
            fleet.servers.is_changed = True
        return
    for old in [old for old, new in fleet.migrations.items() if new == node.id]:
        _let_go(course, fleet.nodes[old], f"{node.label} has taken its place")


def _succeeded(course: Course, node: FleetNode) -> None:
    """Its processes ended well. The agent may have said so before, or its report was lost with it."""
    state, fleet = course.state, _fleet(course)
    fleet.enter(node, NodePhase.SUCCEEDED, course.now)
    node.exit_reason = NodeExit.SUCCEEDED
    fleet.finish(node)
    agent = _unlink(course, node)
    if agent is not None:
        course.finish_node(agent, state.rendezvous.round)
        course.lose(agent, NodeLife.LEFT, f"{node.label} ended well")
    _release_ended(course, node)
    if node.is_critical and state.end is None and not _is_critical_work_left(fleet):
        course.wants_end(ExitReason.COMPLETED, "All nodes that the job cannot do without have done their work.")


def _end(
    course: Course, node: FleetNode, phase: NodePhase, exit_reason: NodeExit, *, is_presumed: bool = False
) -> None:
    """A live node ended, or is taken for ended, without having done its work: replace it, or see what that means."""
    fleet = _fleet(course)
    was_dropped = node.id in fleet.servers.dropped
    node.exit_reason = exit_reason
    node.is_presumed = is_presumed
    fleet.enter(node, phase, course.now)
    agent = _unlink(course, node)
    if agent is not None:
        course.lose(agent, NodeLife.GONE, f"{node.label} ended ({exit_reason.value})")
    if node.is_finished:
        _release_ended(course, node)
        return
    heir = fleet.holder(node.node_type, node.rank)
    if heir is not None:
        node.exit_reason = NodeExit.RELAUNCHED if exit_reason is NodeExit.KILLED else exit_reason
        course.say(f"{_start(node.label)} ended ({exit_reason.value}); {heir.label} has its rank.")
        decision = relaunch.Relaunch(sentence="")
    elif was_dropped:
        decision = relaunch.Relaunch(sentence="")
        fleet.servers.dropped.pop(node.id, None)
    else:
        decision = relaunch.decide(_facts(fleet, node), _terms(course))
        course.say(_start(decision.sentence))
    num_failed = _count_failure(course, fleet, node)
    if decision.is_relaunched:
        _replace(course, fleet, node, decision)
    elif heir is None and not was_dropped:
        fleet.replicas[node.node_type].abandoned[node.rank] = None
    _after_end(course, node, is_final=not decision.is_relaunched and heir is None and not was_dropped)
    _check_rate(course, fleet, num_failed)
    _release_ended(course, node)


def _replace(course: Course, fleet: Fleet, node: FleetNode, decision: relaunch.Relaunch) -> FleetNode:
    replicas = fleet.replicas[node.node_type]
    if decision.is_charged:
        fleet.charge(node)
    elif node.exit_reason is NodeExit.KILLED:
        replicas.evictions[node.rank] = replicas.evictions.get(node.rank, 0) + 1
    if node.exit_reason is NodeExit.CHECK_FAILED:
        fleet.avoid(node.host)
    new = fleet.want_like(node, decision.resource)
    new.is_oom_replacement = node.exit_reason is NodeExit.OOM
    if node.node_type is NodeType.PS:
        fleet.servers.replaced(node.id, new.id)
    return new


def _after_end(course: Course, node: FleetNode, *, is_final: bool) -> None:
    """What the loss of a node means for the others. `is_final`: nobody takes its place."""
    state, fleet = course.state, _fleet(course)
    if node.node_type is NodeType.PS:
        fleet.servers.lost()
    if not is_final or state.end is not None or state.stage is Stage.RESTARTING:
        return
    if node.is_critical:
        _wants_end_for(course, node, f"{_start(node.label)} cannot be replaced, and the job cannot do without it.")
        return
    if node.node_type is not NodeType.WORKER or fleet.spec.strategy is not Strategy.ALLREDUCE or state.terms is None:
        return
    num_left = len(fleet.workers.holders) + sum(
        1 for rank in fleet.workers.finished if rank not in fleet.workers.holders
    )
    if num_left < state.terms.limits.min_nodes:
        _wants_end_for(
            course,
            node,
            f"{_start(node.label)} cannot be replaced, and the {num_left} workers left are fewer than the "
            f"{state.terms.limits.min_nodes} that a world needs.",
        )


def _count_failure(course: Course, fleet: Fleet, node: FleetNode) -> int:
    if node.exit_reason is NodeExit.CHECK_FAILED and node.id < fleet.workers.spec.count:
        fleet.checks_failed[node.rank] = None
    is_counted = relaunch.is_failure(node.exit_reason) or node.is_presumed
    return fleet.note_failure(node, course.now) if is_counted else 0


def _check_rate(course: Course, fleet: Fleet, num_failed: int) -> None:
    """One failure of each worker may be a bad day of the cluster; more in such a short time is not about nodes."""
    if fleet.spec.strategy is not Strategy.ALLREDUCE or course.state.end is not None:
        return
    workers = fleet.workers
    allowed = max(workers.target, workers.budget(0))
    if num_failed > allowed:
        newest = fleet.nodes[fleet.failures[-1].node]
        _wants_end_for(
            course,
            newest,
            f"{num_failed} nodes failed within {fleet.spec.failure_window:g} s, the last one {newest.label} "
            f"({newest.exit_reason.value}). A job of {workers.target} workers should not need so many: look at what they "
            "have in common.",
        )


def _wants_end_for(course: Course, node: FleetNode, sentence: str) -> None:
    reason = relaunch.reason_to_stop(node.node_type, node.exit_reason, has_training_begun=_has_training_begun(course))
    said = f" It said: {node.message.rstrip('.')}." if node.message else ""
    course.wants_end(reason, f"{sentence}{said}")


def _release_ended(course: Course, node: FleetNode) -> None:
    """Nobody expects anything of an ended node. What we only took for ended must be stopped in any case."""
    fleet = _fleet(course)
    fleet.release(node, course.now)
    if fleet.spec.remove_exited or not node.is_over:
        cordoned = node.host if fleet.spec.cordon_faulty and node.exit_reason in _FAULTY_HOST else ""
        fleet.remove(node, Removal(f"it ended ({node.exit_reason.value})", REMOVAL_GRACE, cordoned))
    fleet.forget_oldest()


def _let_go(course: Course, node: FleetNode, why: str) -> None:
    """A node that nobody wants any more, without any blame: it is stopped, and never replaced."""
    fleet = _fleet(course)
    fleet.release(node, course.now)
    agent = _unlink(course, node)
    if agent is not None:
        course.lose(agent, NodeLife.GONE, f"{node.label} is let go: {why}")
    fleet.remove(node, Removal(why))
    fleet.forget_oldest()


def _unlink(course: Course, node: FleetNode) -> Node | None:
    """The live agent on the node, which does not stand for it any more."""
    agent, node.agent = node.agent, None
    if agent is None:
        return None
    _fleet(course).agents.pop(agent, None)
    return course.state.nodes.live.get(agent)


# What the agents tell.


def rank_for(state: JobState, command: Attach) -> Attach:
    """An agent on one of our nodes has that node's rank, whether or not the platform told it."""
    fleet = state.fleet
    node = None if fleet is None else fleet.nodes.get(command.platform_node)
    if node is None or node.node_type is not NodeType.WORKER or command.node_rank is not None:
        return command
    return replace(command, node_rank=NodeRank(node.rank))


def check_attach(state: JobState, command: Attach) -> None:
    """An agent that wakes up on a node which was replaced meanwhile has no place any more."""
    fleet = state.fleet
    if fleet is None or state.end is not None or command.platform_node < 0:
        return
    node = fleet.nodes.get(command.platform_node)
    if fleet.is_forgotten(command.platform_node) or (node is not None and not node.is_live and not node.is_finished):
        what = f"node {command.platform_node}" if node is None else node.label
        raise Rejected(
            f"{_start(what)} on {command.host} is not part of the job any more: it was replaced or let go. It shall end.",
            code="node-released",
        )


def is_taken_over(state: JobState, holder: Node, command: Attach) -> bool:
    """Whether the new node is there to take the place of the one that holds its rank."""
    fleet = state.fleet
    node = None if fleet is None else fleet.of_agent(holder.id)
    if fleet is None or node is None:
        return fleet is not None and holder.dismissed is not None
    return not node.is_live or fleet.migrations.get(node.id) == command.platform_node


def part_with(state: JobState, holder: Node, command: Attach) -> None:
    """Another process on the very same node takes the rank: that node is not lost."""
    fleet = state.fleet
    node = None if fleet is None else fleet.of_agent(holder.id)
    if fleet is not None and node is not None and node.id == command.platform_node:
        node.agent = None
        del fleet.agents[holder.id]


def agent_attached(course: Course, agent: Node, command: Attach) -> None:
    """Whoever attaches from a node runs on it, whatever the platform has shown so far."""
    fleet = course.state.fleet
    if fleet is None or command.platform_node < 0:
        return
    former = fleet.of_agent(agent.id)
    if former is not None and former.id != command.platform_node:
        former.agent = None
    fleet.agents[agent.id] = command.platform_node
    node = fleet.nodes.get(command.platform_node)
    if node is None:
        # Of a life whose journal was lost, and nobody has listed it yet.
        seen = PlatformNode(
            id=command.platform_node,
            node_type=command.node_type,
            rank=agent.rank,
            phase=NodePhase.RUNNING,
            host=command.host,
            group=command.group,
        )
        hear_change(course, NodeEventKind.MODIFIED, seen)
        return
    node.agent = agent.id
    node.host = node.host or command.host
    if node.is_pending:
        node.asked_at = course.now if node.asked_at is None else node.asked_at
        _started(course, node)


def agent_finished(course: Course, agent: Node) -> None:
    fleet = course.state.fleet
    node = None if fleet is None else fleet.of_agent(agent.id)
    if fleet is not None and node is not None:
        fleet.finish(node)


def agent_lost(course: Course, agent: Node, exit_reason: NodeExit, *, is_presumed: bool) -> None:
    """The agent of a node is gone or has left; NONE: on our wish. The platform may tell more, before or after.

    `is_presumed`: only its connection closed. Nobody says that the node failed, so replacing it is free of charge
    unless the platform says so later.
    """
    fleet = course.state.fleet
    node = None if fleet is None else fleet.of_agent(agent.id)
    if fleet is not None:
        fleet.agents.pop(agent.id, None)
    if fleet is None or node is None or node.agent != agent.id:
        return
    node.agent = None
    if course.state.end is not None or node.is_finished:
        return
    if node.is_released or exit_reason is NodeExit.NONE:
        _let_go(course, node, "the job goes on without it")
    elif node.is_live:
        _end(course, node, NodePhase.DELETED, exit_reason, is_presumed=is_presumed)


def exit_of_leave(reason: LeaveReason) -> NodeExit:
    """What a farewell says about the node."""
    match reason:
        case LeaveReason.PREEMPTED | LeaveReason.STOPPED_BY_USER:
            return NodeExit.KILLED
        case LeaveReason.FAILED:
            return NodeExit.UNKNOWN
        case LeaveReason.DISMISSED | LeaveReason.JOB_ENDED:
            return NodeExit.NONE


def hear_node_error(course: Course, node: FleetNode, exit_reason: NodeExit, message: str) -> None:
    """Somebody who looked at the whole node says that it shall be replaced: by the same rules as any other end."""
    if node.is_live and not node.is_finished:
        node.message = message[:MAX_MESSAGE]
        _end(course, node, NodePhase.DELETED, exit_reason)


def replace_node_of(course: Course, node_rank: NodeRank, exit_reason: NodeExit, why: str) -> bool:
    """Workers of this rank cannot go on where they are. Whether another node takes over; if so, it is decided."""
    fleet = course.state.fleet
    agent = course.state.nodes.holder(node_rank)
    node = None if fleet is None or agent is None else fleet.of_agent(agent.id)
    if fleet is None or node is None or not node.is_live:
        return False
    facts = replace(_facts(fleet, node), exit_reason=exit_reason)
    if agent is None or not relaunch.decide(facts, _terms(course)).is_relaunched:
        return False
    _unlink(course, node)
    hear_node_error(course, node, exit_reason, why)
    # It may be just attaching, so it stays for long enough to hear that it shall go.
    course.dismiss(agent, Leave(f"{node.label} is replaced: {why}", _EXIT_REPLACED))
    return True


# What people want.


def retarget(course: Course, max_nodes: int) -> None:
    """The job has other limits now: so many workers and the standbys shall be there. Who is dismissed leaves by itself."""
    fleet = course.state.fleet
    if fleet is None or fleet.spec.strategy is not Strategy.ALLREDUCE:
        return
    scale_workers(course, NodeType.WORKER, max_nodes + fleet.spec.standby)


def scale_workers(course: Course, node_type: NodeType, count: int) -> None:
    """More: the lowest free ranks. Fewer: first who does not run yet, then the highest ranks; never critical ones."""
    fleet = _fleet(course)
    replicas = fleet.replicas[node_type]
    former, replicas.target = replicas.target, count
    course.say(f"The job wants {count} nodes of type {node_type.value} now, {former} before.")
    for node in [fleet.nodes[node] for node in replicas.holders.values()]:
        if _is_dismissed(course, node):
            fleet.release(node, course.now)  # its agent leaves, and then the platform may remove it
    num_surplus = (
        len(replicas.holders) + len([rank for rank in replicas.finished if rank not in replicas.holders]) - count
    )
    is_rendezvous_first = fleet.spec.strategy is Strategy.ALLREDUCE
    candidates = [
        node
        for node in (fleet.nodes[id_] for id_ in replicas.holders.values())
        if not node.is_critical and not node.is_finished and not (is_rendezvous_first and node.agent is not None)
    ]
    candidates.sort(key=lambda node: (node.phase is NodePhase.RUNNING, -node.rank))
    for node in candidates[: max(0, num_surplus)]:
        _let_go(course, node, "the job was scaled down")
    for rank in replicas.lacking():
        want_new(fleet, node_type, rank)


def scale_servers(course: Course, count: int) -> None:
    fleet = _fleet(course)
    replicas, servers = fleet.replicas[NodeType.PS], fleet.servers
    plan = parameter_servers.plan_scale(fleet, count)
    former, replicas.target = replicas.target, count
    course.say(f"The job wants {count} parameter servers now, {former} before; the workers switch when they can.")
    for node in plan.taken_back:
        del servers.dropped[node]
    for rank in plan.added_ranks:
        want_new(fleet, NodeType.PS, rank)
    for node in plan.dropped:
        servers.dropped[node] = None
    for node in plan.removed:
        _let_go(course, fleet.nodes[node], "the job was scaled down")
    servers.is_changed = servers.is_changed or plan != parameter_servers.ScalePlan()


def migrate(course: Course, node: FleetNode, resource: Resource) -> None:
    """Another node with other resources is brought; the old one stays until it can be done without."""
    fleet = _fleet(course)
    address = "" if node.node_type is NodeType.PS else node.service_address
    new = fleet.want(
        node.node_type,
        node.rank,
        resource=resource,
        group=node.group,
        priority=node.priority,
        service_address=address,
        is_critical=node.is_critical,
    )
    fleet.migrations[node.id] = new.id
    if node.node_type is NodeType.PS:
        fleet.servers.is_changed = True
    course.say(f"{_start(node.label)} is exchanged for {new.name}.")


def switch_servers(course: Course) -> None:
    fleet = _fleet(course)
    for node in parameter_servers.switch(fleet):
        node.is_critical = False
        _let_go(course, node, "the workers have switched to other parameter servers")
    course.say(f"The workers use {len(fleet.servers.current)} parameter servers from now on.")


def restart_job(course: Course, reason: str) -> None:
    """Every worker gets a new node, in one step: there is no time in between in which anybody could be lost."""
    state, fleet = course.state, _fleet(course)
    fleet.num_restarts += 1
    if fleet.num_restarts > fleet.spec.max_job_restarts:
        course.wants_end(
            ExitReason.RESTART_OVER_LIMIT,
            f"All {fleet.spec.max_job_restarts} restarts of the job are used up{f'; the last one: {reason}' if reason else '.'}",
        )
        return
    why = f"The job restarts ({fleet.num_restarts} of at most {fleet.spec.max_job_restarts}){f': {reason}' if reason else ''}."
    course.say(why)
    stage, state.stage = state.stage, Stage.RESTARTING
    workers = fleet.workers
    former = [node for node in fleet.nodes.values() if node.node_type is NodeType.WORKER and not node.is_released]
    workers.finished, workers.abandoned = {}, {}
    for node in former:
        node.is_finished = False
        _let_go(course, node, "the job restarts")
    for rank in workers.lacking():
        new = want_new(fleet, NodeType.WORKER, rank)
        new.is_replacement = True
    course.start_over(why)
    state.stage = stage


def suspend(course: Course, reason: str) -> None:
    state, fleet = course.state, _fleet(course)
    fleet.suspended_from, state.stage = state.stage, Stage.SUSPENDED
    course.say(f"The job is suspended and launches no node any more{f': {reason}' if reason else '.'}")


def resume(course: Course) -> None:
    state, fleet = course.state, _fleet(course)
    assert fleet.suspended_from is not None, "the job was not suspended"
    state.stage, fleet.suspended_from = fleet.suspended_from, None
    for node in [fleet.nodes[id_] for replicas in fleet.replicas.values() for id_ in replicas.pending]:
        node.asked_at = None if node.asked_at is None else course.now  # nobody could do anything about it meanwhile
    course.say("The job is resumed.")


def want_new(fleet: Fleet, node_type: NodeType, rank: int) -> FleetNode:
    """A node for a rank that has none, as the job defined it."""
    replicas = fleet.replicas[node_type]
    priorities = relaunch.priorities(replicas.spec.priority, max(replicas.target, rank + 1))
    is_grouped = node_type is NodeType.WORKER
    return fleet.want(
        node_type,
        rank,
        resource=replicas.spec.resource,
        group=group_of(rank, fleet.spec.group_affinity) if is_grouped else -1,
        priority="" if priorities is None else priorities[rank],
        is_critical=_is_critical(fleet, node_type, rank),
    )


# What time brings.


def master_restarted(course: Course) -> None:
    """What exists is not known any more; the clocks that end the job leave the nodes their window for coming back."""
    state, fleet = course.state, _fleet(course)
    ends_at = early_stop.shortage_ends_at(state)
    if ends_at is not None and fleet.short_since is not None:
        fleet.short_since = Micros(fleet.short_since + after_outage(ends_at, state.now, course.now) - ends_at)
    fleet.master_restarted()


def hear_deadline(course: Course, deadline: DeadlinePassed) -> None:
    node = PlatformId(deadline.id)
    match deadline.kind:
        case DeadlineKind.SMALLER_NODE:
            make_smaller(course, node)
        case DeadlineKind.GROUP_PENDING:
            move_group(course, node)
        case DeadlineKind.PS_WAIT:
            stop_waiting_for_server(course, node)


def make_smaller(course: Course, node_id: PlatformId) -> None:
    """A node that waits too long for its resources asks for half of them; if it cannot, it keeps its place in the queue."""
    fleet = _fleet(course)
    for wait in early_stop.to_make_smaller(fleet):
        less = relaunch.smaller(wait.node.resource)
        if wait.node.id == node_id and wait.at <= course.now and less is not None:
            old = wait.node
            seconds = (course.now - (old.asked_at or 0)) / MICROS_PER_SECOND
            course.say(
                f"{_start(old.label)} has waited {seconds:.0f} s for {_amount(old.resource)}; it asks for {_amount(less)}."
            )
            _exchange_at_once(course, old, less)
            return


def move_group(course: Course, node_id: PlatformId) -> None:
    """A relaunched node finds no room in its group: the whole group moves to where there is some, once."""
    fleet = _fleet(course)
    stuck = [wait.node for wait in early_stop.groups_to_move(fleet) if wait.at <= course.now]
    group = next((node.group for node in stuck if node.id == node_id), None)
    if group is None:
        return
    fleet.relaunched_groups[group] = None
    members = [node for node in fleet.live_nodes(NodeType.WORKER) if node.group == group and not node.is_finished]
    new_group, fleet.next_group = fleet.next_group, fleet.next_group + 1
    course.say(f"Group {group} has no room for a replacement: its {len(members)} nodes move to group {new_group}.")
    for node in sorted(members, key=lambda node: node.rank):
        new = _exchange_at_once(course, node, node.resource)
        new.group = new_group


def stop_waiting_for_server(course: Course, node_id: PlatformId) -> None:
    fleet = _fleet(course)
    for wait in early_stop.unseen_servers(fleet):
        if wait.node.id == node_id and wait.at <= course.now:
            wait.node.is_wait_over = True
            course.say(f"{_start(wait.node.label)} did not come in time; the workers go on without it.")


def _exchange_at_once(course: Course, old: FleetNode, resource: Resource) -> FleetNode:
    fleet = _fleet(course)
    was_in_use = old.id in fleet.servers.current
    _let_go(course, old, "another node takes its place")
    new = fleet.want_like(old, resource)
    if was_in_use:
        fleet.servers.replaced(old.id, new.id)
    return new


# At the end of each command.


def settle(course: Course) -> None:
    """Ask the platform for what is wanted now, and end the job if it has no future."""
    state, fleet = course.state, course.state.fleet
    if fleet is None:
        return
    if state.end is None:
        early_stop.note_shortage(state, course.now)
        _note_awaited(state, fleet)
        _end_if_over(course, fleet)
    if state.end is None:
        sentence = early_stop.describe(state)
        if sentence and not fleet.verdict:
            course.say(sentence)  # how many are missing changes with each that comes: the newest is in the status
        elif fleet.verdict and not sentence:
            course.say("Enough workers run now.")
        fleet.verdict = sentence
    issue(course)


def issue(course: Course) -> None:
    """Open intents become effects, once for each master and each list. Nothing is launched before we know what is there."""
    state, fleet = course.state, course.state.fleet
    if fleet is None:
        return
    for node in [fleet.nodes[id_] for id_ in fleet.to_remove]:
        course.effects.append(fleet.removal_of(node, state.master_epoch))
    fleet.to_remove = {}
    if state.end is not None or fleet.is_suspended or not fleet.is_listed:
        return
    for node in [fleet.nodes[id_] for id_ in fleet.to_launch]:
        node.asked_at = course.now if node.asked_at is None else node.asked_at
        course.effects.append(fleet.launch_of(node, state.master_epoch))
    fleet.to_launch = {}


def job_ended(course: Course) -> None:
    """Nodes on which nobody works any more go at once, the others when their agents have left."""
    fleet = course.state.fleet
    for node in list(() if fleet is None else fleet.nodes.values()):
        if not node.is_released and node.agent is None:
            _let_go(course, node, "the job has ended")


def job_finished(course: Course) -> None:
    """Everybody has left: nothing of the job shall remain on the platform."""
    fleet = course.state.fleet
    if fleet is None:
        return
    for node in list(fleet.nodes.values()):
        node.agent = None
        if not node.is_released:
            fleet.release(node, course.now)
        fleet.remove(node, Removal("the job has ended"))
    issue(course)


def _end_if_over(course: Course, fleet: Fleet) -> None:
    state = course.state
    stop = early_stop.judge(state, course.now)
    if stop is not None:
        course.wants_end(*stop)
    if course.ending is None and _have_workers_exited(fleet):
        if any(fleet.replicas[kind].finished for kind in _WORKERS if kind in fleet.replicas):
            course.wants_end(ExitReason.COMPLETED, "The nodes of all workers have ended.")
        else:
            course.wants_end(ExitReason.UNKNOWN_ERROR, "The nodes of all workers have ended, and none of them well.")
    if course.ending is not None:
        course.end_job(*course.ending)


def _have_workers_exited(fleet: Fleet) -> bool:
    """Nobody works, and nobody will: nodes of low priority that never got resources keep no job alive."""
    groups = [fleet.replicas[kind] for kind in _WORKERS if kind in fleet.replicas]
    if any(replicas.running for replicas in groups) or not any(_has_ended(replicas) for replicas in groups):
        return False
    waiting = [fleet.nodes[node] for replicas in groups for node in replicas.pending]
    return all(node.priority == "low" and fleet.replicas[node.node_type].spec.priority != "low" for node in waiting)


def _has_ended(replicas: Replicas) -> bool:
    return bool(replicas.finished or replicas.abandoned)


def _note_awaited(state: JobState, fleet: Fleet) -> None:
    """The rendezvous does not give up on nodes that the platform is about to bring."""
    rdzv, workers = state.rendezvous, fleet.workers
    min_nodes = 0 if state.terms is None else state.terms.limits.min_nodes
    rdzv.num_pending_launches = len(workers.pending) if len(workers.running) < min_nodes else 0
    rdzv.num_unattached = len(fleet.coming_ranks()) if rdzv.finished else 0


def _is_critical_work_left(fleet: Fleet) -> bool:
    return any(node.is_critical for kind in fleet.replicas for node in fleet.live_nodes(kind) if not node.is_finished)


def _is_critical(fleet: Fleet, node_type: NodeType, rank: int) -> bool:
    if node_type in (NodeType.CHIEF, NodeType.EVALUATOR):
        return True
    return rank in fleet.replicas[node_type].budgets


def _is_dismissed(course: Course, node: FleetNode) -> bool:
    agent = None if node.agent is None else course.state.nodes.live.get(node.agent)
    return agent is not None and agent.dismissed is not None


def _has_training_begun(course: Course) -> bool:
    """Whether what failed had worked before: else the code is the first suspect."""
    state, fleet = course.state, _fleet(course)
    if state.restarts.best_step is not None or state.rendezvous.round > 0:
        return True
    if any(node.step is not None for node in state.nodes.live.values()):
        return True
    began = [
        node.running_since
        for node in fleet.nodes.values()
        if node.running_since is not None and node.node_type in (NodeType.CHIEF, NodeType.WORKER)
    ]
    return bool(began) and course.now - min(began) >= micros(TRAINING_BEGINS)


def _facts(fleet: Fleet, node: FleetNode) -> relaunch.End:
    replicas = fleet.replicas[node.node_type]
    return relaunch.End(
        label=node.label,
        exit_reason=node.exit_reason,
        resource=node.resource,
        num_relaunches=replicas.spent.get(node.rank, 0),
        max_relaunches=replicas.budget(node.rank),
    )


def _terms(course: Course) -> relaunch.Terms:
    state, spec = course.state, _fleet(course).spec
    return relaunch.Terms(
        strategy=spec.strategy,
        relaunch_always=spec.relaunch_always,
        is_stopping=state.end is not None or course.ending is not None,
        is_restarting=state.stage is Stage.RESTARTING,
    )


def _exit_of(shown: PlatformNode, otherwise: NodeExit) -> NodeExit:
    return shown.exit_reason or exit_reason_of(shown.exit_code) or otherwise


def _fleet(course: Course) -> Fleet:
    assert course.state.fleet is not None, "this job has no platform"
    return course.state.fleet


def _amount(resource: Resource) -> str:
    return f"{resource.cpu:g} cores and {resource.memory_mb} MB"


def _start(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
