"""The parts of the transformers front end that third parties use by themselves, without a Trainer and without an agent."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers", reason="needs transformers (extra `frameworks`)")
    from dlrover.trainer.torch.flash_checkpoint.hf_trainer import (
        FlashCkptTrainer,
        HfDdpCheckpointer,
        HfDeepSpeedCheckpointer,
        HfFlashCheckpointer,
    )
from safetensors.torch import load_file

from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.storage.manifest import ManifestInvalid


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path / "output"


@pytest.fixture
def checkpointer(directory):
    made = HfDdpCheckpointer(directory)
    yield made
    made.close()


def test_collected_files_become_one_checkpoint(checkpointer, directory):
    save = checkpointer.ckpt_agent.save
    save({"w": torch.arange(3)}, str(directory / "checkpoint-5" / "pytorch_model.bin"))
    save({"lr": 0.1}, str(directory / "checkpoint-5" / "scheduler.pt"))
    assert set(checkpointer.ckpt_agent.paths.values()) == {
        str(directory / "checkpoint-5" / name) for name in ("pytorch_model.bin", "scheduler.pt")
    }
    assert checkpointer.save_checkpoint_to_storage(5, blocking=True) is True
    assert not checkpointer.ckpt_agent.state_dict, "the next one begins empty"
    assert checkpointer.async_save_engine.wait_latest_checkpoint(20, max_steps=5)
    assert torch.equal(torch.load(directory / "checkpoint-5" / "pytorch_model.bin")["w"], torch.arange(3))
    assert torch.load(directory / "checkpoint-5" / "scheduler.pt") == {"lr": 0.1}


def test_weights_become_safetensors_when_asked_for(checkpointer, directory):
    agent = checkpointer.ckpt_agent
    names = ("pytorch_model-00001-of-00002.bin", "adapter_model.bin", "sub/pytorch_model.bin", "optimizer.pt")
    for name in names:
        agent.save({"w": torch.arange(3)}, directory / "checkpoint-1" / name)
    agent.state_dict["safe_serialization"] = True
    assert checkpointer.save_checkpoint_to_storage(1)
    assert checkpointer.wait_latest_checkpoint(20)
    place = directory / "checkpoint-1"
    for name in ("model-00001-of-00002.safetensors", "adapter_model.safetensors", "sub/model.safetensors"):
        assert torch.equal(load_file(place / name)["w"], torch.arange(3))
    assert torch.equal(torch.load(place / "optimizer.pt")["w"], torch.arange(3))
    assert not list(place.rglob("*.bin"))


def test_a_memory_save_leaves_the_directory_alone_and_can_be_laid_out(checkpointer, directory):
    checkpointer.ckpt_agent.save({"w": torch.arange(3)}, directory / "checkpoint-2" / "optimizer.pt")
    checkpointer.ckpt_agent.save({"global_step": 2}, directory / "checkpoint-2" / "trainer_state.json")
    assert checkpointer.save_checkpoint_to_memory(2) is True
    assert not directory.exists()
    laid_out = checkpointer.lay_out_newest()
    assert laid_out is not None
    assert laid_out.endswith("/checkpoint-2")
    assert torch.equal(torch.load(Path(laid_out) / "optimizer.pt")["w"], torch.arange(3))
    checkpointer.remove_layouts()
    assert not Path(laid_out).exists()


def test_storage_that_is_newer_than_memory_is_not_overruled(checkpointer, directory):
    checkpointer.ckpt_agent.save(1, directory / "checkpoint-2" / "trainer_state.json")
    assert checkpointer.save_checkpoint_to_memory(2)
    directory.mkdir()
    (directory / "dlrover_latest.txt").write_text("3")
    assert checkpointer.lay_out_newest() is None


def test_files_of_two_checkpoints_are_not_mixed(checkpointer, directory):
    for step in (1, 2):
        checkpointer.ckpt_agent.save({}, directory / f"checkpoint-{step}" / "optimizer.pt")
    with pytest.raises(ValueError, match="a single directory below"):
        checkpointer.save_checkpoint_to_storage(2)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_sharded_files_of_torchs_distributed_checkpoint_go_through_unchanged(checkpointer, directory):
    """How FSDP writes under transformers: by torch's own code, into the scratch directory."""
    import torch.distributed.checkpoint as dcp

    model = torch.nn.Linear(600, 500)
    with checkpointer.scratch() as scratch:
        with checkpointer.ckpt_agent.collecting(scratch):
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{scratch}/checkpoint-3/pytorch_model_fsdp_0")
            checkpointer.ckpt_agent.add_files()
        assert checkpointer.save_checkpoint_to_storage(3)
    assert checkpointer.wait_latest_checkpoint(20)
    other = torch.nn.Linear(600, 500)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=str(directory / "checkpoint-3" / "pytorch_model_fsdp_0"))
    assert torch.equal(other.weight, model.weight)


