"""A script with `TF_CONFIG` and `tf.estimator.train_and_evaluate`, and without a line of ours."""

from __future__ import annotations

import pytest

from tests.tensorflow.cluster_job import ClusterJob, checkpoint_values, newest_checkpoint
from tests.tensorflow.conftest import StartJob

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

TRAINS = r"Version \d+ trains"


def begin(start: StartJob, *options: str, **environ: object) -> ClusterJob:
    return start("--ps", "2", "--chief", "1", "--nodes", "1", *options, script="plain_script.py", **environ)


def test_a_plain_script_survives_kills_of_parameter_servers(start: StartJob) -> None:
    """The script has no line of ours: what was saved counts, and it trains to its last step."""
    job = begin(start, "--evaluator", "1", max_steps=400, pace=0.03)
    for version in (1, 2):
        job.wait_for_verdict(TRAINS, version)
        trained = len(job.steps("chief-0"))
        job.wait_until("the chief trains", lambda at=trained: len(job.steps("chief-0")) > at + 25)  # type: ignore[misc]
        saved = int(checkpoint_values(newest_checkpoint(job.model_dir))["global_step"])
        job.kill(f"ps-{version - 1}")
        job.wait_for_verdict(TRAINS, version + 1)
        job.wait_until("the chief has restored", lambda at=version: len(lives(job)) == at + 1)  # type: ignore[misc]
        assert min(lives(job)[-1]) >= saved, "it began anew, or from an older checkpoint"
    assert job.finish() == 0, job.output[-4000:]
    values = checkpoint_values(newest_checkpoint(job.model_dir))
    assert 400 <= int(values["global_step"]) <= 402
    assert values["line/weights"].ravel() == pytest.approx([3.0, 1.0], abs=1.0)
    assert list((job.model_dir / "eval").iterdir()), "the evaluator of TensorFlow has seen a checkpoint"


def lives(job: ClusterJob) -> list[list[int]]:
    """The steps of the chief, by process."""
    found: dict[int, list[int]] = {}
    for step in job.steps("chief-0"):
        found.setdefault(step.version, []).append(step.step)
    return list(found.values())


def test_a_planned_change_costs_a_plain_script_no_step(start: StartJob) -> None:
    job = begin(start, max_steps=1500, pace=0.03)
    job.wait_until("all train", lambda: len(job.steps("chief-0")) > 5 and len(job.steps("worker-0")) > 5)
    job.command("scale", "--replicas", "ps=3")
    said = job.wait_for_verdict(TRAINS, 2)
    before = len(lives(job)[0]) + len({step.step for step in job.steps("worker-0")})
    assert "on 3 parameter servers" in said
    assert job.finish() == 0, job.output[-4000:]
    assert int(said.split("of step ")[1].split()[0]) <= before
    assert len(job.steps("chief-0")) + len(job.steps("worker-0")) in (1500, 1501)
    assert int(checkpoint_values(newest_checkpoint(job.model_dir))["global_step"]) in (1500, 1501)
