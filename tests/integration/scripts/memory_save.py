"""Saves once into memory, says so by a file of its own, and waits for the file `stop`."""

import os
import select
import sys
from pathlib import Path

import torch

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

folder = Path(sys.argv[1])
checkpointer = DdpCheckpointer(str(folder / "checkpoints"))
assert checkpointer.save_checkpoint(1, {"w": torch.zeros(1000)}, storage_type=StorageType.MEMORY)
(folder / f"saved-{os.getpid()}").touch()
while not (folder / "stop").exists():
    select.select([], [], [], 0.05)
