"""
Sync points and barriers: workers that wait for each other by name.

The first join of a name fixes who is waited for: the workers that run at that moment. Each join takes one of them off
the list, as does its end; when the list is empty the point is reached. The next join by one of them begins the next
generation, so a name can be used in a loop. Who is not there after an hour is waited for no longer; a job that can do
without its node does so from then on.

A barrier is opened by a notification; the k-th wait for it is released by the k-th notification.

Both belong to the round of their workers: a new round starts all of them anew, and whatever the old ones waited for is
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from dlrover.core.fleet import life_cycle
from dlrover.core.membership.nodes import after_outage
from dlrover.core.outcome import NotYet, micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import Strategy
from dlrover.protocol.messages.job import Command, Done, LookAgain, Micros, NodeId, Query, Reply, Round
from dlrover.protocol.messages.sync import (
    MAX_NAME_BYTES,
    MAX_NAMES,
    AnySyncCommand,
    BarrierOpen,
    JoinSync,
    NotifyBarrier,
    SyncFinished,
    SyncJoined,
    SyncState,
)

if TYPE_CHECKING:
    from dlrover.core.decision import Course
    from dlrover.core.state import JobState

SYNC_TIMEOUT = 3600.0
"""Seconds that a sync point waits for the workers that have not joined."""


class SyncPoint(Struct, kw_only=True):
    """The newest generation of one name."""

    number: int
    """Unique over all: names its deadline."""
    generation: int
    ends_at: Micros
    """When it waits no longer."""
    missing: dict[NodeId, list[int]]
    """Local ranks of workers that are waited for, by node. No list is empty."""
    joined: dict[NodeId, list[int]] = {}

    @property
    def is_reached(self) -> bool:
        return not self.missing


class SyncPoints(Struct):
    points: dict[Round, dict[str, SyncPoint]] = {}
    barriers: dict[Round, dict[str, int]] = {}
    """How often each was opened."""
    open: dict[int, tuple[Round, str]] = {}
    """Number of each point that is not reached, to where it is."""
    last_number: int = 0

    def join(
        self,
        name: str,
        round_: Round,
        worker: tuple[NodeId, int],
        now: Micros,
        targets: Callable[[], dict[NodeId, list[int]]],
    ) -> SyncJoined:
        """`targets` tells which workers run now; only asked at the first join. The caller has checked everything."""
        node, local_rank = worker
        point = self.points.get(round_, {}).get(name)
        if point is None or (point.is_reached and local_rank in point.joined.get(node, ())):
            point = self._begin(name, round_, 1 if point is None else point.generation + 1, targets(), now)
        if not _take(point.missing, node, local_rank):
            return SyncJoined(generation=point.generation, is_late=local_rank not in point.joined.get(node, ()))
        point.joined.setdefault(node, []).append(local_rank)
        self._settle(point)
        return SyncJoined(generation=point.generation)

    def leave(self, node: NodeId) -> tuple[str, ...]:
        """The workers of the node have ended: nobody waits for them. Gives the topics of the points reached by that."""
        reached = []
        for round_, name in list(self.open.values()):
            point = self.points[round_][name]
            if point.missing.pop(node, None) is not None and point.is_reached:
                reached.append(sync_topic(round_, name))
            self._settle(point)
        return tuple(reached)

    def expire(self, number: int, now: Micros) -> tuple[str, str, dict[NodeId, list[int]]] | None:
        """Wait no longer for who is missing: topic, name and who it was. None: not due, or reached meanwhile."""
        round_, name = self.open.get(number, (Round(0), ""))
        point = self.points.get(round_, {}).get(name)
        if point is None or point.number != number or point.ends_at > now:
            return None
        missing, point.missing = point.missing, {}
        self._settle(point)
        return sync_topic(round_, name), name, missing

    def notify(self, name: str, round_: Round) -> None:
        opened = self.barriers.setdefault(round_, {})
        opened[name] = opened.get(name, 0) + 1

    def drop_before(self, round_: Round) -> None:
        """A new round has begun; what workers of older ones waited for is forgotten."""
        for old in [number for number in self.points if 0 < number < round_]:
            for point in self.points.pop(old).values():
                self.open.pop(point.number, None)
        for old in [number for number in self.barriers if 0 < number < round_]:
            del self.barriers[old]

    def master_restarted(self, last_command_at: Micros, now: Micros) -> None:
        for round_, name in self.open.values():
            point = self.points[round_][name]
            point.ends_at = after_outage(point.ends_at, last_command_at, now)

    def _begin(
        self, name: str, round_: Round, generation: int, targets: dict[NodeId, list[int]], now: Micros
    ) -> SyncPoint:
        self.last_number += 1
        point = SyncPoint(
            number=self.last_number,
            generation=generation,
            ends_at=Micros(now + micros(SYNC_TIMEOUT)),
            missing=targets,
        )
        self.points.setdefault(round_, {})[name] = point
        self.open[point.number] = (round_, name)
        return point

    def _settle(self, point: SyncPoint) -> None:
        if point.is_reached:
            self.open.pop(point.number, None)


def sync_topic(round_: Round, name: str) -> str:
    return f"sync/{round_}/{name}"


def barrier_topic(round_: Round, name: str) -> str:
    return f"barrier/{round_}/{name}"


def targets_of(state: JobState, round_: Round) -> dict[NodeId, list[int]]:
    """The workers that run in the round now, by node; for round 0 those of all nodes."""
    rdzv, live = state.rendezvous, state.nodes.live
    found: dict[NodeId, list[int]] = {}
    for node in sorted(live.values(), key=lambda node: node.rank):
        if not node.finished_round and (round_ == 0 or rdzv.is_member(node.id)):
            found[node.id] = list(range(node.local_world_size))
    return found


def leave(course: Course, node: NodeId) -> None:
    """To be called whenever the workers of a node have ended for good."""
    reached = course.state.sync.leave(node)
    if reached:
        course.effects.append(LookAgain(reached))


def expire(course: Course, number: int) -> None:
    """The deadline of a sync point: who has not come is waited for no longer."""
    expired = course.state.sync.expire(number, course.now)
    if expired is None:
        return
    topic, name, missing = expired
    course.effects.append(LookAgain((topic,)))
    live = course.state.nodes.live
    who = "; ".join(
        f"{live[node].label if node in live else f'node {node}'}, local rank{'s' if len(ranks) > 1 else ''} "
        f"{', '.join(map(str, ranks))}"
        for node, ranks in missing.items()
    )
    course.say(f"Sync point {name!r} waits no longer, after {SYNC_TIMEOUT:.0f} s without {who}.")
    _let_go(course, list(missing), f"it did not come to sync point {name!r}")


def _let_go(course: Course, laggards: list[NodeId], why: str) -> None:
    """A job without them is better off, if it can be: not without critical ones, nor with too few for a world.

    Not in an all-reduce job: all others would have to start anew, who have just been allowed to go on. Nor in the last
    minutes of any job, when nobody starts anew.
    """
    state, fleet = course.state, course.state.fleet
    if fleet is None or fleet.spec.strategy is Strategy.ALLREDUCE or state.rendezvous.finished:
        return
    min_nodes = 0 if state.terms is None else state.terms.limits.min_nodes
    for node in [fleet.of_agent(agent) for agent in laggards]:
        if node is None or not node.is_live or node.is_critical:
            continue
        if len(fleet.workers.holders) > min_nodes:
            life_cycle.let_go(course, node, why)


def _join_sync(command: JoinSync, course: Course) -> Reply:
    state = course.state
    _check(command, course, state.sync.points.get(command.round, {}))
    node = state.nodes.live[command.node]
    if not 0 <= command.local_rank < node.local_world_size:
        raise Rejected(f"{node.label} has no local rank {command.local_rank}.", code="malformed")
    if command.round and state.rendezvous.world is None:
        # The journal was lost, and not all of its members are back: a point that waits for nobody would be open for ever.
        raise Rejected(
            f"The world of round {command.round} is not known yet, or will not be any more: join again when it is.",
            code="world-unknown",
        )

    worker = (node.id, command.local_rank)
    joined = state.sync.join(command.name, command.round, worker, course.now, lambda: targets_of(state, command.round))
    if state.sync.points[command.round][command.name].is_reached:
        course.effects.append(LookAgain((sync_topic(command.round, command.name),)))
    return joined


def _notify_barrier(command: NotifyBarrier, course: Course) -> Reply:
    _check(command, course, course.state.sync.barriers.get(command.round, {}))

    course.state.sync.notify(command.name, command.round)
    course.effects.append(LookAgain((barrier_topic(command.round, command.name),)))
    return Done()


def _check(command: AnySyncCommand, course: Course, known: dict[str, Any]) -> None:
    state = course.state
    state.nodes.current(command.node, command.incarnation)
    if command.round not in (0, state.rendezvous.round):
        raise Rejected(
            f"A worker of round {command.round} wants to meet others; the newest round is {state.rendezvous.round}.",
            code="stale-round",
        )
    if not command.name or len(command.name.encode()) > MAX_NAME_BYTES:
        raise Rejected(f"A sync point or barrier needs a name of 1 to {MAX_NAME_BYTES} bytes.", code="malformed")
    if command.name not in known and len(known) >= MAX_NAMES:
        raise Rejected(
            f"There are {MAX_NAMES} names already. Names can be used again: use fewer of them.", code="sync-full"
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


def _take(missing: dict[NodeId, list[int]], node: NodeId, local_rank: int) -> bool:
    """Take a worker off the list; whether it was on it."""
    ranks = missing.get(node)
    if ranks is None or local_rank not in ranks:
        return False
    ranks.remove(local_rank)
    if not ranks:
        del missing[node]
    return True


HANDLERS: dict[type[Command], Callable[[Any, Course], Reply]] = {JoinSync: _join_sync, NotifyBarrier: _notify_barrier}
ANSWERS: dict[type[Query], Callable[[Any, JobState], Reply | NotYet]] = {
    SyncFinished: _sync_finished,
    BarrierOpen: _barrier_open,
}
