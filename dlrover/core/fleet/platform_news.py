"""
What the platform tells: lists of everything it has, and single changes.

The platform is right about what exists, whatever we believed; we are right about what was counted. Nothing that it says
can fail here: unknown nodes, types and phases, old news and news told twice are all answered by doing what still makes
sense, or nothing.
"""

from __future__ import annotations

from dlrover.core.decision import Decision
from dlrover.core.fleet import life_cycle, relaunch
from dlrover.core.fleet.fleet import MAX_MESSAGE, Fleet
from dlrover.core.fleet.relaunch import ENDED, LIVE
from dlrover.core.fleet.replicas import FleetNode, Removal
from dlrover.core.membership.nodes import Node
from dlrover.protocol.messages.fleet import (
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    RemoveNode,
    exit_reason_of,
)
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import NodeId, PlatformId

REFUSAL_COUNTS = 600.0
"""Seconds for which a refusal explains why a node is not there. The shell repeats it twice as often."""
UNSEEN_TOO_LONG = 60.0
"""Seconds after which a list that lacks a node which was asked for means that it is gone."""


def hear_list(decision: Decision, told: NodesListed) -> None:
    """Everything that exists. What we know and it does not show is gone."""
    fleet = life_cycle.fleet_of(decision)
    shown = told.nodes
    if told.master_epoch > decision.state.master_epoch:
        # Our journal was lost, and the platform would refuse whatever we ask for in our own epoch. (A master that was
        # replaced may hear it too; it cannot write any more, so nothing comes of it.)
        decision.state.master_epoch = told.master_epoch
        decision.is_all_touched = True
    listed = {node.id: None for node in shown}
    is_first = not fleet.was_ever_listed
    # Before anything else: a replacement for one of them must not be called like another that comes further down.
    fleet.next_id = max(fleet.next_id, told.next_id)
    for node in sorted(shown, key=_order):
        kind = NodeEventKind.DELETED if node.phase is NodePhase.DELETED else NodeEventKind.MODIFIED
        hear_change(decision, kind, node)
        if is_first and node.id in fleet.nodes:
            _trust_count(fleet, node)
    for known in [node for node in fleet.nodes.values() if node.id not in listed]:
        _hear_absence(decision, known)
    if is_first and (shown or told.next_id):
        _renumber_unseen(decision, fleet)
    if is_first:
        fleet.forget_absent_agents(decision.state.nodes.live)
    fleet.is_listed = fleet.was_ever_listed = True
    for node_id in [node.id for node in fleet.nodes.values() if node.is_live and node.phase is NodePhase.INITIAL]:
        fleet.to_launch[node_id] = None  # asking again is harmless, and heals what was lost on the way
    for node_id in [node.id for node in fleet.nodes.values() if node.removal is not None]:
        fleet.to_remove[node_id] = None


def _order(shown: PlatformNode) -> tuple[bool, PlatformId]:
    """As they were launched; but whether an ended server was still needed is known when all others were heard."""
    is_ended_server = shown.node_type is NodeType.PS and shown.phase is NodePhase.SUCCEEDED
    return is_ended_server, shown.id


def hear_change(decision: Decision, kind: NodeEventKind, shown: PlatformNode) -> None:
    """One node as the platform sees it. Whatever it says, nothing here can fail."""
    fleet = life_cycle.fleet_of(decision)
    node = fleet.nodes.get(shown.id)
    if node is None:
        node = _meet_stranger(decision, fleet, kind, shown)
        if node is None:
            return
    if node.asked_at is None:
        node.asked_at = decision.now  # by a life whose journal was lost; what exists has to be removed some day
    node.host = shown.host or node.host
    node.message = (shown.message or node.message)[:MAX_MESSAGE]
    node.group = shown.group if shown.group >= 0 else node.group
    if kind is NodeEventKind.DELETED:
        fleet.gone(node)
    elif shown.phase in ENDED:
        node.is_over = True
    elif node.is_released and shown.phase in LIVE:
        _hear_of_unwanted(fleet, node)
    phase = relaunch.next_phase(node.phase, kind, shown.phase)
    if phase is None or node.is_released:
        _hear_late_word(fleet, node, shown)
        return
    match phase:
        case NodePhase.SUCCEEDED:
            life_cycle.succeeded(decision, node)
        case NodePhase.FAILED:
            life_cycle.end_node(decision, node, phase, _exit_of(shown, NodeExit.UNKNOWN))
        case NodePhase.DELETED if node.phase in LIVE:
            life_cycle.end_node(decision, node, phase, _exit_of(shown, NodeExit.KILLED))
        case NodePhase.RUNNING:
            life_cycle.started(decision, node)
        case _:
            fleet.enter(node, phase, decision.now)


