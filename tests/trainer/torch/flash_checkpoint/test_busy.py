"""Saves that find no slot, and saves of a state that is not the one that is trained."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from dlrover.snapshot.memory.segment import Segment, segment_paths
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from tests.trainer.torch.flash_checkpoint.test_saves import assert_same, state_of


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))
    return place


@pytest.fixture
def checkpointer(tmp_path):
    made = DdpCheckpointer(tmp_path / "checkpoints")
    yield made
    made.close()


def save(checkpointer, step, state=None, **options):
    state = state_of(step) if state is None else state
    return checkpointer.save_checkpoint(step, state, **{"storage_type": StorageType.MEMORY} | options)


@contextlib.contextmanager
def busy(checkpointer):
    """Somebody reads the older of the two slots, and the newer one is never overwritten."""
    save(checkpointer, 1)
    save(checkpointer, 2)
    [path] = segment_paths(checkpointer._engine.outlet.home)
    with Segment(path) as segment, segment.pin(segment.complete_slots()[0].slot):
        yield


def test_the_latest_state_that_found_no_slot_gets_the_one_that_is_free_next(checkpointer):
    with busy(checkpointer):
        live = state_of(3)
        result = save(checkpointer, 3, live, on_busy="latest")
        assert not result
        assert (result.reason, result.is_done) == (SaveReason.QUEUED, False)
        live["model"]["weight"].zero_()  # it is step 3 that waits, not what becomes of it
        assert not checkpointer.poll()
    assert checkpointer.poll()
    assert result
    assert result.is_done
    assert_same(checkpointer.load_checkpoint(), state_of(3))
    assert checkpointer._engine.restored_step == 3


def test_a_newer_state_takes_the_place_and_the_wish_for_storage(checkpointer, tmp_path):
    with busy(checkpointer):
        first = save(checkpointer, 3, on_busy="latest", storage_type=StorageType.DISK)
        second = save(checkpointer, 4, on_busy="latest")
        assert (first.reason, first.is_done) == (SaveReason.SKIPPED_BUSY, True)
        assert second.reason is SaveReason.QUEUED
        assert save(checkpointer, 4).reason is SaveReason.SKIPPED_BUSY  # it takes nobody's place
        assert second.reason is SaveReason.QUEUED
    third = save(checkpointer, 5)  # a slot is free: it has it, and nobody waits any more
    assert third
    assert second.reason is SaveReason.SKIPPED_BUSY
    assert checkpointer.wait_latest_checkpoint(30)
    assert_same(torch.load(tmp_path / "checkpoints" / "5" / "rank_0.pt"), state_of(5))


def test_what_waits_at_the_end_is_saved_by_closing(checkpointer, tmp_path):
    with busy(checkpointer):
        result = save(checkpointer, 3, on_busy="latest", storage_type=StorageType.DISK)
    checkpointer.close()
    assert result
    assert_same(torch.load(tmp_path / "checkpoints" / "3" / "rank_0.pt"), state_of(3))


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self) -> None:
        self.model(torch.ones(2, 30)).sum().backward()
        self.optimizer.step()


def test_a_state_that_was_copied_once_is_reported_and_saved(checkpointer, caplog):
    training = Training()
    state = {"model": copy.deepcopy(training.model.state_dict())}
    training.train()
    assert not save(checkpointer, 1, state).is_stale
    for step in (2, 3):
        training.train()
        result = save(checkpointer, step, state | {"step": step})
        assert result
        assert result.is_stale
    assert [record.levelname for record in caplog.records if "same bytes" in record.message] == ["WARNING"]
    training.train()
    assert not save(checkpointer, 4, {"model": copy.deepcopy(training.model.state_dict())}).is_stale


def test_equal_bytes_with_a_reason_are_no_news(checkpointer):
    training = Training()
    training.train()
    live = {"model": training.model.state_dict()}
    save(checkpointer, 1, live)
    assert not save(checkpointer, 2, live).is_stale  # no step between them
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.train()
    assert not save(checkpointer, 3, live).is_stale  # the live tensors, which did not move
    frozen = {"teacher": {"weight": torch.ones(7, 7)}}
    save(checkpointer, 4, frozen)
    training.train()
    assert not save(checkpointer, 5, frozen).is_stale  # nothing in it is trained
    copied = copy.deepcopy(training.model.state_dict())
    save(checkpointer, 6, {"model": copied})
    training.train()
    assert not save(checkpointer, 6, {"model": copied}).is_stale  # the step has not moved on
