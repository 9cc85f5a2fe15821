"""
What people are told of a job: its nodes, its world, and why things are as they are.
"""

from __future__ import annotations

from collections.abc import Container

from dlrover.core.check.commands import describe
from dlrover.core.data.progress import progress
from dlrover.core.membership.forming import place_of
from dlrover.core.membership.nodes import Node, NodeLife
from dlrover.core.membership.waiting import pending, standby
from dlrover.core.state import JobState
from dlrover.protocol.messages.job import STANDBY, JobStatus, Limits, NodeId, NodeStatus


def job_status(state: JobState, digest: str) -> JobStatus:
    world = state.rendezvous.world
    limits = Limits() if state.terms is None else state.terms.limits
    incident = state.restarts.incident
    warm, too_many = _bystanders(state)
    return JobStatus(
        job_name=state.job_name,
        user=state.user,
        stage=state.stage,
        master_epoch=state.master_epoch,
        round=state.rendezvous.round,
        world_size=0 if world is None else world.world_size,
        num_restarts=state.restarts.num_restarts,
        verdict=_why(state),
        nodes=tuple(_node_status(state, node, warm, too_many) for node in state.nodes.in_rank_order()),
        end=state.end,
        min_nodes=limits.min_nodes,
        max_nodes=limits.max_nodes,
        limits_version=state.limits_version,
        num_standby=len(warm),
        num_pending=len(too_many),
        distinct_failures=() if incident is None else tuple(incident.distinct),
        fleet=() if state.fleet is None else state.fleet.status(),
        shortage="" if state.fleet is None else state.fleet.verdict,
        digest=digest,
        checkpoints=state.checkpoints.status(),
        pre_check=state.pre_check.status(),
        datasets=progress(state.data),
        cluster=None if state.cluster is None else state.cluster.view(),
    )


def _why(state: JobState) -> str:
    """The last that was said, and behind it what an open round waits for, unless that was the last."""
    if state.rendezvous.opening is None or state.end is not None:
        return state.verdict or "No node has attached yet."
    awaited = describe(state) or state.rendezvous.verdict
    return state.verdict if awaited in state.verdict else f"{state.verdict} {awaited}".lstrip()


def _bystanders(state: JobState) -> tuple[dict[NodeId, None], dict[NodeId, None]]:
    """Who waits beside an active world on purpose, and who is too many."""
    if not state.rendezvous.is_active:
        return {}, {}
    return dict.fromkeys(standby(state)), dict.fromkeys(pending(state))


def _node_status(state: JobState, node: Node, warm: Container[NodeId], too_many: Container[NodeId]) -> NodeStatus:
    status: str = node.life.value
    if node.life is NodeLife.ALIVE and not state.nodes.is_connected(node.id):
        status = "disconnected"
    elif node.life is NodeLife.ALIVE and node.dismissed is not None:
        status = "leaving"
    elif node.life is NodeLife.ALIVE and node.finished_round:
        status = "finished"
    elif node.id in warm:
        status = STANDBY
    elif node.id in too_many:
        status = "pending"
    group_rank, num_workers = place_of(state.rendezvous, node.id)
    result = state.check.results.get(node.rank)
    return NodeStatus(
        node=node.id,
        node_rank=node.rank,
        incarnation=node.incarnation,
        name=node.name,
        host=node.host,
        status=status,
        wish=type(node.desired.wish).__name__.lower(),
        step=node.step,
        check=None if result is None or result.node != node.id else result,
        group_rank=group_rank,
        local_world_size=num_workers,
        slot=_slot(state, node),
    )


def _slot(state: JobState, node: Node) -> str:
    """Nodes of a parameter-server job are called by type and rank: the fleet knows them."""
    found = None if state.cluster is None or state.fleet is None else state.fleet.of_agent(node.id)
    return "" if found is None else f"{found.node_type.value}-{found.rank}"
