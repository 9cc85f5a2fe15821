"""Saving by itself, with a real engine: when, and that one rank's plan is everybody's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dlrover.agreed.cadence import CadencePlan
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.checkpoint import CheckpointSettled
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.saving.cadence import SaveCadence


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(tmp_path))


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[DdpCheckpointer]:
    made = DdpCheckpointer(tmp_path / "checkpoints")
    yield made
    made.close()


def test_a_plan_of_the_callers_is_followed(tmp_path: Path) -> None:
    checkpointer = DdpCheckpointer(tmp_path / "checkpoints", checkpoint_interval=(2, 4))
    num_states = 0

    def state() -> dict[str, object]:
        nonlocal num_states
        num_states += 1
        return {"w": torch.ones(4)}

    results = {}
    for step in range(6):
        results[step] = checkpointer.save_if_due(step, state)
        checkpointer.wait_latest_checkpoint(20)  # or the slot of a storage save may still be busy
    checkpointer.close()
    assert [step for step, result in results.items() if result] == [0, 2, 4]
    assert num_states == 3
    assert (tmp_path / "checkpoints/dlrover_latest.txt").read_text() == "4"


class EngineOfAnotherRank:
    """Its rank 0 says 5 and 50, whatever is proposed here."""

    def __init__(self, inner: CheckpointEngine) -> None:
        self._inner = inner
        self.proposed: list[list[int]] = []

    def agree(self, values: list[int]) -> list[int]:
        self.proposed.append(values)
        return [5, 50]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_the_plan_is_found_from_what_is_measured_and_told_to_all(checkpointer: DdpCheckpointer) -> None:
    engine = EngineOfAnotherRank(checkpointer._engine)
    cadence = SaveCadence(cast("CheckpointEngine", engine))
    for step in range(4):
        storage_type = cadence.due(step)
        assert storage_type is not None
        cadence.saved(checkpointer.save_checkpoint(step, {"w": torch.ones(4)}, storage_type=storage_type), storage_type)
    engine.outlet.settled["x"] = CheckpointSettled(step=1, attempt="x", is_committed=True, seconds=3.0)
    assert cadence.due(4) is not None
    assert cadence.plan == CadencePlan(memory_every=5, storage_every=50)
    [(memory_every, storage_every)] = engine.proposed
    assert memory_every >= 1
    assert storage_every >= memory_every
    assert [step for step in range(5, 20) if cadence.due(step)] == [9, 14, 19]


@pytest.mark.parametrize("interval", ["often", 0, (1,), (0, 3), 2.5])
def test_an_interval_that_cannot_be_is_explained(tmp_path: Path, interval: object) -> None:
    with pytest.raises(ConfigError, match="checkpoint_interval"):
        DdpCheckpointer(tmp_path, checkpoint_interval=interval)  # type: ignore[arg-type]


def test_a_budget_is_a_part(checkpointer: DdpCheckpointer) -> None:
    with pytest.raises(ConfigError, match="overhead_budget"):
        SaveCadence(checkpointer._engine, budget=1.5)
