"""Several launchers on one host: standbys, surplus nodes, preemption and scaling, with real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPTS, JobFactory, Launched, freeze, kill, kill_together, wait_until

ALL_MAY_BE_LATE = "lastcall_timeout=600"
"""However slowly launchers start, their first world has all of them."""


class Nodes:
    """Launchers of one job; the first hosts the master."""

    def __init__(self, jobs: JobFactory, folder: Path, port: int, *options: str) -> None:
        self.address = f"127.0.0.1:{port}"
        self._jobs = jobs
        self.folder = folder
        self._options = options
        self.launched: list[Launched] = []

    def start(self, *options: str) -> Launched:
        endpoint = f"--rdzv-endpoint={self.address}"
        words = (endpoint, "--rdzv-id=elastic", *self._options, *options, SCRIPTS / "steps.py", self.folder)
        self.launched.append(self._jobs.start("dlrover-run", *words))
        wait_until(lambda: self._jobs.pids("dlrover.master"))  # the first one has it
        return self.launched[-1]

    def command(self, *words: str) -> str:
        env = self._jobs.env()
        done = subprocess.run(
            [sys.executable, "-m", "dlrover.cli.main", *words], env=env, capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr

    def newest_life(self) -> int:
        return max((life for life, _ in self.steps()), default=-1)

    def steps(self, rank: int = 0) -> list[tuple[int, float]]:
        """Life and time of each step."""
        try:
            lines = (self.folder / f"steps-{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(int(words[0]), float(words[2])) for line in lines if len(words := line.split()) == 3]

    def wait_for_world(self, size: int, life: int) -> None:
        """All ranks of a world of that size have stepped in that life or a later one."""

        def has_stepped() -> bool:
            return all(any(each >= life for each, _ in self.steps(rank)) for rank in range(size))

        wait_until(has_stepped, explain=lambda: "\n".join(job.err for job in self.launched))

    def end(self) -> None:
        (self.folder / "stop").touch()
        for job in self.launched:
            assert job.wait() is not None


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_standby_takes_the_place_of_a_killed_node(jobs, tmp_path, reserved_port):
    """The killed one may come back for longer than this test lasts, but not where another one waits."""
    patient = ["--node-grace=600", "--node-suspicion=600", "--node-silence=600", f"--rdzv-conf={ALL_MAY_BE_LATE}"]
    nodes = Nodes(jobs, tmp_path, reserved_port, "--nnodes=2", "--standby=1", *patient)
    nodes.start()
    victim = nodes.start()
    nodes.wait_for_world(2, 0)
    nodes.start()
    wait_until(lambda: "standby" in nodes.command("status", "elastic"))
    everything = freeze(victim)
    time_of_death = time.monotonic()
    kill_together(*everything)
    nodes.wait_for_world(2, 1)
    took = min(at for life, at in nodes.steps() if life >= 1) - time_of_death
    print(f"from the kill to the next step: {took:.2f} s")
    nodes.end()
    assert nodes.launched[0].wait() == nodes.launched[2].wait() == 0
    told = nodes.launched[0].err
    assert "Traceback" not in told, "of a peer that is gone"
    assert told.count("Node rank 1 (127.0.0.1) lost its connection and did not come back.") == 1
    assert told.count("All 2 workers were started again on 2 nodes") == 1
    nodes.command("clean")  # what the killed launcher could not remove


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_preempted_node_leaves_and_the_job_is_scaled_under_way(jobs, tmp_path, reserved_port):
    nodes = Nodes(jobs, tmp_path, reserved_port, "--nnodes=1:2", f"--rdzv-conf=pend_timeout=1,{ALL_MAY_BE_LATE}")
    # With ranks of their own: whoever came first would have the lowest, and scaling down lets the highest go.
    first = nodes.start("--node-rank=0")
    notice = tmp_path / "notice"
    second = nodes.start("--node-rank=1", f"--preemption-file={notice}")
    nodes.wait_for_world(2, 0)

    surplus = nodes.start("--node-rank=2")
    assert surplus.wait() == 22, surplus.err
    assert "none had room for this one" in surplus.err
    assert nodes.newest_life() == 0, "nobody was disturbed"

    notice.touch()
    assert second.wait() == 143, second.err
    assert "the job goes on without it" in second.err
    nodes.wait_for_world(1, 1)

    third = nodes.start("--node-rank=1")
    nodes.wait_for_world(2, 2)
    said = nodes.command("scale", "--nodes=1:1", "elastic")
    assert third.wait() == 0, said + third.err
    assert "scaled down" in third.err
    nodes.wait_for_world(1, 3)
    nodes.end()
    assert first.wait() == 0, first.err


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_node_that_is_told_to_end_leaves_and_the_others_train_on(jobs, tmp_path, reserved_port):
    nodes = Nodes(jobs, tmp_path, reserved_port, "--nnodes=1:2", f"--rdzv-conf={ALL_MAY_BE_LATE}")
    first, second = nodes.start("--node-rank=0"), nodes.start("--node-rank=1")
    nodes.wait_for_world(2, 0)
    second.signal(signal.SIGTERM)
    assert second.wait() == 143, second.err
    nodes.wait_for_world(1, 1)
    nodes.end()
    assert first.wait() == 0, first.err


def test_the_agents_of_a_killed_launcher_are_gone(jobs, tmp_path, reserved_port):
    """What the tests above rely on."""
    nodes = Nodes(jobs, tmp_path, reserved_port, "--nnodes=1")
    job = nodes.start()
    nodes.wait_for_world(1, 0)
    [agent] = jobs.pids("dlrover.agent")
    kill(job.pid)
    wait_until(lambda: agent not in jobs.processes())
