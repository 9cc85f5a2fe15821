"""
Agents on nodes of the platform: two sights of the same thing, which have to agree.

An agent that attaches proves that its node runs, one that finished proves that its node needs no replacement. An agent that is gone
says less than it seems: the platform knows better why, if it tells in time. And an agent that wakes up on a node which
was replaced meanwhile is turned away.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.decision import Decision
from dlrover.core.fleet import life_cycle, parameter_servers, platform_news
from dlrover.core.happenings import (
    AgentComes,
    ClusterLooks,
    NodeLost,
    RankContested,
)
from dlrover.core.membership.nodes import Node
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import NodeEventKind, NodeExit, NodePhase, NodeType, PlatformNode, Strategy
from dlrover.protocol.messages.job import Attach, NodeId, NodeRank


def on_agent_comes(decision: Decision, comes: AgentComes) -> None:
    _check_attach(decision.state, comes.command)
    comes.command = _with_rank(decision.state, comes.command)


def _with_rank(state: JobState, command: Attach) -> Attach:
    """An agent on one of our nodes has that node's rank, whether or not the platform told it.

    Unless a node of another rank has it: one that came to a master without its journal and could not say its own.
    """
    fleet = state.fleet
    node = None if fleet is None else fleet.nodes.get(command.platform_node)
    if command.terms.strategy is Strategy.PS:
        return replace(
            command, node_rank=None
        )  # ranks are counted by type there: the fleet knows them, an agent's is only its place
    if fleet is None or node is None or node.node_type is not NodeType.WORKER or command.node_rank is not None:
        return command
    holder = state.nodes.holder(NodeRank(node.rank))
    if holder is not None and holder.launch != command.launch:
        held_from = fleet.of_agent(holder.id)
        is_strange = held_from is None or held_from.rank != node.rank
        if is_strange and holder.dismissed is None and state.nodes.is_connected(holder.id):
            return command
    return replace(command, node_rank=NodeRank(node.rank))


def _check_attach(state: JobState, command: Attach) -> None:
    """An agent that wakes up on a node which was replaced meanwhile has no place any more; nor has one on a server."""
    fleet = state.fleet
    _check_type(state, command)
    if fleet is None or state.end is not None or command.platform_node < 0:
        return
    node = fleet.nodes.get(command.platform_node)
    if fleet.is_forgotten(command.platform_node) or (node is not None and not node.is_live and not node.is_finished):
        what = f"node {command.platform_node}" if node is None else node.label
        why = "" if node is None or node.removal is None else f", because {node.removal.reason}"
        raise Rejected(
            f"{life_cycle.capitalised(what)} on {command.host} is not part of the job any more: it was replaced or let "
            f"go{why}. It shall end.",
            code=ErrorCode.NODE_RELEASED,
        )


def _check_type(state: JobState, command: Attach) -> None:
    """Ranks of the world are ranks of workers; those of other types are counted apart and would collide with them."""
    node = None if state.fleet is None else state.fleet.nodes.get(command.platform_node)
    node_type = command.node_type if node is None else node.node_type
    if node_type is not NodeType.WORKER and command.terms.strategy is not Strategy.PS:
        what = f"{node_type.value} on {command.host}" if node is None else f"{node.label} on {command.host}"
        raise Rejected(
            f"{life_cycle.capitalised(what)} cannot join the training: an agent's workers form one all-reduce world, "
            f"which takes nodes of type {NodeType.WORKER.value} only. Let nodes of type {node_type.value} run their own "
            "program, without an agent.",
            code=ErrorCode.NODE_TYPE,
        )


def on_cluster_looks(decision: Decision, looks: ClusterLooks) -> None:
    fleet = life_cycle.fleet_of(decision)
    looks.servers = tuple(node.id for node in parameter_servers.next_cluster(fleet))
    looks.is_complete = not parameter_servers.is_somebody_awaited(fleet)
    looks.num_workers = len(fleet.workers.holders)


def on_rank_contested(decision: Decision, contested: RankContested) -> None:
    """Whether the new node is there to take the place of the one that holds its rank."""
    fleet, holder = life_cycle.fleet_of(decision), contested.holder
    node = fleet.of_agent(holder.id)
    if node is None:
        contested.is_taken_over = holder.dismissed is not None
    else:
        is_exchange = fleet.migrations.get(node.id) == contested.command.platform_node
        contested.is_taken_over = not node.is_live or is_exchange


def on_agent_attached(decision: Decision, agent: Node, command: Attach) -> None:
    """An agent that attaches from a node runs on it, whatever the platform has shown so far."""
    fleet = life_cycle.fleet_of(decision)
    if command.platform_node < 0:
        return
    former = fleet.of_agent(agent.id)
    if former is not None and former.id != command.platform_node:
        former.agent = None
    fleet.agents[agent.id] = command.platform_node
    node = fleet.nodes.get(command.platform_node)
    if node is None and command.node_rank is None:
        return  # of a life whose journal was lost, and only the platform can say of which rank it is
    if node is None:
        # The same, but it was told.
        seen = PlatformNode(
            id=command.platform_node,
            node_type=command.node_type,
            rank=agent.rank,
            phase=NodePhase.RUNNING,
            host=command.host,
            group=command.group,
        )
        platform_news.hear_change(decision, NodeEventKind.MODIFIED, seen)
        return
    node.agent = agent.id
    node.host = node.host or command.host
    if node.is_pending:
        node.asked_at = decision.now if node.asked_at is None else node.asked_at
        life_cycle.started(decision, node)
    if agent.finished_round and node.is_live:
        life_cycle.finished(decision, node)  # it said so before anybody knew where it is


def on_node_finished(decision: Decision, agent: Node) -> None:
    node = life_cycle.fleet_of(decision).of_agent(agent.id)
    if node is not None:
        life_cycle.finished(decision, node)


def on_round_completed(decision: Decision) -> None:
    """Where a node trains, what the check found of the first node there is of the past."""
    fleet = life_cycle.fleet_of(decision)
    for agent in decision.state.rendezvous.group_ranks if fleet.checks_failed else ():
        node = fleet.of_agent(agent)
        if node is not None:
            fleet.checks_failed.pop(node.rank, None)


def on_node_lost(decision: Decision, lost: NodeLost) -> None:
    """The agent of a node is gone or has left. The platform may tell more, before or after.

    If only its connection closed, nothing says that the node failed: replacing it is free of charge unless the platform says so later. If
    another agent on the very same node takes the rank, that node is not lost; if it was to be exchanged for that one, it goes on our wish.
    """
    fleet, agent = life_cycle.fleet_of(decision), lost.node
    node = fleet.of_agent(agent.id)
    if node is None and agent.dismissed is not None and not agent.finished_round and not fleet.was_ever_listed:
        return  # the first list will show its node, which is not wanted any more
    fleet.agents.pop(agent.id, None)
    if node is None or node.agent != agent.id:
        return
    node.agent = None
    if decision.state.end is not None or node.is_finished or node.id == lost.successor:
        return
    is_exchanged = fleet.migrations.get(node.id) == lost.successor
    if node.is_released or lost.exit_reason is NodeExit.NONE or is_exchanged:
        life_cycle.let_go(decision, node, "the job goes on without it")
    elif node.is_live:
        life_cycle.end_node(decision, node, NodePhase.DELETED, lost.exit_reason, is_presumed=lost.is_presumed)


def on_node_excluded(decision: Decision, agent: Node, why: str) -> None:
    node = life_cycle.fleet_of(decision).of_agent(agent.id)
    if node is not None:
        life_cycle.unlink(decision, node)  # it stays for long enough to hear that it shall go
        life_cycle.hear_node_error(decision, node, NodeExit.CHECK_FAILED, why)


def on_nodes_overdue(decision: Decision, nodes: list[NodeId], why: str) -> None:
    """A job without them is better off, if it can be: not without critical ones, nor with too few for a world.

    Not in an all-reduce job: all others would have to start anew, who have just been allowed to go on. Nor in the last
    minutes of any job, when no worker starts anew.
    """
    state, fleet = decision.state, life_cycle.fleet_of(decision)
    if fleet.spec.strategy is Strategy.ALLREDUCE or state.rendezvous.finished:
        return
    min_nodes = 0 if state.terms is None else state.terms.limits.min_nodes
    for node in [fleet.of_agent(agent) for agent in nodes]:
        if node is None or not node.is_live or node.is_critical:
            continue
        if len(fleet.workers.holders) > min_nodes:
            life_cycle.let_go(decision, node, why)
