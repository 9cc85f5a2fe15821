"""Parameter-server jobs with real processes, signals and TensorFlow."""

from __future__ import annotations

import itertools
import json
import re
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.tensorflow.cluster_job import ClusterJob, checkpoint_values, newest_checkpoint
from tests.tensorflow.conftest import StartJob

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

TRAINS = r"Version \d+ trains"
TRAINED = ("chief-0", "worker-0", "worker-1")


def seen(job: ClusterJob) -> np.ndarray:
    """How often the final model has learned from each record."""
    return checkpoint_values(newest_checkpoint(job.model_dir))["counting/seen"].ravel()


def test_a_job_runs_to_the_end_of_its_data(start: StartJob) -> None:
    """Design 15.1: every record once, the best export there, no process left."""
    job = start("--ps", "2", "--chief", "1", "--evaluator", "1", "--nodes", "2", records=3000)
    assert job.finish() == 0, job.output[-4000:]
    assert seen(job).tolist() == [1.0] * 3000
    assert list((job.model_dir / "export" / "best").iterdir())
    assert job.matching("The job ends \\(Completed\\)")
    assert "unknown key 'savesteps'" in job.output
    assert "Did you mean 'save_steps'?" in job.output
    assert {step.version for who in TRAINED for step in job.steps(who)} == {1}


def test_a_lost_parameter_server_costs_what_came_after_the_last_checkpoint(start: StartJob) -> None:
    """Design 15.2 and 15.3: restored values are those of the checkpoint, bit by bit."""
    job = start("--ps", "2", "--chief", "1", "--nodes", "2", records=6000, pace=0.05, save_steps=20)
    unseen: dict[int, list[int]] = {}
    for version in (1, 2):
        job.wait_for_verdict(TRAINS, version)
        job.wait_for_steps("chief-0", 12, version=version)
        newest = newest_checkpoint(job.model_dir)
        killed_at = job.kill(f"ps-{version - 1}")
        said = job.wait_for_verdict(TRAINS, version + 1)
        restored = np.load(job.directory / f"restored-{version + 1}.npz")
        # The name of a checkpoint has the step at the begin of its save; workers may make further ones before its own step is written.
        prefix, saved = next(
            (prefix, values)
            for prefix in (newest, newest_checkpoint(job.model_dir))
            for values in [checkpoint_values(prefix)]
            if int(values["global_step"]) == int(restored["step"])
        )
        assert f"the model of step {int(restored['step'])} " in said
        assert restored["count"] == 2
        assert restored["table"].shape == (100_000, 16)
        assert np.array_equal(restored["table"].view(np.uint32), saved["counting/table"].view(np.uint32))
        unseen[version + 1] = unseen_by(prefix)
        assert_trains_soon(job, version + 1, killed_at)
    assert job.finish() == 0, job.output[-4000:]
    # What is read after a loss is exactly what the cut of the restored checkpoint does not have.
    assert set(records_read(job, 2)) <= set(unseen[2])
    assert sorted(records_read(job, 3)) == unseen[3]
    assert set(records_read(job, 2)) & set(unseen[3]), "no record was read again, so nothing is shown"
    counts = seen(job)
    # What landed while a checkpoint was written may be in it and is read again: at least once, and seldom twice.
    assert counts.min() == 1.0
    assert counts.max() <= 3.0
    assert counts.mean() < 1.2


def assert_trains_soon(job: ClusterJob, version: int, killed_at: float) -> None:
    """Ten times what a benchmark shows on a quiet machine: about 2 s to the chief's step, and the last worker a second later."""
    for who in TRAINED:
        job.wait_for_steps(who, 1, version=version)
    chief, *workers = (job.steps_of(who, version)[0].at for who in TRAINED)
    assert chief - killed_at < 20, "kill to the first step of the chief"
    assert max(workers) - chief < 10, "the last worker after the chief"


def unseen_by(prefix: str) -> list[int]:
    """Numbers of the records that this checkpoint has not seen, by what is stored beside it."""
    stored = json.loads(Path(f"{prefix}.dlrover.json").read_text())
    [told] = json.loads(stored["data_state"])["datasets"].values()
    # Of a range: its epoch, start and end.
    returned = [number for each in told["ranges"] for number in range(each[1], each[2])]
    return sorted([*returned, *range(told["cursor"] * told["shard_size"], told["dataset_size"])])


