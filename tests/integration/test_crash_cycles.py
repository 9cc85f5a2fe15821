"""Two hundred crashes in one job leak nothing (seventy in CI): no descriptor, process, memory, file or segment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from tests.integration.jobs import SCRIPTS, JobFactory, Launched, wait_until

T = TypeVar("T")
NUM_SAMPLES = 5
NUM_LIVES = 18


def measure(jobs: JobFactory) -> dict[str, float]:
    """Processes and files: slow to count."""
    commands = jobs.processes()
    workers = {pid for pid in commands if psutil.Process(pid).ppid() in jobs.pids("dlrover.agent")}
    return {
        "processes": len(set(commands) - workers),
        "files": sum(1 for path in jobs.runtime.rglob("*") if not path.name.startswith("journal")),
    }


def processes_that_stay(jobs: JobFactory) -> dict[str, psutil.Process]:
    [agent] = jobs.pids("dlrover.agent")
    zygotes = [pid for pid in jobs.pids("dlrover zygote") if psutil.Process(pid).ppid() == agent]
    zygote = min(zygotes, key=lambda pid: psutil.Process(pid).create_time())
    [master] = jobs.pids("dlrover.master")
    return {"agent": psutil.Process(agent), "zygote": psutil.Process(zygote), "master": psutil.Process(master)}


def measure_quickly(staying: dict[str, psutil.Process]) -> dict[str, float]:
    """Often enough to fall between two lives, when nothing of a life is there."""
    return {
        **{f"{name} fds": process.num_fds() for name, process in staying.items()},
        "zygote memory": staying["zygote"].memory_info().rss,
        "agent memory": staying["agent"].memory_full_info().uss,
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cycles", [70, pytest.param(200, marks=pytest.mark.chaos)])
def test_crashes_leak_nothing(jobs, tmp_path, cycles):
    job = jobs.start("dlrover-run", "--nproc-per-node=2", SCRIPTS / "crash_cycles.py", tmp_path, str(cycles))
    early = at_life(jobs, tmp_path, job, 12)
    late = at_life(jobs, tmp_path, job, cycles - 32)
    assert job.wait(120) == 0, job.err
    assert late["processes"] <= early["processes"]
    for name in ("agent fds", "zygote fds", "master fds"):
        assert late[name] <= early[name] + 2, (name, early, late)
    assert late["zygote memory"] <= early["zygote memory"] * 1.05, (early, late)
    assert late["agent memory"] <= early["agent memory"] * 1.20, (early, late)
    assert late["files"] <= early["files"] + 2, (early, late)


def at_life(jobs: JobFactory, tmp_path: Path, job: Launched, life: int) -> dict[str, float]:
    """What stays over some lives: between two of them there are pipes, pidfds, pages and half-born workers."""

    def reached() -> int:
        try:
            return int((tmp_path / "life").read_text())
        except FileNotFoundError:
            return -1

    wait_until(lambda: reached() >= life, 240, lambda: job.err[-2000:])
    staying = looked_at(job, lambda: processes_that_stay(jobs))
    quick, begun_at = [], reached()
    while reached() < begun_at + NUM_LIVES or not quick:
        quick.append(measure_quickly(staying))
    samples = [looked_at(job, lambda: measure(jobs)) for _ in range(NUM_SAMPLES)]
    slow = {name: min(sample[name] for sample in samples) for name in samples[0]}
    return slow | {name: min(sample[name] for sample in quick) for name in quick[0]}


def looked_at(job: Launched, look: Callable[[], T]) -> T:
    """Again if a process of the cycle went while we looked."""
    while True:
        try:
            return look()
        except (psutil.NoSuchProcess, OSError, ValueError):
            assert job.process.poll() is None, job.err[-2000:]
