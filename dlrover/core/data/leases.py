"""
Who holds what of a dataset: leases of one life of a worker, copies that two workers read, and shards that were set aside.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.core.data.ranges import Range
from dlrover.protocol.messages.identity import Incarnation, NodeId, Round
from dlrover.protocol.messages.job import Micros


class LeaseHolder(Struct):
    """One life of a worker, and the shards it holds."""

    node: NodeId
    local_rank: int
    incarnation: Incarnation
    round: Round
    heard_at: Micros
    ids: dict[int, None] = {}
    recalled: dict[int, None] = {}
    """Of them: asked back, because others have nothing to do."""


class HeldShard(Struct):
    range: Range
    """What is left of the shard."""
    node: NodeId
    local_rank: int
    is_begun: bool = False
    given_at: Micros = Micros(0)
    twin: int = 0
    """The other copy, if a second worker got the same because this one is slow."""
    counted_to: int = -1
    """Of a copy: up to where the records count as consumed already, no matter which worker read them."""

    @property
    def open(self) -> Range:
        """What is not reported."""
        whole = self.range
        return Range(whole.epoch, max(whole.start, self.counted_to), whole.end, whole.partition, whole.listing)


class Outdone(Struct):
    """A copy whose twin was quicker: what its reader still says of it is heard and changes nothing."""

    node: NodeId
    local_rank: int
    num_left: int


class SetAside(Struct, frozen=True, array_like=True):
    range: Range
    message: str
