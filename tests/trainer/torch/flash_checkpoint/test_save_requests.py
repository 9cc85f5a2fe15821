"""A save on request: the next one goes to storage by itself, once for each request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dlrover.protocol.messages.checkpoint import SaveRequested
from dlrover.snapshot.storage.commit import latest_step
from dlrover.snapshot.storage.storage import storage_for
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType


@pytest.fixture
def checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DdpCheckpointer]:
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(tmp_path))
    made = DdpCheckpointer(tmp_path / "checkpoints")
    yield made
    made.close()


def test_a_request_makes_one_memory_save_a_storage_save(checkpointer: DdpCheckpointer, tmp_path: Path) -> None:
    def save(step: int) -> int | None:
        checkpointer.save_checkpoint(step, {"w": torch.ones(4)}, storage_type=StorageType.MEMORY)
        checkpointer.wait_latest_checkpoint(20)
        directory = str(tmp_path / "checkpoints")
        return latest_step(storage_for(directory), directory)

    assert not checkpointer.is_save_requested()
    assert save(1) is None
    checkpointer._engine.outlet.save_request = SaveRequested(number=7)  # type: ignore[attr-defined]  # as the agent tells it
    assert checkpointer.is_save_requested()
    assert save(2) == 2
    assert not checkpointer.is_save_requested()
    assert save(3) == 2
    checkpointer._engine.outlet.save_request = SaveRequested(number=8)  # type: ignore[attr-defined]
    assert save(4) == 4
