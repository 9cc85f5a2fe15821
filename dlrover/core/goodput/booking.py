"""
What is booked when: each change of what a node does, by the very command that changes it, and what ended a world.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlrover.core.decision import Decision, Handlers
from dlrover.core.happenings import NodeLost, RoundOpened
from dlrover.core.membership.nodes import Node
from dlrover.core.state import JobState
from dlrover.protocol.errors import malformed
from dlrover.protocol.messages.goodput import AccountGoodput, TimeClass
from dlrover.protocol.messages.job import (
    Check,
    Done,
    End,
    Idle,
    Join,
    JoinCheck,
    Leave,
    Micros,
    NodeId,
    Reply,
    Round,
    Run,
    Wait,
)

_MOST_MILLIS = 2**45
"""A thousand years: beyond it is rubbish."""


def on_round_opened(decision: Decision, opened: RoundOpened) -> None:
    goodput, rdzv = decision.state.goodput, decision.state.rendezvous
    if rdzv.world is not None:
        ranks = [member.node_rank for member in rdzv.world.members if member.node not in rdzv.finished]
        goodput.fault_began(opened.fault, opened.reason, decision.now, rdzv.round, ranks)
        goodput.fault_named(opened.fault, opened.reason, opened.first, node_rank=opened.node_rank)


def on_round_completed(decision: Decision) -> None:
    state = decision.state
    steps = [node.step for node in state.nodes.live.values()]
    world = state.rendezvous.world
    is_full = world is not None and len(world.members) >= state.limits.max_nodes
    state.goodput.round_began(decision.now, steps, is_full=is_full)


def on_node_lost(decision: Decision, lost: NodeLost) -> None:
    state, node = decision.state, lost.node
    if state.end is None and lost.was_member and not lost.was_running:
        incident = state.restarts.open_incident(state.rendezvous.round)
        if incident is not None and incident.is_secondary:
            state.goodput.fault_named("node", lost.why, incident.first, node_rank=node.rank)
    if state.end is not None or node.finished_round or node.dismissed is not None:
        state.goodput.left(node.rank, decision.now)
    else:
        state.goodput.lost(node.rank, decision.now, lost.ended_at)


def on_job_finished(decision: Decision) -> None:
    decision.state.goodput.finish(decision.now)


def class_of(state: JobState, node: Node) -> TimeClass | None:
    """What a live node does, by its newest wish; None: its workers run."""
    rdzv = state.rendezvous
    match node.desired.wish:
        case Run():
            return None
        case Join():
            is_stopping = rdzv.world is not None and node.id in rdzv.group_ranks and node.id not in rdzv.lost
            # Who has not joined yet is not ready: its zygote imports.
            return TimeClass.STOPPING if is_stopping else TimeClass.START_UP
        case Wait():
            return TimeClass.IDLE if rdzv.is_active else TimeClass.RENDEZVOUS
        case JoinCheck() | Check():
            return TimeClass.NODE_CHECK
        case Idle():
            return TimeClass.IDLE
        case End():
            return TimeClass.IDLE if node.finished_round else TimeClass.STOPPING
        case Leave():
            return TimeClass.STOPPING


def follow(state: JobState, nodes: Iterable[NodeId], now: Micros) -> None:
    """Book what these nodes did until now, if they do something else from now on."""
    live, places = state.nodes.live, state.goodput.places
    changed = []
    for node in [live[id_] for id_ in nodes if id_ in live]:
        doing, place, wish = class_of(state, node), places.get(node.rank), node.desired.wish
        round_ = wish.world.round if isinstance(wish, Run) else Round(0)
        is_same = place is not None and place.opened_at is not None and (place.node, place.doing) == (node.id, doing)
        if place is None or not is_same or (doing is None and place.round != round_):
            changed.append((node.rank, node.id, doing, now, round_))
    for change in changed:
        state.goodput.enter(*change)


def _account(command: AccountGoodput, decision: Decision) -> Reply:
    nodes = decision.state.nodes
    for account in command.accounts:
        if any(not 0 <= millis <= _MOST_MILLIS for millis in account.millis):
            raise malformed(
                f"The account of node {account.node} has a time out of range: each must be from 0 to {_MOST_MILLIS} ms."
            )

    for account in command.accounts:
        node = nodes.live.get(account.node)
        if node is not None and node.incarnation == account.incarnation:
            node.reached(account.model_step if account.step is None else account.step)
            decision.state.goodput.account(account, node.rank, decision.now)
    return Done()


HANDLERS: Handlers = {AccountGoodput: _account}
