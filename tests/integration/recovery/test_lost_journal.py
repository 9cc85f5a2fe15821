"""The master dies together with its journal: training does not notice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.integration.jobs import SCRIPTS, kill, wait_until


def test_a_master_without_its_journal_takes_the_running_workers_up_again(jobs, tmp_path):
    job = jobs.start("dlrover-run", "--nproc-per-node=2", f"--journal={tmp_path}", SCRIPTS / "steps.py", tmp_path)
    wait_until(lambda: (tmp_path / "steps-1").exists(), explain=lambda: job.err)
    for deaths in range(1, 3):
        [master] = jobs.pids("dlrover.master")
        lose_with_journal(master, tmp_path)
        wait_until(lambda dead=master: [pid for pid in jobs.pids("dlrover.master") if pid != dead])
        wait_until(lambda: list(tmp_path.glob("*.sqlite")))
        before = num_steps(tmp_path)
        wait_until(lambda before=before: num_steps(tmp_path) > before + 20)
        wait_until(lambda deaths=deaths: job.err.count("the master ended") == deaths)
    (tmp_path / "stop").touch()
    assert job.wait() == 0, job.err
    steps = [line.split() for line in (tmp_path / "steps-0").read_text().splitlines()]
    assert {life for life, _, _ in steps} == {"0"}, "no worker was restarted"


def lose_with_journal(master: int, folder: Path) -> None:
    """The files first: as soon as the master is dead, the next one may open them."""
    kill(master, signal.SIGSTOP)
    for file in folder.glob("*.sqlite*"):
        file.unlink()
    kill(master)


def num_steps(tmp_path: Path) -> int:
    return (tmp_path / "steps-0").read_text().count("\n")


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_data_go_on_where_the_newest_checkpoint_says(jobs, tmp_path):
    """No record is missing in the model, and those are in it twice that a newer model in memory had read."""
    argv = ["--nproc-per-node=2", f"--journal={tmp_path}", SCRIPTS / "read_shards.py", tmp_path, "400"]
    job = jobs.start("dlrover-run", *argv, "--disk-every", "5", "--pace", "0.1")
    wait_until(lambda: (tmp_path / "checkpoints" / "20" / ".dlrover").exists(), 120, lambda: job.err)
    [master] = jobs.pids("dlrover.master")
    lose_with_journal(master, tmp_path)
    assert job.wait(150) == 0, job.err
    model = torch.load(tmp_path / "model.pt")["model"]
    assert int(model.min()) == 1, "a record is in no model"
    assert int(model.sum()) - model.numel() < 100, "all was read again"
    lives = (tmp_path / "lives-0").read_text().splitlines()
    assert len(lives) == 2
    assert int(lives[1].split()[0]) >= 20, "with the model in memory"
