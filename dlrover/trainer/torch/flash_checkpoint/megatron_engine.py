"""
The engine of the Megatron front ends: every rank takes part, and a rank's files are those that Megatron's own rules give it.

Who holds what depends on tensor, pipeline, expert and data parallelism, so nothing is derived from local ranks: a rank saves what it was given, some
ranks nothing. A checkpoint is complete when all ranks have said what they wrote.

A restore from memory is one decision for all ranks. Ranks of a data-parallel group share one model file, which only one of them saved: the
others read it in that rank's segment on the same node, or get it from that rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.segment import Segment, SlotName, segment_paths
from dlrover.snapshot.memory.segment_format import SegmentInvalid
from dlrover.snapshot.storage.commit import read_global_manifest
from dlrover.snapshot.storage.manifest import ManifestInvalid
from dlrover.snapshot.storage.newest import newest_step
from dlrover.snapshot.storage.persist import read_request
from dlrover.snapshot.storage.storage import join
from dlrover.snapshot.storage.user_storage import meta_for, storage_of
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import load_state
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.restoring.early_look import check
from dlrover.trainer.torch.flash_checkpoint.restoring.megatron_stored import (
    RELEASE,
    TRACKER,
    iteration_directory,
    restorable,
)
from dlrover.trainer.torch.flash_checkpoint.restoring.newest_common import Restorer
from dlrover.trainer.torch.flash_checkpoint.restoring.stored_files import told_by_first
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import own_ranks

log = logging.getLogger("dlrover.trainer.flash_checkpoint")


class Memory:
    """An iteration that all ranks hold: this rank's files, and the way to those of others."""

    def __init__(self, step: int, files: dict[str, Any], engine: MegatronCheckpointEngine) -> None:
        self.step = step
        self._files, self._engine = files, engine
        everybody = engine.gather(sorted(files))
        self.names = sorted({name for names in everybody for name in names})
        """Of all files of the checkpoint, on whichever rank."""
        self._owners = everybody

    def read(self, name: str) -> Any:
        """A file of the checkpoint, by its path in there. Raises FileNotFoundError where this rank cannot have it."""
        if name not in self._files:
            found = self._engine.read_beside(self.step, name)
            if found is None:
                raise FileNotFoundError(
                    f"{name} of iteration {self.step} is not in the memory of this rank or its node. Load this "
                    "iteration from storage."
                )
            self._files[name] = found
        return self._files[name]

    def fetch(self, name: str) -> None:
        """
        Have a file at hand, also if it is on another node. All ranks call this together, each with the file that it needs.

        Raises ManifestInvalid, on all ranks, when no rank has a file that another needs.
        """
        if name not in self._files and (found := self._engine.read_beside(self.step, name)) is not None:
            self._files[name] = found
        wants = self._engine.gather([] if name in self._files else [name])
        for needer, wanted in enumerate(wants):
            for each in wanted:
                owner = next((rank for rank, names in enumerate(self._owners) if each in names), None)
                if owner is None:
                    raise ManifestInvalid(
                        f"Rank {needer} needs {each} of iteration {self.step}, but no rank has it in memory."
                    )
                self._engine.hand_over(self._files, each, owner=owner, needer=needer)


