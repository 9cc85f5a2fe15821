"""The clients of dynamic data sharding, alone in their process: everything is read, once, and bad input is named."""

from __future__ import annotations

import json
import multiprocessing
import queue
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import pytest

from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.data import ExchangeShards, ShardsGiven, Supply, TaskType
from dlrover.protocol.messages.job import Reply, WorkerRequest
from dlrover.trainer.agent_link import Link
from dlrover.trainer.data.shard_feed import DataUnavailable
from dlrover.trainer.sharding_client import IndexShardingClient, Shard, ShardingClient
from dlrover.trainer.stand_in import StandIn
from tests.trainer.shared_job import RankLink, SharedJob


class WatchedLink:
    """A stand-in that remembers what it was asked, and can be away."""

    def __init__(self) -> None:
        self.inner = StandIn()
        self.asked: list[WorkerRequest] = []
        self.is_away = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        self.asked.append(request)
        assert self.may_answer.wait(30)
        if self.is_away:
            raise Unavailable("nobody there")
        return self.inner.ask(request, timeout=timeout)

    @property
    def exchanges(self) -> list[ExchangeShards]:
        return [each for each in self.asked if isinstance(each, ExchangeShards)]


@pytest.fixture
def link() -> WatchedLink:
    return WatchedLink()


def client(link: Link, size: int = 100, batch: int = 4, epochs: int = 1, **options: Any) -> ShardingClient:
    return ShardingClient("d", batch, epochs, size, link=link, **({"num_minibatches_per_shard": 2} | options))


def records(shards: list[Shard]) -> Counter[int]:
    return Counter(index for shard in shards for index in shard.record_indices)


def read(client: ShardingClient) -> Iterator[Shard]:
    while (shard := client.fetch_shard()) is not None:
        yield shard
        left = shard.end - shard.start
        while left > 0:
            client.report_batch_done(min(4, left))
            left -= 4


