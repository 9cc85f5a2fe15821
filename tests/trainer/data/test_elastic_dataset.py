"""A map-style dataset over shards: several ranks and several worker processes read every record once, and report what they have read."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from dlrover.protocol.errors import ConfigError, Rejected  # noqa: E402
from dlrover.protocol.messages.data import Consumption, ExchangeShards, ShardsGiven  # noqa: E402
from dlrover.trainer.data.shard_feed import DataUnavailable  # noqa: E402
from dlrover.trainer.sharding_client import IndexShardingClient  # noqa: E402
from dlrover.trainer.stand_in import StandIn  # noqa: E402
from dlrover.trainer.torch.elastic_dataset import ElasticDataset  # noqa: E402
from tests.trainer.shared_job import JobManager, RankLink, SharedJob  # noqa: E402

LARGE = 640
"""Records, so many that one rank cannot hold all of them while another wants one."""


class Numbers(ElasticDataset):
    def read_sample(self, index: int) -> int:
        return index


def numbers(link: Any, size: int = 64, batch: int = 4, epochs: int = 1, **options: Any) -> Numbers:
    return Numbers("numbers", size, batch, epochs, link=link, **options)


def state_after(count: int, size: int) -> dict[str, str]:
    """Of a job that has read so many of the first records."""
    dataset = numbers(StandIn(), size)
    for _ in range(count):
        dataset[0]
    dataset.step(count)
    state = dataset.state_dict()
    dataset.close()
    assert state is not None
    return state


def test_a_state_that_cannot_be_used_is_an_error_and_reading_goes_on() -> None:
    dataset = numbers(StandIn())
    seen = [dataset[0] for _ in range(3)]
    for state in ({"shards": "rubbish"}, {}):
        with pytest.raises(Rejected):
            dataset.load_state_dict(state)
    seen += [dataset[0] for _ in range(61)]
    assert seen == list(range(64))
    dataset.close()


@pytest.mark.parametrize(("num_workers", "method"), [(0, None), (1, "fork"), (2, "fork"), (2, "spawn")])
def test_a_report_names_the_records_of_the_batch(num_workers: int, method: str | None) -> None:
    """Processes read ahead and at different speeds, and what they have read ahead is not reported."""
    dataset = numbers(StandIn(), shuffle=True)
    seen: list[int] = []
    for batch in DataLoader(dataset, 4, num_workers=num_workers, multiprocessing_context=method):
        seen += batch.tolist()
        dataset.step()
        if len(seen) == 20:
            break
    assert Counter(unread(dataset) + seen) == Counter(range(64))
    for batch in DataLoader(dataset, 4, num_workers=num_workers, multiprocessing_context=method):
        seen += batch.tolist()
        dataset.step()
    assert Counter(seen) == Counter(range(64)), "the second pass begins with what the first read ahead"
    assert unread(dataset) == []
    dataset.close()


def unread(dataset: Numbers) -> list[int]:
    """What a new job would read that goes on from here."""
    state = dataset.state_dict()
    assert state is not None
    other = numbers(StandIn(), shuffle=True)
    other.load_state_dict(state)
    found = [record for batch in DataLoader(other, 4) for record in batch.tolist()]
    other.close()
    return found


def test_processes_that_live_on_begin_a_second_pass_with_what_is_unread() -> None:
    dataset = numbers(StandIn())
    loader = DataLoader(dataset, 4, num_workers=2, persistent_workers=True)
    first = next(iter(loader)).tolist()
    dataset.step()
    seen = list(first)
    for batch in loader:
        seen += batch.tolist()
        dataset.step()
    assert seen == list(range(64))
    dataset.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_last_batch_is_short_and_reported_as_it_is(num_workers: int) -> None:
    """The rest of the records is another rank's, so the data end in the middle of a batch."""
    job = SharedJob(2)
    dataset = numbers(RankLink(job, 0), 22)
    given = job.ask(1, ExchangeShards(dataset="numbers", want=1))
    assert isinstance(given, ShardsGiven)
    [other] = given.shards
    assert (other.start, other.end) == (0, 8)
    sizes, seen = [], []
    for batch in DataLoader(dataset, 4, num_workers=num_workers):
        sizes.append(len(batch))
        seen += batch.tolist()
        dataset.step()
        if len(seen) == 14:
            job.ask(1, ExchangeShards(dataset="numbers", consumed=(Consumption(other.id, 8),)))
    assert (sizes, seen) == ([4, 4, 4, 2], list(range(8, 22)))
    assert dataset._client._feed.flush()
    assert dataset._client._feed.books.state().is_complete
    dataset.close()


