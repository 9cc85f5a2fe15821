"""A storage and a deletion strategy of the user's, in a module beside the script: the agent imports and uses them."""

from __future__ import annotations

MODULE = """
import os
from dlrover.python.common.storage import CheckpointDeletionStrategy, PosixDiskStorage


class Mine(PosixDiskStorage):
    def __init__(self, diary):
        self.diary = diary

    def write_state_dict(self, state_dict, path, write_func):
        super().write_state_dict(state_dict, path, write_func)
        self.note(f"wrote {os.path.basename(path)}")

    def commit(self, step, success):
        self.note(f"commit {step} {success}")

    def note(self, words):
        with open(self.diary, "a") as file:
            file.write(f"{os.getpid()} {words}\\n")


class DropOdd(CheckpointDeletionStrategy):
    def __init__(self, checkpoint_dir):
        self.checkpoint_dir = checkpoint_dir

    def clean_up(self, step, delete_func):
        if step % 2:
            delete_func(os.path.join(self.checkpoint_dir, str(step)))
"""
SCRIPT = """
import os, sys
import torch
from my_storage import DropOdd, Mine
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

folder = sys.argv[1]
checkpointer = DdpCheckpointer(
    f"{folder}/checkpoints", storage=Mine(diary=f"{folder}/diary"), deletion_strategy=DropOdd(f"{folder}/checkpoints")
)
state = checkpointer.load_checkpoint()
print("restored", state.get("step"), "in", os.getpid(), flush=True)
first = state.get("step", 0) + 1
for step in range(first, first + 3):
    assert checkpointer.save_checkpoint(step, {"w": torch.full((3,), step), "step": step}, on_busy="block")
    assert checkpointer.wait_latest_checkpoint(60)
"""


def test_the_agent_writes_through_the_users_storage_and_asks_the_users_strategy(jobs, tmp_path):
    scripts, folder = tmp_path / "scripts", tmp_path / "job"
    scripts.mkdir()
    folder.mkdir()
    (scripts / "my_storage.py").write_text(MODULE)
    (scripts / "train.py").write_text(SCRIPT)
    for expected, newest in (("restored None", 3), ("restored 3", 6)):
        job = jobs.run(scripts / "train.py", folder)
        assert job.process.returncode == 0, job.err
        assert expected in job.out
        worker = job.out.split(" in ")[1].split()[0]
        diary = [line.split(maxsplit=1) for line in (folder / "diary").read_text().splitlines()]
        assert [words for _pid, words in diary][-2:] == ["wrote rank_0.pt", f"commit {newest} True"]
        assert worker not in {pid for pid, _words in diary}, "the agent writes, not the trainer"
    left = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())
    assert left == ["2", "4", "6"]
    assert (folder / "checkpoints" / "dlrover_latest.txt").read_text() == "6"
