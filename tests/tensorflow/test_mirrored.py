"""`MultiWorkerMirroredStrategy`: workers of the ordinary rendezvous that find each other by `TF_CONFIG`."""

from __future__ import annotations

import os
import signal

import pytest

from tests.tensorflow.cluster_job import ClusterJob, newest_checkpoint
from tests.tensorflow.conftest import HAS_OWN_ESTIMATOR, StartJob

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.skipif(HAS_OWN_ESTIMATOR, reason="tested with the newest TensorFlow"),
]


def lives(job: ClusterJob, rank: int) -> dict[int, list[tuple[int, float]]]:
    """Steps and weights of each process of that rank."""
    path = job.directory / f"steps-worker-{rank}.txt"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    found: dict[int, list[tuple[int, float]]] = {}
    for line in (each for each in lines if len(each) == 4):
        found.setdefault(int(line[1]), []).append((int(line[2]), float(line[3])))
    return found


def test_a_killed_worker_costs_what_came_after_the_last_checkpoint(start: StartJob) -> None:
    job = start("--nodes", "2", "--framework=tensorflow", script="mirrored_script.py", max_steps=80)
    job.wait_until(
        "both train", lambda: all(any(len(each) > 25 for each in lives(job, rank).values()) for rank in (0, 1))
    )
    job.wait_until("a checkpoint", lambda: bool(list((job.directory / "model").glob("ckpt-20.index"))))
    saved = int(newest_checkpoint(job.directory / "model").rpartition("-")[2])
    [victim] = lives(job, 1)
    os.kill(victim, signal.SIGKILL)
    assert job.finish() == 0, job.output[-4000:]
    for rank in (0, 1):
        first, second = lives(job, rank).values()
        assert second[0][0] > saved, "it began anew, or from an older checkpoint"
        assert second[0][0] <= first[-1][0] + 2
        assert second[-1][0] == 80
        steps = dict(first)
        assert all(weight == steps[step] for step, weight in second if step in steps), "it did not restore the weight"
    assert list(lives(job, 0).values())[-1] == list(lives(job, 1).values())[-1], "the replicas differ"