@pytest.mark.parametrize("storage", ["", "table", "text"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_is_read_once(link: WatchedLink, storage: str, shuffle: bool) -> None:
    with client(link, epochs=2, shuffle=shuffle, storage_type=storage) as reader:
        shards = list(read(reader))
    assert records(shards) == Counter(dict.fromkeys(range(100), 2))
    assert all(len(shard.record_indices) == shard.end - shard.start for shard in shards)
    is_shuffled = [index for shard in shards[:13] for index in shard.record_indices] != list(range(100))
    assert is_shuffled == shuffle


def test_the_example_of_the_documents(link: WatchedLink) -> None:
    with client(link, size=100, batch=16, epochs=2) as reader:
        shards = [(shard.start, shard.end) for shard in read(reader)]
    assert shards == [(0, 32), (32, 64), (64, 96), (96, 100)] * 2


def test_a_report_goes_to_shards_in_the_order_of_fetching(link: WatchedLink) -> None:
    with client(link) as reader:
        one, two = reader.get_task(), reader.get_task()
        assert one is not None
        assert two is not None
        assert reader.get_current_task() == one
        assert not reader.report_batch_done(5)
        assert reader.report_batch_done(5), "the first is complete, two records of the second are done"
        assert reader.get_current_task() == two
        assert not reader.report_batch_done(1, task_ids=[one.task_id]), "it is not pending any more"
        assert reader.report_batch_done(6, task_ids=[two.task_id])
        assert not reader.report_batch_done(1)


def test_a_report_without_a_number_is_a_batch(link: WatchedLink) -> None:
    with client(link) as reader:
        reader.get_task()
        assert [reader.report_batch_done(), reader.report_batch_done()] == [False, True]


def test_unreadable_data_come_again_and_are_set_aside(link: WatchedLink) -> None:
    with client(link, size=16) as reader:
        starts = []
        for _ in range(4):
            task = reader.get_task()
            assert task is not None
            starts.append(task.shard.start)
            reader.report_batch_done(err_msg="broken line")
            assert reader._feed.flush()
            reader._feed.unused(list(reader._feed._taken.values()))
        assert starts.count(0) >= 2
        reader.report_all_task_error("all broken")


def test_the_training_thread_does_not_wait_for_the_master_when_data_are_ahead(link: WatchedLink) -> None:
    with client(link, ahead=4) as reader:
        reader.fetch_shard()
        with reader._feed._news:
            assert reader._feed._news.wait_for(lambda: len(reader._feed._queue) >= 3, timeout=30)
        link.may_answer.clear()
        for _ in range(3):
            assert reader.fetch_shard() is not None
        reader.report_batch_done(8)
        link.may_answer.set()


def test_many_shards_go_into_one_message(link: WatchedLink) -> None:
    with client(link, size=80_000, ahead=64) as reader:
        shards = list(read(reader))
    assert records(shards) == Counter(range(80_000))
    assert len(link.exchanges) < len(shards) / 8


def test_a_master_that_is_away_is_no_end_of_data(link: WatchedLink) -> None:
    reader = client(link)
    link.is_away = True
    with pytest.raises(DataUnavailable, match="No record is lost"):
        list(read(reader))
    reader.close()


def test_steps_of_the_model_travel_with_the_records(link: WatchedLink) -> None:
    with client(link) as reader:
        reader.get_task()
        reader.report_batch_done(3, step=7)
        assert reader._feed.flush()
        assert reader._feed.books.state().num_consumed == 3
        assert reader._feed.books.state().num_committed == 0
        assert reader._feed.unanswered() == []
        link.may_answer.clear()
        reader.report_batch_done(2, step=8)
        assert [(claim.start, claim.end, claim.step) for claim in reader._feed.unanswered()] == [(3, 5, 8)]
        link.may_answer.set()
        assert reader._feed.flush()


@pytest.mark.parametrize("tell", ["consumed", "failed", "unused", "waived"])
def test_who_waits_until_all_is_told_waits_for_the_answer(tell: str) -> None:
    """Of a message that is under way nobody knows whether the master has heard it, whatever it says."""
    is_under_way = threading.Event()

    class Noticed(WatchedLink):
        def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
            if isinstance(request, ExchangeShards) and getattr(request, tell):
                is_under_way.set()
            return super().ask(request, timeout=timeout)

    link = Noticed()
    with client(link, ahead=4) as reader:  # so many that the thread has nothing to ask for
        feed = reader._feed
        shard = feed.take()
        assert shard is not None
        link.may_answer.clear()
        if tell == "consumed":
            feed.consumed(shard, 3)  # without a step: no claim of a model says so
        elif tell == "failed":
            feed.failed(shard, "broken line")
        elif tell == "unused":
            feed.unused([shard])
        else:
            feed.waive("the loss is low")
        assert is_under_way.wait(30)
        assert not feed.flush(timeout=0.01)
        link.may_answer.set()
        assert feed.flush()


def test_a_checkpoint_is_restored(link: WatchedLink) -> None:
    reader = client(link, size=32)
    first = [next(read(reader)) for _ in range(1)]
    reader.report_batch_done(8)
    text = reader.get_shard_checkpoint()
    rest = list(read(reader))
    assert reader.restore_shard_from_checkpoint(text) is True
    assert records(list(read(reader))) == records(rest)
    assert records(first + rest) == Counter(range(32))
    assert reader.restore_shard_from_checkpoint("rubbish") is False
    reader.close()


def test_a_refused_checkpoint_changes_nothing(link: WatchedLink) -> None:
    with client(link, size=32) as reader:
        first = reader.fetch_shard()
        assert first is not None
        assert reader.restore_shard_from_checkpoint("rubbish") is False
        assert reader.report_batch_done(8), "the shard is still ours"
        rest = []
        while (shard := reader.fetch_shard(timeout=30)) is not None:
            rest.append(shard)
            reader.report_batch_done(8)
        assert records([first, *rest]) == Counter(range(32))
        assert reader._feed.flush()
        assert reader._feed.books.state().is_complete


def test_a_stream_that_cannot_begin_anew_goes_on(link: WatchedLink) -> None:
    with client(link, size=30, storage_type="kafka", partitions={"p0": 0}) as reader:
        first = reader.fetch_shard()
        assert first is not None
        with pytest.raises(Rejected, match="Nothing has changed"):
            reader.reset_dataset()
        assert reader.report_batch_done(8), "the shard is still ours"
        rest = reader.fetch_shard(timeout=10)
        assert rest is not None
        assert rest.start == 8


def test_a_closed_client_says_so_instead_of_waiting(link: WatchedLink) -> None:
    reader = client(link)
    reader.fetch_shard()
    reader.close()
    with pytest.raises(DataUnavailable, match="closed"):
        reader.fetch_shard()


def test_a_dataset_can_begin_anew(link: WatchedLink) -> None:
    with client(link, size=32) as reader:
        assert records(list(read(reader))) == Counter(range(32))
        reader.reset_dataset()
        assert records(list(read(reader))) == Counter(range(32))


def test_synchronous_workers_take_equal_numbers(link: WatchedLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with client(link, size=80) as reader:
        reader.set_max_shard_count()
        assert len(list(read(reader))) == 3
        reader.close()
    assert [each.waived for each in link.exchanges if each.waived] == ["every rank takes equally many shards"]


def test_equal_numbers_are_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart in the middle. Whoever is quicker has more ahead than its share, and gives it back."""
    job = SharedJob(2)
    with client(RankLink(job, 0), size=80) as before:
        shards = read(before)
        for _ in range(7):
            next(shards)
    monkeypatch.setenv("WORLD_SIZE", "2")
    readers = [client(RankLink(job, rank), size=80, ahead=4) for rank in (0, 1)]
    for reader in readers:
        reader.set_max_shard_count()
    seen = [list(read(reader)) for reader in readers]
    assert [len(each) for each in seen] == [2, 2]
    read_now = records(seen[0] + seen[1])
    # A shard that was asked back for an idle worker comes in halves, and a half may be what is left over.
    assert not read_now - Counter(range(48, 80))
    assert read_now.total() in (28, 32)
    for reader in readers:
        reader.close()


def test_what_is_given_back_while_the_end_is_on_its_way_comes_again() -> None:
    """The master says that nothing is left while the asker itself holds the rest: then that is still true for everybody but the asker."""
    held: queue.Queue[Any] = queue.Queue()
    is_given_back = threading.Event()

    class GivingBack(WatchedLink):
        def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
            reply = super().ask(request, timeout=timeout)
            if isinstance(reply, ShardsGiven) and reply.supply is Supply.END and not is_given_back.is_set():
                feed.unused([held.get(timeout=30)])
                is_given_back.set()
            return reply

    with client(GivingBack(), size=8) as reader:
        feed = reader._feed
        first = feed.take()
        held.put(first)
        assert is_given_back.wait(30)
        again = feed.take()
        assert first is not None
        assert again is not None
        assert (again.start, again.end) == (first.start, first.end)
        reader._feed.unused([again])


def test_who_stops_early_says_so(link: WatchedLink) -> None:
    with client(link, must_finish=True, skip_bad_data=True) as reader:
        reader.fetch_shard()
        reader.stop_early("the loss is low")
        assert reader._feed.books.state().waived == "the loss is low"


def test_a_stream_is_read_by_partition(link: WatchedLink) -> None:
    with client(link, size=30, storage_type="kafka", partitions={"p0": 0, "p1": 100}) as reader:
        shards = list(read(reader))
    assert sum(shard.end - shard.start for shard in shards) == 30
    assert {shard.name for shard in shards} == {"p0", "p1"}


def test_facts_about_the_dataset(link: WatchedLink) -> None:
    with client(link, size=102, epochs=3, task_type=TaskType.EVALUATION) as reader:
        assert reader.get_minibatch_count_per_epoch() == 25
        assert reader.get_total_sample_num() == 306
        assert reader.get_current_epoch() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "at least 1"),
        ({"batch": 0}, "at least 1"),
        ({"size": 3}, "fewer than one batch"),
        ({"storage_type": "kafka"}, "give its partitions"),
    ],
)
def test_bad_parameters_are_refused_at_once(link: WatchedLink, options: dict[str, Any], words: str) -> None:
    with pytest.raises(Rejected, match=words):
        client(link, **options)


def test_an_unknown_storage_is_named(link: WatchedLink) -> None:
    with pytest.raises(ConfigError, match="'tape' is unknown"):
        client(link, storage_type="tape")


def test_another_cut_of_the_same_name_is_refused(link: WatchedLink) -> None:
    with client(link), pytest.raises(Rejected, match="size 100 and 101"):
        client(link, size=101)


# Records for several processes.


def collect(client: IndexShardingClient, found: Any) -> None:
    seen = []
    while True:
        try:
            seen.append(client.fetch_sample_index())
        except StopIteration:
            break
    found.put(seen)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_the_records(link: WatchedLink, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        # Another test may have ended the tracker that this process shares with all of them.
        warnings.simplefilter("ignore")
        resource_tracker.ensure_running()
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(multiprocessing, "get_context", lambda: context)
    reader = IndexShardingClient(
        "i", 4, 1, 100, num_minibatches_per_shard=2, shuffle=True, storage_type="text", link=link
    )
    monkeypatch.undo()
    found = context.Queue()
    processes = [context.Process(target=collect, args=(reader, found), daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    seen = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert Counter(index for each in seen for index in each) == Counter(range(100))
    reader.close()


def test_the_indices_begin_again_after_a_restore(link: WatchedLink) -> None:
    reader = IndexShardingClient("i", 4, 1, 32, num_minibatches_per_shard=2, link=link)
    first = [reader.fetch_sample_index() for _ in range(8)]
    reader.report_batch_done(8)
    text = reader.get_shard_checkpoint()
    assert json.loads(text)["num_consumed"] == 8
    assert reader.restore_shard_from_checkpoint(text) is True
    rest = [reader.fetch_sample_index() for _ in range(24)]
    with pytest.raises(StopIteration):
        reader.fetch_sample_index()
    assert sorted(first + rest) == list(range(32))
    reader.close()


def test_the_indices_go_on_after_a_refused_restore(link: WatchedLink) -> None:
    with IndexShardingClient("i", 4, 1, 64, num_minibatches_per_shard=2, link=link) as reader:
        seen = [reader.fetch_sample_index() for _ in range(5)]
        assert reader.restore_shard_from_checkpoint("rubbish") is False
        seen += [reader.fetch_sample_index() for _ in range(59)]
        assert seen == list(range(64))
