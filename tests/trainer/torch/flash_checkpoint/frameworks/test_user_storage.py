"""`storage=` and `deletion_strategy=` of the checkpointer, in one process without an agent."""

from __future__ import annotations

import json

import pytest
import torch

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover.trainer.torch.flash_checkpoint.full_ckpt_engine import FullCheckpointEngine
from tests.snapshot.storage.user_classes import DrawerStorage, FailingStorage, KeepEven


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))


@pytest.fixture
def make(tmp_path):
    made = []

    def build(**options) -> DdpCheckpointer:
        made.append(DdpCheckpointer(tmp_path / "checkpoints", **options))
        return made[-1]

    yield build
    for checkpointer in made:
        checkpointer.close()


def test_a_state_goes_through_a_users_storage_and_comes_back(make, tmp_path):
    drawer = DrawerStorage(str(tmp_path / "drawer"), label="mine")
    first = make(storage=drawer)
    assert first.save_checkpoint(5, {"w": torch.arange(1000), "step": 5})
    assert first.wait_latest_checkpoint(30)
    first.close()
    assert not (tmp_path / "checkpoints").exists()
    assert json.loads((tmp_path / "drawer" / "commits").read_text()) == ["mine", 5, True]
    restored = make(storage=drawer).load_checkpoint()
    assert (restored["step"], torch.equal(restored["w"], torch.arange(1000))) == (5, True)


def test_a_storage_that_fails_costs_the_checkpoint_and_nothing_else(make, tmp_path, caplog):
    checkpointer = make(storage=FailingStorage())
    assert checkpointer.save_checkpoint(1, {"w": torch.ones(2)})
    checkpointer.close()
    assert "FailingStorage failed in write_state_dict" in caplog.text
    assert not (tmp_path / "checkpoints" / "dlrover_latest.txt").exists()


def test_a_users_strategy_keeps_what_it_wants_and_the_newest(make, tmp_path):
    checkpointer = make(deletion_strategy=KeepEven(str(tmp_path / "checkpoints")))
    for step in (1, 2, 3, 5):
        assert checkpointer.save_checkpoint(step, {"step": step}, on_busy="block")
        assert checkpointer.wait_latest_checkpoint(30)
    checkpointer.close()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert left == ["2", "5"]


def test_what_the_agent_could_not_build_is_refused_at_once(make):
    with pytest.raises(ConfigError, match="lacks commit"):
        make(storage=object())


def test_the_full_engine_of_the_original(tmp_path):
    engine = FullCheckpointEngine(str(tmp_path / "c"))
    paths = {"model_states": str(tmp_path / "c" / "9" / "mine.pt")}
    try:
        assert engine.load() == {}
        assert engine.save_to_memory(8, {"model_states": {"w": torch.ones(2), "step": 8}}, paths)
        assert engine.load()["step"] == 8
        assert engine.save_to_storage(9, {"model_states": {"step": 9}}, paths, blocking=True)
        assert engine.wait_latest_checkpoint(30)
        assert torch.load(paths["model_states"]) == engine.load(paths["model_states"]) == {"step": 9}
        with pytest.raises(ValueError, match="must have the same directory"):
            engine.save_to_memory(1, {"a": {}, "b": {}}, {"a": f"{tmp_path}/c/1/a", "b": f"{tmp_path}/c/2/b"})
    finally:
        engine.close()
