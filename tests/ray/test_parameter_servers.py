"""A TensorFlow job with parameter servers on a real Ray: one machine for each of its nodes. Run by `make test-tensorflow-clusters`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed here: make test-tensorflow-clusters")

import numpy as np

from dlrover.platforms.ray.store import Registry
from tests.ray.jobs import actor_above, below, dlrover, living, raylet_above
from tests.ray.lab import RayLab, until
from tests.tensorflow.cluster_job import ShownJob, checkpoint_values, newest_checkpoint

pytestmark = pytest.mark.timeout(900)

NAME = "servers"
RECORDS = 2500
COMMAND = ["python", "-m", "dlrover.trainer.entry.local_entry", "--platform=RAY", "--conf=counting_conf.Conf"]
MODELS = Path(__file__).parents[1] / "tensorflow" / "job"


@pytest.fixture
def machines(ray_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayLab]:
    """Three machines of one processor, where the conf class can be imported and its numbers are in the environment."""
    monkeypatch.setenv("PYTHONPATH", str(MODELS))
    settings = {"dir": tmp_path, "records": RECORDS, "pace": 0.05, "save_steps": 20, "exact_saves": 1, "table": 1000}
    for name, value in settings.items():
        monkeypatch.setenv(f"COUNTING_{name.upper()}", str(value))
    lab = RayLab(ray_dir)
    try:
        for _ in range(3):
            lab.add_machine()
        yield lab
    finally:
        lab.close()


def submit(lab: RayLab, directory: Path) -> ShownJob:
    """By the original's job file: a parameter server, a chief and a worker."""
    template = {"spec": {"containers": [{"name": "main", "command": COMMAND}]}}
    replica = {"replicas": 1, "resources": {"cpu": 1}, "template": template}
    spec = {
        "distributionStrategy": "ParameterServerStrategy",
        "replicaSpecs": {"ps": replica, "chief": replica, "worker": replica},
    }
    file = directory / "job.json"
    file.write_text(json.dumps({"spec": spec}))
    output = directory / "output.txt"
    environ = {**os.environ, "RAY_ADDRESS": lab.address}
    with output.open("wb") as log:
        process = subprocess.Popen(
            dlrover("master", "--platform=ray", f"--job-name={NAME}", f"--job-spec={file}"),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environ,
        )
    return ShownJob(directory, output, process)


def test_a_lost_machine_of_a_server_costs_what_came_after_the_last_save(machines: RayLab, tmp_path: Path) -> None:
    """All nodes are actors. With exact saves the model has learned from each record once, whatever was lost."""
    job = submit(machines, tmp_path)
    assert job.process is not None
    try:
        for version, lose in ((1, lose_node), (2, lose_machine)):
            job.wait_for_steps("chief-0", 25, version=version)
            job.wait_for_steps("worker-0", 5, version=version)
            lose(machines, job)
            job.wait_for_steps("chief-0", 1, version=version + 1)
            restored = np.load(tmp_path / f"restored-{version + 1}.npz")
            saved = checkpoint_values(job.model_dir / f"model.ckpt-{int(restored['step'])}")
            assert np.array_equal(restored["table"].view(np.uint32), saved["counting/table"].view(np.uint32))
        (tmp_path / "hurry").touch()
        assert job.process.wait(240) == 0, job.output[-4000:]
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(120)
    counts = checkpoint_values(newest_checkpoint(job.model_dir))["counting/seen"].ravel()
    assert counts.tolist() == [1.0] * RECORDS
    assert not Registry().names()
    machines.await_nothing_left("counting_conf")


def lose_node(lab: RayLab, job: ShownJob) -> None:
    """The actor and everything below it; its machine takes the replacement."""
    actor = actor_above(job.pid_of("ps-0"))
    gone = below(actor.pid)
    actor.kill()
    until(lambda: not living(gone), lambda: f"still there: {living(gone)}")


def lose_machine(lab: RayLab, job: ShownJob) -> None:
    """Its raylet is killed, and another machine joins."""
    raylet = raylet_above(job.pid_of("ps-0"))
    machine = next(each for each in lab.machines if lab.raylet(each) == raylet)
    os.kill(raylet, signal.SIGKILL)
    lab.add_machine()
    lab.remove_machine(machine)
