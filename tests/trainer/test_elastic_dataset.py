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

from dlrover.protocol.errors import Rejected  # noqa: E402
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
    assert clients[1]._feed.state().is_complete
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
