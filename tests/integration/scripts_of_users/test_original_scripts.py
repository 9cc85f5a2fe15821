"""Scripts written for the original DLRover run unchanged: DDP, FSDP, DeepSpeed, transformers; paths of their own, resuming."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.jobs import SCRIPTS

SCRIPT = SCRIPTS / "original_ddp.py"


def loss_of(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("loss "))


def starts_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("start")]


def test_a_ddp_script_saves_crashes_resumes_and_ends_where_an_undisturbed_one_does(jobs, tmp_path):
    directory = tmp_path / "run"
    options = ["--nproc-per-node=2", SCRIPT, "--max_iters", "12", "--user_path"]
    job = jobs.run(*options, "--save_dir", directory, "--crash_at", "8")
    assert job.process.returncode == 0, job.err
    assert starts_of(job.out) == ["start from iteration 0", "start from iteration 8"]
    assert (directory / "dlrover_latest.txt").read_text() == "10"
    state = torch.load(directory / "checkpoint-10.pt")
    assert state["iter_num"] == 10
    assert sorted(name for name in os.listdir(directory) if name.isdigit()) == ["10", "5"]
    resumed = jobs.run(*options, "--save_dir", tmp_path / "other", "--resume_path", directory / "checkpoint-5.pt")
    assert resumed.process.returncode == 0, resumed.err
    assert "start from iteration 5" in resumed.out
    assert loss_of(resumed.out) == loss_of(job.out), "the crash and the resume have changed nothing"


def whole_of_shards(directory: Path) -> int:
    dcp_to_torch_save(directory / "10", directory.parent / "whole.pt")
    return torch.load(directory.parent / "whole.pt", weights_only=False)["step"]


def whole_of_full(directory: Path) -> int:
    return torch.load(directory / "10" / "rank_0.pt", weights_only=False)["step"]


def tag_of_deepspeed(directory: Path) -> int:
    file = min((directory / "10").glob("*mp_rank_00_model_states.pt"))  # of ZeRO 3: one for each rank
    state = torch.load(file, weights_only=False)
    return state["iter_num"] if (directory / "latest").read_text() == "10" else -1


def step_of_transformers(directory: Path) -> int:
    from transformers import GPT2LMHeadModel
    from transformers.trainer_callback import TrainerState

    GPT2LMHeadModel.from_pretrained(directory / "checkpoint-10")
    return TrainerState.load_from_json(directory / "checkpoint-10" / "trainer_state.json").global_step


@pytest.mark.chaos  # imports of frameworks, once per life of a worker
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("words", "second", "step_in"),
    [
        pytest.param(["original_fsdp.py"], 8, whole_of_shards, id="fsdp-shard"),
        pytest.param(["original_fsdp.py", "--flash_full_ckpt"], 8, whole_of_full, id="fsdp-full"),
        pytest.param(["original_deepspeed.py", "--zero_stage", "1"], 8, tag_of_deepspeed, id="deepspeed-1"),
        pytest.param(["original_deepspeed.py", "--zero_stage", "2"], 8, tag_of_deepspeed, id="deepspeed-2"),
        pytest.param(["original_deepspeed.py", "--zero_stage", "3"], 8, tag_of_deepspeed, id="deepspeed-3"),
        # It names the newest checkpoint in storage itself, and a path that was named wins over memory.
        pytest.param(["original_hf.py"], 5, step_of_transformers, id="transformers"),
    ],
)
def test_scripts_of_frameworks_crash_and_end_where_undisturbed_ones_do(jobs, tmp_path, words, second, step_in):
    script, *more = words
    needed = {"original_deepspeed.py": "deepspeed", "original_hf.py": "transformers"}.get(script, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}: the extra `frameworks`")
    options = ["--nproc-per-node=2", SCRIPTS / script, *more]
    job = jobs.run(*options, "--save_dir", tmp_path / "run", "--crash_at", "8", timeout=200)
    assert job.process.returncode == 0, job.err[-5000:]
    assert starts_of(job.out) == ["start from iteration 0", f"start from iteration {second}"]
    assert (tmp_path / "run" / "dlrover_latest.txt").read_text() in ("10", "12")
    assert step_in(tmp_path / "run") == 10
    undisturbed = jobs.run(*options, "--save_dir", tmp_path / "other", timeout=200)
    assert undisturbed.process.returncode == 0, undisturbed.err[-5000:]
    assert loss_of(undisturbed.out) == loss_of(job.out)


def used_in(directory: Path) -> dict[int, tuple[int, list[int]]]:
    """By step: its epoch, and the records of both ranks, as the life used them whose step counted."""
    steps: dict[int, tuple[int, list[int]]] = {}
    by_rank = [
        {line[0]: line[1:] for line in map(json.loads, (directory / f"used-{rank}").read_text().splitlines())}
        for rank in range(2)
    ]
    for step, (epoch, records) in by_rank[0].items():
        assert by_rank[1][step][0] == epoch
        steps[step] = epoch, records + by_rank[1][step][1]
    return steps


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="ddp"),
        pytest.param(["--num_workers", "1"], id="ddp-reading-ahead", marks=pytest.mark.chaos),
        pytest.param(["--fsdp"], id="fsdp", marks=pytest.mark.chaos),
    ],
)
def test_a_script_in_epochs_is_killed_in_each_and_ends_where_an_undisturbed_one_does(jobs, tmp_path, words):
    """12 steps in each of 3 epochs, a save every 5 steps; the kills come 3 steps after a save."""
    options = ["--nproc-per-node=2", SCRIPTS / "original_epochs.py", *words]
    job = jobs.run(*options, "--save_dir", tmp_path / "run", "--kill_at", "8", "18", "33", timeout=200)
    assert job.process.returncode == 0, job.err[-5000:]
    # A busy machine may still write the save before: then the script, as the original's do, leaves one out.
    last_saves = ((0, 0), (5, 0), (15, 10), (30, 25))
    for start, saves in zip(starts_of(job.out), last_saves, strict=True):
        assert start in [f"start at step {step} in epoch {step // 12}" for step in saves]
    undisturbed = jobs.run(*options, "--save_dir", tmp_path / "other", timeout=200)
    assert undisturbed.process.returncode == 0, undisturbed.err[-5000:]
    assert loss_of(undisturbed.out) == loss_of(job.out)
    used = used_in(tmp_path / "run")
    assert used == used_in(tmp_path / "other"), "after each kill the records of a step are those that it had before"
    for epoch in range(3):
        seen = [record for its, records in used.values() if its == epoch for record in records]
        assert sorted(seen) == list(range(96)), "each record once in each epoch"
    assert (tmp_path / "run" / "dlrover_latest.txt").read_text() == "30"
