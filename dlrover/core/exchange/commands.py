"""
What workers do with the key-value store and with sync points, and what becomes of both when nodes go and rounds change.
"""

from __future__ import annotations

from typing import Any, get_args

from dlrover.core.decision import Answers, Decision, Handlers
from dlrover.core.exchange.kv_store import topics_of
from dlrover.core.exchange.sync_points import SYNC_TIMEOUT, barrier_topic, sync_topic
from dlrover.core.membership.nodes import Node
from dlrover.core.outcome import Deadline, NotYet
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.job import DeadlineKind, Done, LookAgain, NodeId, Reply, Round
from dlrover.protocol.messages.kv import AnyKvCommand, AnyKvQuery
from dlrover.protocol.messages.sync import (
    MAX_NAME_BYTES,
    MAX_NAMES,
    AnySyncCommand,
    BarrierOpen,
    JoinSync,
    NotifyBarrier,
    SyncFinished,
    SyncState,
)

NUM_ROUNDS_KEPT = 2
"""Workers of the round before may still be on their way out."""


def _change(command: AnyKvCommand, decision: Decision) -> Reply:
    decision.state.nodes.current(command.node, command.incarnation)
    _check_round(command.round, decision.state)
    reply = decision.state.kv.apply(command)

    topics = topics_of(command)
    if topics:
        decision.effects.append(LookAgain(topics))
    return reply


def _answer(query: AnyKvQuery, state: JobState) -> Reply | NotYet:
    _check_round(query.round, state)
    return state.kv.answer(query)


def _check_round(round_: Round, state: JobState) -> None:
    newest = state.rendezvous.round
    if round_ == 0 or newest - NUM_ROUNDS_KEPT < round_ <= newest:
        return
    if round_ > newest or round_ < 0:
        raise Rejected(f"There was no round {round_} yet; the newest is {newest}.", code=ErrorCode.UNKNOWN_ROUND)
    raise Rejected(f"The keys of round {round_} are gone; the newest round is {newest}.", code=ErrorCode.STALE_ROUND)


def targets_of(state: JobState, round_: Round) -> dict[NodeId, list[int]]:
    """The workers that run in the round now, by node; for round 0 those of all nodes."""
    rdzv, live = state.rendezvous, state.nodes.live
    found: dict[NodeId, list[int]] = {}
    for node in sorted(live.values(), key=lambda node: node.rank):
        if not node.finished_round and (round_ == 0 or rdzv.is_member(node.id)):
            found[node.id] = list(range(node.local_world_size))
    return found


def on_workers_ended(decision: Decision, node: Node) -> None:
    """No worker waits for the workers of a node that have ended for good."""
    reached = decision.state.sync.leave(node.id)
    if reached:
        decision.effects.append(LookAgain(reached))


def on_round_completed(decision: Decision) -> None:
    round_ = decision.state.rendezvous.round
    decision.state.kv.drop_before(Round(round_ - NUM_ROUNDS_KEPT + 1))
    decision.state.sync.drop_before(round_)


def on_job_starts_over(decision: Decision, _: str) -> None:
    next_round = decision.state.rendezvous.next_round
    decision.state.kv.drop_before(next_round)
    decision.state.sync.drop_before(next_round)


def on_master_restarted(decision: Decision) -> None:
    decision.state.sync.master_restarted(decision.state.now, decision.now)


def deadlines(state: JobState) -> list[Deadline]:
    points = state.sync.points
    return [
        Deadline(points[round_][name].ends_at, DeadlineKind.SYNC_TIMEOUT, number)
        for number, (round_, name) in state.sync.open.items()
    ]


def expire(decision: Decision, number: int) -> None:
    """The deadline of a sync point: who has not come is waited for no longer."""
    expired = decision.state.sync.expire(number, decision.now)
    if expired is None:
        return
    topic, name, missing = expired
    decision.effects.append(LookAgain((topic,)))
    live = decision.state.nodes.live
    who = "; ".join(
        f"{live[node].label if node in live else f'node {node}'}, local rank{'s' if len(ranks) > 1 else ''} "
        f"{', '.join(map(str, ranks))}"
        for node, ranks in missing.items()
    )
    decision.say(f"Sync point {name!r} waits no longer, after {SYNC_TIMEOUT:.0f} s without {who}.")
    decision.announce(decision.on.nodes_overdue, list(missing), f"it did not come to sync point {name!r}")


def _join_sync(command: JoinSync, decision: Decision) -> Reply:
    state = decision.state
    _check(command, decision, state.sync.points.get(command.round, {}))
    node = state.nodes.live[command.node]
    if not 0 <= command.local_rank < node.local_world_size:
        raise malformed(f"{node.label} has no local rank {command.local_rank}.")
    if command.round and state.rendezvous.world is None:
        # The journal was lost, and not all of its members are back: a point that waits for nobody would be open for ever.
        raise Rejected(
            f"The world of round {command.round} is not known yet, or will not be any more: join again when it is.",
            code=ErrorCode.WORLD_UNKNOWN,
        )

    worker = (node.id, command.local_rank)
    joined = state.sync.join(
        command.name, command.round, worker, decision.now, lambda: targets_of(state, command.round)
    )
    if state.sync.points[command.round][command.name].is_reached:
        decision.effects.append(LookAgain((sync_topic(command.round, command.name),)))
    return joined


def _notify_barrier(command: NotifyBarrier, decision: Decision) -> Reply:
    _check(command, decision, decision.state.sync.barriers.get(command.round, {}))

    decision.state.sync.notify(command.name, command.round)
    decision.effects.append(LookAgain((barrier_topic(command.round, command.name),)))
    return Done()


def _check(command: AnySyncCommand, decision: Decision, known: dict[str, Any]) -> None:
    state = decision.state
    state.nodes.current(command.node, command.incarnation)
    if command.round not in (0, state.rendezvous.round):
        raise Rejected(
            f"A worker of round {command.round} wants to meet others, but the newest round is {state.rendezvous.round}. Do nothing: "
            "workers of other rounds stop.",
            code=ErrorCode.STALE_ROUND,
        )
    if not command.name or len(command.name.encode()) > MAX_NAME_BYTES:
        raise malformed(f"A sync point or barrier needs a name of 1 to {MAX_NAME_BYTES} bytes.")
    if command.name not in known and len(known) >= MAX_NAMES:
        raise Rejected(
            f"There are {MAX_NAMES} names already. Names can be used again: use fewer of them.",
            code=ErrorCode.SYNC_FULL,
        )


def _sync_finished(query: SyncFinished, state: JobState) -> Reply | NotYet:
    point = state.sync.points.get(query.round, {}).get(query.name)
    is_over = point is not None and point.generation > query.generation > 0
    if is_over or (point is not None and point.is_reached and query.generation <= point.generation):
        return SyncState(True)
    return NotYet((sync_topic(query.round, query.name),), SyncState(False))


def _barrier_open(query: BarrierOpen, state: JobState) -> Reply | NotYet:
    if state.sync.barriers.get(query.round, {}).get(query.name, 0) >= max(query.generation, 1):
        return SyncState(True)
    return NotYet((barrier_topic(query.round, query.name),), SyncState(False))


HANDLERS: Handlers = {
    **dict.fromkeys(get_args(AnyKvCommand), _change),
    JoinSync: _join_sync,
    NotifyBarrier: _notify_barrier,
}
ANSWERS: Answers = {
    **dict.fromkeys(get_args(AnyKvQuery), _answer),
    SyncFinished: _sync_finished,
    BarrierOpen: _barrier_open,
}
