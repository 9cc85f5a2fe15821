"""
What is not taken yet of a dataset: the rest of an epoch behind its cursor, and what lies beyond the offsets of a stream.

Nothing is stored for it: the order of shards and records is computed (`permutation`), the same in every process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from msgspec import Struct

from dlrover.agreed.permutation import Permutation
from dlrover.core.data.ranges import Range
from dlrover.protocol.messages.data import DatasetSpec, StorageKind


class FreshData(Struct):
    spec: DatasetSpec
    number: int = 1
    """In the job: names its deadlines."""
    epoch: int = 0
    cursor: int = 0
    """Shards of the epoch that were taken from its order."""
    offsets: dict[str, int] = {}
    """Of a stream: the next fresh offset of each partition."""
    ends: dict[str, int] = {}
    """Of a stream: where partitions end, as far as that is known."""
    num_left: int = -1
    """Of a stream with a size: records that are still fresh; -1: no limit."""
    is_over: bool = False
    """Of a stream that grows: its ends are final."""
    turn: int = 0
    """Of a stream: the partition to look at first."""

    @property
    def is_stream(self) -> bool:
        return self.spec.storage is StorageKind.STREAM

    @property
    def num_shards(self) -> int:
        """Of one epoch."""
        return 0 if self.is_stream else -(-self.spec.size // self.spec.shard_size)

    @property
    def is_last_epoch(self) -> bool:
        return 0 < self.spec.num_epochs <= self.epoch + 1

    @property
    def has_fresh(self) -> bool:
        if self.is_stream:
            return any(True for _ in self.open_partitions())
        return bool(self.num_shards) and (self.cursor < self.num_shards or not self.is_last_epoch)

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing fresh will ever come. A stream may grow until all its partitions have an end."""
        if not self.is_stream:
            return not self.has_fresh
        if self.num_left == 0:
            return True
        are_ends_final = (
            self.is_over if self.spec.grows else bool(self.offsets) and all(part in self.ends for part in self.offsets)
        )
        return are_ends_final and not self.has_fresh

    @property
    def num_fresh(self) -> int:
        """Records of this epoch that are not taken."""
        if self.is_stream:
            known = sum(max(0, self.ends[part] - at) for part, at in self.offsets.items() if part in self.ends)
            return known if self.num_left < 0 else self.num_left
        if self.cursor >= self.num_shards:
            return 0
        left = (self.num_shards - self.cursor) * self.spec.shard_size
        last = self.num_shards - 1
        short = self.num_shards * self.spec.shard_size - self.spec.size
        return left - short if self._place_of(last) >= self.cursor else left

    def fresh_ranges(self) -> list[Range]:
        """What is left of the epoch, in its order: only for datasets of which a list is wanted."""
        order = self._order()
        indices = [order.at(place) if self._shuffles_shards else place for place in range(self.cursor, self.num_shards)]
        return [self._shard_range(index) for index in indices]

    def reading_order(self, each: Range) -> tuple[int, str, int, int, int]:
        """A key to sort by: what came first the first time comes first again."""
        place = 0
        if self._shuffles_shards and not each.listing:
            order = _order_of(self.num_shards, self.spec.seed, each.epoch)
            place = order.place_of(each.start // self.spec.shard_size)
        return each.epoch, each.partition, each.listing, place, each.start

    def take_fresh_shard(self) -> Range:
        index = self._order().at(self.cursor) if self._shuffles_shards else self.cursor
        self.cursor += 1
        return self._shard_range(index)

    def _shard_range(self, index: int) -> Range:
        start = index * self.spec.shard_size
        return Range(self.epoch, start, min(start + self.spec.shard_size, self.spec.size))

    def take_of_partition(self, part: str) -> Range:
        start = self.offsets[part]
        size = self.spec.shard_size if self.num_left < 0 else min(self.spec.shard_size, self.num_left)
        end = min(start + size, self.ends.get(part, start + size))
        self.offsets[part] = end
        if self.num_left > 0:
            self.num_left -= end - start
        self.turn = (list(self.offsets).index(part) + 1) % len(self.offsets)
        return Range(0, start, end, part)

    def open_partitions(self) -> Iterator[str]:
        """Those with something fresh, in turn."""
        if self.num_left == 0:
            return
        parts = list(self.offsets)
        for part in parts[self.turn :] + parts[: self.turn]:
            is_endless = part not in self.ends and not self.spec.grows
            if is_endless or self.offsets[part] < self.ends.get(part, 0):
                yield part

    @property
    def _shuffles_shards(self) -> bool:
        return self.spec.shuffle and self.spec.storage is StorageKind.TABLE

    def _order(self) -> Permutation:
        return _order_of(self.num_shards, self.spec.seed, self.epoch)

    def _place_of(self, index: int) -> int:
        return self._order().place_of(index) if self._shuffles_shards else index


@functools.lru_cache(maxsize=64)
def _order_of(size: int, seed: int, epoch: int) -> Permutation:
    return Permutation(size, seed, epoch)
