"""The name that `full_ckpt_engine` had in the first versions of the original."""

from __future__ import annotations

from dlrover.trainer.torch.flash_checkpoint.full_ckpt_engine import FullCheckpointEngine as DdpCheckpointEngine

__all__ = ["DdpCheckpointEngine"]