def records_read(job: ClusterJob, version: int) -> list[int]:
    """By chief and workers in this version."""
    lines = [line.split() for path in job.directory.glob("read-*.txt") for line in path.read_text().splitlines()]
    ranges = [(int(start), int(end)) for number, start, end in lines if int(number) == version]
    return [number for start, end in ranges for number in range(start, end)]


def test_workers_and_chief_may_be_lost_beside_living_variables(start: StartJob) -> None:
    """Design 15.5 and 15.6: no other version, and the global step never falls."""
    job = start("--ps", "2", "--chief", "1", "--nodes", "2", records=10_000, pace=0.05, save_steps=20)
    for who in TRAINED:
        job.wait_for_steps(who, 3, version=1)
    worker_killed_at = job.kill("worker-1")
    job.wait_for_verdict("worker-1 starts again")
    job.wait_until("worker-1 trains again", lambda: job.steps("worker-1")[-1].at > worker_killed_at + 1)
    status = job.command("status")
    for slot in (
        "ps-0",
        "ps-1",
        "chief-0",
        "worker-0",
        "worker-1",
        "cluster: version 1, training, 2 parameter servers",
    ):
        assert slot in status
    killed_at = job.kill("chief-0")
    job.wait_for_verdict("chief-0 starts again")
    job.wait_until("the chief trains again", lambda: job.steps("chief-0")[-1].at > killed_at + 1)
    assert job.finish() == 0, job.output[-4000:]
    assert len(job.matching(TRAINS)) == 1
    assert not job.matching("Version 2"), "nobody else was stopped"
    # The others train on meanwhile: between the last and the next step of the one that was killed they make theirs.
    for who, at in (("worker-1", worker_killed_at), ("chief-0", killed_at)):
        last, back = pause_of(job, who, at)
        for other in TRAINED:
            meanwhile = [step for step in job.steps(other) if last < step.at < back]
            assert other == who or len(meanwhile) >= 3, f"{other} paused for {who}"
    for who in ("worker-0", "worker-1", "chief-0"):
        steps = [step.step for step in job.steps(who)]
        assert steps == sorted(steps), f"the step of {who} fell"
    # The batch of a killed process may have landed without its report.
    counts = seen(job)
    assert counts.min() == 1.0
    assert counts.sum() <= 10_000 + 2 * 10


def pause_of(job: ClusterJob, who: str, killed_at: float) -> tuple[float, float]:
    """When the killed process made its last step, and the next one its first: the longest pause between two steps of that task around the kill."""
    times = [step.at for step in job.steps(who)]
    pauses = [(after - before, before, after) for before, after in itertools.pairwise(times)]
    _, before, after = max(pause for pause in pauses if pause[1] < killed_at + 1 and pause[2] > killed_at)
    return before, after


def test_a_model_that_cannot_be_built_ends_the_job_with_its_traceback(start: StartJob) -> None:
    """Design 15.10."""
    job = start("--ps", "1", "--chief", "1", "--nodes", "1", fault="model")
    assert job.finish() == 1
    assert "this model cannot be built" in job.output
    assert "in model_fn" in job.output
    assert job.matching("The job ends \\(CodeError\\)")
    assert len(job.matching("starts again")) <= 8


@pytest.mark.parametrize(("environ", "most"), [({"max_steps": 30}, 36), ({"fault": "stop-hook"}, 12)])
def test_training_may_end_before_the_data(start: StartJob, environ: dict[str, object], most: int) -> None:
    job = start("--ps", "1", "--chief", "1", "--nodes", "1", records=50_000, **environ)
    assert job.finish() == 0, job.output[-4000:]
    assert int(checkpoint_values(newest_checkpoint(job.model_dir))["global_step"]) <= most
    assert job.matching("were left unread: training ended, by the last step or by a hook of the script")


def test_a_stopped_parameter_server_is_named_and_replaced(start: StartJob) -> None:
    """Design 15.7: TensorFlow says nothing about it, so the agent of its node does."""
    job = start("--ps", "2", "--chief", "1", "--nodes", "1", records=100_000, pace=0.05, save_steps=20)
    job.wait_for_steps("chief-0", 5, version=1)
    job.kill("ps-1", signal.SIGSTOP)
    assert "ps-1" in job.wait_for_verdict("is stopped \\(SIGSTOP\\)")
    job.wait_for_verdict(TRAINS, 2)
    job.wait_for_steps("worker-0", 2, version=2)
    job.close()
    assert not job.left_behind()


