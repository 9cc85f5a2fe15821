"""The checkpointer in one process, without an agent: what is saved, what comes back, and what the files look like."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.memory.segment import segment_paths
from dlrover.snapshot.storage.manifest import ManifestInvalid
from dlrover.snapshot.storage.retention import KeepLatest
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Ranks, share_of
from tests.trainer.torch.flash_checkpoint.any_front import PlainFront


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """Segments in a place of this test."""
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))
    return place


@contextlib.contextmanager
def maker(kind, tmp_path):
    made = []

    def build(directory: Path | str = tmp_path / "checkpoints", **options):
        made.append(kind(directory, **options))
        return made[-1]

    yield build
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture
def make(tmp_path):
    with maker(DdpCheckpointer, tmp_path) as build:
        yield build


@pytest.fixture(params=[DdpCheckpointer, PlainFront], ids=["ddp", "any model"])
def make_any(request, tmp_path):
    """For what both have to do: the front end of DDP, and `dlrover.Checkpointer` behind its calls."""
    with maker(request.param, tmp_path) as build:
        yield build


def state_of(step: int) -> dict[str, object]:
    torch.manual_seed(step)
    weight = torch.randn(300, 70)
    return {
        "model": {"weight": weight, "tied": weight, "half": torch.randn(5).bfloat16(), "count": torch.tensor(step)},
        "optimizer": {
            "state": {0: {"exp_avg": torch.randn(300, 70)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "step": step,
    }


def assert_same(one: object, other: object) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def test_nothing_is_restored_at_the_very_beginning(make_any):
    assert make_any().load_checkpoint() == {}


def test_a_memory_save_comes_back_bit_for_bit_and_writes_no_file(make_any, tmp_path):
    checkpointer = make_any()
    result = checkpointer.save_checkpoint(7, state_of(7), storage_type=StorageType.MEMORY)
    assert result
    assert (result.reason, result.step) == (SaveReason.SAVED, 7)
    assert result.num_bytes >= 2 * 300 * 70 * 4
    assert result.blocking > 0
    assert_same(checkpointer.load_checkpoint(), state_of(7))
    assert not (tmp_path / "checkpoints").exists()


def test_step_0_is_a_step(make_any):
    checkpointer = make_any()
    assert checkpointer.save_checkpoint(0, state_of(0), storage_type=StorageType.MEMORY)
    assert_same(checkpointer.load_checkpoint(), state_of(0))


def test_restored_tensors_never_alias_the_segment(make_any):
    checkpointer = make_any()
    checkpointer.save_checkpoint(1, state_of(1), storage_type=StorageType.MEMORY)
    restored = checkpointer.load_checkpoint()
    for step in (2, 3, 4):
        checkpointer.save_checkpoint(step, state_of(step), storage_type=StorageType.MEMORY)
    assert_same(restored, state_of(1))
    restored["model"]["weight"].zero_()
    assert_same(checkpointer.load_checkpoint(), state_of(4))


def test_tied_tensors_stay_tied(make_any):
    checkpointer = make_any()
    checkpointer.save_checkpoint(1, state_of(1), storage_type=StorageType.MEMORY)
    model = checkpointer.load_checkpoint()["model"]
    assert model["weight"].data_ptr() == model["tied"].data_ptr()


def test_the_structure_may_change_between_saves(make_any):
    checkpointer = make_any()
    for size in (10, 100_000, 3):
        state = {"grown": torch.arange(size), "only": {str(size): torch.ones(size)}}
        assert checkpointer.save_checkpoint(size, state, storage_type=StorageType.MEMORY)
        assert_same(checkpointer.load_checkpoint(), state)


def test_a_disk_save_is_a_file_for_torch_load_and_the_tracker_names_it(make, tmp_path):
    checkpointer = make()
    assert checkpointer.save_checkpoint(12, state_of(12))
    assert checkpointer.wait_latest_checkpoint(30)
    directory = tmp_path / "checkpoints"
    assert_same(torch.load(directory / "12" / "rank_0.pt"), state_of(12))
    assert (directory / "dlrover_latest.txt").read_text() == "12"
    assert sorted(os.listdir(directory)) == ["12", "dlrover_latest.txt"]


def test_another_process_restores_from_storage(make_any, tmp_path):
    first = make_any()
    first.save_checkpoint(3, state_of(3))
    first.close()
    assert_same(make_any().load_checkpoint(), state_of(3))


def test_closing_waits_for_the_queued_save_and_leaves_no_segment(make_any, tmp_path, memory):
    checkpointer = make_any()
    checkpointer.save_checkpoint(5, state_of(5))
    checkpointer.close()
    assert (tmp_path / "checkpoints" / "dlrover_latest.txt").read_text() == "5"
    assert not list(memory.rglob("*"))


@pytest.mark.parametrize("path", ["best.pt", "named/deep/model.pt"])
def test_a_path_of_the_callers_is_honoured(make, tmp_path, path):
    checkpointer = make()
    wanted = tmp_path / "checkpoints" / path
    checkpointer.save_checkpoint(4, state_of(4), path=str(wanted))
    assert checkpointer.wait_latest_checkpoint(30)
    checkpointer.close()
    assert_same(torch.load(wanted), state_of(4))
    assert_same(make().load_checkpoint(), state_of(4))


def test_a_file_of_the_caller_beside_it_is_never_removed(make, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "precious").write_text("mine")
    checkpointer = make()
    checkpointer.save_checkpoint(4, state_of(4), path=str(tmp_path / "checkpoints" / "best.pt"))
    checkpointer.close()
    assert (tmp_path / "checkpoints" / "precious").read_text() == "mine"


def test_the_resume_path_wins_over_memory(make, tmp_path):
    torch.save({"from": "elsewhere"}, tmp_path / "old.pt")
    checkpointer = make()
    checkpointer.save_checkpoint(9, state_of(9), storage_type=StorageType.MEMORY)
    assert checkpointer.load_checkpoint(str(tmp_path / "old.pt")) == {"from": "elsewhere"}


def test_an_unknown_resume_path_is_an_error(make, tmp_path):
    with pytest.raises(FileNotFoundError):
        make().load_checkpoint(str(tmp_path / "nothing.pt"))


def test_a_checkpoint_of_the_original_opens(make, tmp_path):
    directory = tmp_path / "checkpoints"
    (directory / "100").mkdir(parents=True)
    torch.save(state_of(100), directory / "100" / "rank_0.pt")
    (directory / "dlrover_latest.txt").write_text("100")
    assert_same(make().load_checkpoint(), state_of(100))


def test_a_tracker_without_its_checkpoint_is_no_reason_to_begin_anew(make_any, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "dlrover_latest.txt").write_text("100")
    with pytest.raises(ManifestInvalid, match="step 100"):
        make_any().load_checkpoint()


def test_a_damaged_file_gives_way_to_the_next_older_checkpoint(make_any, tmp_path):
    checkpointer = make_any()
    for step in (1, 2):
        checkpointer.save_checkpoint(step, state_of(step))
        checkpointer.wait_latest_checkpoint(30)
    checkpointer.close()
    file = tmp_path / "checkpoints" / "2" / "rank_0.pt"
    os.truncate(file, file.stat().st_size // 2)
    assert_same(make_any().load_checkpoint(), state_of(1))


def test_storage_that_cannot_be_written_is_told_once_and_the_next_save_works(make_any, tmp_path, caplog):
    directory = tmp_path / "checkpoints"
    directory.write_text("a file where the directory should be")
    checkpointer = make_any(num_slots=3)
    for step in (1, 2, 3):
        assert checkpointer.save_checkpoint(step, state_of(step), on_busy="block")
    assert checkpointer.save_checkpoint(4, state_of(4), storage_type=StorageType.MEMORY, on_busy="block")
    checkpointer.engine.outlet._writer.submit(lambda: None).result()  # the ones before it have failed by now
    assert [record.levelname for record in caplog.records if "not written" in record.message].count("ERROR") == 1
    directory.unlink()
    assert checkpointer.save_checkpoint(5, state_of(5))
    assert checkpointer.wait_latest_checkpoint(30)


def test_a_save_is_skipped_while_all_other_slots_are_held(make_any, tmp_path):
    checkpointer = make_any()
    checkpointer.save_checkpoint(1, state_of(1), storage_type=StorageType.MEMORY)
    from dlrover.snapshot.memory.segment import Segment

    [path] = segment_paths(checkpointer.engine.outlet.home)
    with Segment(path) as segment:
        with segment.pin(segment.complete_slots()[0].slot):
            assert checkpointer.save_checkpoint(2, state_of(2), storage_type=StorageType.MEMORY)
            result = checkpointer.save_checkpoint(3, state_of(3), storage_type=StorageType.MEMORY)
            assert not result
            assert result.reason is SaveReason.SKIPPED_BUSY
        assert checkpointer.save_checkpoint(4, state_of(4), storage_type=StorageType.MEMORY)
    assert_same(checkpointer.load_checkpoint(), state_of(4))


def test_a_flipped_bit_in_memory_is_caught_and_the_older_snapshot_taken(make_any):
    from dlrover.snapshot.memory.segment import Segment
    from dlrover.snapshot.storage.persist import sum_slot

    checkpointer = make_any()
    for step in (1, 2):
        checkpointer.save_checkpoint(step, state_of(step), storage_type=StorageType.MEMORY)
    [path] = segment_paths(checkpointer.engine.outlet.home)
    with Segment(path) as segment:
        newest = segment.complete_slots()[-1]
        assert sum_slot(newest)
        at = segment.geometry.data_at(newest.slot) + 1000
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))
    assert_same(checkpointer.load_checkpoint(), state_of(1))


def test_waiting_for_a_save_that_failed_ends_at_once_and_says_why(make_any, tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    checkpointer = make_any()
    checkpointer.save_checkpoint(1, state_of(1))
    assert not checkpointer.wait_latest_checkpoint(3600)
    assert "step 1 was not committed: " in caplog.text


def test_a_step_that_is_saved_twice_is_the_newer_of_the_two(make, tmp_path):
    checkpointer = make()
    for seed in (1, 2):
        assert checkpointer.save_checkpoint(9, state_of(seed), on_busy="block")
        assert checkpointer.wait_latest_checkpoint(30)
    assert_same(torch.load(tmp_path / "checkpoints" / "9" / "rank_0.pt"), state_of(2))
    assert_same(checkpointer.load_checkpoint(), state_of(2))
    checkpointer.close()
    assert_same(make().load_checkpoint(), state_of(2))


def test_ranks_that_hold_different_saves_of_a_step_do_not_mix_them(make_any, monkeypatch, caplog):
    checkpointer = make_any()
    for step in (3, 4):
        checkpointer.save_checkpoint(step, state_of(step), storage_type=StorageType.MEMORY)
    agreement = checkpointer.engine.agreement
    others = {"steps": {3, 4}, "saves": []}

    def common(values):
        """Another rank has both steps, but step 4 of another save."""
        if len(values) == 2:
            return others["steps"] & set(values)
        others["saves"].append(values[0])
        return set(values) if len(others["saves"]) > 1 else set()

    monkeypatch.setattr(agreement, "common", common)
    assert_same(checkpointer.load_checkpoint(), state_of(3))
    assert "different saves of step 4" in caplog.text
    assert len(set(others["saves"])) == 2, "each save has a number of its own"


def test_old_checkpoints_go_as_the_strategy_says(make_any, tmp_path):
    checkpointer = make_any(deletion_strategy=KeepLatest(2))
    for step in (1, 2, 3, 4):
        checkpointer.save_checkpoint(step, state_of(step))
        assert checkpointer.wait_latest_checkpoint(30)
    checkpointer.close()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["3", "4", "dlrover_latest.txt"]


def test_memory_is_prepared_after_the_first_optimizer_step(make_any):
    checkpointer = make_any()
    model = torch.nn.Linear(400, 400)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 400)).sum().backward()
    optimizer.step()
    checkpointer.engine._preparation.wait()
    [path] = segment_paths(checkpointer.engine.outlet.home)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert checkpointer.save_checkpoint(1, state, storage_type=StorageType.MEMORY)
    assert segment_paths(checkpointer.engine.outlet.home) == [path]


def test_bad_arguments_are_explained(make):
    checkpointer = make()
    with pytest.raises(ValueError, match="storage_type"):
        checkpointer.save_checkpoint(1, {}, storage_type="disk")
    with pytest.raises(ValueError, match="step"):
        checkpointer.save_checkpoint(-1, {})
    with pytest.raises(ValueError, match="on_busy"):
        checkpointer.save_checkpoint(1, {}, on_busy="perhaps")
    with pytest.raises(ValueError, match="plain file name"):
        checkpointer.save_checkpoint(1, {}, path=str(Path(checkpointer._engine.checkpoint_dir) / "5.tmp-x" / "a.pt"))
    with pytest.raises(ConfigError, match="only 1 ranks"):
        make(global_shard_num=4)


@pytest.mark.parametrize(
    ("global_rank", "shards", "expected"),
    [
        (0, (1, 1), (0, True, True)),
        (1, (1, 1), (0, False, False)),
        (2, (1, 1), (0, True, False)),
        (3, (2, 4), (3, True, True)),
        (3, (2, 2), (1, True, False)),
        (3, (1, 2), (1, False, False)),
    ],
)
def test_who_saves_what_on_two_nodes_of_two_ranks(global_rank, shards, expected):
    ranks = Ranks(global_rank=global_rank, world_size=4, local_rank=global_rank % 2, local_world_size=2)
    share = share_of(ranks, [0, 1, 0, 1], *shards)
    assert (share.shard, share.is_saving, share.is_writer) == expected