def test_the_names_and_arguments_of_the_original_are_there(directory):
    made = HfDeepSpeedCheckpointer(None, directory, storage=None, comm_backend="")
    assert isinstance(made, HfFlashCheckpointer)
    made.close()
    for name in ("get_last_checkpoint", "wait_latest_checkpoint"):
        assert callable(getattr(FlashCkptTrainer, name))


def test_what_is_due_is_collected_and_saved(directory):
    checkpointer = HfDdpCheckpointer(directory, checkpoint_interval=2)
    collected = []

    def collect() -> None:
        collected.append(step)
        checkpointer.ckpt_agent.save({"w": torch.arange(3)}, directory / f"checkpoint-{step}" / "pytorch_model.bin")

    try:
        for step in range(4):
            assert checkpointer.save_if_due(step, collect)
            assert checkpointer.wait_latest_checkpoint(20)
        assert collected == [0, 1, 2, 3]
        assert sorted(path.name for path in directory.glob("checkpoint-*")) == ["checkpoint-0", "checkpoint-2"]
        assert not checkpointer.is_save_requested()
    finally:
        checkpointer.close()


def test_the_newest_checkpoint_in_storage_is_one_that_is_as_it_was_written(checkpointer, directory):
    for step in (1, 2):
        checkpointer.ckpt_agent.save({"w": torch.arange(300)}, directory / f"checkpoint-{step}" / "optimizer.pt")
        assert checkpointer.save_checkpoint_to_storage(step, blocking=True)
    assert checkpointer.wait_latest_checkpoint(20)
    assert checkpointer.newest_whole() == str(directory / "checkpoint-2")
    file = directory / "checkpoint-2" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert checkpointer.newest_whole() == str(directory / "checkpoint-1")
    with pytest.raises(Corrupt, match=r"optimizer\.pt is damaged: its CRC"):
        checkpointer.async_save_engine.refuse_damaged(str(directory / "checkpoint-2"))


def test_a_beginning_is_an_empty_directory(checkpointer, directory, caplog):
    """Decision 46, for the tracker, the directory and the manifest."""
    assert checkpointer.newest_whole() is None
    for step in (1, 2, 3):
        checkpointer.ckpt_agent.save({"w": torch.arange(300)}, directory / f"checkpoint-{step}" / "optimizer.pt")
        assert checkpointer.save_checkpoint_to_storage(step, blocking=True)
    assert checkpointer.wait_latest_checkpoint(20)
    tracker = directory / "dlrover_latest.txt"
    tracker.unlink()
    assert checkpointer.newest_whole() == str(directory / "checkpoint-3")
    assert "dlrover_latest.txt is missing" in caplog.text
    tracker.write_text("3")
    shutil.rmtree(directory / "checkpoint-3")
    assert checkpointer.newest_whole() == str(directory / "checkpoint-2")
    assert "The next older complete checkpoint is used: step 2." in caplog.text
    for step in (1, 2):
        (directory / f"checkpoint-{step}" / ".dlrover" / "manifest.json").unlink()
    with pytest.raises(ManifestInvalid, match=r"All checkpoints in .* are damaged"):
        checkpointer.newest_whole()
