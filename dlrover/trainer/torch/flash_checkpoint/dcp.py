"""
Flash Checkpoint for scripts that call torch's distributed checkpoint (DCP) themselves.

    checkpointer = FsdpShardCheckpointer("/shared/run7")
    dcp.save(state, checkpoint_id="/shared/run7/100", storage_writer=FlashStorageWriter(checkpointer))
    dcp.load(state, storage_reader=FlashStorageReader(checkpointer))

`dcp.save` returns when the state is in memory; the agent writes the files, which are DCP's own. `dcp.load` reads from memory if it can.
"""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dlrover.protocol.errors import ConfigError, DLRoverError
from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.storage.storage import storage_for
from dlrover.trainer.older_names import older_names
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason, StorageType
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_items import DcpPart, resolve_items
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_plan import data_file, encode_metadata, place, with_places
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_reading import PieceReader, read_directory
from dlrover.trainer.torch.flash_checkpoint.frameworks.piece_engine import FsdpCheckpointEngine, file_bytes


class FlashStorageWriter(StorageWriter):  # type: ignore[misc]  # torch does not type it
    """
    Takes what `dcp.save` or `dcp.async_save` plans into memory, for the agent to write.

    A save needs a step: the digits at the end of `checkpoint_id`, or `step`, which can be set before each save.
    """

    def __init__(
        self,
        checkpointer: Any,
        *,
        step: int | None = None,
        storage_type: StorageType = StorageType.DISK,
        on_busy: str = "block",
    ) -> None:
        """All ranks make it together. `on_busy` as for `save_checkpoint`; a script that calls `dcp.save` expects no save to be skipped."""
        super().__init__()
        self._engine = _engine_of(checkpointer)
        self.step = step
        self._storage_type, self._on_busy = storage_type, on_busy
        self._path = ""
        self._is_coordinator = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._path = "" if checkpoint_id is None else os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "FlashStorageWriter needs use_collectives=True, because one rank describes the files of all ranks."
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        engine = self._engine
        step = self._step()
        with torch.no_grad():
            items = resolve_items(planner, plan, plan.planner_data or {})
            lengths = [file_bytes(item) for item in items]
            places = place(lengths, [item.num_bytes for item in items], [True] * len(items))
            written = [
                WriteResult(item.write.index, length, _StorageInfo(data_file(engine.shard), at, length))
                for item, at, length in zip(items, places, lengths, strict=True)
            ]
            metadata = self._describe(planner, written)
            saved = engine.save_pieces(
                step,
                DcpPart(items, places),
                metadata,
                path=self._path,
                storage_type=self._storage_type,
                on_busy=self._on_busy,
            )
        if saved.reason is SaveReason.ERROR:
            raise RuntimeError(f"step {step} was not saved: {saved.message}")
        if not saved:
            raise RuntimeError(
                f"step {step} was not saved: earlier saves still use all memory for snapshots. Save again "
                "later, or save less often"
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The metadata is in the snapshot already, or it could be lost between the two."""
        places = {written.index: written.storage_data for each in results for written in each}
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._path or None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _step(self) -> int:
        found = re.search(r"(\d+)/*$", self._path)
        if self.step is not None:
            return self.step
        if found is None:
            raise ConfigError(
                f"The step of the checkpoint {self._path!r} is unknown. Let checkpoint_id end with the step, or "
                "set the writer's `step`."
            )
        return int(found.group(1))

    def _describe(self, planner: SavePlanner, written: list[WriteResult]) -> bytes:
        """The `.metadata` of the checkpoint, on rank 0. All ranks call this."""
        group = self._engine.agreement.group
        results: list[Any] = [written]
        if group is not None:
            results = [None] * self._engine.agreement.ranks.world_size
            dist.all_gather_object(results, written, group=group)
        if self._engine.shard != 0:
            return b""
        metadata = getattr(planner, "metadata", None)
        if not isinstance(metadata, Metadata):
            raise ConfigError(
                f"FlashStorageWriter cannot work with {type(planner).__name__}, because it keeps no `metadata` "
                "of the global plan. Derive your planner from DefaultSavePlanner, and let rank 0 coordinate."
            )
        places: dict[MetadataIndex, Any] = {each.index: each.storage_data for found in results for each in found}
        return encode_metadata(with_places(metadata, places))


class FlashStorageReader(PieceReader):
    """
    Reads the newest state that all ranks can have, from memory or storage, or the checkpoint at `path`.

    All ranks make it together. `step` says which state it is; None: there is none, and reading raises FileNotFoundError.
    """

    @older_names(resume_path="path")
    def __init__(self, checkpointer: Any, path: str | os.PathLike[str] = "") -> None:
        engine = _engine_of(checkpointer)
        reader = engine.get_storage_reader(path)
        self.step: int | None = None
        if reader is None:
            super().__init__(Metadata({}), _Nothing(engine.checkpoint_dir), engine._copier)
        else:
            super().__init__(reader._metadata, reader._pieces, reader._copier)
            self.step = None if path else engine.restored_step

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if isinstance(self._pieces, _Nothing):
            raise FileNotFoundError(
                f"There is no checkpoint in memory or in {self._pieces.directory}. Give the directory of a checkpoint."
            )
        return super().read_metadata(*args, **kwargs)


class DirectoryReader(PieceReader):
    """Reads one directory: a DCP checkpoint of torch, of ours, or of the original DLRover."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        storage = storage_for(os.fspath(path))
        metadata, pieces = read_directory(storage, os.fspath(path), is_checked=False)
        super().__init__(metadata, pieces, Copier(1))


class _Nothing:
    """Pieces of a state that does not exist."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def open(self, wanted: Any) -> None:
        raise FileNotFoundError(f"There is no checkpoint in {self.directory}. Give the directory of a checkpoint.")

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        raise FileNotFoundError(f"There is no checkpoint in {self.directory}. Give the directory of a checkpoint.")

    def content(self, index: MetadataIndex) -> bytes:
        raise FileNotFoundError(f"There is no checkpoint in {self.directory}. Give the directory of a checkpoint.")

    def close(self) -> None:
        """Nothing is open."""


def _engine_of(checkpointer: Any) -> FsdpCheckpointEngine:
    engine = checkpointer if isinstance(checkpointer, FsdpCheckpointEngine) else getattr(checkpointer, "engine", None)
    if not isinstance(engine, FsdpCheckpointEngine):
        raise ConfigError(
            f"`checkpointer` must be a FsdpShardCheckpointer (got {type(checkpointer).__name__}). Make one with "
            "the checkpoint directory."
        )
    return engine


__all__ = ["DLRoverError", "DirectoryReader", "FlashStorageReader", "FlashStorageWriter"]
