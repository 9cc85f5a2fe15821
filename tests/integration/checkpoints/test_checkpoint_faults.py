"""Checkpoints in real jobs on disks that fail: training goes on, the reason is said once, the next save works, nothing is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from dlrover.snapshot.storage.commit import committed_checkpoints, find_damage, latest_step
from dlrover.snapshot.storage.storage import LocalStorage
from tests.integration.jobs import SCRIPTS, Launched


def may_mount() -> bool:
    """Root alone is not enough: containers often lack the capability."""
    unshare = shutil.which("unshare")
    tried = unshare and subprocess.run(
        [unshare, "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return bool(tried) and tried.returncode == 0


def run_in_mounts(jobs, tmp_path, mounts: dict[str, str], *arguments: str) -> Launched:
    """dlrover-run with file systems of its own; its errors are in `Launched.err_path`."""
    places = [f"{path}={size}" for path, size in mounts.items()]
    argv = [sys.executable, str(SCRIPTS / "in_mounts.py"), *places, "--", *arguments]
    job = Launched(argv, jobs.env(), tmp_path, "in-mounts")
    jobs.launched.append(job)
    job.wait()
    return job


def test_a_full_a_read_only_and_a_vanished_disk_and_64_mib_of_shared_memory(jobs, tmp_path):
    """One job through all of it. Two states of 40 MiB do not fit into the shared memory of a default container, either."""
    if not may_mount():
        pytest.skip("needs the right to mount in a namespace of its own")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts = {str(disk): "400m", str(jobs.shared_memory): "64m"}
    job = run_in_mounts(
        jobs, tmp_path, mounts, str(SCRIPTS / "flash_faults.py"), str(tmp_path), str(tmp_path / "in-mounts.err")
    )
    assert job.process.returncode == 0, job.err
    told = [line for line in job.err.splitlines() if "was not written" in line]
    assert len(told) == 3, told
    assert "No space left on device" in told[0]
    assert "Read-only file system" in told[1]
    assert str(tmp_path / "checkpoints") in told[2]
    assert all("Training continues" in line for line in told)
    state = torch.load(tmp_path / "last" / "rank_0.pt", mmap=True)
    assert state["step"] == 11


def test_two_jobs_with_one_directory_never_mix(jobs, tmp_path):
    """Whoever loses a race is told; what is there is whole; both jobs end well."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    (one / "checkpoints").mkdir()
    (two / "checkpoints").symlink_to(one / "checkpoints")
    running = [
        jobs.start("dlrover-run", SCRIPTS / "flash.py", folder, "30", "--disk-every", "2") for folder in (one, two)
    ]
    assert [job.wait() for job in running] == [0, 0], running[0].err + running[1].err
    storage, directory = LocalStorage(), str(one / "checkpoints")
    checkpoints = committed_checkpoints(storage, directory)
    assert [find_damage(storage, each) for each in checkpoints] == [[]] * len(checkpoints)
    assert latest_step(storage, directory) in [each.manifest.step for each in checkpoints]
    assert checkpoints[-1].manifest.step == 28
    for job in running:
        told = [line for line in job.err.splitlines() if "was not written" in line]
        assert len(told) <= 8, told  # once for each time that it lost after it had won; there are fifteen saves
        assert all("another job writes to the same directory" in line for line in told)
        assert "bug" not in job.err
        assert "Traceback" not in job.err


SLOW_STORAGE = """
import time
from dlrover.python.common.storage import PosixDiskStorage


class Slow(PosixDiskStorage):
    def __init__(self, seconds):
        self.seconds = seconds

    def write_state_dict(self, state_dict, path, write_func):
        time.sleep(self.seconds)
        super().write_state_dict(state_dict, path, write_func)
"""
SLOW_TRAINING = """
import json, sys, time
from collections import Counter
import torch
from slow_storage import Slow
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

folder, seconds, num_saves = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
checkpointer = DdpCheckpointer(f"{folder}/checkpoints", storage=Slow(seconds=seconds), num_slots=3)
counts, calls = Counter(), []
for step in range(num_saves):
    state = {"weights": torch.full((100_000,), step), "step": step}
    kind = StorageType.MEMORY if step % 2 else StorageType.DISK
    began_at = time.perf_counter()
    result = checkpointer.save_checkpoint(step, state, storage_type=kind)
    calls.append(time.perf_counter() - began_at)
    counts[result.reason.value] += 1
newest = checkpointer.load_checkpoint()["step"]
assert checkpointer.save_checkpoint(num_saves, {"step": num_saves}, on_busy="block")
with open(f"{folder}/told", "w") as told:
    json.dump({"counts": counts, "usual": sorted(calls)[int(0.98 * num_saves)], "newest": newest}, told)
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("seconds", "num_saves"), [(1.0, 300), pytest.param(30.0, 1000, marks=pytest.mark.chaos)])
def test_no_call_waits_for_a_storage_that_takes_long_for_every_write(jobs, tmp_path, seconds, num_saves):
    """Who finds no free slot is skipped and told so; what was asked for last is in storage when the job ends."""
    scripts, folder = tmp_path / "scripts", tmp_path / "job"
    scripts.mkdir()
    folder.mkdir()
    (scripts / "slow_storage.py").write_text(SLOW_STORAGE)
    (scripts / "train.py").write_text(SLOW_TRAINING)
    job = jobs.run(scripts / "train.py", folder, str(seconds), str(num_saves), timeout=300)
    assert job.process.returncode == 0, job.err
    told = json.loads((folder / "told").read_text())
    assert sum(told["counts"].values()) == num_saves
    assert set(told["counts"]) <= {"saved", "skipped_busy"}
    assert told["counts"]["saved"] >= 3
    assert told["usual"] < seconds / 2, "nobody waited for a write"
    assert told["newest"] >= 2, "memory saves went on"
    directory = folder / "checkpoints"
    assert (directory / "dlrover_latest.txt").read_text() == str(num_saves)
    assert torch.load(directory / str(num_saves) / "rank_0.pt") == {"step": num_saves}
    for checkpoint in committed_checkpoints(LocalStorage(), str(directory)):
        assert find_damage(LocalStorage(), checkpoint) == []
