"""The memory of the first save is there before it."""

from __future__ import annotations

from pathlib import Path

import torch

from dlrover.snapshot.segment import segment_paths
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.outlets import ThreadOutlet


def test_the_first_save_goes_into_the_file_that_was_prepared(tmp_path: Path) -> None:
    """Also a state of very many tensors, whose names alone take more room than that of a small one."""
    engine = CheckpointEngine(str(tmp_path / "checkpoints"), outlet=ThreadOutlet(tmp_path / "shm"))
    try:
        params = [torch.nn.Parameter(torch.ones(8)) for _ in range(300)]
        optimizer = torch.optim.AdamW(params)
        for param in params:
            param.grad = torch.ones(8)
        optimizer.step()
        assert engine._preparation is not None
        engine._preparation.wait()
        [prepared] = segment_paths(engine.outlet.home, 0)
        state = {
            "params": {f"layers.{n}.attention.weight": p for n, p in enumerate(params)},
            "o": optimizer.state_dict(),
        }
        assert engine.save(1, {"m": state}, {"m": "f.pt"}, is_storage=False)
        assert segment_paths(engine.outlet.home, 0) == [prepared]
    finally:
        engine.close()
