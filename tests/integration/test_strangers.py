"""A stranger floods the master of a job of four nodes: the job trains on, and a worker that is killed meanwhile is replaced."""

from __future__ import annotations

import psutil
import pytest

from tests.floods import Flooding
from tests.integration.jobs import JobFactory, kill, wait_until
from tests.integration.test_local_platform import SCRIPT, LocalJob

FLOODS = ("reset", "open", "bodies", "idle", "settled", "handshakes")
RANKS = range(4)
NUM_STEPS = 25
MOST_GROWTH_BYTES = 128 * 2**20
"""`benchmarks/strangers.py` measures against 64 MiB. Here a slow machine holds more connections at once: 70 MB were seen."""


def master_of(jobs: JobFactory) -> tuple[int, str]:
    """Its pid and its address."""
    [pid] = jobs.pids("dlrover.master")
    [port] = {each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"}
    return pid, f"127.0.0.1:{port}"


def train_on(job: LocalJob, num_steps: int) -> None:
    """All ranks, in the life in which they are."""
    before = [job.last(rank) for rank in RANKS]
    wait_until(lambda: all(job.last(rank).step >= before[rank].step + num_steps for rank in RANKS))
    assert {job.last(rank).life for rank in RANKS} == {before[0].life}, "a worker was restarted"


def endure(jobs: JobFactory, job: LocalJob, kind: str, *, num_steps: int) -> None:
    pid, address = master_of(jobs)
    life, memory = job.last(0).life, psutil.Process(pid).memory_info().rss
    with Flooding(kind, address, seconds=60) as flood:
        flood.wait_until_it_began()
        train_on(job, num_steps)
        kill(jobs.pids(f"-u {SCRIPT}")[0])
        job.trains(*RANKS, size=4, after=life)
        train_on(job, num_steps)
        grown = psutil.Process(pid).memory_info().rss - memory
        count = flood.end()
    assert job.last(0).life == life + 1, f"{kind}: {count}"
    assert grown < MOST_GROWTH_BYTES, f"{kind}: {count}"


def test_a_job_of_four_nodes_endures_a_flood_and_a_kill_in_it(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=4", "--netns=off")
    job.trains(*RANKS, size=4)
    endure(jobs, job, "reset", num_steps=NUM_STEPS)
    endure(jobs, job, "settled", num_steps=NUM_STEPS)
    job.finish()


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_job_of_four_nodes_endures_every_flood_for_ten_seconds(jobs, tmp_path):
    job = LocalJob(jobs, tmp_path, "--nodes=4", "--netns=off")
    job.trains(*RANKS, size=4)
    for kind in FLOODS:
        endure(jobs, job, kind, num_steps=250)
    job.finish()
