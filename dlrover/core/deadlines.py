"""
Deadlines: when time alone changes something.

Each room says which of its deadlines are running; the job gathers them, and the shell turns those that have passed into
commands. A deadline is state, not a timer: it is computed anew whenever somebody asks, so there is nothing to cancel.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover.core.check import commands as check_commands
from dlrover.core.fleet import early_stop
from dlrover.core.membership.waiting import gone_times, pend_timeouts
from dlrover.core.state import JobState
from dlrover.protocol.messages.job import DeadlineKind, Micros, NodeId


class Deadline(NamedTuple):
    at: Micros
    kind: DeadlineKind
    id: int
    """What it belongs to: a round, a node id."""


def passed_deadlines(state: JobState, now: Micros) -> list[Deadline]:
    """Those that have passed, in their order."""
    nodes = [
        node
        for node, broken in state.nodes.broken.items()
        if broken.broken_at is not None or broken.gone_at <= now  # the first may depend on the others
    ]
    return sorted(deadline for deadline in _running(state, nodes) if deadline.at <= now)


def next_deadline(state: JobState) -> Micros | None:
    """
    When the first of all passes.

    Asked in each turn of the master. Under a new one all nodes wait for the same moment, ten thousand perhaps: they are only
    glanced at.
    """
    broken = state.nodes.broken
    times = [
        deadline.at for deadline in _running(state, [node for node in broken if broken[node].broken_at is not None])
    ]
    times += [each.gone_at for each in broken.values() if each.broken_at is None]
    return min(times, default=None)


def _running(state: JobState, nodes: list[NodeId]) -> list[Deadline]:
    """In no order; of the nodes without a stream only those that are asked for."""
    fleet = [Deadline(at, kind, id_) for at, kind, id_ in early_stop.deadlines(state)]
    return [
        *_of_nodes(state, nodes),
        *_of_rendezvous(state),
        *_of_sync_points(state),
        *_of_checkpoints(state),
        *_of_data(state),
        *fleet,
    ]


def _of_nodes(state: JobState, nodes: list[NodeId]) -> list[Deadline]:
    gone = [Deadline(at, DeadlineKind.NODE_GONE, node) for node, at in gone_times(state, nodes).items()]
    if state.drains_at is not None:
        gone.append(Deadline(state.drains_at, DeadlineKind.DRAIN, state.master_epoch))
    return gone


def _of_rendezvous(state: JobState) -> list[Deadline]:
    rdzv = state.rendezvous
    if state.terms is None or state.end is not None:
        return []
    limits = state.terms.limits
    times = (
        (rdzv.call_ends_at(limits), DeadlineKind.LAST_CALL),
        (rdzv.too_few_at(limits), DeadlineKind.LAST_CALL),
        (rdzv.gives_up_at(limits), DeadlineKind.JOIN_TIMEOUT),
        (rdzv.hold_ends_at(), DeadlineKind.BLOCK_LEASE),
        (rdzv.take_up.until if rdzv.take_up.claims else None, DeadlineKind.TAKE_UP),
        (rdzv.grows_at(limits), DeadlineKind.GROWTH),
        (check_commands.begins_at(state), DeadlineKind.CHECK_CALL),
        (state.check.ends_at(), DeadlineKind.CHECK_PHASE),
    )
    running = [Deadline(at, kind, rdzv.next_round) for at, kind in times if at is not None]
    pend_times = pend_timeouts(state).items()
    return running + [Deadline(at, DeadlineKind.PEND_TIMEOUT, node) for node, at in pend_times]


def _of_sync_points(state: JobState) -> list[Deadline]:
    if state.end is not None:
        return []
    sync = state.sync
    return [
        Deadline(sync.points[round_][name].ends_at, DeadlineKind.SYNC_TIMEOUT, number)
        for number, (round_, name) in sync.open.items()
    ]


def _of_checkpoints(state: JobState) -> list[Deadline]:
    if state.end is not None:
        return []
    running = [Deadline(at, DeadlineKind.SAVE_TIMEOUT, number) for at, number in state.checkpoints.deadlines()]
    open_ = state.checkpoints.breaks.open
    if open_ is not None:
        running.append(Deadline(open_.ends_at, DeadlineKind.BREAK_POINT, open_.number))
    return running


def _of_data(state: JobState) -> list[Deadline]:
    if state.end is not None:
        return []
    return [Deadline(at, DeadlineKind.DATA_LEASE, number) for number, at in state.data.lease_looks.items()]
