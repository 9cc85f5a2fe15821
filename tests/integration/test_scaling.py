"""
A job of `dlrover local` that finds its own size: real nodes, a law for the length of a step, shortened settings.

The law and its 5 % noise are in `scripts/law_steps.py`. What takes minutes in a usual job (a size is watched for 60 s) takes seconds here; `make chaos` has the
full times.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dlrover.cli.connection import JobConnection
from dlrover.cli.show.replay import walk_journal
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.fleet import LaunchNode
from dlrover.protocol.messages.scaling import AskScaling, RunMeasured, ScaleOutcome, ScalingStatus
from tests.integration.jobs import SCRIPTS, JobFactory, Launched, wait_until

JOB = "scaling-test"
SCRIPT = SCRIPTS / "law_steps.py"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/scaling/train.py"
SHORT = {
    "DLROVER_SECONDS_FOR_STABLE_WORKER_COUNT": "4",
    "DLROVER_GLOBAL_STEP_COUNT_TO_AUTO_WORKER": "20",
    "DLROVER_SECONDS_INTERVAL_TO_OPTIMIZE": "1",
}
PATIENCE = 600.0
"""Seconds; ten times what it takes on a quiet machine. On a busy one a change costs ten times as much, and the job waits twenty times its cost for the next."""


pytestmark = [pytest.mark.timeout(1500), pytest.mark.usefixtures("same_temporary_directory")]


@pytest.fixture
def same_temporary_directory(jobs: JobFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that this process finds the job as a person on this machine does."""
    monkeypatch.setenv("TMPDIR", str(jobs.runtime))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


