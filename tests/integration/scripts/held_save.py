"""
Saves one step through a storage that writes when the file `go` is there, and ends: the save is left to the agent.

    held_save.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time

import torch
from dlrover.python.common.storage import PosixDiskStorage

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer


class Held(PosixDiskStorage):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def write_state_dict(self, state_dict, path, write_func):
        while not os.path.exists(f"{self.folder}/go"):
            time.sleep(0.02)
        super().write_state_dict(state_dict, path, write_func)


if __name__ == "__main__":
    from held_save import Held as Importable  # the agent finds it by the module's name

    folder = sys.argv[1]
    checkpointer = DdpCheckpointer(f"{folder}/checkpoints", storage=Importable(folder=folder))
    assert checkpointer.save_checkpoint(1, {"weight": torch.ones(3)})
