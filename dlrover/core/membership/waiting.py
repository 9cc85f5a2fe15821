"""
What the state says of those who are not in the world: who waits warm, who is too many, who is missed, and until when.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlrover.core.membership.forming import (
    call_ends_at,
    gives_up_at,
    grows_at,
    has_spare,
    hold_ends_at,
    outsiders,
    too_few_at,
)
from dlrover.core.outcome import Deadline
from dlrover.core.state import JobState
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import DeadlineKind, FailureKind, Micros, NodeId


def gone_times(state: JobState, nodes: Iterable[NodeId]) -> dict[NodeId, Micros]:
    """When those of the nodes that have no stream are given up."""
    broken = [node for node in nodes if node in state.nodes.broken]
    is_replaceable = bool(broken) and has_spare(state.rendezvous)
    is_last_hope = bool(broken) and _is_none_dispensable(state)
    missed = _missed_by_all(state) if is_replaceable else []
    return {
        node: state.nodes.gone_at(
            node,
            state.detection,
            has_spare=is_replaceable,
            is_missed=node in missed,
            is_needed=is_last_hope and not state.nodes.live[node].finished_round,
        )
        for node in broken
    }


def deadlines_of(state: JobState, nodes: Iterable[NodeId]) -> list[Deadline]:
    """Of nodes without a stream, and of all that shall leave."""
    gone = [Deadline(at, DeadlineKind.NODE_GONE, node) for node, at in gone_times(state, nodes).items()]
    if state.drains_at is not None:
        gone.append(Deadline(state.drains_at, DeadlineKind.DRAIN, state.master_epoch))
    return gone


def deadlines(state: JobState) -> list[Deadline]:
    """Of the round."""
    rdzv = state.rendezvous
    if state.terms is None or state.cluster is not None:
        return []
    limits = state.limits
    times = (
        (call_ends_at(rdzv, limits), DeadlineKind.LAST_CALL),
        (too_few_at(rdzv, limits), DeadlineKind.LAST_CALL),
        (gives_up_at(rdzv, limits), DeadlineKind.JOIN_TIMEOUT),
        (hold_ends_at(rdzv), DeadlineKind.BLOCK_LEASE),
        (rdzv.take_up.until if rdzv.take_up.claims else None, DeadlineKind.TAKE_UP),
        (grows_at(rdzv, limits), DeadlineKind.GROWTH),
    )
    running = [Deadline(at, kind, rdzv.next_round) for at, kind in times if at is not None]
    pend_times = pend_timeouts(state).items()
    return running + [Deadline(at, DeadlineKind.PEND_TIMEOUT, node) for node, at in pend_times]


def standby(state: JobState) -> list[NodeId]:
    """Who waits warm beside the world, as wished: the lowest ranks outside it."""
    wanted = 0 if state.terms is None else state.terms.standby
    return outsiders(state.rendezvous)[:wanted]


def pending(state: JobState) -> list[NodeId]:
    """Who waits beside the world although fewer were asked for."""
    wanted = 0 if state.terms is None else state.terms.standby
    return outsiders(state.rendezvous)[wanted:]


def pend_timeouts(state: JobState) -> dict[NodeId, Micros]:
    """When pending nodes are sent away. Not while a round is open: it may take them."""
    timeout = None if state.terms is None else state.terms.limits.pend_timeout
    if timeout is None or state.end is not None or not state.rendezvous.is_active:
        return {}
    left_out = state.rendezvous.bystanders.left_out
    return {node: Micros(since + micros(timeout)) for node, since in left_out.items()}


def suspects(state: JobState) -> list[NodeId]:
    """Members that have not come back although all the others can say is that they lost a peer."""
    rdzv = state.rendezvous
    incident = state.restarts.open_incident(rdzv.round)
    if state.end is not None or incident is None or incident.first.failure.kind is not FailureKind.PEER_LOST:
        return []
    return [node for node in rdzv.expected if node in rdzv.group_ranks]


def _missed_by_all(state: JobState) -> list[NodeId]:
    """Those of them without whose memory the others can go on."""
    incident = state.restarts.incident
    return suspects(state) if incident is not None and incident.has_whole_state else []


def _is_none_dispensable(state: JobState) -> bool:
    """Whether the job fails with the next unfinished node that goes, because some have finished and too few are left."""
    rdzv, terms = state.rendezvous, state.terms
    if state.end is not None or terms is None or not rdzv.finished:
        return False
    return terms.limits.num_usable(rdzv.num_unfinished - 1) < terms.limits.min_nodes
