"""The contract of all Flash Checkpoint front ends: what is saved, where to, and what a save says about itself."""

from __future__ import annotations

import abc
import enum
import os
from typing import Any

from msgspec import Struct


class StorageType(enum.Enum):
    MEMORY = 0
    """A snapshot in shared memory: survives the worker and the agent, not the machine."""
    DISK = 1
    """The same, and the agent writes it to storage in the background."""


class SaveReason(enum.StrEnum):
    SAVED = "saved"
    SKIPPED_BUSY = "skipped_busy"
    """Every slot that may be overwritten is still being written to storage, here or on another saving rank."""
    QUEUED = "queued"
    """The same, and the state waits aside, as `on_busy="latest"` wants it."""
    NOT_A_SAVING_RANK = "not_a_saving_rank"
    """Another rank of this node saves the same state."""
    ERROR = "error"


class SaveResult(Struct, kw_only=True):
    """
    True if the snapshot is in memory. Whether it is in storage is known later: `wait_latest_checkpoint`.

    A lazy save returns before its copy has ended: until `is_done` the result is true if it began, and it changes when the copy ends.
    """

    reason: SaveReason
    step: int
    blocking: float = 0.0
    """Seconds for which training stood still in this call."""
    waited: float = 0.0
    """Seconds for which it stood still afterwards, before a step or where the copy was waited for. Final when `is_done`."""
    num_bytes: int = 0
    """Room that the state takes in its slot."""
    message: str = ""
    is_lazy: bool = False
    """Some of it was copied while training went on."""
    is_done: bool = True
    """Nothing of this will change any more."""
    is_stale: bool = False
    """The bytes are those of the save before, although an optimizer has stepped: probably not the state that was meant."""

    def __bool__(self) -> bool:
        return self.reason is SaveReason.SAVED


class FlashCheckpointer(abc.ABC):
    @abc.abstractmethod
    def save_checkpoint(
        self,
        step: int,
        state_dict: dict[str, Any],
        path: str | os.PathLike[str] = "",
        storage_type: StorageType = StorageType.DISK,
    ) -> SaveResult:
        """Copy the state into memory; with DISK have it written to storage in the background."""

    @abc.abstractmethod
    def load_checkpoint(self, path: str | os.PathLike[str] = "") -> dict[str, Any]:
        """The newest state that all ranks have; empty when there is none."""


Checkpointer = FlashCheckpointer
"""Its name in the original. `dlrover.Checkpointer` is another class: the one for every kind of model."""
