"""
The engine for states that are cut over the ranks: saved as pieces of whole tensors, restored by any number of ranks.

What is saved, and which rank holds which part of it, torch's distributed checkpoint (DCP) says. A snapshot in memory holds a table of its pieces,
and the files are DCP's own, so a rank that needs a piece finds it by name and place: from the memory of the ranks on this node or from
storage, by the same code.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dlrover.protocol.errors import DLRoverError, Unavailable
from dlrover.snapshot.files.torch_file import torch_file_bytes
from dlrover.snapshot.storage.commit import committed_checkpoints, read_global_manifest
from dlrover.snapshot.storage.manifest import DIRECTORY
from dlrover.snapshot.storage.storage import full_path, join
from dlrover.snapshot.storage.user_storage import storage_of
from dlrover.trainer import phases
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult, StorageType
from dlrover.trainer.torch.flash_checkpoint.encoding.parts import RawPart
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_items import (
    DcpPart,
    LocalItem,
    LocalPlans,
    Serialiser,
    archive_pickle,
    collect_items,
)
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_plan import (
    METADATA_FILE,
    RankShare,
    SharedPlan,
    data_file,
    place,
    plan_together,
)
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_reading import (
    FilePieces,
    MemoryPieces,
    PieceReader,
    Pieces,
    fit_to,
    load_into,
    merged,
    metadata_of_items,
    plan_load,
    read_directory,
)
from dlrover.trainer.torch.flash_checkpoint.frameworks.reshard_exchange import bring, newest_attempts, tell_saves
from dlrover.trainer.torch.flash_checkpoint.restoring.newest_common import Restorer
from dlrover.trainer.torch.flash_checkpoint.restoring.reshard import (
    LocalMemory,
    SavedState,
    find_saves,
    remove_abandoned,
)
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import own_ranks

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

DATA = "dcp"
METADATA = "metadata"
"""Names of the two parts of a snapshot; only rank 0 has the second."""
_READER = "reader"
_SAVES_UNTIL_SETTLED = 2
"""When a second save begins, every rank has completed the first: no rank needs the pieces of an earlier world any more."""


class FsdpCheckpointEngine(CheckpointEngine):
    """One per process. All ranks save, and call everything here together."""

    keeps_claims = False
    notes_saves = False

    def __init__(self, checkpoint_dir: str | os.PathLike[str], **options: Any) -> None:
        ranks = own_ranks()
        super().__init__(
            checkpoint_dir,
            local_shard_num=max(1, ranks.local_world_size),
            global_shard_num=max(1, ranks.world_size),
            is_group_private=True,
            **options,
        )
        self._serialise = Serialiser()
        self._local_plans = LocalPlans()
        self._signature: tuple[Any, ...] = ()
        self._plan: SharedPlan | None = None
        self._readers: list[PieceReader] = []
        """Handed out; they pin what they read until the next save."""
        self._num_states_saved = 0

    # Saving.

    def save_state(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        path: str | os.PathLike[str] = "",
        storage_type: StorageType = StorageType.DISK,
        *,
        on_busy: str = "skip",
        lazy: bool | str | None = None,
        metric: float | None = None,
    ) -> SaveResult:
        """Copy a state of (D)Tensors and other values into memory; `path` is the directory of the checkpoint."""
        if not isinstance(storage_type, StorageType):
            raise ValueError(f"storage_type must be StorageType.MEMORY or StorageType.DISK (got {storage_type!r}).")
        begun_at = time.perf_counter()
        self._agree_late()
        planner = DefaultSavePlanner()
        with torch.no_grad():
            planner.set_up_planner(dict(state_dict), is_coordinator=self.shard == 0)
            items = collect_items(planner, self._local_plans.plan_for(planner), planner.mappings, self._serialise)
        try:
            plan = self._plan_for(items, planner.mappings)
        except RuntimeError as error:  # what torch raises when a rank is gone
            gone = Unavailable(f"The ranks could not agree on this save: {error}")
            return self._failed(step, gone, time.perf_counter() - begun_at)
        kept = [item for item, is_kept in zip(items, plan.own.keep, strict=True) if is_kept]
        places = [at for at, is_kept in zip(plan.own.places, plan.own.keep, strict=True) if is_kept]
        part = DcpPart(kept, places)
        planned_after = time.perf_counter() - begun_at
        result = self.save_pieces(
            step, part, plan.metadata, path=path, storage_type=storage_type, on_busy=on_busy, lazy=lazy, metric=metric
        )
        result.blocking += planned_after
        if result:
            self._num_states_saved += 1
            if self._num_states_saved == _SAVES_UNTIL_SETTLED and self.agreement.ranks.local_rank == 0:
                self._clear_abandoned(plan.own.ranks_here)
        return result

    def save_pieces(
        self,
        step: int,
        part: DcpPart,
        metadata: bytes,
        *,
        path: str | os.PathLike[str] = "",
        storage_type: StorageType = StorageType.DISK,
        on_busy: str = "skip",
        lazy: bool | str | None = None,
        metric: float | None = None,
    ) -> SaveResult:
        """Pieces that have their places already."""
        self._release_readers()
        files = {DATA: data_file(self.shard)}
        parts: dict[str, object] = {DATA: part}
        if self.shard == 0:
            files[METADATA] = METADATA_FILE
            parts[METADATA] = RawPart(metadata)
        target, links = self._place(step, path)
        return self.save(
            step,
            parts,
            files,
            is_storage=storage_type is StorageType.DISK,
            on_busy=on_busy,
            target=target,
            links=links,
            lazy=lazy,
            metric=metric,
        )

    def save_alone(self, step: int, parts: Mapping[str, object], paths: Mapping[str, str], attempt: str) -> None:
        """All pieces that this rank has, also those that a lost one would have kept for it. A restore looks for pieces, not for ranks."""
        self._release_readers()
        planner = DefaultSavePlanner()
        with torch.no_grad():
            planner.set_up_planner(dict(parts), is_coordinator=self.shard == 0)
            items = collect_items(planner, self._local_plans.plan_for(planner), planner.mappings, self._serialise)
        lengths = [file_bytes(item) for item in items]
        places = place(lengths, [item.num_bytes for item in items], [True] * len(items))
        self._write_alone(step, {DATA: DcpPart(items, places)}, {DATA: data_file(self.shard)}, attempt)

    def _plan_for(self, items: Sequence[LocalItem], mappings: Mapping[str, Any]) -> SharedPlan:
        """The plan of the last save, if no rank's state has changed its structure since."""
        signature = tuple(item.signature for item in items)
        is_same = self._plan is not None and signature == self._signature
        if not self.agreement.have_all(is_same) or self._plan is None:
            claim = RankShare(
                plan=SavePlan([item.write for item in items], planner_data=dict(mappings)),
                file_bytes=[file_bytes(item) for item in items],
                num_bytes=[item.num_bytes for item in items],
                node=str(self.outlet.home),
            )
            ranks = self.agreement.ranks
            self._plan = plan_together(claim, self.agreement.group, ranks.global_rank, ranks.world_size)
            self._signature = signature
        return self._plan

    def _place(self, step: int, path: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
        """Name of the checkpoint, and where else its files shall be found."""
        if not path:
            return str(step), {}
        full = full_path(path)
        inside = full.removeprefix(self.checkpoint_dir.rstrip("/") + "/")
        if inside != full and "/" not in inside:
            return inside, {}
        names = [METADATA_FILE, *(data_file(rank) for rank in range(self.agreement.ranks.world_size))]
        return str(step), {name: join(full, name) for name in names}

    def _clear_abandoned(self, ranks_here: list[int]) -> None:
        for gone in remove_abandoned(self.outlet.home, ranks_here):
            log.info("removed %s, because no rank of this world writes to it", gone.name)

    # Restoring.

    def load_state(self, state: dict[str, Any], resume_path: str | os.PathLike[str] = "") -> dict[str, Any] | None:
        """
        Fill a state with the newest one that every rank can have, and add whatever else was saved with it. None: there is none.

        What was in its tensors is lost also when this raises.
        """
        self._agree_late()
        self.wait_for_staging()
        if resume_path:
            state = self._load_path(state, os.fspath(resume_path))
            self.tell_data_of(os.fspath(resume_path))
            return state
        restored = _StateRestorer(self, _fill).load(None, state)
        self.tell_data(restored)
        return None if restored is None else self._accept(restored.step, restored.is_from_memory, restored.parts)

    def get_storage_reader(self, resume_path: str | os.PathLike[str] = "") -> PieceReader | None:
        """A reader for `torch.distributed.checkpoint.load`; None: there is nothing to read."""
        self._agree_late()
        self.wait_for_staging()
        if resume_path:
            reader = self._opened(*self._open_path(os.fspath(resume_path)))
            self.tell_data_of(os.fspath(resume_path))
            return reader
        restored = _StateRestorer(self, lambda state, reader: {_READER: reader}).load(None, None)
        self.tell_data(restored)
        if restored is None:
            return None
        return self._accept(restored.step, restored.is_from_memory, restored.parts)[_READER]  # type: ignore[no-any-return]

    def close(self) -> None:
        self._release_readers()
        super().close()

    def _accept(self, step: int, is_from_memory: bool, parts: dict[str, Any]) -> dict[str, Any]:
        log.info("restored step %d from %s", step, "memory" if is_from_memory else self.checkpoint_dir)
        self.restored_step = step
        phases.tell_step(step)
        return parts

    def _load_path(self, state: dict[str, Any], path: str) -> dict[str, Any]:
        reader = self._opened(*self._open_path(path))
        try:
            return _fill(state, reader)
        finally:
            reader.close()

    def _open_path(self, path: str) -> tuple[Metadata, FilePieces]:
        storage = storage_of(path, self._storage)
        full = full_path(path)
        try:
            return read_directory(storage, full, is_checked=read_global_manifest(storage, full) is not None)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{full} is not a DCP checkpoint: it has no {METADATA_FILE}.") from error

    def _opened(self, metadata: Metadata, pieces: Pieces) -> PieceReader:
        reader = PieceReader(metadata, pieces, self._copier)
        self._readers.append(reader)
        return reader

    def _release_readers(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers = []


def _fill(state: dict[str, Any], reader: PieceReader) -> dict[str, Any]:
    filled = dict(state)
    fit_to(filled, reader.read_metadata())
    load_into(filled, reader)
    return filled


class _StateRestorer(Restorer):
    """Looks for pieces instead of whole shards."""

    def __init__(
        self, engine: FsdpCheckpointEngine, take: Callable[[dict[str, Any], PieceReader], dict[str, Any]]
    ) -> None:
        super().__init__(
            engine.checkpoint_dir, engine.outlet.home, engine.agreement, engine._copier, storage=engine._storage
        )
        self._engine, self._take = engine, take
        self._memory = LocalMemory(engine.outlet.home, engine._look)
        self._homes: list[str] = []
        """Of all ranks: which node each is on."""
        self._wanted: dict[str, Any] | None = None
        self._described: dict[str, Metadata] = {}
        """By attempt: what lies on this node."""

    def load(self, names: Any, into: Any) -> Any:
        self._wanted = into
        restored = None
        try:
            restored = super().load(names, into)
        finally:
            if restored is None or into is not None or not restored.is_from_memory:
                self._memory.close()  # else the reader that was handed out needs it
        return restored

    def _offers(self) -> dict[int, Any]:
        """Steps of which this rank can have all that it needs from memory."""
        self._agreement.have_all(True)  # a neighbour may still be at the end of its last save
        saves = find_saves([self._memory], self._directory)
        self._homes, everywhere = tell_saves(saves, str(self._home), self._agreement)
        offers = {}
        for step, save in newest_attempts(everywhere).items():
            nothing = SavedState(
                step=step, round=save.round, attempt=save.attempt, num_shards=save.num_shards, shards={}
            )
            state = saves.get(save.attempt, nothing)
            if self._is_enough(state, is_whole_somewhere=len(save.shards) == save.num_shards):
                offers[step] = state
        return offers

    def _claims_of(self, name: Any) -> dict[str, Any]:
        return {}  # none are kept: `keeps_claims`

    def _save_number(self, name: Any) -> int:
        return zlib.crc32(name.attempt.encode())

    def _is_enough(self, state: SavedState, *, is_whole_somewhere: bool) -> bool:
        if state.is_whole or (is_whole_somewhere and self._wanted is not None):
            return True
        if self._wanted is None:  # not known yet what will be read: our own share, if we are cut as it was
            share = self._agreement.share
            return share.num_shards == state.num_shards and share.shard in state.shards
        return self._is_all_here(state, self._wanted)

    def _is_all_here(self, state: SavedState, wanted: dict[str, Any]) -> bool:
        if state.is_whole:
            return True
        try:
            metadata = self._metadata_in_memory(state)
            template = dict(wanted)
            fit_to(template, metadata)
            plan_load(template, metadata)
        except DLRoverError as error:
            log.info("Step %d is not complete in the memory of this node: %s", state.step, error)
            return False
        return True

    def _from_memory(self, name: Any, names: Any, into: Any) -> dict[str, Any] | None:
        metadata = self._metadata_in_memory(name)
        group = self._agreement.group
        if self._wanted is None and group is not None:
            found: list[Any] = [None] * self._agreement.ranks.world_size
            dist.all_gather_object(found, metadata, group=group)
            metadata = merged(found)
        if self._wanted is not None and not self._agreement.have_all(self._is_all_here(name, self._wanted)):
            brought = bring(name, self._wanted, self._homes, self._agreement)
            if brought is None:
                return None
            return self._try(name.step, lambda: (brought.metadata, MemoryPieces(name, None, brought.pieces)), into)
        on_close = None if into is not None else self._memory.close
        return self._try(name.step, lambda: (metadata, MemoryPieces(name, on_close)), into)

    def _metadata_in_memory(self, state: SavedState) -> Metadata:
        if state.attempt not in self._described:
            items = (item for holding, _source in state.shards.values() for item in holding.items)
            self._described[state.attempt] = metadata_of_items(items)
        return self._described[state.attempt]

    def _from_storage(self, step: int, names: Any, into: Any) -> dict[str, Any] | None:
        return self._try(step, lambda: self._read_step(step), into)

    def _try(self, step: int, opening: Callable[[], tuple[Metadata, Pieces]], into: Any) -> dict[str, Any] | None:
        """None, with a warning, when this rank's pieces cannot be read."""
        try:
            return self._take(into, self._engine._opened(*opening()))
        except (OSError, DLRoverError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError, EOFError) as error:
            log.warning("Step %d cannot be restored on this rank: %s", step, error)
            return None
        finally:
            if into is not None:
                self._engine._release_readers()

    def _read_step(self, step: int) -> tuple[Metadata, FilePieces]:
        storage = storage_of(self._directory, self._storage)
        for each in committed_checkpoints(storage, self._directory):
            if each.manifest.step == step:
                return read_directory(storage, each.path, is_checked=True)
        return read_directory(storage, join(self._directory, str(step)), is_checked=False)

    def _is_foreign(self, step: int) -> bool:
        """Written by software that knows no manifests: plain DCP, or the original DLRover."""
        storage = storage_of(self._directory, self._storage)
        names = {entry.name for entry in storage.list(join(self._directory, str(step)))}
        return METADATA_FILE in names and DIRECTORY not in names


def file_bytes(item: LocalItem) -> int:
    if item.tensor is None:
        return len(item.content)
    return torch_file_bytes(len(archive_pickle(item.tensor.dtype, tuple(item.tensor.shape))), [item.num_bytes])
