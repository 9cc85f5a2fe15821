"""
Readers of data, in the environment of the system under test (ours, or dlrover 0.6.1 in its own): nothing else is imported.

    python data_clients.py KIND shards --address HOST:PORT [--clients N] [--seconds S] [--pid MASTER]
    python data_clients.py KIND start --address HOST:PORT --records N [--storage text]
    python data_clients.py KIND steps --address HOST:PORT [--seconds S] [--pace S]
    python data_clients.py KIND sampler

It prints one line of JSON. Both systems are used through their public clients and make the same calls.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import statistics
import time
from typing import Any

FORK = multiprocessing.get_context("fork")
DEADLINE = 120.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
BATCH = 100
RECORDS = 1_000_000_000
SAMPLED = 1_000_000
REPLICAS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["ours", "dlrover-0.6.1"])
    parser.add_argument("part", choices=["shards", "start", "steps", "sampler"])
    parser.add_argument("--address", default="127.0.0.1:0", help="of the master; ours is reached by its agent's socket")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--pace", type=float, default=0.005, help="seconds that one training step lasts")
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--storage", default="")
    parser.add_argument("--pid", type=int, default=0, help="the master, whose CPU time and memory are told")
    args = parser.parse_args()
    parts = {"shards": shards, "start": start, "steps": steps, "sampler": sampler}
    print(json.dumps(parts[args.part](args)), flush=True)
    for process in multiprocessing.active_children():
        process.kill()
        process.join(DEADLINE)
    os._exit(0)  # threads of peers that nobody can stop must not keep us


def cpu_seconds(pid: int) -> float:
    if not pid:
        return 0.0
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def rss_mb(pid: int) -> float:
    if not pid:
        return 0.0
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def import_client() -> Any:
    """The same path in both: scripts of the original run with ours."""
    return importlib.import_module("dlrover.python.elastic_agent.sharding.client").ShardingClient


def make_client(args: argparse.Namespace, number: int, **options: Any) -> Any:
    """As worker number so-and-so, before anything of the library looks at the environment."""
    os.environ["DLROVER_MASTER_ADDR"] = args.address
    os.environ["NODE_ID"] = os.environ["WORKER_ID"] = os.environ["LOCAL_RANK"] = str(number)
    values: dict[str, Any] = {"num_minibatches_per_shard": 10, "shuffle": True, "storage_type": args.storage}
    return import_client()("bench", BATCH, 1, args.records, **(values | options))


# How many shards a second.


def shards(args: argparse.Namespace) -> dict[str, float]:
    """From the common start until everybody's last report has arrived; a shard is one batch, taken and reported."""
    import_client()
    barrier = FORK.Barrier(args.clients + 1)
    results: Any = FORK.SimpleQueue()
    for number in range(args.clients):
        FORK.Process(target=take_shards, args=(args, number, barrier, results), daemon=True).start()
    barrier.wait(DEADLINE)
    before, began_at = cpu_seconds(args.pid), time.monotonic()
    counts = [results.get() for _ in range(args.clients)]
    took, spent = time.monotonic() - began_at, cpu_seconds(args.pid) - before
    assert min(counts) >= 0, "the reports of a client did not arrive"
    figures = {"num": float(sum(counts)), "seconds": took, "cpu": spent, "rss_mb": rss_mb(args.pid)}
    return figures | {"fewest": float(min(counts)), "most": float(max(counts))}


def take_shards(args: argparse.Namespace, number: int, barrier: Any, results: Any) -> None:
    try:
        client = make_client(args, number, num_minibatches_per_shard=1)
        for _ in range(3):
            client.fetch_shard()
            client.report_batch_done()
        barrier.wait(DEADLINE)
        end_at, num = time.monotonic() + args.seconds, 0
        while time.monotonic() < end_at:
            shard = client.fetch_shard()
            assert shard is not None, "the data ended"
            client.report_batch_done()
            num += 1
        results.put(num if all_arrived(client) else -1)
        barrier.wait(DEADLINE)
    except BaseException:
        results.put(-1)
        barrier.abort()
        raise


def all_arrived(client: Any) -> bool:
    """Ours reports in the background; the original's call returns when its report has arrived."""
    feed = getattr(client, "_feed", None)
    return feed is None or bool(feed.flush(DEADLINE))


# How a large dataset begins.


def start(args: argparse.Namespace) -> dict[str, float]:
    import_client()
    before, began_at = rss_mb(args.pid), time.monotonic()
    client = make_client(args, 0)
    shard = client.fetch_shard()
    took = time.monotonic() - began_at
    assert shard is not None, "a billion records are no end"
    assert shard.end - shard.start == 10 * BATCH, shard
    for _ in range(200):
        client.report_batch_done()
        if client.get_current_task() is None:
            client.fetch_shard()
    all_arrived(client)
    return {"seconds": took, "rss_mb": rss_mb(args.pid), "grown_mb": rss_mb(args.pid) - before}


# What a training step pays.


def steps(args: argparse.Namespace) -> dict[str, float]:
    """Time of the training thread in the client, per step; a shard lasts ten steps."""
    client = make_client(args, 0)
    client.fetch_shard()
    left, waits = 10, []
    end_at = time.monotonic() + args.seconds
    while time.monotonic() < end_at:
        time.sleep(args.pace)
        began_at = time.perf_counter()
        client.report_batch_done()
        left -= 1
        if not left:
            assert client.fetch_shard() is not None
            left = 10
        waits.append(time.perf_counter() - began_at)
    waits = waits[20:]  # until the client knows how fast it is read
    ordered = sorted(waits)
    return {
        "mean_us": 1e6 * statistics.fmean(waits),
        "p99_us": 1e6 * ordered[int(len(ordered) * 0.99)],
        "most_us": 1e6 * ordered[-1],
    }


# What the order of the records costs.


def sampler(args: argparse.Namespace) -> dict[str, float]:
    """Nanoseconds per index, against torch's own sampler in the same process, in turn; the best of several."""
    from torch.utils.data import DistributedSampler

    kind = importlib.import_module("dlrover.trainer.torch.elastic.sampler").ElasticDistributedSampler
    records = range(SAMPLED)

    def make(cls: Any) -> Any:
        return cls(records, num_replicas=REPLICAS, rank=1, shuffle=True, seed=7)

    ours, torchs, resumed, played = make(kind), make(DistributedSampler), make(kind), make(kind)
    resumed.load_state_dict(resumed.state_dict(SAMPLED // 4 // 100 // REPLICAS, 100))
    cases = {"elastic": ours, "torch": torchs, "resumed": resumed}
    if hasattr(played, "play"):
        played.play(2 * REPLICAS, 50)
        cases["played"] = played
    found: dict[str, list[float]] = {name: [] for name in cases}
    for epoch in range(4):
        for name, each in cases.items():
            if name != "resumed":
                each.set_epoch(epoch)
            began_at = time.perf_counter()
            num = sum(1 for _ in each)
            found[name].append((time.perf_counter() - began_at) / num * 1e9)
    return {f"{name}_ns": min(times) for name, times in found.items()}


if __name__ == "__main__":
    main()
