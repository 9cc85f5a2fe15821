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

from msgspec import Struct

from dlrover.core.membership.nodes import after_outage
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Micros, NodeId, Round
from dlrover.protocol.messages.sync import SyncJoined

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
        """The workers of the node have ended: no worker waits for them. Gives the topics of the points reached by that."""
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


def _take(missing: dict[NodeId, list[int]], node: NodeId, local_rank: int) -> bool:
    """Take a worker off the list; whether it was on it."""
    ranks = missing.get(node)
    if ranks is None or local_rank not in ranks:
        return False
    ranks.remove(local_rank)
    if not ranks:
        del missing[node]
    return True
