"""What collectors have measured, as the master keeps it for a while: by kind, bounded in age and in size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Micros, NodeId
from dlrover.protocol.messages.watch import SampleTaken

LIFE = 600.0
"""Seconds after which a sample says nothing any more. By the master's clock: those of nodes may be anywhere."""
MAX_SIZE = 200_000
"""Numbers and lines of text in all; then the oldest go, whatever their kind."""
MAX_KINDS = 64


class Sample(Struct, frozen=True):
    at: Micros
    """When it came."""
    taken: SampleTaken

    @property
    def size(self) -> int:
        return 1 + len(self.taken.numbers) + len(self.taken.text) // 80


class Samples:
    def __init__(self, *, max_size: int = MAX_SIZE) -> None:
        self._max_size = max_size
        self._all: deque[Sample] = deque()
        self._kinds: dict[str, int] = {}
        """How many there are of each."""
        self._size = 0

    def add(self, taken: SampleTaken, now: Micros) -> None:
        self.expire(now)
        if taken.kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            return
        sample = Sample(now, taken)
        self._all.append(sample)
        self._kinds[taken.kind] = self._kinds.get(taken.kind, 0) + 1
        self._size += sample.size
        while self._size > self._max_size and len(self._all) > 1:
            self._drop_oldest()

    def expire(self, now: Micros) -> None:
        while self._all and self._all[0].at <= now - micros(LIFE):
            self._drop_oldest()

    def of_kind(self, kind: str) -> Iterator[Sample]:
        """Oldest first."""
        return (sample for sample in self._all if sample.taken.kind == kind) if kind in self._kinds else iter(())

    def newest(self) -> list[Sample]:
        """Of each node and kind."""
        found: dict[tuple[NodeId, str], Sample] = {}
        for sample in self._all:
            found[sample.taken.node, sample.taken.kind] = sample
        return list(found.values())

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def _drop_oldest(self) -> None:
        oldest = self._all.popleft()
        self._size -= oldest.size
        self._kinds[oldest.taken.kind] -= 1
        if not self._kinds[oldest.taken.kind]:
            del self._kinds[oldest.taken.kind]