class ScaledJob:
    def __init__(
        self,
        jobs: JobFactory,
        folder: Path,
        *options: str,
        law: str = "",
        script: tuple[str, ...] = (),
        environ: dict[str, str],
    ) -> None:
        """`law`: of the script without torch; `script`: another one, with its arguments."""
        self.jobs, self.folder = jobs, folder
        self.journal = folder / "journal"
        argv = [sys.executable, "-m", "dlrover.cli.main", "local", f"--job-name={JOB}", "--netns=off", *options]
        argv += [
            "--",
            "--no-warm",
            "--heartbeat=1",
            "--node-silence=30",
            "--shutdown-timeout=5",
            f"--journal={self.journal}",
        ]
        argv += script or (str(SCRIPT), str(folder), *law.split())
        self.host = Launched(argv, jobs.env(**environ), folder, f"local-{len(jobs.launched)}")
        jobs.launched.append(self.host)

    def command(self, *words: str) -> str:
        """What it printed; empty while the master is between two lives."""
        done = subprocess.run(
            [sys.executable, "-m", "dlrover.cli.main", *words, JOB],
            env=self.jobs.env(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""

    def status(self) -> ScalingStatus | None:
        """None: there is no job yet, or no master between two lives."""
        try:
            return JobConnection(job=JOB).ask(AskScaling(), ScalingStatus)
        except DLRoverError:
            return None

    def size(self, rank: int = 0) -> int:
        """Workers of the world in which the rank made its last step."""
        try:
            return int((self.folder / f"alive-{rank}").read_text().split()[0])
        except (OSError, IndexError):
            return 0

    def until(self, is_so: Callable[[ScalingStatus], object], limit: float = PATIENCE) -> ScalingStatus:
        end_at = time.monotonic() + limit
        while True:
            status = self.status()
            if status is not None and is_so(status):
                return status
            assert self.host.process.poll() is None, self.host.err
            assert time.monotonic() < end_at, f"{self.command('scale', '--why')}\n{self.host.err[-3000:]}"
            time.sleep(0.2)  # a question to another process: no event exists for its answer

    def finish(self) -> None:
        (self.folder / "stop").touch()
        assert self.host.wait(PATIENCE) == 0, self.host.err

    @property
    def journal_file(self) -> Path:
        [path] = self.journal.glob("*.sqlite")
        return path

    def launches(self) -> list[LaunchNode]:
        return [
            effect
            for step, _ in walk_journal(self.journal_file)
            if step is not None
            for effect in step.outcome.effects
            if isinstance(effect, LaunchNode)
        ]


def changes(status: ScalingStatus) -> list[tuple[str, int, int]]:
    moved = (ScaleOutcome.PLANNED, ScaleOutcome.TAKEN_BACK)
    return [
        (each.outcome.value, each.nodes_before, each.nodes_after) for each in status.decisions if each.outcome in moved
    ]


def test_a_job_that_is_best_at_two_nodes_tries_three_and_takes_it_back(jobs: JobFactory, tmp_path: Path) -> None:
    """The best size of a law, shortened, and what `--why` says of it (line 12)."""
    job = ScaledJob(jobs, tmp_path, "--nodes=1:4", "--auto-scale=on", law="0.08 0.004 2 2.5", environ=SHORT)
    status = job.until(lambda status: status.num_outcomes.get(ScaleOutcome.TAKEN_BACK, 0))
    back = next(each for each in status.decisions if each.outcome is ScaleOutcome.TAKEN_BACK)
    assert back.nodes_after == 2
    wait_until(lambda: job.size() == 2, explain=lambda: job.host.err)
    rested = job.until(lambda status: status.target == 2 and not status.on_probation and status.fit is not None)
    assert rested.num_outcomes[ScaleOutcome.TAKEN_BACK] == 1
    assert sum(rested.num_outcomes.get(each, 0) for each in (ScaleOutcome.PLANNED, ScaleOutcome.TAKEN_BACK)) <= 8
    text = job.command("scale", "--why")
    assert back.speed_before > 0
    assert back.sentence in text, "the taking back names both speeds"
    for part in (
        "Automatic scaling is on",
        "Why:",
        "Brake:",
        "Last decisions",
        "Best candidates",
        "Fit: median error",
        "Room for worker",
    ):
        assert part in text, text
    picture = tmp_path / "curve.svg"
    job.command("scale", "--why", f"--picture={picture}")
    assert "<polyline" in picture.read_text()
    job.finish()
    sentences = [
        text for step, _ in walk_journal(job.journal_file) if step is not None for text in step.outcome.verdicts
    ]
    assert back.sentence in sentences, "dlrover replay prints the same"
    runs = [
        step.record.command
        for step, _ in walk_journal(job.journal_file)
        if step is not None and isinstance(step.record.command, RunMeasured)
    ]
    assert runs
    assert all(len(msgspec.msgpack.encode(run)) <= 2048 for run in runs)


@pytest.mark.chaos
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("law", "best", "num_back"), [((), 4, 0), (("--knee=2", "--knee-factor=2.5"), 2, 1)])
def test_a_ddp_job_reaches_its_best_size_in_five_minutes_and_rests(
    jobs: JobFactory, tmp_path: Path, law: tuple[str, ...], best: int, num_back: int
) -> None:
    """The best size of a law with the times of a usual job, and real DistributedDataParallel."""
    script = (str(EXAMPLE), f"--end-file={tmp_path / 'stop'}", *law)
    environ = {"SCALING_CHECKPOINTS": str(tmp_path)}
    job = ScaledJob(jobs, tmp_path, "--nodes=1:4", "--auto-scale=on", script=script, environ=environ)
    job.until(lambda status: status.target)
    began_at = time.monotonic()
    reached = job.until(
        lambda status: status.target == best and status.num_outcomes.get(ScaleOutcome.TAKEN_BACK, 0) == num_back
    )
    print(f"\n{best} nodes after {time.monotonic() - began_at:.0f} s; {reached.sentence}")
    job.until(lambda status: not status.on_probation and status.target == best)
    before = moves_of(job.until(lambda status: True))
    rests_until = time.monotonic() + 120
    while time.monotonic() < rests_until:
        time.sleep(2)  # that nothing happens has no event
        status = job.until(lambda status: True)
        assert status.target == best, status.sentence
    assert moves_of(status) == before <= 8
    if num_back:
        text = job.command("scale", "--why")
        assert "records/s before" in text or "steps/s before" in text, text
    job.finish()


def moves_of(status: ScalingStatus) -> int:
    return sum(status.num_outcomes.get(each, 0) for each in (ScaleOutcome.PLANNED, ScaleOutcome.TAKEN_BACK))


def test_room_that_shrinks_is_an_order_and_the_minimum_holds(jobs: JobFactory, tmp_path: Path) -> None:
    """Line 11: 4 nodes, room for 2, then for 1 where 2 is the least."""
    job = ScaledJob(
        jobs, tmp_path, "--nodes=2:4", "--auto-scale=on", "--nodes-start=4", law="0.05 0.001 0 1", environ=SHORT
    )
    wait_until(lambda: job.size() == 4, timeout=PATIENCE, explain=lambda: job.host.err)
    job.until(lambda status: status.room)
    began_at = time.monotonic()
    assert "At most 2 nodes" in job.command("scale", "--room=2")
    wait_until(lambda: job.size() == 2 == job.size(1), timeout=PATIENCE, explain=lambda: job.host.err)
    print(f"\n2 of 4 nodes train {time.monotonic() - began_at:.1f} s after the order")
    assert time.monotonic() - began_at < 40, "3 s and the pause; ten times that on a busy machine"
    job.command("scale", "--room=1")
    status = job.until(lambda status: status.room and status.room[0].most == 1)
    assert status.target == 2, "never below the minimum"
    assert "2" in status.sentence
    assert job.size() == 2
    job.finish()


def test_dry_run_decides_and_launches_nothing(jobs: JobFactory, tmp_path: Path) -> None:
    job = ScaledJob(
        jobs, tmp_path, "--nodes=1:3", "--auto-scale=dry-run", "--max-local-nodes=3", law="0.05 0.1 0 1", environ=SHORT
    )
    wait_until(lambda: job.size() == 3, timeout=PATIENCE, explain=lambda: job.host.err)
    status = job.until(lambda status: status.decisions)
    assert status.num_outcomes.get(ScaleOutcome.PLANNED, 0) == 0
    assert "dry-run" in job.command("scale", "--why")
    assert "Automatic scaling is off" in job.command("scale", "--auto=off")
    assert job.size() == 3
    job.finish()
    assert len(job.launches()) == 3, "those that the job began with"


@pytest.mark.parametrize("num_kills", [3, pytest.param(20, marks=pytest.mark.chaos)])
def test_a_plan_outlives_the_master_and_is_carried_out_once(jobs: JobFactory, tmp_path: Path, num_kills: int) -> None:
    """Line 7: the master is killed again and again, at any moment between a measured run, its plan and the switch."""
    job = ScaledJob(jobs, tmp_path, "--nodes=1:3", "--auto-scale=on", law="0.05 0.001 0 1", environ=SHORT)
    wait_until(lambda: job.size() == 1, timeout=PATIENCE, explain=lambda: job.host.err)
    for number in range(num_kills):
        time.sleep(
            0.7 + 1.3 * (number % 7)
        )  # another moment each time: no event tells when a run is about to be measured
        masters = jobs.pids("dlrover.master")
        if masters:
            os.kill(masters[0], signal.SIGKILL)
    status = job.until(lambda status: status.target == 3 and not status.on_probation)
    wait_until(lambda: job.size() == 3, timeout=PATIENCE, explain=lambda: job.host.err)
    assert [moved for moved in changes(status) if moved[0] == "taken-back"] == []
    job.finish()
    ranks = [launch.rank for launch in {launch.id: launch for launch in job.launches()}.values()]
    assert sorted(ranks) == [0, 1, 2], "each node was asked for as one"
    done = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.main", "replay", "--json", str(job.journal_file)],
        capture_output=True, text=True, check=True, env=jobs.env(),
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert any("nodes instead of" in text for line in told for text in line.get("verdicts", ()))
    assert told[-1]["verified"]
