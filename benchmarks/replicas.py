"""
Copies of snapshots on other nodes: how fast they are made and brought back, what they cost in processor time and in memory.

    python benchmarks/replicas.py                     100 MB per node, five saves, whole copies and parity 2+1, 4+1 and 3+2
    python benchmarks/replicas.py --megabytes 1000    larger

Each node is a process with the agent's own exchange of snapshots and no training; all are on the loopback of one machine, so all nodes share its processors
and memory. Times are medians over the saves after the first one, which also pays for clearing the memory of the copies. Processor time is
of all processes together, per gigabyte of snapshots.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dlrover.agent.replicas.config import ReplicaConfig
from dlrover.agent.replicas.exchange import ReplicaExchange
from dlrover.protocol.messages.job import AgentCommand, NodeId, NodeRank, Query, Round, WorldSpec
from dlrover.protocol.messages.peers import AskPeers, Peer, Peers
from dlrover.snapshot.memory.contents import Contents, encode_contents
from dlrover.snapshot.memory.layout import Layout
from dlrover.snapshot.memory.segment import SegmentWriter, SlotName
from dlrover.snapshot.memory.segment_format import Owner
from dlrover.snapshot.storage.persist import REQUEST, SaveRequest, encode_request, sum_slot

NUM_SAVES = 5
CASES = ((2, 1, 0, 0), (3, 0, 2, 1), (5, 0, 4, 1), (5, 0, 3, 2))
"""Nodes, copies, and k and m of the parity."""


class Node:
    """In a process of its own; does what it is told over a pipe."""

    def __init__(self, number: int, pipe: Connection, root: Path, case: Sequence[int], num_bytes: int) -> None:
        self._number, self._pipe, self._num_bytes = number, pipe, num_bytes
        self._size, self._copies, self._num_data, self._num_parity = case
        self._home = root / f"job.bench.node-{number}"
        self._addresses: list[str] = []

    async def run(self) -> None:
        config = ReplicaConfig(job="job", copies=self._copies, num_data=self._num_data, num_parity=self._num_parity)
        self._replicas = ReplicaExchange(
            config, token="bench", tls=None, host="127.0.0.1", home_for=lambda rank: self._home
        )
        self._home.mkdir(mode=0o700)
        owner = Owner(job="job", launch="a", node_rank=0, global_rank=self._number, local_rank=0, pid=os.getpid())
        self._writer = SegmentWriter(self._home, owner)
        self._pipe.send(self._replicas.address)
        loop = asyncio.get_running_loop()
        while True:
            order, *words = await loop.run_in_executor(None, self._pipe.recv)
            self._pipe.send(await getattr(self, order)(*words))

    async def enter(self, addresses: list[str], round_: int) -> float:
        self._addresses = addresses
        world = WorldSpec(
            round=Round(round_),
            group_rank=self._number,
            group_world_size=self._size,
            first_global_rank=self._number,
            local_world_size=1,
            world_size=self._size,
            coordinator="127.0.0.1:1",
            restart_count=0,
        )
        begun_at = time.perf_counter()
        node = NodeId(1000 * round_ + self._number)
        await self._replicas.enter(world, node=node, node_rank=NodeRank(self._number), ask=self._ask)
        return time.perf_counter() - begun_at

    async def save(self, step: int) -> None:
        self._newest = self._save(step)
        sum_slot(self._newest)

    async def copy(self) -> float:
        """How long the copies, or the parity, of the newest save took."""
        begun_at = time.perf_counter()
        self._replicas.offer(self._newest)
        await self._replicas._pushing[self._newest.path]
        return time.perf_counter() - begun_at

    async def spent(self) -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    async def kept(self) -> tuple[int, int]:
        """Bytes kept for others, and bytes of our own slots."""
        own = sum(path.stat().st_blocks * 512 for path in self._home.glob("rank-*"))
        return sum(path.stat().st_blocks * 512 for path in self._home.iterdir()) - own, own

    async def forget(self) -> None:
        """As a node that replaces a lost one: nothing is here."""
        for path in self._home.iterdir():
            path.unlink()
        store = self._replicas._store.parity
        store._whole.clear()
        store._growing.clear()
        self._replicas._members = ()

    async def close(self) -> None:
        os._exit(0)

    def _save(self, step: int) -> SlotName:
        request = SaveRequest(
            directory="/nowhere",
            target=str(step),
            step=step,
            attempt=f"save-{step}",
            shard=self._number,
            num_shards=self._size,
            world_size=self._size,
            is_storage=False,
            is_writer=True,
            is_committer=False,
        )
        contents = Contents(layout=Layout(), files=(), pickles={}, extra={REQUEST: encode_request(request)})
        sections, layout_hash = encode_contents(contents)
        slot = self._writer.begin(self._num_bytes, 1000)
        assert slot is not None, "no free slot"
        with slot:
            slot.data[: self._num_bytes] = os.urandom(4096) * (self._num_bytes // 4096)
            return slot.complete(
                step=step, round_=1, data_length=self._num_bytes, layout_hash=layout_hash, sections=sections
            )

    async def _ask(self, command: AgentCommand | Query, *, timeout: float) -> Peers:
        """In place of the master."""
        assert isinstance(command, AskPeers), f"nobody answers {command}"
        question, first = command, 1000 * command.round
        peers = [Peer(NodeId(first + index), NodeRank(index), each) for index, each in enumerate(self._addresses)]
        others = tuple(peers[(self._number + step) % self._size] for step in range(1, self._size))
        group = tuple(peers) if question.num_data else ()
        return Peers(
            round=question.round,
            keepers=others[: question.copies],
            group=group,
            neighbours=others,
            num_members=self._size,
        )


def start(number: int, pipe: Connection, root: Path, case: Sequence[int], num_bytes: int) -> None:
    asyncio.run(Node(number, pipe, root, case, num_bytes).run())


class Nodes:
    def __init__(self, root: Path, case: Sequence[int], num_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for number in range(case[0]):
            ours, theirs = context.Pipe()
            context.Process(target=start, args=(number, theirs, root, case, num_bytes), daemon=True).start()
            self._pipes.append(ours)
        self.addresses = [pipe.recv() for pipe in self._pipes]

    def tell(self, number: int, *order: Any) -> Any:
        self._pipes[number].send(order)
        return self._pipes[number].recv()

    def tell_all(self, *order: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(order)
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(("close",))


def measure(case: Sequence[int], megabytes: int) -> str:
    size, copies, num_data, num_parity = case
    num_bytes = megabytes * 1_000_000 // 4096 * 4096
    root = Path(tempfile.mkdtemp(prefix="dlrover-bench-", dir="/dev/shm"))
    nodes = Nodes(root, case, num_bytes)
    try:
        nodes.tell_all("enter", nodes.addresses, 1)
        seconds, spent = [], []
        for step in range(1, NUM_SAVES + 1):
            nodes.tell_all("save", step)
            before = sum(nodes.tell_all("spent"))
            seconds.append(max(nodes.tell_all("copy")))
            spent.append(sum(nodes.tell_all("spent")) - before)
        kept = [extra / own for extra, own in nodes.tell_all("kept")]
        nodes.tell(0, "forget")
        for number in range(1, size):
            nodes.tell(number, "enter", nodes.addresses, 2)
        back = nodes.tell(0, "enter", nodes.addresses, 2)
    finally:
        nodes.close()
        shutil.rmtree(root, ignore_errors=True)
    what = f"{copies} copy" if copies else f"parity {num_data}+{num_parity}"
    gigabytes = size * num_bytes / 1e9
    took = statistics.median(seconds[1:])
    return (
        f"| {what}, {size} nodes | {took:.2f} s | {num_bytes / 1e6 / took:.0f} MB/s | {size * num_bytes / 1e6 / took:.0f} MB/s "
        f"| {statistics.median(spent[1:]) / gigabytes:.2f} s | {statistics.median(kept):.2f} | {back:.2f} s |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What copies of snapshots on other nodes cost.")
    parser.add_argument("--megabytes", type=int, default=100, help="of snapshot per node")
    megabytes = parser.parse_args().megabytes
    print("| | per save | each node | all nodes | processor per GB | kept for others / own slots | brought back in |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        print(measure(case, megabytes), flush=True)


if __name__ == "__main__":
    main()
