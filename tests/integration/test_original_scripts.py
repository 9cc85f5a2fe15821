"""Scripts written for the original DLRover run unchanged: DDP with its checkpointer, paths of their own, resuming."""

from __future__ import annotations

import os

import torch

from tests.integration.jobs import SCRIPTS

SCRIPT = SCRIPTS / "original_ddp.py"


def loss_of(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("loss "))


def test_a_ddp_script_saves_crashes_resumes_and_ends_where_an_undisturbed_one_does(jobs, tmp_path):
    directory = tmp_path / "run"
    options = ["--nproc-per-node=2", SCRIPT, "--max_iters", "12", "--user_path"]
    job = jobs.run(*options, "--save_dir", directory, "--crash_at", "8")
    assert job.process.returncode == 0, job.err
    assert [line for line in job.out.splitlines() if line.startswith("start")] == [
        "start from iteration 0", "start from iteration 8",
    ]  # fmt: skip
    assert (directory / "dlrover_latest.txt").read_text() == "10"
    state = torch.load(directory / "checkpoint-10.pt")
    assert state["iter_num"] == 10
    assert sorted(name for name in os.listdir(directory) if name.isdigit()) == ["10", "5"]
    resumed = jobs.run(*options, "--save_dir", tmp_path / "other", "--resume_path", directory / "checkpoint-5.pt")
    assert resumed.process.returncode == 0, resumed.err
    assert "start from iteration 5" in resumed.out
    assert loss_of(resumed.out) == loss_of(job.out), "the crash and the resume have changed nothing"
