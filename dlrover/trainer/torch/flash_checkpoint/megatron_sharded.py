"""
Megatron-Core's distributed checkpoints (`torch_dist`) through memory.

    checkpointer = MegatronShardedCheckpointer("/shared/run7")
    checkpointer.save_checkpoint(iteration, sharded_state_dict)
    state = checkpointer.load_checkpoint(sharded_state_dict)   # None at the very beginning

`megatron.core.dist_checkpointing` does the work: it validates, cuts and describes the state. Where it would write its files the pieces go
into memory, and the agent writes what it would have written: DCP files, `common.pt` and `metadata.json`, in `iter_0000100/`. So its own
`load` reads our checkpoints, on any number of ranks, and ours reads its.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dlrover.agreed.cadence import BUDGET
from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.segment import Segment, segment_paths
from dlrover.snapshot.storage.manifest import DIRECTORY, ManifestInvalid
from dlrover.snapshot.storage.persist import pin_newest, release
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.trainer.older_names import older_names
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType as StorageType
from dlrover.trainer.torch.flash_checkpoint.dcp import FlashStorageWriter
from dlrover.trainer.torch.flash_checkpoint.encoding.parts import RawPart
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_reading import PieceReader
from dlrover.trainer.torch.flash_checkpoint.frameworks.piece_engine import FsdpCheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.restoring.megatron_stored import (
    TRACKER,
    iteration_directory,
    restorable,
    whole_iteration,
)
from dlrover.trainer.torch.flash_checkpoint.restoring.stored_files import told_by_first
from dlrover.trainer.torch.flash_checkpoint.saving.cadence import AUTO, Interval, SaveCadence, read_interval

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

COMMON = "common.pt"
"""What is the same on all ranks; written by rank 0."""
CONFIG = "metadata.json"
"""Which format the checkpoint has. Without it Megatron-Core takes a directory for no checkpoint."""


class MegatronShardedCheckpointer:
    """Made by all ranks together. One per process: a rank has one set of segments."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        deletion_strategy: object = None,
        save_timeout: float = 600,
        replica_count: int = 0,
        num_slots: int = 2,
        checkpoint_interval: Interval = AUTO,
        overhead_budget: float = BUDGET,
    ) -> None:
        """The last two are for `save_if_due`: how often, or "auto", and which part of the training time saves may take then."""
        read_interval(checkpoint_interval, overhead_budget)  # before anything exists that would have to be closed
        self.engine = _ShardedEngine(
            checkpoint_dir,
            deletion_strategy=deletion_strategy,
            save_timeout=save_timeout,
            replica_count=replica_count,
            num_slots=num_slots,
        )
        self._cadence = SaveCadence(self.engine, checkpoint_interval, overhead_budget)

    @older_names(iteration="step")
    def save_checkpoint(
        self,
        step: int,
        sharded_state_dict: dict[str, Any],
        storage_type: StorageType = StorageType.DISK,
        **options: Any,
    ) -> SaveResult:
        """
        `options` go to `megatron.core.dist_checkpointing.save`, such as `content_metadata`. All ranks call this. If every slot is
        still being written to storage it waits for one, as a caller of Megatron's function expects.
        """
        core = importlib.import_module("megatron.core.dist_checkpointing")
        strategy = _make_strategy(self.engine, step, storage_type)
        with tempfile.TemporaryDirectory(prefix="dlrover-megatron-") as folder:
            core.save(sharded_state_dict, folder, sharded_strategy=strategy, **options)
        assert self.engine.last_result is not None, "the strategy has saved"
        return self.engine.last_result

    @older_names(iteration="step")
    def save_if_due(self, step: int, state_fn: Callable[[], dict[str, Any]], **options: Any) -> SaveResult | None:
        """
        Save this iteration if it is time, to memory or to storage. `state_fn` is only called when there is something to save. All ranks call this after
        every iteration. None: it is not time.
        """
        return self._cadence.save_if_due(
            step, lambda storage_type: self.save_checkpoint(step, state_fn(), storage_type, **options)
        )

    def is_save_requested(self) -> bool:
        """Whether a checkpoint is wanted soon; the next save will be one to storage by itself. The same on all ranks."""
        return self.engine.is_save_requested

    def load_checkpoint(self, sharded_state_dict: dict[str, Any], **options: Any) -> Any:
        """
        What `megatron.core.dist_checkpointing.load` returns, of the newest iteration that all ranks can have; None: there is none.

        From memory where every rank finds its pieces on its own node, as after a restart with the same cut; else from storage.
        """
        stored = trouble = None
        try:
            stored = self._newest_stored()
        except ManifestInvalid as error:  # memory may do
            log.warning("The storage cannot be used: %s", error)
            trouble = error
        reader = self.engine.get_storage_reader()
        if reader is None and trouble is not None:
            raise trouble
        step = self.engine.restored_step if reader is not None else None
        if reader is None or step is None or (stored is not None and stored >= step):
            return None if stored is None else self._load_stored(stored, sharded_state_dict, options)
        if self._is_stored(step):
            return self._load_stored(step, sharded_state_dict, options)
        try:
            return self._load_from_memory(reader, step, sharded_state_dict, options)
        except CheckpointException as error:  # torch raises it on all ranks at once
            if stored is None:
                raise
            log.warning(
                "Iteration %d is not complete in memory. Iteration %d is loaded from storage: %s", step, stored, error
            )
        return self._load_stored(stored, sharded_state_dict, options)

    def wait_latest_checkpoint(self, timeout: float = 1800) -> bool:
        return self.engine.wait_for_storage(timeout)

    def close(self) -> None:
        self.engine.close()

    def _load_from_memory(
        self, reader: PieceReader, step: int, sharded_state_dict: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        core = importlib.import_module("megatron.core.dist_checkpointing")
        files = self.engine.files_in_memory(step)
        with tempfile.TemporaryDirectory(prefix="dlrover-megatron-") as folder, _reading(reader):
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            return core.load(sharded_state_dict, folder, **options)

    def _load_stored(self, step: int, sharded_state_dict: dict[str, Any], options: dict[str, Any]) -> Any:
        core = importlib.import_module("megatron.core.dist_checkpointing")
        step = whole_iteration(self.engine.agreement, LocalStorage(), self.engine.checkpoint_dir, step)
        self.engine.restored_step = step
        return core.load(sharded_state_dict, self._directory_of(step), **options)

    def _is_stored(self, step: int) -> bool:
        return self.engine.agreement.have_all(os.path.isfile(os.path.join(self._directory_of(step), CONFIG)))

    def _newest_stored(self) -> int | None:
        """
        What there is to restore, as rank 0 sees it: the commit writes Megatron's tracker, and so does Megatron itself. None without
        one.
        """
        told = told_by_first(self.engine.agreement, self._find_stored)
        return told[0] if told else None

    def _find_stored(self) -> list[int]:
        found = restorable(LocalStorage(), self.engine.checkpoint_dir)
        if not found.isdigit():
            return []
        folder = self._directory_of(int(found))
        if not os.path.isdir(os.path.join(folder, DIRECTORY)) and not os.path.isfile(os.path.join(folder, CONFIG)):
            log.warning("%s is not restored, because it is not a distributed checkpoint: it has no %s.", folder, CONFIG)
            return []
        return [int(found)]

    def _directory_of(self, step: int) -> str:
        return os.path.join(self.engine.checkpoint_dir, iteration_directory(step))


class _ShardedEngine(FsdpCheckpointEngine):
    """Saves two small files with the pieces: rank 0 for the storage, all ranks for a restore from memory."""

    files: Mapping[str, bytes] = {}
    last_result: SaveResult | None = None

    def save(self, step: int, parts: Mapping[str, object], paths: Mapping[str, str], **options: Any) -> SaveResult:
        own = {**parts, **{name: RawPart(content) for name, content in self.files.items()}}
        where = {**paths, **{name: name if self.shard == 0 else "" for name in self.files}}
        self.last_result = super().save(step, own, where, **{**options, "trackers": {TRACKER: str(step)}})
        return self.last_result

    def files_in_memory(self, step: int) -> dict[str, bytes]:
        for path in segment_paths(self.outlet.home, self.shard):
            with Segment(path) as segment:
                slots = [slot for slot in segment.complete_slots() if slot.step == step]
            for slot in slots:
                pinned = pin_newest(slot.path, slot.slot, slot.generation)
                if pinned is None:
                    continue
                try:
                    pickles = decode_contents(pinned.sections()).pickles
                    return {name: pickles[name] for name in (COMMON, CONFIG) if name in pickles}
                finally:
                    release(pinned)
        raise FileNotFoundError(f"Iteration {step} is no longer in the memory of this rank. Load it from storage.")


def _make_strategy(engine: _ShardedEngine, iteration: int, storage_type: StorageType) -> Any:
    """A save strategy of Megatron-Core. Its classes are known only where it is installed, so ours is made there."""
    theirs = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    core = importlib.import_module("megatron.core.dist_checkpointing.core")

    class FlashStrategy(theirs.TorchDistSaveShardedStrategy):  # type: ignore[misc,name-defined]
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            flat, _, _ = theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            pieces = theirs.mcore_to_pyt_state_dict(flat, False)
            engine.files = _told_by_rank_0(engine, lambda: self._small_files(Path(checkpoint_dir)))
            dcp.save(
                pieces,
                checkpoint_id=os.path.join(engine.checkpoint_dir, iteration_directory(iteration)),
                storage_writer=FlashStorageWriter(engine, step=iteration, storage_type=storage_type),
                planner=theirs.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=engine.agreement.group,
            )

        def async_save(self, *_: Any) -> Any:
            raise ConfigError(
                "async_sharded_save is not supported here and not needed, because this save never waits for "
                "storage. Leave it out."
            )

        def _small_files(self, folder: Path) -> dict[str, bytes]:
            core.save_config(core.CheckpointingConfig(self.backend, self.version), str(folder))
            return {name: (folder / name).read_bytes() for name in (COMMON, CONFIG)}

    return FlashStrategy("torch_dist", 1)


def _told_by_rank_0(engine: _ShardedEngine, make: Any) -> dict[str, bytes]:
    told: list[Any] = [make() if engine.agreement.ranks.global_rank == 0 else None]
    if engine.agreement.group is not None:
        dist.broadcast_object_list(told, src=0, group=engine.agreement.group)
    files: dict[str, bytes] = told[0]
    return files


@contextlib.contextmanager
def _reading(reader: PieceReader) -> Iterator[None]:
    """While this lasts Megatron-Core's load strategy reads with this reader instead of one for files."""
    theirs: Any = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")
    real = theirs._get_filesystem_reader
    theirs._get_filesystem_reader = lambda *args, **options: reader
    try:
        yield
    finally:
        theirs._get_filesystem_reader = real
