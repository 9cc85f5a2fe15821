"""Dynamic data sharding in real jobs: whatever is killed, the model has seen each record exactly once, and the audit says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.jobs import SCRIPTS, kill, wait_until

SCRIPT = SCRIPTS / "read_shards.py"


def first_steps(folder: Path, rank: int = 0) -> list[int]:
    return [int(line.split()[0]) for line in (folder / f"lives-{rank}").read_text().splitlines()]


def assert_seen_once(folder: Path) -> None:
    model = torch.load(folder / "model.pt")["model"]
    assert torch.equal(model, torch.ones_like(model)), "seen otherwise than once: " + str(
        (model != 1).nonzero().tolist()
    )


def audit(folder: Path) -> dict[str, object]:
    [journal] = folder.glob("*.sqlite")
    told = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.main", "data", "audit", "--json", str(journal)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    [finding] = json.loads(told.stdout)
    return finding  # type: ignore[no-any-return]


def test_workers_that_die_lose_and_repeat_nothing(jobs, tmp_path):
    kills = ["--kill-at", "3", "--kill-at", "7", "--kill-at", "8"]
    job = jobs.run(
        "--nproc-per-node=2",
        f"--journal={tmp_path}",
        SCRIPT,
        tmp_path,
        "100",
        "--epochs",
        "2",
        "--disk-every",
        "5",
        *kills,
    )
    assert job.process.returncode == 0, job.err
    assert first_steps(tmp_path) == first_steps(tmp_path, 1)
    # A save that the master did not confirm in time was skipped, and the model went back a little further.
    assert all(first <= kill for first, kill in zip(first_steps(tmp_path), (0, 3, 7, 8), strict=True))
    assert_seen_once(tmp_path)
    finding = audit(tmp_path)
    assert (finding["num_seen"], finding["is_complete"]) == (200, True)


def test_a_master_that_dies_loses_and_repeats_nothing(jobs, tmp_path):
    job = jobs.start(
        "dlrover-run", "--nproc-per-node=2", f"--journal={tmp_path}", SCRIPT, tmp_path, "300", "--pace", "0.02",
        "--kill-at", "12", "--hold-at", "20",
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "lives-0").exists(), explain=lambda: job.err)
    for _ in range(3):
        [master] = jobs.pids("dlrover.master")
        kill(master)
        wait_until(lambda dead=master: [pid for pid in jobs.pids("dlrover.master") if pid != dead])
    (tmp_path / "go").touch()  # only now: a job that is over has no master to kill
    assert job.wait() == 0, job.err
    assert_seen_once(tmp_path)
    assert audit(tmp_path)["num_seen"] == 300
    assert len(first_steps(tmp_path)) == 2


def test_an_older_checkpoint_named_by_its_path_brings_the_data_back(jobs, tmp_path):
    """Step 6 is in storage and its records are final; the second life goes on with step 3 all the same."""
    job = jobs.run(
        "--nproc-per-node=2", f"--journal={tmp_path}", SCRIPT, tmp_path, "100",
        "--disk-every", "3", "--kill-at", "7", "--resume", "3",
    )  # fmt: skip
    assert job.process.returncode == 0, job.err
    assert first_steps(tmp_path) == [0, 3]
    assert_seen_once(tmp_path)
    finding = audit(tmp_path)
    trusted, seen = int(str(finding["num_trusted"])), int(str(finding["num_seen"]))
    assert 0 < trusted <= 24, "what the model of step 3 contains"
    assert (trusted + seen, finding["is_complete"]) == (100, True)


def test_a_job_that_leaves_data_unread_says_so_and_fails(jobs, tmp_path):
    job = jobs.run("--nproc-per-node=1", f"--journal={tmp_path}", SCRIPT, tmp_path, "100", "--stop-at", "3")
    assert job.process.returncode == 1
    assert "DataUnfinished" in job.err
    assert "88 of 100 records" in " ".join(job.err.split())


@pytest.mark.chaos
def test_a_job_that_stops_early_on_purpose_completes(jobs, tmp_path):
    job = jobs.run(
        "--nproc-per-node=1", f"--journal={tmp_path}", SCRIPT, tmp_path, "100", "--stop-at", "3", "--on-purpose"
    )
    assert job.process.returncode == 0, job.err


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_twenty_kills_in_three_workers(jobs, tmp_path):
    kills = [word for step in range(4, 84, 4) for word in ("--kill-at", str(step))]
    job = jobs.run(
        "--nproc-per-node=3", "--max-restarts=30", f"--journal={tmp_path}", SCRIPT, tmp_path, "900", "--epochs", "2",
        "--disk-every", "7", *kills, timeout=400,
    )  # fmt: skip
    assert job.process.returncode == 0, job.err
    assert_seen_once(tmp_path)
    assert audit(tmp_path)["num_seen"] == 1800


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_directory_that_grows_is_read_once_through_crashes(jobs, tmp_path):
    """Lines come while workers and the master die; each is in the model once when the marker ends the stream."""
    folder = tmp_path / "in"
    folder.mkdir()

    def seen() -> int:
        return int((tmp_path / "seen").read_text() or 0) if (tmp_path / "seen").exists() else 0

    def write(name: str, numbers: range) -> None:
        with (folder / name).open("a") as out:
            out.writelines(f"{number}\n" for number in numbers)

    write("a", range(50))
    job = jobs.start(
        "dlrover-run", "--nproc-per-node=2", f"--journal={tmp_path}", SCRIPTS / "tail_steps.py", tmp_path, "200",
        "--kill-at", "3", "--kill-at", "12",
    )  # fmt: skip
    wait_until(lambda: seen() >= 50, 120, lambda: job.err)
    write("a", range(50, 80))
    write("b", range(80, 140))
    wait_until(lambda: seen() >= 140, 120, lambda: job.err)
    [master] = jobs.pids("dlrover.master")
    kill(master)
    write("b", range(140, 200))
    (folder / "_END").touch()
    assert job.wait(120) == 0, job.err
    assert_seen_once(tmp_path)
    assert audit(tmp_path)["num_seen"] == 200
    assert len(list(tmp_path.glob("killed-*"))) == 2
