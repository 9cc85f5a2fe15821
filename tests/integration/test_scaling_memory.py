"""Workers of a world that run out of the memory that their nodes are given (line 9 of scaling), with a real limit of the kernel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlrover.cli.show.replay import walk_journal
from dlrover.platforms.local.memory_limits import MemoryLimits
from dlrover.protocol.messages.fleet import LaunchNode
from tests.integration.jobs import SCRIPTS, JobFactory, Launched

PATIENCE = 300.0
LIMIT = 200
"""MiB of a node: launcher, agent, and a worker that loads no torch."""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MemoryLimits.available(), reason="needs root and a memory cgroup"),
]


def run(jobs: JobFactory, folder: Path, needs: int, *options: str) -> tuple[Launched, list[tuple[int, int]]]:
    """The job, and rank and memory of each node that was launched."""
    argv = [
        sys.executable,
        "-m",
        "dlrover.cli.main",
        "local",
        "--nodes=2",
        f"--memory={LIMIT}",
        "--netns=off",
        *options,
    ]
    argv += ["--", "--no-warm", "--shutdown-timeout=5", f"--journal={folder / 'journal'}"]
    host = Launched([*argv, str(SCRIPTS / "greedy.py"), str(folder), str(needs)], jobs.env(), folder, "local")
    jobs.launched.append(host)
    host.wait(PATIENCE)
    [journal] = (folder / "journal").glob("*.sqlite")
    launches = {
        effect.id: (effect.rank, effect.resource.memory_mb)
        for step, _ in walk_journal(journal)
        if step is not None
        for effect in step.outcome.effects
        if isinstance(effect, LaunchNode)
    }
    return host, list(launches.values())


def test_all_workers_come_back_with_more_memory_once(jobs: JobFactory, tmp_path: Path) -> None:
    host, launches = run(jobs, tmp_path, LIMIT + 60, "--auto-scale=on")
    assert host.process.returncode == 0, host.err
    assert sorted(launches) == [(0, LIMIT), (0, 2 * LIMIT), (1, LIMIT), (1, 2 * LIMIT)]
    assert (tmp_path / "had-enough").exists()


def test_the_second_time_the_job_ends_and_says_what_it_had(jobs: JobFactory, tmp_path: Path) -> None:
    host, launches = run(jobs, tmp_path, 3 * LIMIT, "--auto-scale=on")
    assert host.process.returncode != 0
    assert sorted(launches) == [(0, LIMIT), (0, 2 * LIMIT), (1, LIMIT), (1, 2 * LIMIT)]
    said = " ".join((host.err + host.out).split())
    assert f"it had {2 * LIMIT} MiB" in said
    assert f"with {LIMIT} MiB one had run out of it before" in said
