"""
Nodes that wait beside a world: who is there on purpose, who is too many, and who may enlarge it.

A standby waits to take a lost member's place and is never sent away. A node that waits beyond that is pending: it may
enlarge the world if there is room, and leaves after the pend timeout if there never is. A node that came and went again
and again is let in later and later, because each of its visits costs all workers a restart; a round that opens for another
reason takes it at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Micros, NodeId, NodeRank

SHORT_VISIT = 60.0
"""Seconds: a node that was lost so soon after it had entered the world may be one that comes and goes."""
FIRST_DELAY = 15.0
"""Seconds that it waits after the second short visit in a row; each further one doubles it."""
LONGEST_DELAY = 300.0


class Visits(Struct, frozen=True):
    """Short visits of a node rank, in a row."""

    count: int
    welcome_at: Micros
    """When the next one may enlarge the world."""


class Bystanders(Struct):
    left_out: dict[NodeId, Micros] = {}
    """Pending nodes, since when. Kept only where there is a pend timeout."""
    visits: dict[NodeRank, Visits] = {}

    def note_pending(self, pending: Iterable[NodeId], now: Micros) -> None:
        """These wait and are too many; all others are not left out, or no longer."""
        self.left_out = {node: self.left_out.get(node, now) for node in pending}

    def note_loss(self, node_rank: NodeRank, entered_at: Micros, now: Micros) -> None:
        """A member is gone. A long visit clears what was before."""
        if now - entered_at >= micros(SHORT_VISIT):
            self.visits.pop(node_rank, None)
            return
        known = self.visits.get(node_rank)
        count = 1 if known is None else known.count + 1
        # A first short visit may be bad luck and costs nothing.
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(count - 2, 16)) if count > 1 else 0.0
        self.visits[node_rank] = Visits(count, Micros(now + micros(delay)))

    def welcome_at(self, node_rank: NodeRank) -> Micros:
        known = self.visits.get(node_rank)
        return Micros(0) if known is None else known.welcome_at
