"""
Looks: every worker is asked twice what it is doing, and the answers are put side by side.

A look is harmless, so it is taken early and repeated while the job stands still, in growing intervals. The second dump comes late enough
that a pause of the usual length would be over by then.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlrover.core.diagnosis.hang import Sight, see
from dlrover.core.diagnosis.picture import Scene
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, micros
from dlrover.protocol.messages.job import Micros, NodeId, Round
from dlrover.protocol.messages.watch import LookTaken, TakeLook, WatchOrder, WorkerDump

AGAIN_AFTER = 2.0
ANSWER_WITHIN = 6.0
"""Seconds for the answers, on top of the pause between the dumps: a busy machine needs some."""
FIRST_INTERVAL = 3.0
LONGEST_INTERVAL = 60.0


class Look:
    """One, under way."""

    def __init__(self, number: int, scene: Scene, *, again_after: float, now: Micros) -> None:
        self.number = number
        self.round: Round = scene.round
        self.again_after = again_after
        self.asked_at = now
        self.expires_at = Micros(now + micros(again_after + ANSWER_WITHIN))
        self.is_judged_early = False
        self._ranks = {
            rank: place.node
            for place in scene.places
            for rank in range(place.first_rank, place.first_rank + place.num_ranks)
        }
        self._nodes = {place.node: None for place in scene.places}
        self._dumps: tuple[dict[int, WorkerDump], dict[int, WorkerDump]] = ({}, {})
        self._came: tuple[dict[NodeId, Micros], dict[NodeId, Micros]] = ({}, {})

    def orders(self) -> list[tuple[NodeId, WatchOrder]]:
        order = TakeLook(look=self.number, round=self.round, again_after=self.again_after)
        return [(node, WatchOrder(id=self.number, expires_in=ANSWER_WITHIN, order=order)) for node in self._nodes]

    def hear(self, taken: LookTaken, now: Micros) -> None:
        if taken.look != self.number or taken.number not in (0, 1) or taken.node not in self._nodes:
            return
        self._came[taken.number][taken.node] = now
        for dump in taken.workers:
            if self._ranks.get(dump.global_rank) == taken.node:
                self._dumps[taken.number][dump.global_rank] = dump

    def lose(self, nodes: Iterable[NodeId]) -> None:
        """They are not attached, so they will not answer."""
        for node in nodes:
            self._nodes.pop(node, None)

    def is_complete(self, number: int) -> bool:
        return len(self._came[number]) >= len(self._nodes)

    def is_over(self, now: Micros) -> bool:
        return self.is_complete(1) or now >= self.expires_at

    def sights(self) -> list[Sight]:
        """Of all ranks that have answered, in their order."""
        found = []
        for rank, node in sorted(self._ranks.items()):
            first, second = self._dumps[0].get(rank), self._dumps[1].get(rank)
            newest = second or first
            if newest is None:
                continue
            first_at, second_at = self._came[0].get(node, self.asked_at), self._came[1].get(node, self.asked_at)
            interval = max(AGAIN_AFTER / 2, (second_at - first_at) / MICROS_PER_SECOND)
            found.append(see(node, first if second is not None else None, newest, interval))
        return found

    def missing(self) -> list[int]:
        seen = {sight.rank: None for sight in self.sights()}
        return [rank for rank in sorted(self._ranks) if rank not in seen]


def interval_after(num_looks: int) -> float:
    """Seconds between two looks at the same episode."""
    return min(LONGEST_INTERVAL, FIRST_INTERVAL * 2.0 ** max(0, num_looks - 1))
