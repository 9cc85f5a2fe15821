"""Storage that fails or crawls, states that change their shape: training goes on, the error is told once, nothing is lost."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

pytest.importorskip("fsspec")

from dlrover.snapshot.storage.commit import committed_checkpoints, find_damage, latest_step
from dlrover.snapshot.storage.storage import storage_for
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from tests.trainer.torch.flash_checkpoint.faults.faulty_files import SCHEME, Plan, install
from tests.trainer.torch.flash_checkpoint.test_saves import assert_same

Make = Callable[..., DdpCheckpointer]


@pytest.fixture
def plan() -> Plan:
    return install()


@pytest.fixture
def directory(tmp_path: Path, plan: Plan) -> str:
    return f"{SCHEME}://{tmp_path}/checkpoints"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(tmp_path / "memory"))
    made: list[DdpCheckpointer] = []

    def build(place: str, **options: Any) -> DdpCheckpointer:
        made.append(DdpCheckpointer(place, **options))
        return made[-1]

    yield build
    for checkpointer in made:
        checkpointer.close()


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), step), "step": step}


def drain(checkpointer: DdpCheckpointer) -> None:
    """Until the thread that writes has done all it was asked for, well or badly."""
    checkpointer._engine.outlet._writer.submit(lambda: None).result(30)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (errno.ENOSPC, "rank_0.pt"),
        (errno.ENOSPC, "rank-00000.json"),
        (errno.ENOSPC, "manifest.json"),
        (errno.ENOSPC, "dlrover_latest.txt"),
        (errno.EROFS, ""),
        (errno.EACCES, ""),
        (errno.EACCES, "dlrover_latest.txt"),
        (errno.ESTALE, ""),
        (errno.ENOTCONN, "manifest.json"),
        (errno.EIO, "rank_0.pt"),
    ],
    ids=lambda value: errno.errorcode.get(value, value) if isinstance(value, int) else value or "everything",
)
def test_failing_storage_is_told_once_and_costs_only_what_it_could_not_take(
    number: int, word: str, make: Make, plan: Plan, directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Full, read-only, forbidden, a mount that has vanished; wherever in the course of a commit."""
    checkpointer = make(directory, num_slots=3)
    assert checkpointer.save_checkpoint(1, state_of(1))
    drain(checkpointer)
    with plan.failing(number, word):
        for step in (2, 3):
            assert checkpointer.save_checkpoint(step, state_of(step), on_busy="block"), "training goes on"
            drain(checkpointer)
        assert plan.num_failures > 0
        errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(errors) == 1, errors
        assert os.strerror(number) in errors[0]
        assert "Training continues" in errors[0]
        assert_same(checkpointer.load_checkpoint(), state_of(3))  # in memory nothing is missing
    assert latest_step(storage_for(directory), directory) == 1
    assert_same(make(directory).load_checkpoint(), state_of(1))
    assert checkpointer.save_checkpoint(4, state_of(4))
    assert checkpointer.wait_latest_checkpoint(30)
    assert_same(make(directory).load_checkpoint(), state_of(4))
    storage = storage_for(directory)
    for checkpoint in committed_checkpoints(storage, directory):
        assert find_damage(storage, checkpoint) == []


def test_a_thousand_saves_with_storage_that_stands_still(make: Make, plan: Plan, directory: str) -> None:
    """
    No call waits for storage: none of its writes ends before all the saves have been made. Who was skipped is told, and the last checkpoint
    is in storage at the end.
    """
    checkpointer = make(directory, num_slots=3)
    saved, skipped = [], []
    with plan.standing_still():
        for step in range(1000):
            kind = StorageType.MEMORY if step % 2 else StorageType.DISK
            result = checkpointer.save_checkpoint(step, state_of(step), storage_type=kind)
            (saved if result else skipped).append(step)
            assert result or result.reason is SaveReason.SKIPPED_BUSY
        # One is being written, one waits for it, and the newest state is never given up for an attempt at a newer one.
        assert len(saved) >= 3
        assert len(saved) + len(skipped) == 1000
        assert_same(checkpointer.load_checkpoint(), state_of(saved[-1]))
        assert plan.num_writes <= 2, "the first file is still being written"
    assert checkpointer.save_checkpoint(1000, state_of(1000), on_busy="block")
    checkpointer.close()
    assert latest_step(storage_for(directory), directory) == 1000
    assert_same(make(directory).load_checkpoint(), state_of(1000))


def tensors() -> some.SearchStrategy[Any]:
    kinds = some.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool])
    shapes = some.lists(some.integers(0, 7), max_size=3)
    return some.builds(lambda kind, shape: torch.ones(shape, dtype=kind), kinds, shapes)


LEAVES = tensors() | some.integers() | some.text(max_size=5) | some.none() | some.floats(allow_nan=False)
STATES = some.dictionaries(
    some.text("abc.", min_size=1, max_size=3),
    some.recursive(
        LEAVES,
        lambda below: (
            some.lists(below, max_size=3)
            | some.tuples(below, below)
            | some.dictionaries(some.text("xyz", max_size=2) | some.integers(0, 3), below, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(states=some.lists(STATES, min_size=2, max_size=5), kinds=some.lists(some.booleans(), min_size=5, max_size=5))
def test_whatever_the_structure_becomes_the_newest_state_comes_back(
    make: Make, tmp_path_factory: pytest.TempPathFactory, states: list[dict[Any, Any]], kinds: list[bool]
) -> None:
    """Keys, shapes, types and nesting change from save to save, in memory and in storage."""
    directory = str(tmp_path_factory.mktemp("fuzz"))
    checkpointer = make(directory)
    for step, (state, is_disk) in enumerate(zip(states, kinds, strict=False)):
        kind = StorageType.DISK if is_disk else StorageType.MEMORY
        assert checkpointer.save_checkpoint(step, state, storage_type=kind, on_busy="block")
        assert_same(checkpointer.load_checkpoint(), state)
    checkpointer.save_checkpoint(99, states[-1], on_busy="block")
    checkpointer.close()
    assert_same(make(directory).load_checkpoint(), states[-1])
    assert_same(torch.load(f"{directory}/99/rank_0.pt"), states[-1])