def hear_refusal(decision: Decision, node_id: PlatformId, reason: str) -> None:
    """The platform has no room now. The shell goes on trying; the node waits meanwhile, and the pending timeout counts."""
    node = life_cycle.fleet_of(decision).nodes.get(node_id)
    if node is None or not node.is_pending:
        return
    node.refused_at = decision.now
    decision.announce(decision.on.launch_refused, node.id, reason[:MAX_MESSAGE])
    if not node.is_pending:
        return
    if node.message != reason[:MAX_MESSAGE]:
        node.message = reason[:MAX_MESSAGE]
        decision.say(f"The platform does not launch {node.label} now: {node.message}")


def _meet_stranger(decision: Decision, fleet: Fleet, kind: NodeEventKind, shown: PlatformNode) -> FleetNode | None:
    """A node that we do not know: one that we have given up, or one of a life whose journal was lost."""
    is_there = kind is not NodeEventKind.DELETED and shown.phase in LIVE
    is_forgotten = fleet.is_forgotten(shown.id)
    fleet.next_id = max(fleet.next_id, PlatformId(shown.id + 1))
    if is_there and not is_forgotten and shown.node_type in fleet.replicas:
        return _adopt(decision, fleet, shown)
    is_left_over = kind is not NodeEventKind.DELETED and not is_forgotten
    if is_there or is_left_over:
        name = shown.name or f"{fleet.job_name}-{shown.node_type.value}-{shown.id}"
        reason = "the job does not know it, or no longer"
        decision.effects.append(
            RemoveNode(id=shown.id, name=name, reason=reason, master_epoch=decision.state.master_epoch)
        )
    return None


def _adopt(decision: Decision, fleet: Fleet, shown: PlatformNode) -> FleetNode:
    replicas = fleet.replicas[shown.node_type]
    holder = fleet.holder(shown.node_type, shown.rank)
    like = replicas.spec
    agent_id = _agent_on(fleet, shown.id)
    agent = None if agent_id is None else decision.state.nodes.live.get(agent_id)
    is_leaving = agent_id is not None and (agent is None or agent.dismissed is not None)
    if not fleet.was_ever_listed and (fleet.is_released or not is_leaving):
        replicas.target = max(replicas.target, shown.rank + 1)  # it had been scaled before the journal was lost
    node = fleet.want(
        shown.node_type,
        shown.rank,
        resource=like.resource if holder is None else holder.resource,
        group=shown.group,
        priority="" if holder is None else holder.priority,
        service_address=shown.service_address or ("" if holder is None else holder.service_address),
        is_critical=life_cycle.is_critical(fleet, shown.node_type, shown.rank),
        id_=shown.id,
        name=shown.name,
    )
    fleet.to_launch.pop(node.id, None)
    node.asked_at = decision.now
    node.agent = agent_id
    has_finished = agent is not None and bool(agent.finished_round)
    if (is_leaving or fleet.is_released) and not has_finished:
        if holder is not None:
            replicas.hold(holder.rank, holder.id)
        _see_off(decision, fleet, node, agent)
        return node
    decision.say(f"The platform has {node.label}, which is taken over.")
    if holder is not None and holder.id < node.id:
        holder.exit_reason = NodeExit.RELAUNCHED
        life_cycle.let_go(decision, holder, "a newer node has its rank")
        if holder.id in fleet.servers.current:
            fleet.servers.replaced(holder.id, node.id)
    elif holder is not None:
        replicas.hold(holder.rank, holder.id)
        node.exit_reason = NodeExit.RELAUNCHED
        life_cycle.let_go(decision, node, "a newer node has its rank")
    if has_finished:
        life_cycle.finished(decision, node)
    return node


def _agent_on(fleet: Fleet, node: PlatformId) -> NodeId | None:
    """The newest first: mostly it is the one that has just attached and made us look."""
    return next((agent for agent, on in reversed(fleet.agents.items()) if on == node), None)


