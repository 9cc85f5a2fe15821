"""A real job in which ranks stand still: it runs again without anybody's help, the page names the rank, and pauses are left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import JobFactory, wait_until

JOB = Path(__file__).parents[3] / "benchmarks/diagnosis_job.py"
NUM_RANKS = 3
FAULTS = [
    ("stop", 2, "state T"),
    ("deadlock-lock", 0, " _lock"),
    ("threads-in-one-group", 1, "two threads inside collectives of one process group"),
]


class Training:
    def __init__(self, jobs: JobFactory, folder: Path) -> None:
        self.folder = folder
        self.job = jobs.start(
            "dlrover-run", f"--nproc-per-node={NUM_RANKS}", f"--log-dir={folder / 'logs'}", JOB, folder
        )
        self._env = jobs.env()
        self._num_faults = 0
        self.train(30)

    def steps(self) -> list[tuple[int, int]]:
        """Step and life of each rank."""
        found = []
        for rank in range(NUM_RANKS):
            try:
                step, life = (self.folder / f"step-{rank}").read_text().split()
            except (FileNotFoundError, ValueError):  # none yet, or just being written
                step, life = "0", "0"
            found.append((int(step), int(life)))
        return found

    def train(self, num_steps: int, life: int = 0) -> None:
        """Until everybody has gone on for so many steps in that life."""
        wait_until(lambda: all(now == life and step > 0 for step, now in self.steps()), 90, lambda: self.job.err)
        goal = max(step for step, _ in self.steps()) + num_steps
        wait_until(lambda: min(step for step, _ in self.steps()) >= goal, 90, lambda: self.job.err)
        assert {now for _, now in self.steps()} == {life}, self.job.err

    def inject(self, kind: str, rank: int) -> Path:
        self._num_faults += 1
        told = {"number": self._num_faults, "kind": kind, "rank": rank, "after_step": max(self.steps())[0] + 3}
        (self.folder / "fault.new").write_text(json.dumps(told))
        (self.folder / "fault.new").rename(self.folder / "fault.json")
        mark = self.folder / f"injected-{self._num_faults}"
        wait_until(mark.exists)
        return mark

    def newest_page(self) -> str:
        return max((self.folder / "logs").glob("*autopsy*.md"), key=lambda path: path.stat().st_mtime_ns).read_text()

    def ask(self, command: str) -> str:
        argv = [sys.executable, "-m", "dlrover.cli.main", command]
        return subprocess.run(argv, env=self._env, capture_output=True, text=True, timeout=60, check=True).stdout

    def end(self) -> None:
        (self.folder / "end").touch()
        self.job.wait()


@pytest.mark.timeout(240)
def test_ranks_that_stand_still_are_named_and_training_runs_again_but_pauses_are_left_alone(
    jobs: JobFactory, tmp_path: Path
) -> None:
    training = Training(jobs, tmp_path)
    training.inject("short-pause", 1)
    training.train(20)

    for life, (kind, rank, trace) in enumerate(FAULTS, 1):
        mark = training.inject(kind, rank)
        training.train(1, life)
        took = (tmp_path / "step-1").stat().st_mtime - mark.stat().st_mtime
        print(f"{kind}: training ran again {took:.1f} s after it stood still")
        page = training.newest_page()
        assert f"# Rank {rank} on" in page
        assert trace in page
        training.train(30, life)
    shown = training.ask("diagnosis")
    assert "diagnosis: stopped of rank 2 in round 1" in shown
    assert "# Rank 1 on" in shown
    assert "diagnosis: concurrent-collectives of rank 1 in round 3" in training.ask("status")
    training.end()
    told = [line for line in training.job.err.splitlines() if line.startswith("dlrover-run: diagnosis: ")]
    for fault in ("stopped of rank 2. ", "deadlock of rank 0. ", "concurrent-collectives of rank 1. "):
        assert sum(fault in line for line in told) == 1, "on the console, in one line, once"