class MegatronCheckpointEngine:
    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        storage: object = None,
        comm_backend: str = "",
        save_timeout: float = 600,
        replica_count: int = 0,
        *,
        deletion_strategy: object = None,
        num_slots: int = 2,
    ) -> None:
        """Made by all ranks together, after the process group. `comm_backend` is accepted and not needed."""
        ranks = own_ranks()
        self._storage = meta_for(storage)[0]
        self.engine = CheckpointEngine(
            checkpoint_dir,
            local_shard_num=max(1, ranks.local_world_size),
            global_shard_num=max(1, ranks.world_size),
            deletion_strategy=deletion_strategy,
            save_timeout=save_timeout,
            num_slots=num_slots,
            storage=storage,
            replica_count=replica_count,
        )
        self.storage = self.engine.storage
        self._rank = ranks.global_rank
        self._group: Any = None
        """For what is more than a few numbers; None: no other rank."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    @property
    def checkpoint_dir(self) -> str:
        return self.engine.checkpoint_dir

    def save(
        self,
        iteration: int,
        files: Mapping[str, object],
        *,
        is_storage: bool,
        on_busy: str = "skip",
        metric: float | None = None,
    ) -> SaveResult:
        """`files` by their path in the iteration's directory; ranks without any call this too."""
        return self.engine.save(
            iteration,
            files,
            {name: name for name in files},
            is_storage=is_storage,
            on_busy=on_busy,
            target=iteration_directory(iteration),
            trackers={TRACKER: str(iteration)},
            metric=metric,
        )

    def forget_directory(self, iteration: int) -> None:
        """What Megatron itself wrote of an iteration, and that its tracker names it."""
        storage = storage_of(self.checkpoint_dir, self._storage)
        directory = join(self.checkpoint_dir, iteration_directory(iteration))
        tracker = join(self.checkpoint_dir, TRACKER)
        if read_global_manifest(storage, directory) is None:
            storage.remove_tree(directory)
        newest = newest_step(storage, self.checkpoint_dir)
        if newest is None:
            storage.remove_file(tracker)
        else:
            storage.write_atomic(tracker, str(newest).encode())

    def delete_by(self, strategy: object) -> None:
        """From the next commit on. A load usually makes the engine, and only the saves say what may go."""
        self.engine.delete_by(strategy)

    def restore_memory(self) -> Memory | None:
        """The newest iteration in all ranks' memory, if the storage has none that is newer. All ranks call this."""
        self.engine.wait_for_staging()
        restorer = _FromMemory(
            self.checkpoint_dir,
            self.engine.outlet.home,
            self.engine.agreement,
            self.engine._copier,
            storage=self._storage,
            look=self.engine._look,
        )
        restorer.oldest = self._stored_iteration()
        try:
            restored = restorer.load(None, None)
        except ManifestInvalid as error:  # the same on all ranks, and the warnings have said why
            log.warning("Snapshots in memory cannot be used: %s", error)
            return None
        return None if restored is None else Memory(restored.step, restored.parts, self)

    def wait_latest_checkpoint(self, timeout: float = 1800, max_steps: int | None = None) -> bool:
        return self.engine.wait_for_storage(timeout)

    def close(self) -> None:
        self.engine.close()

    def gather(self, names: list[str]) -> list[list[str]]:
        """What each rank says."""
        if self._group is None:
            return [names]
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, names, group=self._group)
        return found

    def hand_over(self, files: dict[str, Any], name: str, *, owner: int, needer: int) -> None:
        if self._rank == owner:
            dist.send_object_list([files[name]], dst=needer, group=self._group)
        elif self._rank == needer:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=owner, group=self._group)
            files[name] = received[0]

    def read_beside(self, step: int, name: str) -> Any:
        """A file that another rank of this node holds in its segment; None when there is none."""
        for path in segment_paths(self.engine.outlet.home):
            try:
                with Segment(path, private=True) as segment:
                    for slot in segment.complete_slots():
                        if slot.step == step and (found := self._read_slot(segment, slot, name)) is not None:
                            return found
            except (OSError, SegmentInvalid, Corrupt) as error:
                log.warning("%s", error)
        return None

    def _read_slot(self, segment: Segment, slot: SlotName, name: str) -> Any:
        pinned = segment.pin(slot.slot, slot.generation)
        if pinned is None:
            return None
        with pinned:
            contents = decode_contents(pinned.sections())
            request = read_request(contents)
            is_ours = request is not None and request.directory == self.checkpoint_dir
            if not is_ours or name not in [entry.name for entry in contents.files]:
                return None
            check(pinned)
            return load_state(pinned, self.engine._copier, names=[name])[name]

    def _stored_iteration(self) -> int:
        """What the storage has to restore, as global rank 0 sees it; -1: nothing. A release counts as 0. All ranks call this."""
        try:
            told = told_by_first(self.engine.agreement, self._find_iteration)
        except ManifestInvalid as error:  # memory may do
            log.warning("The storage cannot be used: %s", error)
            return -1
        return told[0] if told else -1

    def _find_iteration(self) -> list[int]:
        found = restorable(storage_of(self.checkpoint_dir, self._storage), self.checkpoint_dir)
        return [0 if found == RELEASE else int(found)] if found else []


class MegatronDistCheckpointEngine(MegatronCheckpointEngine):
    """For the distributed optimizer. Here all ranks take part in any case."""


class _FromMemory(Restorer):
    """Memory alone: what is in storage Megatron reads by itself."""

    oldest = -1

    def _offers(self) -> dict[int, SlotName]:
        return {step: name for step, name in super()._offers().items() if step >= self.oldest}

    def _stored_steps(self) -> tuple[list[int], str]:
        return [], ""
