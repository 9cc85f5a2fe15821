"""Two hundred crashes in one job leak nothing (sixty in CI): no descriptor, process, memory, file or segment."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import SCRIPTS, JobFactory, Launched, wait_until

NUM_SAMPLES = 20


def measure(jobs: JobFactory, tmp_path: Path) -> dict[str, float]:
    commands = jobs.processes()
    workers = {pid for pid in commands if psutil.Process(pid).ppid() in jobs.pids("dlrover.agent")}
    [agent] = jobs.pids("dlrover.agent")
    zygotes = [pid for pid in jobs.pids("dlrover zygote") if psutil.Process(pid).ppid() == agent]
    zygote = min(zygotes, key=lambda pid: psutil.Process(pid).create_time())
    [master] = jobs.pids("dlrover.master")
    return {
        "processes": len(set(commands) - workers),
        "agent fds": psutil.Process(agent).num_fds(),
        "zygote fds": psutil.Process(zygote).num_fds(),
        "master fds": psutil.Process(master).num_fds(),
        "zygote memory": psutil.Process(zygote).memory_info().rss,
        "agent memory": psutil.Process(agent).memory_full_info().uss,
        "files": sum(1 for path in jobs.runtime.rglob("*") if not path.name.startswith("journal")),
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cycles", [60, pytest.param(200, marks=pytest.mark.chaos)])
def test_crashes_leak_nothing(jobs, tmp_path, cycles):
    job = jobs.start("dlrover-run", "--nproc-per-node=2", SCRIPTS / "crash_cycles.py", tmp_path, str(cycles))
    early = at_life(jobs, tmp_path, job, 20)
    late = at_life(jobs, tmp_path, job, cycles - 30)
    assert job.wait(120) == 0, job.err
    assert late["processes"] <= early["processes"]
    for name in ("agent fds", "zygote fds", "master fds"):
        assert late[name] <= early[name] + 2, (name, early, late)
    assert late["zygote memory"] <= early["zygote memory"] * 1.05, (early, late)
    assert late["agent memory"] <= early["agent memory"] * 1.20, (early, late)
    assert late["files"] <= early["files"] + 2, (early, late)


def at_life(jobs: JobFactory, tmp_path: Path, job: Launched, life: int) -> dict[str, float]:
    def reached() -> bool:
        try:
            return int((tmp_path / "life").read_text()) >= life
        except FileNotFoundError:
            return False

    wait_until(reached, 240, lambda: job.err[-2000:])
    samples: list[dict[str, float]] = []
    while len(samples) < NUM_SAMPLES:
        try:
            samples.append(measure(jobs, tmp_path))
        except (psutil.NoSuchProcess, OSError, ValueError):
            continue  # a process of the cycle went while we looked; look again
    # Between two lives there are pipes, pidfds and half-born workers: what stays is the least that was seen.
    return {name: min(sample[name] for sample in samples) for name in samples[0]}
