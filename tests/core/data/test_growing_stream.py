"""A stream that grows, under any order of writers, late watchers, readers, crashes and returns to older models: each record once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.core.data.commands import _grow
from dlrover.core.data.dataset import Dataset
from dlrover.core.data.leases import LeaseHolder
from dlrover.protocol.messages.data import DatasetSpec, ExtendStream, LeasedShard, StorageKind
from dlrover.protocol.messages.identity import Incarnation, NodeId, Round
from dlrover.protocol.messages.job import Micros

SPEC = DatasetSpec(name="d", size=-1, shard_size=4, storage=StorageKind.STREAM, grows=True)
PARTS = ("p", "q", "r")

Grow = st.tuples(st.just("grow"), st.sampled_from(PARTS), st.integers(1, 9))
Late = st.tuples(st.just("late"), st.sampled_from(PARTS), st.integers(0, 9))
Take = st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 3))
Train = st.tuples(st.just("train"), st.integers(0, 2), st.integers(1, 6))
Back = st.tuples(st.just("back"), st.integers(0, 4), st.just(0))


class Reading:
    def __init__(self) -> None:
        self.books = Dataset(SPEC)
        self.ends: dict[str, int] = {}
        self.step = 0
        self.model: list[tuple[int, str, int]] = []
        """Step, partition and place of everything that it has seen."""
        self.restore(0)

    def restore(self, step: int) -> None:
        self.step = step
        self.model = [each for each in self.model if each[0] <= step]
        self.books.restore(step)
        self.readers = [LeaseHolder(NodeId(n), 0, Incarnation(1), Round(1), Micros(0)) for n in range(3)]
        self.held: list[list[LeasedShard]] = [[], [], []]
        self.done: Counter[int] = Counter()

    def tell(self, ends: dict[str, int], *, is_over: bool = False) -> None:
        _grow(ExtendStream(dataset="d", partitions=dict.fromkeys(ends, 0), ends=ends, is_over=is_over), self.books)

    def train(self, who: int, count: int) -> None:
        self.step += 1
        while count and self.held[who]:
            shard = self.held[who][0]
            start = shard.start + self.done[shard.id]
            part = min(count, shard.end - start)
            self.books.consume(shard.id, part, self.step)
            self.model += [(self.step, shard.partition, place) for place in range(start, start + part)]
            self.done[shard.id] += part
            count -= part
            if start + part == shard.end:
                self.held[who].pop(0)

    def check(self) -> None:
        seen = Counter((part, place) for _, part, place in self.model)
        assert all(count == 1 for count in seen.values()), "seen twice"
        assert all(place < self.ends[part] for part, place in seen), "seen before it was there"
        assert not self.books.is_complete


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(Grow, Late, Take, Train, Back), max_size=40))
def test_each_record_of_a_growing_stream_is_seen_once(events: list[tuple[str, object, int]]) -> None:
    reading = Reading()
    for word, who, number in events:
        if word == "grow":
            part = str(who)
            reading.ends[part] = reading.ends.get(part, 0) + number
            reading.tell({part: reading.ends[part]})
        elif word == "late":  # a watcher that saw less
            reading.tell({str(who): min(number, reading.ends.get(str(who), 0))})
        elif word == "take":
            assert isinstance(who, int)
            reading.held[who] += reading.books.take(reading.readers[who], number)
        elif word == "train":
            assert isinstance(who, int)
            reading.train(who, number)
        else:
            assert isinstance(who, int)
            reading.restore(max(0, reading.step - who))
        reading.check()
    reading.tell(reading.ends, is_over=True)
    reading.restore(reading.step)
    while shards := reading.books.take(reading.readers[0], 3):
        reading.held[0] += shards
        reading.train(0, 100)
    assert reading.books.is_complete
    seen = Counter((part, place) for _, part, place in reading.model)
    assert seen == Counter({(part, place): 1 for part, end in reading.ends.items() for place in range(end)})
    for part in reading.ends:
        places = [place for _, name, place in reading.model if name == part]
        assert places == sorted(places), "the records of a partition keep their order"
