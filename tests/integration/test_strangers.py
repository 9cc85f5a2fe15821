"""
A stranger floods the master of a job of four nodes: honest callers are answered, the job trains on, and a worker that is killed meanwhile is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.job import Ping
from dlrover.protocol.rpc.client import ask
from tests.floods import FEW_CONNECTIONS, Flooding
from tests.integration.jobs import JobFactory, kill, wait_until
from tests.integration.test_local_platform import SCRIPT, LocalJob

RANKS = range(4)
NUM_STEPS = 25
CALL_LIMIT = 5.0
"""Ten times the 0.5 s that `benchmarks/strangers.py` measures on a quiet machine."""
CALL_PERIOD = 0.05
FEW_CALLS = 5
"""That are made during a flood, at least."""
MOST_GROWTH_BYTES = 64 * 2**20
MOST_GROWTH_OF_MANY_BYTES = 128 * 2**20
"""With up to 4,000 connections. `benchmarks/strangers.py` measures against 64 MiB; a slow machine holds more of them at once."""


class HonestCalls:
    """One after the other, each on a connection of its own, and what the master's memory is after each."""

    def __init__(self, master: psutil.Process, address: str) -> None:
        self._master = master
        self._address = address
        config = json.loads(Path(master.cmdline()[-1]).read_bytes())
        self._token = Path(config["token_file"]).read_text().strip()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._call()))
        self.durations: list[float] = []
        self.troubles: list[str] = []
        self.most_bytes = 0

    async def _call(self) -> None:
        while not self._is_over.wait(CALL_PERIOD):
            began_at = time.monotonic()
            try:
                await ask(self._address, Ping(), token=self._token, timeout=CALL_LIMIT)
            except DLRoverError as error:
                self.troubles.append(str(error))
            self.durations.append(time.monotonic() - began_at)
            self.most_bytes = max(self.most_bytes, self._master.memory_info().rss)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
            wait_until(lambda: len(self.durations) >= FEW_CALLS, explain=lambda: f"calls hang: {self.durations}")
        finally:
            self._is_over.set()
            self._thread.join()


def master_of(jobs: JobFactory) -> tuple[psutil.Process, str]:
    """And its address."""
    [pid] = jobs.pids("dlrover.master")
    master = psutil.Process(pid)
    [port] = {each.laddr.port for each in master.net_connections("tcp") if each.status == "LISTEN"}
    return master, f"127.0.0.1:{port}"


def train_on(job: LocalJob, num_steps: int) -> None:
    """All ranks, in the life in which they are."""
    before = [job.last(rank) for rank in RANKS]
    wait_until(lambda: all(job.last(rank).step >= before[rank].step + num_steps for rank in RANKS))
    assert {job.last(rank).life for rank in RANKS} == {before[0].life}, "a worker was restarted"


def endure(jobs: JobFactory, job: LocalJob, kind: str, *, num_steps: int, connections: int = 0) -> int:
    """The master's greatest memory."""
    master, address = master_of(jobs)
    life, calls = job.last(0).life, HonestCalls(master, address)
    with Flooding(kind, address, seconds=60, connections=connections) as flood:
        flood.wait_until_it_began()
        with calls.going_on():
            train_on(job, num_steps)
            kill(jobs.pids(f"-u {SCRIPT}")[0])
            job.trains(*RANKS, size=4, after=life)
            train_on(job, num_steps)
        count = flood.end()
    assert job.last(0).life == life + 1, f"{kind}: {count}"
    assert not calls.troubles, f"{kind}: {count}"
    assert max(calls.durations) < CALL_LIMIT, f"{kind}: {count}"
    return calls.most_bytes


def test_a_job_of_four_nodes_endures_every_flood_and_a_kill_in_it(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=4", "--netns=off")
    job.trains(*RANKS, size=4)
    before = master_of(jobs)[0].memory_info().rss
    for kind, connections in FEW_CONNECTIONS.items():
        most = endure(jobs, job, kind, num_steps=NUM_STEPS, connections=connections)
        assert most - before < MOST_GROWTH_BYTES, kind
    job.finish()


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_job_of_four_nodes_endures_every_flood_for_ten_seconds(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=4", "--netns=off")
    job.trains(*RANKS, size=4)
    for kind in FEW_CONNECTIONS:
        before = master_of(jobs)[0].memory_info().rss
        most = endure(jobs, job, kind, num_steps=250)
        assert most - before < MOST_GROWTH_OF_MANY_BYTES, kind
    job.finish()
