"""Two hundred crashes in one job leak nothing (seventy in CI): no descriptor, process, memory, file or segment."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import SCRIPTS, JobFactory, Launched, wait_until

EARLY = 12
"""The life from which on nothing may grow."""
NUM_WORKERS = 2


def measure(jobs: JobFactory) -> dict[str, float]:
    [agent], [master] = jobs.pids("dlrover.agent"), jobs.pids("dlrover.master")
    staying = {"agent": agent, "zygote": jobs.zygote(), "master": master}
    return {
        **{f"{name} fds": psutil.Process(pid).num_fds() for name, pid in staying.items()},
        "zygote memory": psutil.Process(staying["zygote"]).memory_info().rss,
        "agent memory": psutil.Process(agent).memory_full_info().uss,
        "processes": len(jobs.processes()),
        "files": sum(1 for path in jobs.runtime.rglob("*") if not path.name.startswith("journal")),
    }


def allowed_after(early: dict[str, float]) -> dict[str, float]:
    more = {
        "processes": 0,
        "zygote memory": 0.05 * early["zygote memory"],
        "agent memory": 0.20 * early["agent memory"],
    }
    return {name: value + more.get(name, 2) for name, value in early.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("cycles", [70, pytest.param(200, marks=pytest.mark.chaos)])
def test_crashes_leak_nothing(jobs, tmp_path, cycles):
    """What a life needs for a moment is gone when one lasts; a leak is not."""
    late = cycles - 2
    words = [str(word) for word in (cycles, EARLY, late)]
    job = jobs.start("dlrover-run", f"--nproc-per-node={NUM_WORKERS}", SCRIPTS / "crash_cycles.py", tmp_path, *words)
    wait_until_held(jobs, tmp_path, job, EARLY)
    allowed = allowed_after(measure(jobs))
    (tmp_path / f"go-{EARLY}").touch()
    wait_until_held(jobs, tmp_path, job, late)

    def grown() -> dict[str, tuple[float, float]]:
        return {name: (allowed[name], now) for name, now in measure(jobs).items() if now > allowed[name]}

    wait_until(lambda: not grown(), 30, lambda: f"more than allowed: {grown()}")
    (tmp_path / f"go-{late}").touch()
    assert job.wait() == 0, job.err


def wait_until_held(jobs: JobFactory, folder: Path, job: Launched, life: int) -> None:
    """With the spares that the zygote forks when nobody wants anything of it any more."""

    def is_so() -> bool:
        are_held = all((folder / f"holding-{life}-{rank}").exists() for rank in range(NUM_WORKERS))
        return are_held and len(jobs.pids("dlrover spare worker")) == NUM_WORKERS

    wait_until(is_so, 240, lambda: f"{jobs.processes()}\n{job.err[-2000:]}")
