"""The example of docs/how-to/data-sources.md in a real job: whatever happens to it, it trains as if nothing had."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrover.trainer.data_sources import CsvSource
from dlrover.trainer.stand_in import StandIn
from dlrover.trainer.torch.data import StepLoader
from tests.integration.jobs import JobFactory, Launched, kill, wait_until
from tests.integration.test_data import audit

EXAMPLE = Path(__file__).parents[3] / "examples" / "tabular"
JOB = "tabular-test"
SIZE, BATCH = 1010, 20
NUM_STEPS = 2 * 51


def write_table(path: Path) -> None:
    rows = [((n * 37 % 101) / 50 - 1, (n * 61 % 97) / 48 - 1) for n in range(SIZE)]
    path.write_text("a,b,label\n" + "".join(f"{a:.4f},{b:.4f},{int(a > b)}\n" for a, b in rows))


def undisturbed(table: Path) -> Iterator[float]:
    """The losses of one process to which nothing happens."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    loader = StepLoader(CsvSource(table), batch_size=BATCH, num_epochs=2, shuffle=True, link=StandIn())
    for batch in loader:
        inputs = torch.stack([batch.data["a"], batch.data["b"]], dim=1).float()
        loss = binary_cross_entropy_with_logits(network(inputs).squeeze(1), batch.data["label"].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loader.used(batch, 1)
        yield loss.item()
    loader.close()


class TabularJob:
    def __init__(self, jobs: JobFactory, folder: Path) -> None:
        self._jobs, self._folder = jobs, folder
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        argv = [sys.executable, "-m", "dlrover.cli.main", "local", "--nodes=3", "--netns=off", f"--job-name={JOB}"]
        argv += ["--", f"--journal={folder}", str(EXAMPLE / "train.py"), str(folder / "table.csv")]
        argv += [f"--batch-size={BATCH}", f"--dir={self.checkpoints}", f"--metrics={folder / 'metrics'}", "--pace=1"]
        argv += ["--num-workers=1"]
        self.host = Launched(argv, jobs.env(), folder, "local")
        jobs.launched.append(self.host)

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / "metrics"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [event for event in map(json.loads, whole.splitlines()) if event["event"] == name]

    def lives(self, rank: int = 0) -> list[dict[str, Any]]:
        return [event for event in self.events("start") if event["rank"] == rank]

    def wait_for_step(self, more: int = 1) -> None:
        """So many more are trained."""
        before = len(self.events("step"))
        wait_until(lambda: len(self.events("step")) >= before + more, 90, lambda: self.host.err)

    def scale(self, num_nodes: int) -> None:
        words = [sys.executable, "-m", "dlrover.cli.main", "scale", JOB, "--nodes", str(num_nodes)]
        subprocess.run(words, env=self._jobs.env(), check=True, capture_output=True, timeout=60)

    def wait_for_world(self, num_workers: int) -> None:
        wait_until(lambda: self.lives()[-1]["world_size"] == num_workers, 150, lambda: self.host.err)

    def kill_worker(self, rank: int) -> None:
        """And wait for the next life. A step is proof that all of them are there."""
        self.wait_for_step()
        before = len(self.lives())
        kill(self.lives(rank)[-1]["pid"])
        wait_until(lambda: len(self.lives()) > before, 90, lambda: self.host.err)

    def kill_master(self) -> None:
        [master] = self._jobs.pids("dlrover.master")
        kill(master)

    def hurry(self) -> None:
        (self.checkpoints / "hurry").touch()


@pytest.mark.timeout(450)
def test_kills_and_a_resize_change_neither_the_data_nor_the_loss(jobs, tmp_path):
    """Three workers with a process each that reads; one is killed, a fourth is added, the master is killed."""
    write_table(tmp_path / "table.csv")
    job = TabularJob(jobs, tmp_path)
    job.kill_worker(1)
    job.scale(4)
    job.wait_for_world(4)
    job.kill_master()
    job.hurry()
    assert job.host.wait(150) == 0, job.host.err
    assert_nothing_shows(job, tmp_path)
    assert {life["world_size"] for life in job.lives()} == {3, 4}


def assert_nothing_shows(job: TabularJob, folder: Path) -> None:
    finding = audit(folder)
    assert (finding["num_seen"], finding["is_complete"]) == (2 * SIZE, True)
    losses = {event["step"]: event["loss"] for event in job.events("step")}
    assert list(losses) == sorted(losses)
    assert len(losses) == NUM_STEPS
    assert list(losses.values()) == pytest.approx(list(undisturbed(folder / "table.csv")), rel=1e-3, abs=1e-4)


@pytest.mark.chaos
@pytest.mark.timeout(590)
def test_workers_that_die_with_the_master_and_a_world_that_shrinks_and_grows_change_nothing_either(jobs, tmp_path):
    write_table(tmp_path / "table.csv")
    job = TabularJob(jobs, tmp_path)
    job.wait_for_step(2)
    job.kill_master()
    job.kill_worker(2)
    job.wait_for_step(2)
    job.scale(2)
    job.wait_for_world(2)
    job.kill_worker(0)
    job.scale(4)
    job.wait_for_world(4)
    job.kill_worker(1)
    job.kill_master()
    job.wait_for_step(2)
    job.hurry()
    assert job.host.wait(150) == 0, job.host.err
    assert_nothing_shows(job, tmp_path)
    assert {life["world_size"] for life in job.lives()} == {2, 3, 4}


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("format_", ["csv", "parquet"])
def test_the_demonstration_shows_what_it_says(jobs, format_):
    words = [sys.executable, str(EXAMPLE / "demo.py"), f"--format={format_}", "--records=6000", "--timeout=250"]
    told = subprocess.run(words, env=jobs.env(), capture_output=True, text=True, check=False, timeout=280)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "four workers train" in told.stdout
    assert "the model contains 12000 records" in told.stdout
