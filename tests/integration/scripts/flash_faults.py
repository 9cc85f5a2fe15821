"""
Saves while its storage is full, read-only or gone, and goes on when it is back.

    flash_faults.py FOLDER LOG        FOLDER/disk is a small file system, LOG is where the agent's words go

For each fault: two checkpoints that cannot be written, and one after the fault is over, which has to be. Then the worker is killed once; its
next life has to find the last state in memory.
"""

import ctypes
import errno
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from dlrover.snapshot.storage.commit import committed_checkpoints, find_damage, latest_step
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

folder, log = Path(sys.argv[1]), Path(sys.argv[2])
disk = folder / "disk"
directory = folder / "checkpoints"
NUM_NUMBERS = 10 * 1024 * 1024
SENTENCE = "was not written"
MS_RDONLY, MS_REMOUNT = 1, 32
PATIENCE = 100.0


def remount(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    deadline = time.monotonic() + PATIENCE
    while libc.mount(b"tmpfs", os.fsencode(disk), b"tmpfs", MS_REMOUNT | flags, None) != 0:
        number = ctypes.get_errno()
        if number != errno.EBUSY or time.monotonic() > deadline:
            raise OSError(number, os.strerror(number))
        time.sleep(0.02)  # the agent is just closing a file of the last checkpoint


def fill() -> None:
    with (disk / "filler").open("wb") as file:
        try:
            while True:
                file.write(bytes(1024 * 1024))
                file.flush()
        except OSError:
            return


FAULTS = {
    "full": (fill, lambda: (disk / "filler").unlink()),
    "read-only": (lambda: remount(MS_RDONLY), lambda: remount(0)),
    "gone": (lambda: (disk / "run").rename(disk / "away"), lambda: (disk / "away").rename(disk / "run")),
}


def state_of(step: int) -> dict[str, object]:
    return {"weights": torch.full((NUM_NUMBERS,), float(step)), "step": step}


def save(step: int, kind: StorageType = StorageType.DISK) -> None:
    result = checkpointer.save_checkpoint(step, state_of(step), storage_type=kind, on_busy="block")
    assert result, f"step {step}: training could not go on: {result}"


def wait_for_errors(number: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while log.read_text(errors="replace").count(SENTENCE) < number:
        assert time.monotonic() < deadline, "the agent does not say that it could not write"
        time.sleep(0.02)  # another process's file: there is no event


if not directory.is_symlink():
    (disk / "run").mkdir()
    directory.symlink_to(disk / "run")
checkpointer = DdpCheckpointer(directory)
state = checkpointer.load_checkpoint()
if not state:
    step = 0
    save(step)
    assert checkpointer.wait_latest_checkpoint(PATIENCE)
    for number, (name, (begin, end)) in enumerate(FAULTS.items(), 1):
        begin()
        save(step + 1)
        wait_for_errors(number)
        save(step + 2)
        checkpointer.wait_latest_checkpoint(0.3)
        end()
        # What was there is not lost; the second one may have been quick enough, or late enough, to get through.
        assert latest_step(LocalStorage(), str(directory)) in (step, step + 2), name
        step += 3
        save(step)
        assert checkpointer.wait_latest_checkpoint(PATIENCE), f"{name}: the next save does not work"
    save(step + 1, StorageType.MEMORY)
    (folder / "killed").write_text(str(step + 1))
    os.kill(os.getpid(), signal.SIGKILL)
step = int((folder / "killed").read_text())
assert state["step"] == step
assert torch.equal(state["weights"], state_of(step)["weights"])
save(step + 1)
assert checkpointer.wait_latest_checkpoint(PATIENCE)
for checkpoint in committed_checkpoints(LocalStorage(), str(directory)):
    assert find_damage(LocalStorage(), checkpoint) == []
shutil.copytree(directory / str(step + 1), folder / "last")
