"""The saver's names of the original, on our segments."""

from __future__ import annotations

import pytest
import torch

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover.trainer.torch.flash_checkpoint.old_saver import (
    DLROVER_CKPT_CONFIG_KEY,
    AsyncCheckpointSaver,
    CheckpointConfig,
    DdpCheckpointSaver,
    MegatronCheckpointSaver,
    SharedMemoryHandler,
)


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
