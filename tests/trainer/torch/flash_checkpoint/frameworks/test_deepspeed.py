"""The DeepSpeed front end against an engine that calls its checkpoint engine as DeepSpeed does; the real one runs in the integration tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.checkpoint import SaveRequested
from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.memory.segment import Segment
from dlrover.snapshot.storage.commit import locate
from dlrover.snapshot.storage.manifest import ManifestInvalid
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.trainer.torch.flash_checkpoint.deepspeed import (
    AsyncCheckpointAgent,
    AsyncSaveEngine,
    DeepSpeedCheckpointer,
    StorageType,
)
from tests.trainer.torch.flash_checkpoint.any_front import DeepSpeedFront


class FilesOnDisk:
    """What DeepSpeed has by itself."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def save(self, state_dict: object, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: object = None) -> object:
        return torch.load(path, map_location="cpu", weights_only=False)


class StandIn:
    """An engine without ZeRO that writes a model file and one file per layer."""

    def __init__(self) -> None:
        self.checkpoint_engine: object = FilesOnDisk()
        self.module = torch.nn.Linear(3, 2)
        self.save_non_zero_checkpoint = True
        self.global_steps = 0
        self.fails = False

    def _get_ckpt_name(self, directory: str, tag: str, mp_placeholder: str | None = None) -> str:
        return os.path.join(directory, tag, f"mp_rank_{mp_placeholder or '00'}_model_states.pt")

    def _get_all_ckpt_names(self, directory: str, tag: str) -> list[str]:
        return [str(path) for path in Path(directory, tag).glob("mp_rank_*_model_states.pt")]

    def _copy_recovery_script(self, path: str) -> None:
        Path(path, "zero_to_fp32.py").write_text("a script")

    def save_checkpoint(self, save_dir: str, tag: str, client_state: dict[str, object], save_latest: bool) -> None:
        self.checkpoint_engine.makedirs(os.path.join(save_dir, tag), exist_ok=True)
        for layer in range(3):
            path = os.path.join(save_dir, tag, f"layer_{layer}-model_states.pt")
            self.checkpoint_engine.save({"layer": layer}, path)
        if self.fails:
            raise RuntimeError("no")
        state = {"module": self.module.state_dict(), "global_steps": self.global_steps, **client_state}
        self.checkpoint_engine.save(state_dict=state, path=self._get_ckpt_name(save_dir, tag))
        self._copy_recovery_script(save_dir)
        if save_latest:
            Path(save_dir, "latest").write_text(tag)

    def load_checkpoint(self, directory: str, tag: str | None = None, **arguments: object):
        if tag is None:
            if not Path(directory, "latest").is_file():
                return None, None
            tag = Path(directory, "latest").read_text()
        [path] = self._get_all_ckpt_names(directory, tag)
        assert os.path.exists(path)
        state = self.checkpoint_engine.load(path, map_location="cpu")
        self.module.load_state_dict(state.pop("module"))
        self.global_steps = state.pop("global_steps")
        return path, state


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def engine() -> StandIn:
    return StandIn()


@contextlib.contextmanager
def maker(kind, directory):
    made = []

    def build(engine: StandIn):
        made.append(kind(engine, directory))
        return made[-1]

    yield build
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture
def make(directory):
    with maker(DeepSpeedCheckpointer, directory) as build:
        yield build


@pytest.fixture(params=[DeepSpeedCheckpointer, DeepSpeedFront], ids=["deepspeed", "any model"])
def make_any(request, directory):
    """For what both have to do: the front end of DeepSpeed, and `dlrover.Checkpointer` behind its calls."""
    with maker(request.param, directory) as build:
        yield build


def test_files_whose_names_end_the_same_are_all_there(make_any, engine, directory):
    checkpointer = make_any(engine)
    assert checkpointer.save_checkpoint(directory, tag=5)
    assert checkpointer.wait_latest_checkpoint(20)
    names = {path.name for path in (directory / "5").iterdir()} - {".dlrover"}
    assert names == {"mp_rank_00_model_states.pt", *(f"layer_{layer}-model_states.pt" for layer in range(3))}
    for layer in range(3):
        assert torch.load(directory / "5" / f"layer_{layer}-model_states.pt") == {"layer": layer}


@pytest.mark.parametrize(
    ("tag", "name", "step"), [(7, "7", 7), ("12", "12", 12), ("best", "best", 3), (None, "global_step3", 3)]
)
def test_any_tag_names_the_checkpoint_and_a_number_is_its_step(make, engine, directory, tag, name, step):
    engine.global_steps = 3
    checkpointer = make(engine)
    checkpointer.save_checkpoint(directory, tag)
    assert checkpointer.wait_latest_checkpoint(20)
    assert (directory / "latest").read_text() == name
    assert (directory / "dlrover_latest.txt").read_text() == str(step)
    assert StandIn().load_checkpoint(str(directory))[0] == str(directory / name / "mp_rank_00_model_states.pt")