def _see_off(decision: Decision, fleet: Fleet, node: FleetNode, agent: Node | None) -> None:
    """
    The platform shows a node that the job has sent away before it knew of it, or that a suspension releases.

    Taken over as one of the job's own, it would end well and count as finished work.
    """
    why = "the job is suspended" if fleet.is_released else "the job goes on without it"
    decision.say(f"The platform has {node.label}, which leaves, because {why}.")
    if agent is None:
        life_cycle.let_go(decision, node, why)
        return
    fleet.release(node, decision.now)  # it is removed when its agent has left
    if agent.dismissed is None:
        decision.announce(decision.on.job_pauses, why)


def _trust_count(fleet: Fleet, shown: PlatformNode) -> None:
    """Our own counters win, unless we have none because this is the first that we hear."""
    node = fleet.nodes[shown.id]  # by its type and rank as we know them: the platform may show others
    replicas = fleet.replicas[node.node_type]
    if shown.relaunch_count > replicas.spent.get(node.rank, 0):
        replicas.spent[node.rank] = min(shown.relaunch_count, replicas.budget(node.rank))


def _hear_of_unwanted(fleet: Fleet, node: FleetNode) -> None:
    """It is there although it is not wanted: maybe its launch took longer than its removal, and was not there to be seen.

    On one that we were told had ended this is old news. An agent that was asked to leave does so first.
    """
    if node.is_over and not node.is_gone:
        return
    node.is_gone = node.is_over = False
    if node.agent is None:
        fleet.remove(node, Removal("it is not wanted"))


def _hear_absence(decision: Decision, node: FleetNode) -> None:
    fleet = life_cycle.fleet_of(decision)
    if node.is_released:
        fleet.gone(node)
        return
    if node.phase is not NodePhase.INITIAL:
        fleet.gone(node)
    elif _is_overdue(decision, node):
        node.message = "the platform was asked for it and does not have it"
        life_cycle.end_node(decision, node, NodePhase.DELETED, NodeExit.KILLED)
        return
    if node.phase in (NodePhase.PENDING, NodePhase.RUNNING):
        node.message = "the platform does not have it any more"
        life_cycle.end_node(decision, node, NodePhase.DELETED, NodeExit.KILLED)
    elif node.phase in (NodePhase.FAILED, NodePhase.SUCCEEDED):
        fleet.enter(node, NodePhase.DELETED, decision.now)


def _is_overdue(decision: Decision, node: FleetNode) -> bool:
    """It may have come and gone before the master looked; then asking for the same again would never help.

    One that the platform refuses to launch gives its reason, and is tried again as it is. A refusal that was not repeated
    for long is over: the node may have been launched since then, too.
    """
    if node.asked_at is None or decision.now - node.asked_at < micros(UNSEEN_TOO_LONG):
        return False
    return node.refused_at is None or decision.now - node.refused_at >= micros(REFUSAL_COUNTS)


def _renumber_unseen(decision: Decision, fleet: Fleet) -> None:
    """Ids below those that exist were used by a life whose journal was lost; a platform would not launch them again."""
    for node in [node for node in fleet.nodes.values() if node.phase is NodePhase.INITIAL and node.is_live]:
        if node.asked_at is None:
            exchanged = next((old for old, new in fleet.migrations.items() if new == node.id), None)
            fleet.release(node, decision.now)
            new = fleet.want_like(node, node.resource)
            if exchanged is not None:
                fleet.migrations[exchanged] = new.id
            if node.id in fleet.servers.current:
                fleet.servers.replaced(node.id, new.id)
            del fleet.nodes[node.id]


def _hear_late_word(fleet: Fleet, node: FleetNode, shown: PlatformNode) -> None:
    """We took it for gone, free of charge; now the platform says that it had failed, or was taken away."""
    if not node.is_presumed:
        return
    if shown.exit_reason is NodeExit.KILLED:
        # By others: that it went because we asked for it comes without a reason.
        node.is_presumed = False
        fleet.forgive(node)
    elif shown.phase is NodePhase.FAILED:
        node.is_presumed = False
        node.exit_reason = _exit_of(shown, NodeExit.UNKNOWN)
        if relaunch.is_failure(node.exit_reason):
            fleet.charge(node)


def _exit_of(shown: PlatformNode, otherwise: NodeExit) -> NodeExit:
    return shown.exit_reason or exit_reason_of(shown.exit_code) or otherwise
