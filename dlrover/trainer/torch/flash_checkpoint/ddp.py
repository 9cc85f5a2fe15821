"""
`DdpCheckpointer`: Flash Checkpoint for any state dict that a rank holds whole.

    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    checkpointer = DdpCheckpointer("/shared/run7")
    state = checkpointer.load_checkpoint()          # {} at the very beginning
    ...
    checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from dlrover.agreed.cadence import BUDGET
from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.storage.storage import full_path
from dlrover.trainer.older_names import older_names
from dlrover.trainer.torch.flash_checkpoint.checkpointer import Checkpointer, SaveReason, SaveResult
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType as StorageType
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.saving.cadence import AUTO, Interval, SaveCadence, read_interval

PART = "model_states"


class DdpCheckpointer(Checkpointer):
    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        comm_backend: str = "",
        deletion_strategy: object = None,
        save_timeout: float = 600,
        replica_count: int = 0,
        *,
        storage: Any = None,
        num_slots: int = 2,
        lazy: bool | str = False,
        checkpoint_interval: Interval = AUTO,
        overhead_budget: float = BUDGET,
    ) -> None:
        """
        With 1 and 1 shards the state is the same on all ranks and local rank 0 of each node saves; for a state that is cut over all ranks
        give the ranks per node and the world size.

        `storage` is an object of a class derived from `CheckpointStorage`, `deletion_strategy` one of `CheckpointDeletionStrategy`; see
        docs/reference/compatibility.md.

        `comm_backend` is accepted and not needed: ranks agree over gloo. `num_slots` is how many states are kept in memory; a
        third one lets memory saves go on while storage is slow. `lazy` is how saves are made that do not say. The last two are for
        `save_if_due`: how often, or "auto", and which part of the training time saves may take then.
        """
        if replica_count < 0:
            raise ConfigError(
                f"replica_count, the number of copies in other nodes' memory, must be at least 0 (got {replica_count})."
            )
        read_interval(checkpoint_interval, overhead_budget)  # before anything exists that would have to be closed
        self._engine = CheckpointEngine(
            checkpoint_dir,
            local_shard_num=local_shard_num,
            global_shard_num=global_shard_num,
            deletion_strategy=deletion_strategy,
            save_timeout=save_timeout,
            replica_count=replica_count,
            num_slots=num_slots,
            storage=storage,
            lazy=lazy,
        )
        self.checkpoint_dir, self.storage = os.fspath(checkpoint_dir), self._engine.storage
        self.cadence = SaveCadence(self._engine, checkpoint_interval, overhead_budget)

    @property
    def engine(self) -> CheckpointEngine:
        return self._engine

    def save_checkpoint(
        self,
        step: int,
        state_dict: dict[str, Any],
        path: str | os.PathLike[str] = "",
        storage_type: StorageType = StorageType.DISK,
        *,
        on_busy: str = "skip",
        lazy: bool | str | None = None,
        metric: float | None = None,
    ) -> SaveResult:
        """
        Copy the state into memory; it may change again as soon as this returns. With DISK the agent writes `path` afterwards, by
        default `{checkpoint_dir}/{step}/rank_{shard}.pt`.

        `on_busy="block"` waits for a free slot instead of skipping the save: for the last one of a training.

        `lazy=True` lets parameters and optimizer state be copied during the next forward and backward pass; the next step of the optimizer
        waits for the rest. Until then only an optimizer may change them. "auto" is the same, and says nothing where that is not possible.

        `metric` is how good the state is, for a `deletion_strategy` of `KeepBest`.
        """
        if not isinstance(storage_type, StorageType):
            raise ValueError(f"storage_type must be StorageType.MEMORY or StorageType.DISK (got {storage_type!r}).")
        target, file, links = self._place(step, path)
        return self._engine.save(
            step,
            {PART: state_dict},
            {PART: file},
            is_storage=storage_type is StorageType.DISK,
            on_busy=on_busy,
            target=target,
            links=links,
            lazy=lazy,
            metric=metric,
        )

    def save_if_due(self, step: int, state_fn: Callable[[], dict[str, Any]]) -> SaveResult | None:
        """
        Save this step if it is time, to memory or to storage. All ranks call this at every step; `state_fn` is only called when
        there is something to save. None: it is not time.
        """
        return self.cadence.save_if_due(
            step, lambda storage_type: self.save_checkpoint(step, state_fn(), storage_type=storage_type)
        )

    @older_names(resume_path="path")
    def load_checkpoint(
        self, path: str | os.PathLike[str] = "", *, into: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """
        The newest state that all ranks can have, from memory or storage, on the CPU; {} when there is none.

        A `path` (a file, or the directory of a checkpoint) wins over everything, and has to exist. All ranks call this.

        `into` is a state like the saved one: its tensors are filled where they are and returned, which is as fast as memory is, while fresh
        ones cost several times that. What is not a tensor is only returned. If this raises, the tensors hold anything.
        """
        state = self._engine.load_file(path, into=into) if path else self._engine.load(PART, into=into)
        return {} if state is None else state

    def wait_for_staging(self) -> bool:
        """Until the newest lazy save is in memory. False: it was discarded; its result says why."""
        return self._engine.wait_for_staging()

    def poll(self) -> bool:
        """Whether the newest save is in memory, without waiting."""
        return self._engine.poll()

    def wait_latest_checkpoint(self, timeout: float = 1800) -> bool:
        """Until the newest DISK save of this rank is committed. Ranks that do not save return at once."""
        return self._engine.wait_for_storage(timeout)

    def is_save_requested(self) -> bool:
        """
        Whether a checkpoint is wanted soon (`dlrover save`, a node that is to go). The next `save_checkpoint` will be one to storage
        by itself; a script that saves rarely may ask here and save now. The same on all saving ranks.
        """
        return self._engine.is_save_requested

    def close(self) -> None:
        """End the threads. Under `dlrover-run` what was saved stays; elsewhere this waits until it is written."""
        self._engine.close()

    def _place(self, step: int, path: str | os.PathLike[str]) -> tuple[str, str, dict[str, str]]:
        """
        Name of the checkpoint, name of the file in it, and where else the file shall be found.

        A checkpoint is a directory. A file that the caller wants elsewhere gets a second name there.
        """
        default = f"rank_{self._engine.shard}.pt"
        if not path:
            return str(step), default, {}
        full = full_path(path)
        inside = full.removeprefix(self._engine.checkpoint_dir.rstrip("/") + "/")
        parts = inside.split("/")
        if inside != full and len(parts) >= 2:
            return parts[0], "/".join(parts[1:]), {}
        return str(step), default, {default: full}


__all__ = ["DdpCheckpointer", "SaveReason", "SaveResult", "StorageType"]
