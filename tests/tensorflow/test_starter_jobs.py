"""Whole jobs under the historical flags: `--platform local_kubernetes` and `local_ray`, by both names of the starter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.tensorflow.cluster_job import checkpoint_values, newest_checkpoint

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

JOB = Path(__file__).with_name("job")


def run(
    directory: Path, module: str, platform: str, *flags: str, **environ: object
) -> subprocess.CompletedProcess[str]:
    own = {f"COUNTING_{name.upper()}": str(value) for name, value in {"dir": directory, **environ}.items()}
    command = [sys.executable, "-m", module, f"--platform={platform}", "--conf=counting_conf.Conf", *flags]
    done = subprocess.run(
        command,
        cwd=JOB,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **own},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert not left_behind(directory), "processes of the job are left"
    return done


def left_behind(directory: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("COUNTING_DIR") == str(directory):
                found.append(process.pid)
        except psutil.Error:
            continue  # of another user, or gone
    return found


@pytest.mark.parametrize(
    ("module", "platform"),
    [("dlrover.trainer", "local_kubernetes"), ("dlrover.trainer.entry.local_entry", "local_ray")],
)
def test_a_job_of_the_historical_flags_ends_with_0_and_counts_every_record(
    tmp_path: Path, module: str, platform: str
) -> None:
    flags = ("--ps_num=2", "--worker_num=2", "--evaluator_num=1", "--enable_auto_scaling=True")
    done = run(tmp_path, module, platform, *flags, records=1000)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    counts = checkpoint_values(newest_checkpoint(tmp_path / "model"))["counting/seen"].ravel()
    assert counts.tolist() == [1.0] * 1000
    tasks = {path.name for path in tmp_path.glob("steps-*.txt")}
    assert tasks <= {"steps-chief-0.txt", "steps-worker-0.txt"}, "a worker is the chief"
    assert "steps-chief-0.txt" in tasks
    assert list((tmp_path / "model" / "export" / "best").iterdir())


def test_a_broken_model_ends_it_with_255_and_its_traceback(tmp_path: Path) -> None:
    """Spec 09 §3.3: any failure ends all, and the exit code is -1."""
    flags = ("--ps_num=1", "--worker_num=1", "--evaluator_num=0")
    done = run(tmp_path, "dlrover.trainer", "local_ray", *flags, fault="model")
    assert done.returncode == 255, done.stdout[-4000:] + done.stderr[-4000:]
    assert "this model cannot be built" in done.stdout + done.stderr
