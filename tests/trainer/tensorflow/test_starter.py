"""The flags of the starter, and what it says where it cannot start. No TensorFlow is needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dlrover
from dlrover.cli.options.settings import read_settings
from dlrover.protocol.messages.fleet import Strategy
from dlrover.trainer.tensorflow.starter import get_parsed_args, main, node_command
from dlrover.trainer.worker.tf_ray_worker import TFRayWorker


def test_the_defaults_are_those_of_the_original() -> None:
    args = get_parsed_args([])
    assert (args.platform, args.worker_action, args.ps_num, args.worker_num) == ("KUBERNETES", "run", 1, 3)
    assert (args.evaluator_num, args.mock, args.enable_auto_scaling) == (1, False, False)


@pytest.mark.parametrize(
    ("text", "value"), [("False", False), ("no", False), ("0", False), ("true", True), ("yes", True)]
)
def test_booleans_mean_what_they_say(text: str, value: bool) -> None:
    assert get_parsed_args([f"--enable_auto_scaling={text}"]).enable_auto_scaling is value


def test_unknown_flags_are_named_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert get_parsed_args(["--platform", "ray", "--colour", "blue"]).platform == "RAY"
    assert "--colour blue" in caplog.text


def test_only_the_action_run_starts_anything() -> None:
    assert main(["--worker_action", "predict"]) == 0


def test_a_build_tells_its_commit_and_logs_go_to_a_file_of_each_process_where_that_is_wanted(tmp_path: Path) -> None:
    """A build of our own: the package beside a `COMMIT_INFO`."""
    package = tmp_path / "dlrover"
    package.mkdir()
    for part in Path(dlrover.__file__).parent.iterdir():
        (package / part.name).symlink_to(part)
    (package / "COMMIT_INFO").write_text("commit 0123abc of branch release\n")
    logs = tmp_path / "logs"
    process = subprocess.Popen(
        [sys.executable, "-m", "dlrover.trainer", "--worker_action", "predict"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "DLROVER_TRAINER_LOG_DIR": str(logs)},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert output.splitlines() == ["commit 0123abc of branch release"]
    [file] = logs.iterdir()
    assert file.name == f"trainer.{process.pid}.log"
    assert "--worker_action predict does nothing" in file.read_text()


@pytest.mark.parametrize("flag", ["--worker_num=0", "--ps_num=0", "--evaluator_num=2"])
def test_a_local_job_has_numbers_that_make_sense(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--platform", "local_kubernetes", flag]) == 2
    assert flag.partition("=")[0] in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed here")
@pytest.mark.parametrize("module", ["dlrover.trainer", "dlrover.trainer.entry.local_entry"])
def test_without_tensorflow_the_error_names_the_extra(module: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_")}
    done = subprocess.run(
        [sys.executable, "-m", module, "--conf", "conf.TrainConf"],
        capture_output=True,
        text=True,
        env=environ,
        timeout=120,
    )
    assert done.returncode == 2
    assert "dlrover[tensorflow-estimator]" in done.stderr


@pytest.mark.parametrize(
    ("environ", "limits"), [({"NODE_NUM": "3"}, ["--nnodes=3"]), ({"PET_NNODES": "1:4", "NODE_NUM": "3"}, [])]
)
def test_a_node_of_a_platform_becomes_its_agent_first(environ: dict[str, str], limits: list[str]) -> None:
    """Manifests of the original start this program in each pod. The agent starts it again, for each version of the cluster."""
    command = node_command(["--platform=KUBERNETES", "--conf=conf.TrainConf"], environ)
    assert command[:3] == [sys.executable, "-m", "dlrover.cli.run"]
    _, settings = read_settings(
        command[3:], {**environ, "DLROVER_MASTER_ADDR": "master:50001", "DLROVER_NODE_ID": "2", "NODE_TYPE": "ps"}
    )
    assert settings.terms.strategy is Strategy.PS
    assert settings.entry.target == b"dlrover.trainer.entry.local_entry"
    assert settings.entry.args == (b"--platform=KUBERNETES", b"--conf=conf.TrainConf")
    assert command[4:-4] == limits


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed here")
def test_a_worker_of_ray_works_in_a_thread_and_its_health_check_tells_of_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("DLROVER_")]:
        monkeypatch.delenv(name)
    worker = TFRayWorker({"conf": "conf.TrainConf", "task_type": "chief", "task_id": 0, "mock": False})
    assert worker.join(120)
    with pytest.raises(RuntimeError, match=r"its process ended with 2:\n.*dlrover\[tensorflow-estimator\]"):
        worker.health_check()


def test_a_mocked_worker_of_ray_starts_nothing() -> None:
    worker = TFRayWorker(get_parsed_args(["--mock=True", "--task_type=ps"]))
    assert worker.join(0)
    assert worker.health_check() == "OK"
    assert worker.args["task_type"] == "ps"
