"""The saver's names of the original, on our segments."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dlrover.compat.client.torch_saver import (
    DLROVER_CKPT_CONFIG_KEY,
    AsyncCheckpointSaver,
    CheckpointConfig,
    DdpCheckpointSaver,
    DeepSpeedCheckpointSaver,
    MegatronCheckpointSaver,
    SharedMemoryHandler,
    TempDirCheckpointSaver,
)
from dlrover.snapshot.storage.class_meta import ClassMeta
from dlrover.snapshot.storage.user_storage import PosixDiskStorage
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))
    return place


@pytest.fixture
def checkpointer(tmp_path):
    made = DdpCheckpointer(str(tmp_path / "checkpoints"))
    yield made
    made.close()


def test_a_saver_writes_what_is_only_in_memory(checkpointer, tmp_path):
    directory = tmp_path / "checkpoints"
    checkpointer.save_checkpoint(4, {"w": torch.ones(3)}, storage_type=StorageType.MEMORY)
    saver = MegatronCheckpointSaver(str(directory))
    assert AsyncCheckpointSaver.get_ckpt_saver() is saver
    assert saver.save_shm_to_storage()
    assert not saver.wait_saving_checkpoint()
    assert torch.equal(torch.load(directory / "4" / "rank_0.pt")["w"], torch.ones(3))
    assert (directory / "dlrover_latest.txt").read_text() == "4"
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "4"
    saver.close()
    assert AsyncCheckpointSaver.get_ckpt_saver() is None


def test_a_saver_of_another_directory_finds_nothing(checkpointer, tmp_path):
    checkpointer.save_checkpoint(4, {"w": torch.ones(3)}, storage_type=StorageType.MEMORY)
    assert not DdpCheckpointSaver(str(tmp_path / "other")).save_shm_to_storage()
    assert not DdpCheckpointSaver(str(tmp_path / "checkpoints")).save_step_checkpoint(3)


def test_a_handler_keeps_a_state_and_its_config(memory):
    handler = SharedMemoryHandler(0)
    assert handler.no_checkpint_state()
    assert handler.load_state_dict() == {}
    assert handler.get_checkpoint_config(CheckpointConfig(step=-1)).step == -1
    config = CheckpointConfig(rank=1, world_size=2, step=9, paths={"model_states": "x.pt"})
    handler.save_state_dict({"model_states": {"w": torch.arange(5)}, DLROVER_CKPT_CONFIG_KEY: config})
    other = SharedMemoryHandler(0, host=False)
    assert other.get_checkpoint_config(CheckpointConfig()) == config
    state = other.load_state_dict()
    assert state.pop(DLROVER_CKPT_CONFIG_KEY) == config
    assert torch.equal(state["model_states"]["w"], torch.arange(5))
    handler.unlink()
    assert other.no_checkpint_state()
    assert not list(memory.rglob("rank-*"))


class TestCommit:
    """A saver of the user's own writes and marks; the commit is what makes it count."""

    @pytest.fixture
    def directory(self, tmp_path):
        (tmp_path / "done").mkdir()
        return tmp_path

    def test_it_waits_for_every_shard_and_then_names_the_step(self, directory):
        saver = DeepSpeedCheckpointSaver(str(directory / "checkpoints"), global_shard_num=2)
        (directory / "done" / "0").write_text("done")
        (directory / "checkpoints").mkdir()
        threading.Timer(0.2, (directory / "done" / "1").write_text, ["done"]).start()
        assert saver.commit_checkpoint(7, str(directory / "done"), timeout=60)
        assert (directory / "checkpoints" / "dlrover_latest.txt").read_text() == "7"
        assert (directory / "checkpoints" / "latest").read_text() == "7"
        assert not (directory / "done").exists()

    def test_without_all_shards_nothing_is_named(self, directory):
        saver = DdpCheckpointSaver(str(directory / "checkpoints"), global_shard_num=2)
        (directory / "done" / "0").write_text("done")
        assert not saver.commit_checkpoint(7, str(directory / "done"), timeout=0)
        assert not (directory / "checkpoints").exists()
        assert not (directory / "done").exists()

    def test_a_restart_of_the_workers_ends_the_wait(self, directory):
        saver = DdpCheckpointSaver(str(directory / "checkpoints"), global_shard_num=2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(saver.commit_checkpoint, 7, str(directory / "done"), 600)
            while not waiting.done():
                AsyncCheckpointSaver.reset()
        assert waiting.result() is False

    def test_the_staged_directory_takes_the_place_of_the_target(self, directory):
        saver = TempDirCheckpointSaver(str(directory / "checkpoints"))
        staged, target = directory / "stage" / "7", directory / "checkpoints" / "7"
        staged.mkdir(parents=True)
        (staged / "model.pt").write_text("new")
        target.mkdir(parents=True)
        (target / "model.pt").write_text("old")
        (directory / "done" / "0").write_text("done")
        assert saver.commit_checkpoint(7, str(directory / "done"), str(staged), str(target))
        assert (target / "model.pt").read_text() == "new"
        assert not staged.exists()
        assert (directory / "checkpoints" / "dlrover_latest.txt").read_text() == "7"

    def test_a_storage_of_the_users_own_moves_and_is_told(self, directory):
        diary = directory / "diary"
        meta = ClassMeta(__name__, "Moving", {"diary": str(diary)}, str(Path(__file__).parents[2]))
        saver = TempDirCheckpointSaver(str(directory / "checkpoints"), meta)
        (directory / "stage").mkdir()
        (directory / "done" / "0").write_text("done")
        saver.commit_checkpoint(7, str(directory / "done"), str(directory / "stage"), str(directory / "checkpoints/7"))
        assert diary.read_text() == "moved 7\ncommit 7 True\n"


class Moving(PosixDiskStorage):
    def __init__(self, diary):
        self.diary = diary

    def safe_move(self, src_path, dst_path):
        super().safe_move(src_path, dst_path)
        with open(self.diary, "a") as file:
            file.write(f"moved {Path(dst_path).name}\n")

    def commit(self, step, success):
        with open(self.diary, "a") as file:
            file.write(f"commit {step} {success}\n")
