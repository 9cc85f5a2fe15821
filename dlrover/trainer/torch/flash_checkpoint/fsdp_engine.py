"""
The engine for states that are cut over the ranks, under the path and with the names of the original.

The engine itself is in `frameworks/piece_engine.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.torch.flash_checkpoint.dcp import DirectoryReader as FileReader
from dlrover.trainer.torch.flash_checkpoint.dcp import FlashStorageReader as SharedMemoryReader
from dlrover.trainer.torch.flash_checkpoint.dcp import FlashStorageWriter as SharedMemoryWriter
from dlrover.trainer.torch.flash_checkpoint.frameworks.piece_engine import FsdpCheckpointEngine


@dataclass
class _StorageInfo:
    """Place of a piece in files of the original DLRover, whose metadata refers to this class by name."""

    relative_path: str
    offset: int
    length: int
    is_bare: ClassVar[bool] = True
    """The bytes of the tensor, without an archive around them."""


_OLD_NAMES = (FileReader, SharedMemoryReader, SharedMemoryWriter)
"""Scripts of the original import them from here."""

__all__ = ["ConfigError", "FsdpCheckpointEngine"]
