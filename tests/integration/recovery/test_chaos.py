"""Faults that need their time. Not part of `make test`; run by `make chaos`."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.integration.jobs import SCRIPTS, kill, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


def life(tmp_path, rank: int) -> int:
    return int((tmp_path / f"pid-{rank}").read_text().split()[1])


def test_an_agent_that_was_frozen_beyond_its_lease_kills_its_workers_first(jobs, tmp_path):
    """The agent stops for 35 s while its workers run on; when it wakes up, the world has moved on without it."""
    job = jobs.start("dlrover-run", "--nproc-per-node=2", SCRIPTS / "steps.py", tmp_path)
    wait_until(lambda: (tmp_path / "steps-1").exists(), explain=lambda: job.err)
    [agent] = jobs.pids("dlrover.agent")
    workers = {int((tmp_path / f"pid-{rank}").read_text().split()[0]) for rank in (0, 1)}
    kill(agent, signal.SIGSTOP)
    wakes_at = time.monotonic() + 36
    wait_until(lambda: time.monotonic() > wakes_at, 40)
    assert workers <= set(jobs.processes()), "workers train on while their agent is stopped"
    kill(agent, signal.SIGCONT)
    wait_until(lambda: not workers & set(jobs.processes()), 10)
    wait_until(lambda: all(life(tmp_path, rank) > 0 for rank in (0, 1)), 30, lambda: job.err)
    (tmp_path / "stop").touch()
    assert job.wait() == 0, job.err


def test_random_kills_of_everything_but_the_launcher(jobs, tmp_path):
    """Forty SIGKILLs at workers, agent, zygote and master in random order and rhythm: the job goes on to its end."""
    job = jobs.start(
        "dlrover-run", "--nproc-per-node=2", "--max-restarts=1000", SCRIPTS / "steps.py", tmp_path, "grandchildren"
    )
    wait_until(lambda: (tmp_path / "steps-1").exists(), explain=lambda: job.err)
    chance = random.Random(11)
    for _ in range(40):
        pause_ends_at = time.monotonic() + chance.uniform(0.2, 2.0)
        wait_until(lambda at=pause_ends_at: time.monotonic() > at)
        kinds = {
            "worker": [int((tmp_path / f"pid-{rank}").read_text().split()[0]) for rank in (0, 1)],
            "agent": jobs.pids("dlrover.agent"),
            "zygote": jobs.pids("dlrover zygote"),
            "master": jobs.pids("dlrover.master"),
        }
        # Agents have a budget of three deaths in a row; the others have none.
        kind = chance.choices(list(kinds), weights=[10, 1, 4, 6])[0]
        alive = set(jobs.processes())
        if victims := [pid for pid in kinds[kind] if pid in alive]:
            kill(chance.choice(victims))
    before = (tmp_path / "steps-0").stat().st_size
    wait_until(lambda: (tmp_path / "steps-0").stat().st_size > before + 200, 30, lambda: job.err[-3000:])
    (tmp_path / "stop").touch()
    assert job.wait() == 0, job.err