def test_a_memory_save_touches_nothing_on_disk_and_comes_back(make, engine, directory):
    checkpointer = make(engine)
    assert checkpointer.load_checkpoint(directory) == (None, None)
    engine.global_steps = 4
    saved = engine.module.weight.detach().clone()
    assert checkpointer.save_checkpoint(directory, None, {"epoch": 2}, storage_type=StorageType.MEMORY)
    assert not directory.exists()
    with torch.no_grad():
        engine.module.weight.zero_()
    engine.global_steps = 0
    path, client_state = checkpointer.load_checkpoint(directory)
    assert path == str(directory / "global_step4" / "mp_rank_00_model_states.pt")
    assert client_state == {"epoch": 2}
    assert engine.global_steps == 4
    assert torch.equal(engine.module.weight, saved)


def test_a_failing_engine_gets_everything_back_that_was_its_own(make_any, engine, directory):
    checkpointer = make_any(engine)
    own = engine.checkpoint_engine
    engine.fails = True
    engine.save_non_zero_checkpoint = False
    with pytest.raises(RuntimeError, match="no"):
        checkpointer.save_checkpoint(directory, 1)
    assert engine.checkpoint_engine is own
    assert engine.save_non_zero_checkpoint is False
    assert "_copy_recovery_script" not in engine.__dict__
    assert not directory.exists()


def test_a_directory_below_is_one_checkpoint_with_its_own_tracker_inside(make, engine, directory):
    checkpointer = make(engine)
    engine.global_steps = 9
    checkpointer.save_checkpoint(directory / "checkpoint-9")
    assert checkpointer.wait_latest_checkpoint(20)
    assert not (directory / "latest").exists()
    assert (directory / "checkpoint-9" / "latest").read_text() == "global_step9"
    path, _ = StandIn().load_checkpoint(str(directory / "checkpoint-9"))
    assert path == str(directory / "checkpoint-9" / "global_step9" / "mp_rank_00_model_states.pt")


def test_a_tag_that_is_asked_for_is_the_one_that_is_loaded(make_any, engine, directory):
    checkpointer = make_any(engine)
    for step in (1, 2):
        engine.global_steps = step
        checkpointer.save_checkpoint(directory, step, {"at": step}, on_busy="block")
        assert checkpointer.wait_latest_checkpoint(20)
    engine.global_steps = 3
    checkpointer.save_checkpoint(directory, 3, {"at": 3}, storage_type=StorageType.MEMORY)
    assert checkpointer.load_checkpoint(directory, tag=1)[1] == {"at": 1}
    assert checkpointer.load_checkpoint(directory, tag="2")[1] == {"at": 2}
    assert checkpointer.load_checkpoint(directory)[1] == {"at": 3}


def test_after_a_cut_between_the_trackers_ours_is_right(make_any, engine, directory):
    checkpointer = make_any(engine)
    for step in (1, 2):
        checkpointer.save_checkpoint(directory, step, {"at": step}, on_busy="block")
        assert checkpointer.wait_latest_checkpoint(20)
    (directory / "latest").write_text("1")
    assert make_any(StandIn()).load_checkpoint(directory)[1] == {"at": 2}


def test_a_checkpoint_that_deepspeed_wrote_later_by_itself_wins(make, engine, directory):
    checkpointer = make(engine)
    checkpointer.save_checkpoint(directory, 2, {"at": 2})
    assert checkpointer.wait_latest_checkpoint(20)
    engine.save_checkpoint(str(directory), "by-itself", {"at": 9}, save_latest=True)
    assert make(StandIn()).load_checkpoint(directory)[1] == {"at": 9}


def test_of_a_step_that_was_saved_twice_the_later_state_comes_back(make_any, engine, directory):
    checkpointer = make_any(engine)
    for life in (1, 2):
        assert checkpointer.save_checkpoint(directory, 4, {"life": life}, storage_type=StorageType.MEMORY)
    assert checkpointer.load_checkpoint(directory)[1] == {"life": 2}


def test_a_damaged_snapshot_gives_way_to_the_older_one(make_any, engine, directory):
    checkpointer = make_any(engine)
    for step in (1, 2):
        assert checkpointer.save_checkpoint(directory, step, {"at": step}, storage_type=StorageType.MEMORY)
    [newest, _] = checkpointer.async_save_engine.snapshots().of_shard(0)
    with Segment(newest.name.path) as segment, segment.pin(newest.name.slot) as pinned:
        pinned.store_sums()
        at = segment.geometry.data_at(newest.name.slot)
    with open(newest.name.path, "r+b") as file:
        file.seek(at)
        first = file.read(1)
        file.seek(at)
        file.write(bytes([first[0] ^ 1]))
    assert checkpointer.load_checkpoint(directory)[1] == {"at": 1}


def test_another_directory_is_refused_with_a_way_out(make, engine, directory, tmp_path):
    with pytest.raises(ConfigError, match="lies outside the checkpoint_dir"):
        make(engine).save_checkpoint(tmp_path / "elsewhere", 1)


@pytest.mark.parametrize("tag", ["a/b", ""])
def test_a_tag_is_a_plain_name(make, engine, directory, tag):
    with pytest.raises(ValueError, match="plain file name"):
        make(engine).save_checkpoint(directory, tag)