def test_a_worker_that_sleeps_through_a_change_never_writes_to_the_new_variables(start: StartJob) -> None:
    """Design 15.9: it wakes up alone, while its agent still sleeps and cannot end it."""
    job = start("--ps", "2", "--chief", "1", "--nodes", "1", records=2500, pace=0.05, save_steps=40, exact_saves=1)
    job.wait_until("an exact save", lambda: len(saved_steps(job)) >= 2)
    job.wait_for_steps("worker-0", len(job.steps("worker-0")) + 3, version=1)
    worker = psutil.Process(job.pid_of("worker-0"))
    agent = worker.parent()
    assert agent is not None
    agent.suspend()
    worker.suspend()
    job.kill("ps-0")
    job.wait_for_verdict(TRAINS, 2)
    job.wait_for_steps("chief-0", 2, version=2)
    num_steps = len(job.steps_of("worker-0", 1))
    worker.resume()
    job.wait_for_steps("chief-0", 12, version=2)
    late = job.steps_of("worker-0", 1)[num_steps:]
    assert len(late) <= 1, "the step that it slept in is written down; another one there cannot be"
    agent.resume()
    assert job.finish() == 0, job.output[-4000:]
    assert job.steps_of("worker-0", 2), "its node trains on with the new variables"
    assert seen(job).tolist() == [1.0] * 2500


def saved_steps(job: ClusterJob) -> list[int]:
    """As the chief tells them."""
    return [int(step) for step in re.findall(r"saved step (\d+) with cut", job.output)]


@pytest.mark.parametrize("is_warm", [True, False])
def test_processes_come_from_zygotes_unless_somebody_does_not_want_them(start: StartJob, is_warm: bool) -> None:
    """Design 15.12: after a loss, too, nobody imports TensorFlow again."""
    options = ["--ps", "1", "--chief", "1", "--nodes", "1", *([] if is_warm else ["--no-warm"])]
    job = start(*options, records=2000, pace=0.02)
    job.wait_for_steps("worker-0", 5, version=1)
    job.kill("ps-0")
    assert job.finish() == 0, job.output[-4000:]
    assert seen(job).min() == 1.0
    starts = [line.split() for line in (job.directory / "starts.txt").read_text().splitlines()]
    assert sorted(who for who, _ in starts) == ["chief", "chief", "worker", "worker"]
    assert {how for _, how in starts} == {"warm" if is_warm else "cold"}


def test_exact_saves_leave_no_doubt(start: StartJob) -> None:
    """Five servers are lost, one after the other, and still the model has learned from each record once."""
    options = ("--ps", "2", "--chief", "1", "--nodes", "2")
    job = start(*options, records=9000, pace=0.02, save_steps=25, exact_saves=1)
    for version in range(1, 6):
        job.wait_for_verdict(TRAINS, version)
        job.wait_for_steps("worker-0", 15, version=version)
        killed_at = job.kill(f"ps-{version % 2}")
        assert_trains_soon(job, version + 1, killed_at)
    assert job.finish() == 0, job.output[-4000:]
    assert seen(job).tolist() == [1.0] * 9000
    assert len(job.matching(TRAINS)) == 6, "a save alone begins no version"
    assert not job.matching("this save is not exact")


def test_data_that_goes_on_is_read_once_and_the_model_loses_what_came_since(start: StartJob) -> None:
    """`data_on_restore = "continue"`. Saves are exact, so the model that comes back has seen nothing twice."""
    options = ("--ps", "2", "--chief", "1", "--nodes", "1")
    job = start(*options, records=3000, pace=0.2, save_steps=30, exact_saves=1, on_restore="continue")
    job.wait_until("an exact save", lambda: any(step > 0 for step in saved_steps(job)))
    for who in ("chief-0", "worker-0"):
        job.wait_for_steps(who, len(job.steps(who)) + 3, version=1)
    job.kill("ps-1")
    job.wait_for_verdict(TRAINS, 2)
    assert job.matching("The datasets go on where they are; what was read since the checkpoint is not in the model")
    assert not job.matching("are read again")
    assert job.finish() == 0, job.output[-4000:]
    counts = seen(job)
    assert counts.max() == 1.0, "a record was read twice"
    assert 0 < (counts == 0.0).sum() <= 3000 - 300, "what came after the checkpoint is lost, and nothing else"
    first, second = records_read(job, 1), records_read(job, 2)
    given_back = set(first) & set(second)
    assert all(counts[number] == 1.0 for number in second)
    assert len(given_back) <= 2 * 20 * 2, "only shards that were not reported are read again"
