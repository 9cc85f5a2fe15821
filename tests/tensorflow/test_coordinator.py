"""The coordinator runtime with real processes, signals and TensorFlow: one process runs the program, workers and servers serve it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tensorflow.cluster_job import ClusterJob, checkpoint_values, newest_checkpoint
from tests.tensorflow.conftest import HAS_OWN_ESTIMATOR, StartJob

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.slow,
    pytest.mark.skipif(HAS_OWN_ESTIMATOR, reason="tested with the newest TensorFlow"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensorflow" / "ctr"
CONF, KERAS = "coordinated_conf.Conf", "coordinated_keras.Conf"
TRAINS = r"Version \d+ trains"
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def play(directory: Path, **environ: object) -> dict[str, Any]:
    """The chief alone, with servers in its own process and a master that agrees to everything."""
    own = {f"COORDINATED_{name.upper()}": str(value) for name, value in {"dir": directory, **environ}.items()}
    usual = {"DLROVER_CLUSTER_VERSION": "1", "TF_NUM_INTEROP_THREADS": "16", "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = Path(__file__).with_name("job")
    done = subprocess.run(
        [sys.executable, "coordination.py"],
        cwd=job, env={**os.environ, **usual, **own}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_each_record_is_trained_once_and_saves_wait_for_all_batches(tmp_path: Path) -> None:
    found = play(tmp_path, records=300)
    assert found["seen"] == [1.0] * 300
    told = [name for name, _ in found["told"]]
    assert told[:4] == ["ServerBound", "ModelRestored", "TakeCut", "ModelSaved"]
    assert set(told[2:]) == {"TakeCut", "ModelSaved"}
    saved = [step for name, step in found["told"] if name == "ModelSaved"]
    assert saved[0] == 0
    assert saved == sorted(set(saved))
    assert saved[-1] == 30


def test_a_chief_parks_when_nothing_is_under_way_and_the_next_one_goes_on(tmp_path: Path) -> None:
    first = play(tmp_path, records=300, park_at=10, save_steps=10)
    assert [name for name, _ in first["told"][-4:]] == ["ProcessParked", "TakeCut", "ModelSaved", "over"]
    saved = first["told"][-2][1]
    assert sum(first["seen"]) == 10 * saved
    second = play(tmp_path, records=300)
    assert second["told"][1] == ["ModelRestored", saved]


@pytest.mark.parametrize("package", ["keras", "tf_keras"])
def test_programs_may_be_of_either_keras(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    found = play(tmp_path, keras=package, conf=KERAS, records=2000)
    assert found["told"][-1] == ["ModelSaved", 200]
    flat = [float(np.ravel(value)[0]) for value in found["values"].values() if np.shape(value) in ((1,), (1, 1))]
    assert any(value == pytest.approx(3.0, abs=0.5) for value in flat), flat
    assert any(value == pytest.approx(1.0, abs=0.5) for value in flat), flat


def test_a_model_of_tf_keras_is_trained_by_its_fit(tmp_path: Path) -> None:
    """Its epochs, metrics and callbacks, with the master's batches; stopped by a change in the middle, it goes on in the epoch that it was in."""
    pytest.importorskip("tf_keras")
    settings = {"keras": "tf_keras", "conf": KERAS, "records": 2000, "fit": 1}
    first = play(tmp_path, park_at=100, **settings)
    assert first["told"][-1] == ["over", None]
    [saved] = [step for name, step in first["told"][-2:] if name == "ModelSaved"]
    second = play(tmp_path, **settings)
    assert second["told"][1] == ["ModelRestored", saved]
    assert second["told"][-1] == ["ModelSaved", saved + 200]
    iterations = [
        value for name, value in second["values"].items() if name.startswith("model/optimizer/_iterations/.ATTR")
    ]
    assert iterations == [saved + 200], second["values"].keys()
    epochs = [json.loads(line) for line in (tmp_path / "epochs.jsonl").read_text().splitlines()]
    assert [each["epoch"] for each in epochs] == [*range(saved // 50), *range(saved // 50, saved // 50 + 4)]
    assert epochs[-1]["loss"] < 0.1 < epochs[0]["loss"]
    assert set(epochs[-1]) == {"epoch", "loss", "mae"}


def begin(start: StartJob, *options: str, **environ: object) -> ClusterJob:
    return start("--ps", "2", "--chief", "1", "--nodes", "2", *options, conf=CONF, **environ)


def seen(job: ClusterJob) -> np.ndarray:
    """How often the final model has learned from each record."""
    return checkpoint_values(newest_checkpoint(job.model_dir))[f"seen{VALUE}"]


def is_reading_on(job: ClusterJob, version: int) -> None:
    job.wait_for_verdict(TRAINS, version)
    job.wait_for_steps("chief-0", 8, version=version)


def begins_with_a_checkpoint(job: ClusterJob, version: int) -> int:
    """Its step. The values that the version trains on are those of the checkpoint, bit by bit."""
    step = int(trained(job, version).split("of step ")[1].split()[0])
    path = job.directory / f"restored-{version}.npz"
    job.wait_until(f"version {version} reads", path.exists)
    restored, saved = np.load(path), checkpoint_values(job.model_dir / f"model.ckpt-{step}")[f"table{VALUE}"]
    assert restored["table"].shape == (100_000, 16)
    assert np.array_equal(restored["table"].view(np.uint32), saved.view(np.uint32))
    return step


def trained(job: ClusterJob, version: int) -> str:
    """What the master says of the version when it trains."""
    return job.wait_for_verdict(f"Version {version} trains")


def test_a_program_trains_to_the_end_of_its_data(start: StartJob) -> None:
    job = begin(start, "--evaluator", "1", records=1500)
    assert job.finish() == 0, job.output[-4000:]
    assert seen(job).tolist() == [1.0] * 1500
    assert job.matching("The job ends \\(Completed\\)")
    assert len(job.matching(TRAINS)) == 1
    assert "with 2 servers and 2 workers" in job.output


def test_lost_servers_cost_what_came_after_the_last_checkpoint(start: StartJob) -> None:
    """Saves of a coordinator are exact: whatever is lost, the model has learned from each record once."""
    job = begin(start, records=4000, pace=0.2, save_steps=20)
    for version in (1, 2):
        is_reading_on(job, version)
        job.wait_until("a checkpoint", lambda at=version: len(job.output.split("saved step")) > 2 * at)  # type: ignore[misc]
        saved = int(checkpoint_values(newest_checkpoint(job.model_dir))[f"global_step{VALUE}"])
        job.kill(f"ps-{version - 1}")
        assert begins_with_a_checkpoint(job, version + 1) >= saved
    assert job.finish() == 0, job.output[-4000:]
    assert seen(job).tolist() == [1.0] * 4000


def test_a_lost_worker_comes_back_where_it_was(start: StartJob) -> None:
    job = begin(start, records=2500, pace=0.2)
    is_reading_on(job, 1)
    job.kill("worker-0")
    job.wait_for_verdict("worker-0 starts again")
    assert job.finish() == 0, job.output[-4000:]
    assert len(job.matching(TRAINS)) == 1, "no other version"
    # A batch of the killed process may have landed before its answer was lost; it was run again.
    counts = seen(job)
    assert counts.min() == 1.0
    assert counts.sum() <= 2500 + 2 * 10


def test_workers_may_be_lost_again_and_again_at_any_moment_of_a_step(start: StartJob) -> None:
    """Now and then the chief fetches just then, and hears of the loss before TensorFlow has the batch run again."""
    job = begin(start, records=40_000, pace=0.002, save_steps=500)
    is_reading_on(job, 1)
    for _ in range(6):
        former = job.pid_of("worker-1")
        job.kill("worker-1")
        job.wait_until("it is back", lambda pid=former: job.pid_of("worker-1") != pid)  # type: ignore[misc]
        job.wait_for_steps("chief-0", len(job.steps("chief-0")) + 10, version=1)
    assert job.finish() == 0, job.output[-4000:]
    assert len(job.matching(TRAINS)) == 1, "no other version"
    counts = seen(job)
    assert counts.min() == 1.0
    assert counts.sum() <= 40_000 + 6 * 2 * 10


def test_a_lost_chief_goes_back_to_its_last_checkpoint(start: StartJob) -> None:
    job = begin(start, records=4000, pace=0.2, save_steps=20)
    is_reading_on(job, 1)
    job.wait_until("a checkpoint of trained steps", lambda: len(job.output.split("saved step")) > 2)
    saved = int(checkpoint_values(newest_checkpoint(job.model_dir))[f"global_step{VALUE}"])
    assert saved > 0
    job.kill("chief-0")
    job.wait_for_verdict("Version 2 of the cluster begins: chief-0 is lost")
    assert begins_with_a_checkpoint(job, 2) >= saved
    assert job.finish() == 0, job.output[-4000:]
    assert seen(job).tolist() == [1.0] * 4000


def test_a_stopped_server_is_named_and_replaced(start: StartJob) -> None:
    job = begin(start, records=100_000, pace=0.2)
    is_reading_on(job, 1)
    job.kill("ps-1", signal.SIGSTOP)
    assert "ps-1" in job.wait_for_verdict("is stopped \\(SIGSTOP\\)")
    is_reading_on(job, 2)
    job.close()
    assert not job.left_behind()


def test_planned_changes_lose_no_batch_and_no_record(start: StartJob) -> None:
    """Servers 2 to 3 to 2 and an exchange: the save of each change is exact, and the next version begins with it."""
    job = begin(start, records=6000, pace=0.3, save_steps=100_000)
    changes = (
        ("scale", "--replicas", "ps=3"),
        ("scale", "--replicas", "ps=2"),
        ("migrate", "--node", "ps-0", "--cpu", "1", "--memory-mb", "0"),
    )
    for version, change in enumerate(changes, start=2):
        job.wait_for_steps("chief-0", 4, version=version - 1)
        job.command(*change)
        step = begins_with_a_checkpoint(job, version)
        saved = job.matching(r"step \d+ is saved and the parameter servers change")[version - 2]
        assert [str(step)] == re.findall(r"step (\d+) is saved", saved)
    assert "on 3 parameter servers" in trained(job, 2)
    assert job.finish() == 0, job.output[-4000:]
    assert seen(job).tolist() == [1.0] * 6000


def test_workers_that_come_later_join_after_a_save(start: StartJob) -> None:
    """A strategy cannot be told of them, so they come with the next version."""
    job = begin(start, records=6000, pace=0.3, save_steps=10, join=5)
    is_reading_on(job, 1)
    job.command("scale", "--replicas", "worker=3")
    job.wait_until("three workers train", lambda: "with 2 servers and 3 workers" in job.output)
    assert job.matching(r"of the cluster begins: .*worker-2.* joins")
    assert job.finish() == 0, job.output[-4000:]
    assert seen(job).tolist() == [1.0] * 6000


def test_a_program_that_cannot_be_built_ends_the_job_with_its_traceback(start: StartJob) -> None:
    job = start("--ps", "1", "--chief", "1", "--nodes", "1", conf=CONF, fault="model")
    assert job.finish(timeout=600) == 1
    assert "this model cannot be built" in job.output
    assert "in train_step" in job.output
    assert job.matching("The job ends \\(CodeError\\)")
    assert len(job.matching("starts again")) <= 4


def test_the_last_step_ends_the_training_before_the_data(start: StartJob) -> None:
    job = start("--ps", "1", "--chief", "1", "--nodes", "1", conf=CONF, records=50_000, max_steps=30)
    assert job.finish() == 0, job.output[-4000:]
    assert int(checkpoint_values(newest_checkpoint(job.model_dir))[f"global_step{VALUE}"]) == 30
    assert job.matching("were left unread: training ended, by the last step or by a hook of the script")


def test_a_killed_master_changes_nothing_for_a_program(start: StartJob) -> None:
    job = begin(start, records=4000, pace=0.2)
    is_reading_on(job, 1)
    job.kill_master()
    job.wait_until("there is another master", lambda: "master_epoch=2" in job.master_log)
    assert job.finish() == 0, job.output[-4000:]
    assert len(job.matching(TRAINS)) == 1, "no other version"
    assert seen(job).tolist() == [1.0] * 4000


def begin_change(start: StartJob, hold: str) -> ClusterJob:
    """Slow enough that the data lasts until the change has been asked for, however busy the machine is."""
    job = start("--ps", "1", "--chief", "1", "--nodes", "1", conf=CONF, records=4000, pace=0.5, save_steps=100_000)
    job.wait_for_steps("chief-0", 3, version=1)
    job.hold(hold)
    job.command("scale", "--replicas", "ps=2")
    return job


@pytest.mark.parametrize("phase", ["parking", "saving", "restoring"])
def test_a_killed_master_takes_up_the_change_of_a_program_where_it_was(start: StartJob, phase: str) -> None:
    where = {"parking": "stepping"}.get(phase, phase)
    job = begin_change(start, where)
    job.wait_for_verdict("chief and workers park")
    job.wait_for_held(where)
    job.kill_master()
    job.wait_until("there is another master", lambda: "master_epoch=2" in job.master_log)
    assert len(job.matching(TRAINS)) == 1, f"the master was killed after {phase}"
    job.let_go(where)
    assert "on 2 parameter servers" in trained(job, 2)
    begins_with_a_checkpoint(job, 2)
    assert job.finish() == 0, job.output[-4000:]
    assert len(job.matching(TRAINS)) == 2
    assert seen(job).tolist() == [1.0] * 4000


def test_a_second_change_of_the_servers_waits_for_the_first(start: StartJob) -> None:
    job = begin_change(start, "saving")
    job.wait_for_held("saving")
    job.command("scale", "--replicas", "ps=3")
    job.let_go("saving")
    assert "on 3 parameter servers" in trained(job, 2)
    begins_with_a_checkpoint(job, 2)
    assert job.finish() == 0, job.output[-4000:]
    assert len(job.matching(TRAINS)) == 2, "none with 2 servers in between"
    assert seen(job).tolist() == [1.0] * 4000


@pytest.mark.parametrize(
    ("package", "fit"), [("keras", ""), ("tf_keras", "1")], ids=["a loop of Keras 3", "fit of tf_keras"]
)
def test_a_keras_model_loses_a_server_and_no_batch(start: StartJob, package: str, fit: str) -> None:
    pytest.importorskip(package)
    options = ("--ps", "2", "--chief", "1", "--nodes", "1")
    job = start(*options, conf=KERAS, keras=package, fit=fit, records=3000, pace=0.1)
    is_reading_on(job, 1)
    job.wait_until("a checkpoint", lambda: "saved step 2" in job.output)
    job.kill("ps-1")
    assert int(trained(job, 2).split("of step ")[1].split()[0]) >= 20
    assert job.finish() == 0, job.output[-4000:]
    values = checkpoint_values(newest_checkpoint(job.model_dir))
    assert int(values[f"global_step{VALUE}"]) == 300
    flat = [float(np.ravel(value)[0]) for value in values.values() if np.shape(value) in ((1,), (1, 1))]
    assert any(value == pytest.approx(3.0, abs=0.5) for value in flat), flat
    if fit:
        epochs = [json.loads(line)["epoch"] for line in (job.directory / "epochs.jsonl").read_text().splitlines()]
        assert epochs[-1] == max(epochs) >= 4, "fit did not go on in the epoch that it was in"


def test_the_example_trains_a_click_rate_model_of_keras(tmp_path: Path) -> None:
    """`examples/tensorflow/ctr` with its coordinator: two passes over the click log, each record counted in each."""
    for name, rows in (("train.csv", 1000), ("eval.csv", 10)):
        make = [sys.executable, "make_data.py", "--rows", str(rows), str(tmp_path / name)]
        subprocess.run(make, cwd=EXAMPLE, check=True, timeout=60)
    options = ("--ps", "2", "--chief", "1", "--nodes", "1")
    job = ClusterJob(tmp_path, *options, conf="coordinated.TrainConf", cwd=EXAMPLE, epochs=2, embedding=4)
    try:
        assert job.finish() == 0, job.output[-4000:]
    finally:
        job.close()
    prefix = newest_checkpoint(tmp_path / "coordinated")
    stored = json.loads(Path(f"{prefix}.dlrover.json").read_text())
    [books] = json.loads(stored["data_state"])["datasets"].values()
    assert books["num_consumed"] == 2 * 1000
    values = checkpoint_values(prefix)
    # Shards of 128: in each pass seven whole ones and one of 104 records.
    assert int(values[f"global_step{VALUE}"]) == stored["step"] == 2 * 16
    assert np.abs(values[f"linear{VALUE}"]).max() > 0.0, "it began with zeros and learned nothing"
