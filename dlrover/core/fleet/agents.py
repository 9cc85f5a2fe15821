"""
Agents on nodes of the platform: two sights of the same thing, which have to agree.

An agent that attaches proves that its node runs, one that finished that nobody has to replace it. An agent that is gone
says less than it seems: the platform knows better why, if it tells in time. And an agent that wakes up on a node which
was replaced meanwhile is turned away.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover.core.fleet import life_cycle, platform_news
from dlrover.core.membership.nodes import Node
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import NodeEventKind, NodeExit, NodePhase, NodeType, PlatformNode
from dlrover.protocol.messages.job import Attach, LeaveReason, NodeId, NodeRank

if TYPE_CHECKING:  # a course calls us
    from dlrover.core.decision import Course
    from dlrover.core.state import JobState


def rank_for(state: JobState, command: Attach) -> Attach:
    """An agent on one of our nodes has that node's rank, whether or not the platform told it.

    Unless a node of another rank has it: one that came to a master without its journal and could not say its own.
    """
    fleet = state.fleet
    node = None if fleet is None else fleet.nodes.get(command.platform_node)
    if fleet is None or node is None or node.node_type is not NodeType.WORKER or command.node_rank is not None:
        return command
    holder = state.nodes.holder(NodeRank(node.rank))
    if holder is not None and holder.launch != command.launch:
        held_from = fleet.of_agent(holder.id)
        is_strange = held_from is None or held_from.rank != node.rank
        if is_strange and holder.dismissed is None and state.nodes.is_connected(holder.id):
            return command
    return replace(command, node_rank=NodeRank(node.rank))


def check_attach(state: JobState, command: Attach) -> None:
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
            code="node-released",
        )


def _check_type(state: JobState, command: Attach) -> None:
    """Ranks of the world are ranks of workers; those of other types are counted apart and would collide with them."""
    node = None if state.fleet is None else state.fleet.nodes.get(command.platform_node)
    node_type = command.node_type if node is None else node.node_type
    if node_type is not NodeType.WORKER:
        what = f"{node_type.value} on {command.host}" if node is None else f"{node.label} on {command.host}"
        raise Rejected(
            f"{life_cycle.capitalised(what)} cannot join the training: an agent's workers form one all-reduce world, "
            f"which takes nodes of type {NodeType.WORKER.value} only. Let nodes of type {node_type.value} run their own "
            "program, without an agent.",
            code="node-type",
        )


def is_taken_over(state: JobState, holder: Node, command: Attach) -> bool:
    """Whether the new node is there to take the place of the one that holds its rank."""
    fleet = state.fleet
    node = None if fleet is None else fleet.of_agent(holder.id)
    if fleet is None or node is None:
        return fleet is not None and holder.dismissed is not None
    return not node.is_live or fleet.migrations.get(node.id) == command.platform_node


def exit_of_predecessor(state: JobState, holder: Node, command: Attach) -> NodeExit:
    """Why the one whose place is taken goes; NONE: on our wish, because it was to be exchanged for the new one."""
    fleet = state.fleet
    node = None if fleet is None else fleet.of_agent(holder.id)
    is_exchanged = fleet is not None and node is not None and fleet.migrations.get(node.id) == command.platform_node
    return NodeExit.NONE if is_exchanged else NodeExit.KILLED


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
        platform_news.hear_change(course, NodeEventKind.MODIFIED, seen)
        return
    node.agent = agent.id
    node.host = node.host or command.host
    if node.is_pending:
        node.asked_at = course.now if node.asked_at is None else node.asked_at
        life_cycle.started(course, node)
    if agent.finished_round and node.is_live:
        life_cycle.finished(course, node)  # it said so before anybody knew where it is


def agent_finished(course: Course, agent: Node) -> None:
    fleet = course.state.fleet
    node = None if fleet is None else fleet.of_agent(agent.id)
    if fleet is not None and node is not None:
        life_cycle.finished(course, node)


def world_formed(course: Course, agents: Iterable[NodeId]) -> None:
    """Where somebody trains, what the check found of the first node there is of the past."""
    fleet = course.state.fleet
    if fleet is None or not fleet.checks_failed:
        return
    for agent in agents:
        node = fleet.of_agent(agent)
        if node is not None:
            fleet.checks_failed.pop(node.rank, None)


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
        life_cycle.let_go(course, node, "the job goes on without it")
    elif node.is_live:
        life_cycle.end_node(course, node, NodePhase.DELETED, exit_reason, is_presumed=is_presumed)


def exit_of_leave(reason: LeaveReason) -> NodeExit:
    """What a farewell says about the node."""
    match reason:
        case LeaveReason.PREEMPTED | LeaveReason.STOPPED_BY_USER:
            return NodeExit.KILLED
        case LeaveReason.FAILED:
            return NodeExit.UNKNOWN
        case LeaveReason.DISMISSED | LeaveReason.JOB_ENDED:
            return NodeExit.NONE