def test_an_unknown_kind_of_storage_is_refused(make, engine, directory):
    with pytest.raises(ValueError, match="MEMORY or"):
        make(engine).save_checkpoint(directory, 1, storage_type=2)


def test_optimizer_state_on_nvme_is_refused_at_once(engine, directory):
    engine.zero_nvme_offload_optimizer = lambda: True
    with pytest.raises(ConfigError, match="NVMe"):
        DeepSpeedCheckpointer(engine, directory)


def test_names_of_the_original_are_there_and_deepspeed_is_not_needed(monkeypatch):
    assert AsyncSaveEngine is AsyncCheckpointAgent
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as if it were not installed
    found = importlib.util.find_spec("dlrover.trainer.torch.flash_checkpoint.deepspeed")
    copy = importlib.util.module_from_spec(found)
    found.loader.exec_module(copy)
    assert copy.DeepSpeedCheckpointer.__name__ == "DeepSpeedCheckpointer"


def test_it_saves_by_itself_and_on_request(engine, directory):
    checkpointer = DeepSpeedCheckpointer(engine, directory, checkpoint_interval=(2, 4))
    try:
        saved = []
        for step in range(6):
            engine.global_steps = step
            saved.append(bool(checkpointer.save_if_due(directory, client_state={"lr": 0.5})))
            assert checkpointer.wait_latest_checkpoint(20)
        assert saved == [True, False, True, False, True, False]
        assert (directory / "latest").read_text() == "global_step4"
        assert not checkpointer.is_save_requested()
        checkpointer.async_save_engine.outlet.save_request = SaveRequested(number=7)  # as the agent tells it
        assert checkpointer.is_save_requested()
        engine.global_steps = 6
        assert checkpointer.save_checkpoint(directory, storage_type=StorageType.MEMORY, metric=0.25)
        assert checkpointer.wait_latest_checkpoint(20)
        assert (directory / "latest").read_text() == "global_step6"
        assert locate(LocalStorage(), str(directory)).manifest.metric == 0.25
    finally:
        checkpointer.close()


def flip(path: Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.7])
def test_a_flipped_bit_in_a_file_leads_to_the_next_older_checkpoint(make_any, engine, directory, place):
    checkpointer = make_any(engine)
    for step in (1, 2):
        engine.global_steps = step
        assert checkpointer.save_checkpoint(directory, tag=step, on_busy="block")
    assert checkpointer.wait_latest_checkpoint(20)
    checkpointer.close()
    flip(directory / "2" / "mp_rank_00_model_states.pt", place)
    other = StandIn()
    path, _ = make_any(other).load_checkpoint(directory)
    assert (path, other.global_steps) == (str(directory / "1" / "mp_rank_00_model_states.pt"), 1)
    with pytest.raises(Corrupt, match="Restore another checkpoint"):
        make_any(StandIn()).load_checkpoint(directory, tag=2)
    elsewhere = DeepSpeedCheckpointer(StandIn(), directory.parent / "new run")
    with pytest.raises(Corrupt, match=r"mp_rank_00_model_states\.pt is damaged: its CRC"):
        elsewhere.load_checkpoint(directory)
    elsewhere.close()
    flip(directory / "1" / ".dlrover" / "manifest.json")
    with pytest.raises(ManifestInvalid, match="are damaged"):
        make_any(StandIn()).load_checkpoint(directory)


@pytest.mark.parametrize(
    ("lost", "content", "expected"),
    [
        (("dlrover_latest.txt",), None, 2),
        (("dlrover_latest.txt", "latest"), None, 2),
        (("dlrover_latest.txt", "latest"), "no step", 2),
        (("2",), None, 1),
        (("2/.dlrover/manifest.json",), None, 1),
    ],
)
def test_a_beginning_is_an_empty_directory(make_any, engine, directory, caplog, lost, content, expected):
    """Decision 46: whatever is lost, a complete checkpoint is found and told; where only damaged ones are left, the load raises."""
    checkpointer = make_any(engine)
    assert checkpointer.load_checkpoint(directory) == (None, None)
    for step in (1, 2):
        assert checkpointer.save_checkpoint(directory, step, {"at": step}, on_busy="block")
    assert checkpointer.wait_latest_checkpoint(20)
    checkpointer.close()
    for name in lost:
        lose(directory / name, content)
    assert make_any(StandIn()).load_checkpoint(directory)[1] == {"at": expected}
    assert f"complete checkpoint is used: step {expected}" in caplog.text
    for step in (1, 2):
        (directory / str(step) / ".dlrover" / "manifest.json").unlink(missing_ok=True)
    with pytest.raises(ManifestInvalid, match=r"All checkpoints in .* are damaged"):
        make_any(StandIn()).load_checkpoint(directory)
    for step in (1, 2):
        lose(directory / str(step))
    (directory / "latest").write_text("2")
    with pytest.raises(ManifestInvalid, match=r"has no complete checkpoint, but|must contain the number of a step"):
        make_any(StandIn()).load_checkpoint(directory)


def lose(path: Path, content: str | None = None) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif content is not None:
        path.write_text(content)
    else:
        path.unlink(missing_ok=True)