def test_a_report_never_names_more_than_was_handed_out() -> None:
    dataset = numbers(StandIn())
    assert dataset.__getitems__([0, 1]) == [0, 1]
    dataset.step(4)
    dataset.step()
    assert json.loads(dataset.state_dict()["shards"])["num_consumed"] == 2  # type: ignore[index]
    assert [dataset[0] for _ in range(6)] == [2, 3, 4, 5, 6, 7]
    dataset.step()
    assert json.loads(dataset.state_dict()["shards"])["num_consumed"] == 6, "a batch of single ones"  # type: ignore[index]
    dataset.close()


@pytest.mark.parametrize("batch_size", [4, 1])
def test_another_order_of_the_positions_is_an_error_where_processes_read(batch_size: int) -> None:
    dataset = numbers(StandIn())
    positions = list(reversed(range(64)))
    with pytest.raises((ConfigError, DataUnavailable), match="no sampler"):
        list(DataLoader(dataset, batch_size, sampler=positions, num_workers=2))
    dataset.close()


def test_a_pass_ends_when_the_data_go_back() -> None:
    dataset = numbers(StandIn())
    state = dataset.state_dict()
    batches = iter(DataLoader(dataset, 4, num_workers=1))
    next(batches)
    dataset.load_state_dict(state)
    with pytest.raises(DataUnavailable, match="This iterator has ended"):
        list(batches)
    assert next(iter(DataLoader(dataset, 4, num_workers=1))).tolist() == [0, 1, 2, 3]
    dataset.close()


class Doubled(Numbers):
    def __getitem__(self, position: int) -> int:
        return 2 * int(super().__getitem__(position))


def test_a_subclass_may_make_its_records_itself() -> None:
    dataset = Doubled("numbers", 10, 4, 1, link=StandIn())
    found = []
    for batch in DataLoader(dataset, 4, num_workers=2):
        found.append(batch.tolist())
        dataset.step()
    assert found == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert dataset._client._feed.flush()
    assert dataset._client._feed.books.state().is_complete
    dataset.close()


def test_a_client_of_single_records_takes_nothing_before_it_is_asked() -> None:
    """Shards that it held would be of the past when another rank restores."""
    job = SharedJob(2)
    clients = [
        IndexShardingClient("i", 4, 1, 32, num_minibatches_per_shard=2, link=RankLink(job, rank)) for rank in (0, 1)
    ]
    done = IndexShardingClient("i", 4, 1, 32, num_minibatches_per_shard=2, link=StandIn())
    [done.fetch_sample_index() for _ in range(8)]
    done.report_batch_done(8)
    assert clients[0].restore_shard_from_checkpoint(done.get_shard_checkpoint())
    assert [clients[1].fetch_sample_index() for _ in range(24)] == list(range(8, 32))
    clients[1].report_batch_done(24)
    assert clients[1]._feed.flush()
    assert clients[1]._feed.books.state().is_complete
    for each in (*clients, done):
        each.close()


def read_rest(rank: int, job: Any, folder: str, state: dict[str, str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    dataset = numbers(RankLink(job, rank), LARGE)
    dataset[0]  # both hold shards before they load anything
    dist.barrier()
    with pytest.raises(Rejected, match="cannot be read"):
        dataset.load_state_dict({"shards": "rubbish"} if rank == 0 else None)  # type: ignore[arg-type]
    dataset.load_state_dict(state if rank == 0 else None)  # type: ignore[arg-type]
    seen = []
    while True:
        try:
            seen.append(dataset[0])
        except StopIteration:
            break
        dataset.step(1)
    dataset.close()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def test_all_ranks_go_on_where_the_state_says(tmp_path: Path) -> None:
    with JobManager() as manager:
        job = manager.SharedJob(2)  # type: ignore[attr-defined]
        mp.start_processes(read_rest, (job, str(tmp_path), state_after(16, LARGE)), nprocs=2, start_method="spawn")
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert Counter(seen[0] + seen[1]) == Counter(range(16, LARGE))
