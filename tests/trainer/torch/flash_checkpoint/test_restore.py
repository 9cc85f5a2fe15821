"""Restoring: several parts, into live tensors, and files that are not what their manifest says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.storage.manifest import ManifestInvalid
from dlrover.trainer import environment
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.frameworks.reshard_exchange import Summary, newest_attempts
from dlrover.trainer.torch.flash_checkpoint.restoring.reading import read_content, read_file
from tests.trainer.torch.flash_checkpoint.test_saves import assert_same, state_of


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))
    return place


@pytest.fixture
def directory(tmp_path) -> str:
    return str(tmp_path / "checkpoints")


@pytest.fixture
def make(directory):
    made: list[CheckpointEngine] = []

    def build() -> CheckpointEngine:
        made.append(CheckpointEngine(directory))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


PARTS = {"model": {"w": torch.arange(70_000.0)}, "deep/optimizer": {"m": torch.ones(5), "lr": 0.5}}
PATHS = {"model": "mp_rank_00/model.pt", "deep/optimizer": "mp_rank_00/optimizer.pt"}


@pytest.mark.parametrize("is_storage", [False, True])
def test_all_parts_of_a_save_come_back_by_name(make, is_storage):
    engine = make()
    assert engine.save(4, PARTS, PATHS, is_storage=is_storage)
    if is_storage:
        engine.close()
        engine = make()
    restored = engine.load_parts()
    assert engine.restored_step == 4
    assert_same(restored, PARTS)
    assert_same(engine.load_parts(["deep/optimizer"]), {"deep/optimizer": PARTS["deep/optimizer"]})
    assert_same(engine.load("model"), PARTS["model"])


def test_a_training_that_went_back_is_not_restored_from_the_past_that_it_gave_up(make):
    """Step 9 is still in memory when step 5 is saved again, by ranks that had gone back to an older model."""
    engine = make()
    for step in (9, 5):
        parts = {"model": {"step": step}}
        assert engine.save(step, parts, {"model": "model.pt"}, is_storage=False)
    assert engine.load("model") == {"step": 5}


@pytest.fixture
def go_on(monkeypatch):
    """From here on this process is a worker of round 5, which hears what earlier rounds went on with."""

    def go_on(turns):
        variables = {"DLROVER_AGENT_SOCKET": "/s", "DLROVER_ROUND": "5", "DLROVER_TURNS": turns}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        environment.current.cache_clear()

    yield go_on
    monkeypatch.undo()
    environment.current.cache_clear()


@pytest.mark.parametrize(
    ("turns", "restored"), [("", 9), ("3:9", 9), ("3:5", 5), ("3:5,4:7", 5), ("2:5", 9), ("3:4", 9)]
)
def test_what_others_have_given_up_is_the_last_thing_to_go_on_with(make, go_on, caplog, turns, restored):
    """Steps 5 and 9 are of round 2, on a node that was cut off then; later rounds went on with another one."""
    engine = make()
    engine._round = 2
    for step in (5, 9):
        assert engine.save(step, {"model": {"step": step}}, {"model": "model.pt"}, is_storage=False)
    go_on(turns)
    assert engine.load("model") == {"step": restored}
    assert ("Only step" in caplog.text) == (turns == "3:4")


def test_of_two_saves_of_a_step_the_one_counts_that_nobody_has_given_up(go_on):
    go_on("4:5")
    cut_off = Summary(attempt="cut-off", step=9, round=3, num_shards=1, shards=(0,))
    ours = Summary(attempt="ours", step=9, round=4, num_shards=2, shards=(0,))
    assert newest_attempts([ours, cut_off]) == {9: ours}


def test_a_step_without_the_wanted_part_is_passed_over(make):
    engine = make()
    engine.save(1, PARTS, PATHS, is_storage=False)
    engine.save(2, {"model": PARTS["model"]}, PATHS, is_storage=False)
    assert engine.load_parts(["deep/optimizer"]) is not None
    assert engine.restored_step == 1
    with pytest.raises(ManifestInvalid, match="can be restored on all ranks"):
        engine.load_parts(["what nobody saved"])


def live_like(state: dict) -> dict:
    """Like that state, with other values; one tensor of another shape."""
    return {
        "model": {
            "weight": (weight := torch.zeros(300, 70)),
            "tied": weight,
            "half": torch.zeros(6).bfloat16(),
            "count": torch.tensor(0),
        },
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(300, 70)}}, "param_groups": []},
        "step": -1,
    }


@pytest.mark.parametrize("is_storage", [False, True])
def test_live_tensors_are_filled_where_they_are_and_the_rest_is_fresh(directory, is_storage):
    checkpointer = DdpCheckpointer(directory)
    checkpointer.save_checkpoint(7, state_of(7), storage_type=StorageType.DISK if is_storage else StorageType.MEMORY)
    if is_storage:
        checkpointer.close()
        checkpointer = DdpCheckpointer(directory)
    live = live_like(state_of(7))
    addresses = [live["model"]["weight"].data_ptr(), live["optimizer"]["state"][0]["exp_avg"].data_ptr()]
    restored = checkpointer.load_checkpoint(into=live)
    checkpointer.close()
    assert_same(restored, state_of(7))
    assert_same(live["model"]["weight"], state_of(7)["model"]["weight"])
    found = [restored["model"]["weight"].data_ptr(), restored["optimizer"]["state"][0]["exp_avg"].data_ptr()]
    assert found == addresses
    assert restored["model"]["half"].data_ptr() != live["model"]["half"].data_ptr()
    assert torch.equal(live["model"]["half"], torch.zeros(6).bfloat16())


def test_a_model_and_its_optimizer_go_on_from_where_they_were(directory):
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Linear(300, 300)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        for _ in range(num_steps):
            model(torch.ones(2, 300)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer, 3)
    checkpointer = DdpCheckpointer(directory)
    checkpointer.save_checkpoint(3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, 2)
    other, other_optimizer = build()
    train(other, other_optimizer, 1)
    state = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    restored = checkpointer.load_checkpoint(into=state)
    other_optimizer.load_state_dict(restored["optimizer"])
    train(other, other_optimizer, 2)
    checkpointer.close()
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("where", ["begin", "middle", "end"])
def test_a_flipped_bit_anywhere_in_a_file_gives_way_to_the_older_step(directory, caplog, where):
    checkpointer = DdpCheckpointer(directory)
    for step in (1, 2):
        checkpointer.save_checkpoint(step, state_of(step))
        assert checkpointer.wait_latest_checkpoint(30)
    checkpointer.close()
    file = Path(directory) / "2" / "rank_0.pt"
    size = file.stat().st_size
    flip(file, {"begin": 5, "middle": size // 2, "end": size - 3}[where])
    checkpointer = DdpCheckpointer(directory)
    assert_same(checkpointer.load_checkpoint(into=live_like(state_of(1))), state_of(1))
    checkpointer.close()
    assert "step 2 cannot be read" in caplog.text


def test_the_directory_of_a_checkpoint_can_be_named_whatever_its_file_is_called(directory):
    checkpointer = DdpCheckpointer(directory)
    checkpointer.save_checkpoint(3, state_of(3), path=f"{directory}/best/deep/model.pt")
    checkpointer.save_checkpoint(4, state_of(4), storage_type=StorageType.MEMORY)
    assert checkpointer.wait_latest_checkpoint(30)
    assert_same(checkpointer.load_checkpoint(f"{directory}/best"), state_of(3))
    flip(Path(directory) / "best" / "deep" / "model.pt", 2000)
    with pytest.raises(Corrupt, match="is damaged"):
        checkpointer.load_checkpoint(f"{directory}/best")
    checkpointer.close()


def test_a_file_of_torch_save_is_read_too(tmp_path):
    path = str(tmp_path / "theirs.pt")
    torch.save(state_of(3), path)
    assert_same(read_file(path), state_of(3))
    live = live_like(state_of(3))
    assert read_file(path, into=live)["model"]["weight"].data_ptr() == live["model"]["weight"].data_ptr()
    assert_same(read_content(Path(path).read_bytes(), path), state_of(3))
    torch.save(state_of(3), path, _use_new_zipfile_serialization=False)
    assert_same(read_file(path), state_of(3))


def test_a_checkpoint_over_fsspec_is_verified_as_well():
    fsspec = pytest.importorskip("fsspec")
    directory = f"memory://restore-{os.getpid()}"
    checkpointer = DdpCheckpointer(directory)
    for step in (1, 2):
        checkpointer.save_checkpoint(step, state_of(step))
        assert checkpointer.wait_latest_checkpoint(30)
    checkpointer.close()
    checkpointer = DdpCheckpointer(directory)
    assert_same(checkpointer.load_checkpoint(), state_of(2))
    files = fsspec.filesystem("memory")
    content = bytearray(files.cat(f"{directory}/2/rank_0.pt"))
    content[len(content) // 2] ^= 1
    files.pipe(f"{directory}/2/rank_0.pt", bytes(content))
    assert_same(checkpointer.load_checkpoint(), state_of(1))
    checkpointer.close()
