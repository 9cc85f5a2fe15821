"""Planned changes of the parameter servers, and masters that are killed in the middle of one, with real TensorFlow."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.tensorflow.cluster_job import ClusterJob, checkpoint_values, newest_checkpoint
from tests.tensorflow.conftest import StartJob

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

TRAINS = r"Version \d+ trains"
SHORT = {
    "DLROVER_SECONDS_FOR_STABLE_WORKER_COUNT": "4",
    "DLROVER_GLOBAL_STEP_COUNT_TO_AUTO_WORKER": "20",
}
"""A server is watched for 12 s instead of three minutes."""
TRAINED = ("chief-0", "worker-0", "worker-1")
CHANGES = (
    ("scale", "--replicas", "ps=3"),
    ("scale", "--replicas", "ps=2"),
    ("migrate", "--node", "ps-0", "--cpu", "1", "--memory-mb", "0"),
    ("scale", "--replicas", "ps=1"),
    ("scale", "--replicas", "ps=3"),
    ("scale", "--replicas", "ps=2"),
    ("migrate", "--node", "ps-1", "--cpu", "1", "--memory-mb", "0"),
)
"""1 to 3 to 2 and an exchange, twice in a row."""


def test_other_numbers_of_parameter_servers_lose_no_step_and_no_record(start: StartJob) -> None:
    """Design 15.4: the save of a planned change is exact, and old servers leave when all have moved."""
    job = start("--ps", "1", "--chief", "1", "--nodes", "2", records=16_000, pace=0.3, save_steps=100_000)
    job.wait_for_verdict(TRAINS)
    for version, change in enumerate(CHANGES, start=2):
        for who in TRAINED:
            job.wait_for_steps(who, 2, version=version - 1)
        job.command(*change)
        job.wait_for_verdict(TRAINS, version)
        restored = np.load(job.directory / f"restored-{version}.npz")
        saved = checkpoint_values(job.model_dir / f"model.ckpt-{int(restored['step'])}")
        assert np.array_equal(restored["table"].view(np.uint32), saved["counting/table"].view(np.uint32))
        before = [step.step for who in TRAINED for step in job.steps(who) if step.version < version]
        assert len(before) == int(restored["step"]), "a step was lost, or one too many is in the checkpoint"
        job.wait_for_verdict("The workers use", version)
        assert job.decided_at("The workers use", version) >= job.decided_at(TRAINS, version)
    assert job.finish() == 0, job.output[-4000:]
    records = checkpoint_values(newest_checkpoint(job.model_dir))["counting/seen"].ravel()
    assert records.tolist() == [1.0] * 16_000


def test_a_hot_server_is_exchanged_by_the_job_itself_and_keeps_its_memory(
    start: StartJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaling, line 8: one server uses all of its cores and the other little. The variables move to the new one bit by bit."""
    for name, value in SHORT.items():
        monkeypatch.setenv(name, value)
    scaling = ("--cpus", "0.05", "--auto-scale", "on", "--optimizer", "none")
    job = start(
        "--ps",
        "2",
        "--chief",
        "1",
        "--nodes",
        "1",
        *scaling,
        records=20_000,
        pace=0.5,
        save_steps=100_000,
        burning=0,
    )
    said = job.wait_for_verdict("Server 0 gets 0.1 cores instead of 0.05")
    assert "its memory stays" in said
    job.wait_for_verdict(TRAINS, 2)
    restored = np.load(job.directory / "restored-2.npz")
    saved = checkpoint_values(job.model_dir / f"model.ckpt-{int(restored['step'])}")
    assert np.array_equal(restored["table"].view(np.uint32), saved["counting/table"].view(np.uint32))
    job.wait_for_steps("chief-0", 20, version=2)
    assert job.finish() == 0, job.output[-4000:]
    assert len(job.matching(r"Server \d gets")) == 1, "once"
    records = checkpoint_values(newest_checkpoint(job.model_dir))["counting/seen"].ravel()
    assert records.tolist() == [1.0] * 20_000


def begin_change(start: StartJob, hold: str) -> ClusterJob:
    """Slow enough that the data lasts until the change has been asked for, however busy the machine is."""
    job = start("--ps", "1", "--chief", "1", "--nodes", "1", records=6000, pace=0.5, save_steps=100_000, own_saver=1)
    job.wait_for_steps("chief-0", 3, version=1)
    job.wait_for_steps("worker-0", 1, version=1)
    job.hold(hold)
    job.command("scale", "--replicas", "ps=2")
    return job


@pytest.mark.parametrize("phase", ["parking", "saving", "restoring"])
def test_a_killed_master_takes_up_the_change_where_it_was(start: StartJob, phase: str) -> None:
    """Design 15.8: the phases are state."""
    where = {"parking": "stepping"}.get(phase, phase)
    job = begin_change(start, where)
    job.wait_for_verdict("chief and workers park")
    job.wait_for_held(where)
    job.kill_master()
    job.wait_until("there is another master", lambda: "master_epoch=2" in job.master_log)
    assert len(job.matching(TRAINS)) == 1, f"the master was killed after {phase}"
    job.let_go(where)
    assert "on 2 parameter servers" in job.wait_for_verdict(TRAINS, 2)
    assert job.finish() == 0, job.output[-4000:]
    assert len(job.matching(TRAINS)) == 2
    assert json.loads((job.model_dir / "data_shard_checkpoint.json").read_text())["step"] > 0
    records = checkpoint_values(newest_checkpoint(job.model_dir))["counting/seen"].ravel()
    assert records.tolist() == [1.0] * 6000


def test_a_second_change_waits_for_the_first(start: StartJob) -> None:
    """Design 15.9: two versions, no deadlock. What is wanted when the save is done is what the next version gathers."""
    job = begin_change(start, "saving")
    job.wait_for_held("saving")
    job.command("scale", "--replicas", "ps=3")
    job.let_go("saving")
    assert "on 3 parameter servers" in job.wait_for_verdict(TRAINS, 2)
    assert job.finish() == 0, job.output[-4000:]
    assert len(job.matching(TRAINS)) == 2, "none with 2 servers in between"
    records = checkpoint_values(newest_checkpoint(job.model_dir))["counting/seen"].ravel()
    assert records.tolist() == [1.0] * 6000
