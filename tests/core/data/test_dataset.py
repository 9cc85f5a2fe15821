"""The books of a dataset: whatever happens, the model that trains on has seen each record exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlrover.core.data.checkpoint_text import read_checkpoint, write_checkpoint
from dlrover.core.data.dataset import Dataset
from dlrover.core.data.leases import LeaseHolder
from dlrover.core.data.ranges import Range
from dlrover.protocol.messages.data import NO_STEP, Claim, DatasetSpec, LeasedShard, StorageKind
from dlrover.protocol.messages.identity import Incarnation, NodeId, Round
from dlrover.protocol.messages.job import Micros


def dataset(size: int = 100, shard_size: int = 10, **options: object) -> Dataset:
    return Dataset(DatasetSpec(name="d", size=size, shard_size=shard_size, **options))  # type: ignore[arg-type]


def stream(**options: object) -> Dataset:
    books = dataset(size=-1, shard_size=100, storage=StorageKind.STREAM, **options)
    books.offsets = {"p0": 0, "p1": 1000}
    return books


def reader(node: int = 0, local_rank: int = 0) -> LeaseHolder:
    return LeaseHolder(NodeId(node), local_rank, Incarnation(1), Round(1), Micros(0))


def read_all(books: Dataset, who: LeaseHolder) -> list[LeasedShard]:
    shards = []
    while given := books.take(who, 1):
        shards += given
        for shard in given:
            books.consume(shard.id, shard.end - shard.start, NO_STEP)
    return shards


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("size", [1, 99, 100, 101])
def test_each_epoch_holds_every_record_once(size: int, shuffle: bool) -> None:
    books = dataset(size, num_epochs=3, shuffle=shuffle, seed=5)
    shards = read_all(books, reader())
    orders = []
    for epoch in range(3):
        records = [place for shard in shards if shard.epoch == epoch for place in range(shard.start, shard.end)]
        assert sorted(records) == list(range(size))
        orders.append(tuple(records))
    assert (len(set(orders)) > 1) == (shuffle and size > 10), "each epoch has its own order"
    assert books.is_complete
    assert (books.num_consumed, books.num_committed) == (3 * size, 3 * size)


def test_a_billion_records_cost_nothing() -> None:
    books = dataset(10**9, shard_size=100, shuffle=True, num_epochs=0)
    assert len(books.take(reader(), 1000)) == 1000
    assert books.num_fresh == 10**9 - 100_000
    assert len(books.held) == 1000


def test_what_comes_back_is_handed_out_first_and_in_order() -> None:
    books, who, other = dataset(), reader(0), reader(1)
    first = books.take(who, 3)
    books.consume(first[0].id, 4, step=1)
    books.end_leases([who])
    again = books.take(other, 4)
    assert [(shard.start, shard.end) for shard in again] == [(4, 10), (10, 20), (20, 30), (30, 40)]
    assert not {shard.id for shard in again} & {shard.id for shard in first}, "numbers are never used again"


def test_a_model_that_goes_back_reads_again_what_it_has_not_seen() -> None:
    books, who = dataset(), reader()
    one, two = books.take(who, 2)
    books.consume(one.id, 10, step=1)
    books.consume(two.id, 3, step=2)
    books.consume(two.id, 3, step=3)
    assert books.restore(2) == []
    assert books.num_consumed == 13
    assert [(shard.start, shard.end) for shard in books.take(who, 2)] == [(13, 20), (20, 30)]


@pytest.mark.parametrize("storage", [StorageKind.TABLE, StorageKind.TEXT])
def test_a_single_reader_sees_the_same_order_after_the_model_went_back(storage: StorageKind) -> None:
    undisturbed = [shard.start for shard in read_all(dataset(shuffle=True, storage=storage), reader())]
    books, who = dataset(shuffle=True, storage=storage), reader()
    seen = []
    for step in range(6):
        [shard] = books.take(who, 1)
        books.take(who, 1)  # one is always ahead
        books.consume(shard.id, shard.end - shard.start, step)
        seen.append(shard.start)
        books.end_leases(books.all_readers())
        if step == 4:
            books.restore(1)
            seen = seen[:2]
    assert seen + [shard.start for shard in read_all(books, reader(1))] == undisturbed


def test_a_committed_step_is_never_given_back() -> None:
    books, who = dataset(), reader()
    [shard] = books.take(who, 1)
    books.consume(shard.id, 5, step=1)
    books.consume(shard.id, 5, step=2)
    books.commit(1)
    assert (books.num_committed, books.num_consumed) == (5, 10)
    books.restore(0)
    assert [(each.start, each.end) for each in books.take(who, 1)] == [(5, 10)]


def test_a_restored_model_takes_back_what_only_it_knows_of() -> None:
    books, who = dataset(), reader()
    [shard] = books.take(who, 1)
    books.consume(shard.id, 2, step=1)
    # It consumed four more records in step 2, and its word about them was lost with it.
    assert books.restore(2, [Claim(0, 0, 2, 1), Claim(0, 2, 6, 2)]) == []
    assert books.num_consumed == 6
    assert [(each.start, each.end) for each in books.take(who, 1)] == [(6, 10)]


def test_claims_of_thousands_of_ranks_are_settled_in_one_pass() -> None:
    """By comparing each with each this would take hours, and the master would serve nobody meanwhile."""
    num_ranks = 10_000
    books, late = dataset(2 * num_ranks, shard_size=1), reader(1)
    shards = [shard for _ in range(2 * num_ranks) for shard in books.take(late, 1)]
    for shard in shards[:num_ranks]:
        books.consume(shard.id, 1, step=1)
    books.end_leases([late])
    assert len(books.returned) == num_ranks
    assert books.restore(2, [Claim(shard.epoch, shard.start, shard.end, 2) for shard in shards]) == []
    assert books.is_complete
    assert books.num_consumed == 2 * num_ranks


def test_a_claim_of_something_never_taken_is_not_believed() -> None:
    books = dataset()
    foreign = Claim(0, 50, 60, 1)
    assert books.restore(5, [foreign]) == [foreign]
    assert books.num_consumed == 0


def test_data_that_cannot_be_read_are_set_aside_in_the_end() -> None:
    books, who = dataset(20, max_errors=2), reader()
    outcomes = []
    for _ in range(3):
        [shard] = books.take(who, 1)
        assert shard.start == 0, "at the head of the queue each time"
        outcomes.append(books.fail(shard.id, "bad line"))
    assert outcomes == [False, False, True]
    assert [each.range for each in books.set_aside] == [Range(0, 0, 10)]
    assert [shard.start for shard in read_all(books, who)] == [10]
    assert books.is_complete


def test_lost_workers_never_use_up_a_shard() -> None:
    books = dataset(10)
    for life in range(20):
        who = reader(life)
        assert books.take(who, 1)
        books.end_leases([who])
    assert not books.set_aside


def test_towards_the_end_nobody_gets_a_heap() -> None:
    books, one, two = dataset(160), reader(0), reader(1)
    assert len(books.take(one, 100)) == 8
    assert len(books.take(two, 100)) == 2
    sizes = []
    while given := books.take(one, 100):
        sizes.append(len(given))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_an_idle_worker_gets_what_a_slow_one_has_not_begun() -> None:
    books, slow = dataset(), reader(0)
    ids = [shard.id for shard in books.take(slow, 5)]
    ids += [shard.id for shard in books.take(slow, 5)]
    read_all(books, reader(1))
    books.consume(ids[0], 1, step=1)
    assert books.recall()
    asked = list(slow.recalled)
    assert asked == ids[len(ids) - len(asked) :], "the last ones"
    assert len(asked) == 4
    books.give_back(asked)
    assert not slow.recalled
    assert len(books.take(reader(1), 10)) >= 1


def test_idle_workers_may_ask_as_often_as_there_are_others() -> None:
    """Looking at all readers for each of them would cost the master a second per second."""
    num_readers = 3_000
    books = dataset(2 * num_readers, shard_size=2)
    for number in range(num_readers):
        assert len(books.take(reader(number), 1)) == 1
    for _ in range(num_readers):
        assert books.recall()
    assert books.num_recalled == 1
    for id_ in list(books.held):
        books.consume(id_, 1, NO_STEP)
    for _ in range(100 * num_readers):
        assert not books.recall()


def test_partitions_of_a_stream_keep_their_order() -> None:
    books, one, two = stream(), reader(0), reader(1)
    first = books.take(one, 1) + books.take(two, 1)
    assert [(shard.partition, shard.start) for shard in first] == [("p0", 0), ("p1", 1000)]
    more = books.take(one, 2)
    assert {shard.partition for shard in more} == {"p0"}, "the other one is being read by somebody else"
    books.end_leases([two])
    assert books.take(one, 1)[0].partition == "p1"
    assert not books.take(two, 1), "both are being read"


def test_a_stream_with_a_size_ends_with_a_short_shard() -> None:
    books = stream()
    books.num_left = 450
    shards = read_all(books, reader())
    assert sorted(shard.end - shard.start for shard in shards) == [50, 100, 100, 100, 100]
    assert len({(shard.partition, shard.start) for shard in shards}) == 5
    assert books.is_complete


def test_a_stream_waits_for_its_ends() -> None:
    books = stream()
    books.ends = {"p0": 150}
    who = reader()
    for _ in range(8):
        books.take(who, 1)
    assert (books.offsets["p0"], books.offsets["p1"]) == (150, 1600)
    assert not books.is_exhausted, "more may come"
    books.ends["p1"] = 1600
    assert books.is_exhausted


class Training(RuleBasedStateMachine):
    """Workers of a model that trains, loses workers, goes back to older steps, and is written to storage now and then."""

    @initialize(
        size=st.integers(1, 60),
        shard_size=st.integers(1, 12),
        num_epochs=st.integers(1, 2),
        shuffle=st.booleans(),
        num_workers=st.integers(1, 4),
    )
    def begin(self, size: int, shard_size: int, num_epochs: int, shuffle: bool, num_workers: int) -> None:
        self.books = dataset(size, shard_size, num_epochs=num_epochs, shuffle=shuffle, seed=3)
        self.num_workers = num_workers
        self.step = self.committed = 0
        self.model: dict[int, list[Claim]] = {}
        self.kept: tuple[int, dict[int, list[Claim]], str] | tuple[()] = ()
        self.new_round()

    def new_round(self) -> None:
        self.readers = [reader(number) for number in range(self.num_workers)]
        self.queues: list[list[LeasedShard]] = [[] for _ in self.readers]
        self.done: dict[int, int] = {}

    @rule(number=st.integers(0, 3), want=st.integers(1, 5))
    def take(self, number: int, want: int) -> None:
        number %= self.num_workers
        self.queues[number] += self.books.take(self.readers[number], want)

    @rule(amounts=st.lists(st.integers(0, 7), min_size=4, max_size=4), is_told=st.booleans(), back=st.integers(0, 3))
    def train(self, amounts: list[int], is_told: bool, back: int) -> None:
        """One step of the model; if nobody told of it, the workers died right after it."""
        self.step += 1
        for number, amount in enumerate(amounts[: self.num_workers]):
            while amount and self.queues[number]:
                shard = self.queues[number][0]
                start = shard.start + self.done.get(shard.id, 0)
                count = min(amount, shard.end - start)
                self.model.setdefault(self.step, []).append(Claim(shard.epoch, start, start + count, self.step))
                if is_told:
                    self.books.consume(shard.id, count, self.step)
                self.done[shard.id] = self.done.get(shard.id, 0) + count
                amount -= count
                if start + count == shard.end:
                    self.queues[number].pop(0)
        if not is_told:
            self.restore(max(self.committed, self.step - back))

    @rule(number=st.integers(0, 3))
    def give_back(self, number: int) -> None:
        queue = self.queues[number % self.num_workers]
        unbegun = [shard for shard in queue if shard.id not in self.done][1:]
        self.books.give_back([shard.id for shard in unbegun])
        for shard in unbegun:
            queue.remove(shard)

    @rule(number=st.integers(0, 3))
    def recall(self, number: int) -> None:
        self.books.recall()
        number %= self.num_workers
        asked = list(self.readers[number].recalled)
        self.books.give_back([id_ for id_ in asked if id_ not in self.done])
        self.queues[number] = [shard for shard in self.queues[number] if shard.id not in asked or shard.id in self.done]

    @precondition(lambda self: self.step > self.committed)
    @rule(ahead=st.integers(0, 5))
    def write_checkpoint(self, ahead: int) -> None:
        self.committed = min(self.step, self.committed + ahead)
        self.books.commit(self.committed)

    @rule(back=st.integers(0, 5), num_workers=st.integers(1, 4))
    def crash(self, back: int, num_workers: int) -> None:
        self.num_workers = num_workers
        self.restore(max(self.committed, self.step - back))

    @precondition(lambda self: self.step > self.committed)
    @rule(back=st.integers(0, 5))
    def keep(self, back: int) -> None:
        """A checkpoint that somebody may want again, whatever is final by then."""
        step = max(self.committed, self.step - back)
        model = {at: list(claims) for at, claims in self.model.items() if at <= step}
        self.kept = step, model, write_checkpoint(self.books, step)

    @precondition(lambda self: self.kept)
    @rule()
    def go_back_by_name(self) -> None:
        """Workers of this very round hold shards already."""
        step, model, text = self.kept
        former, self.books = self.books, read_checkpoint(text, self.books)
        self.books.last_id = former.last_id
        self.books.take_over_leases(former, Round(1))
        self.step = self.committed = step
        self.model = {at: list(claims) for at, claims in model.items()}
        self.readers = [self.books.reader(NodeId(number), 0) or reader(number) for number in range(self.num_workers)]
        self.queues = [[shard for shard in queue if shard.id in self.books.held] for queue in self.queues]

    def restore(self, step: int) -> None:
        self.step = step
        self.model = {at: claims for at, claims in self.model.items() if at <= step}
        claims = [claim for at, each in self.model.items() if at > self.committed for claim in each]
        assert self.books.restore(step, claims) == []
        self.new_round()

    @invariant()
    def nothing_is_lost_or_seen_twice(self) -> None:
        if not hasattr(self, "books"):
            return
        seen = Counter(
            (c.epoch, place) for each in self.model.values() for c in each for place in range(c.start, c.end)
        )
        assert all(count == 1 for count in seen.values()), "seen twice"
        books = self.books
        under_way = Counter(
            (each.epoch, place)
            for each in [*books.returned, *(held.range for held in books.held.values())]
            for place in range(each.start, each.end)
        )
        assert not (seen & under_way)
        assert books.num_unbegun == sum(not held.is_begun for held in books.held.values())
        assert books.num_recalled == sum(len(who.recalled) for who in books.all_readers())
        assert books.num_consumed == sum(seen.values())
        complete = sum(books.spec.size for _ in range(books.epoch))
        assert sum(seen.values()) + sum(under_way.values()) + books.num_fresh == complete + books.spec.size

    def teardown(self) -> None:
        if not hasattr(self, "books"):
            return
        self.restore(self.step)
        last = read_all(self.books, self.readers[0])
        seen = Counter(
            (c.epoch, place) for each in self.model.values() for c in each for place in range(c.start, c.end)
        )
        seen.update((shard.epoch, place) for shard in last for place in range(shard.start, shard.end))
        spec = self.books.spec
        assert seen == Counter({(epoch, place): 1 for epoch in range(spec.num_epochs) for place in range(spec.size)})
        assert self.books.is_complete


TestTraining = Training.TestCase
TestTraining.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
