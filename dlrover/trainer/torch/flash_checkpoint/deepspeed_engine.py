"""
The engine for frameworks that write a checkpoint as many files: DeepSpeed, and the Trainer of transformers.

Every rank is a shard of its own and keeps the files that it would have written, by their path in the checkpoint. Files that all ranks
read but one rank writes are kept once per node as well, so that a node can go on from its own memory: such a copy has no place in
storage.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.storage.commit import Committed
from dlrover.snapshot.storage.manifest import ManifestInvalid
from dlrover.snapshot.storage.newest import complete_up_to, newest_step
from dlrover.snapshot.storage.storage import Storage
from dlrover.snapshot.storage.user_storage import storage_of
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.restoring.node_snapshots import NodeSnapshots, Snapshot, read_files
from dlrover.trainer.torch.flash_checkpoint.restoring.stored_files import newest_whole, refuse_damaged, told_by_first
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import own_ranks

log = logging.getLogger("dlrover.trainer.flash_checkpoint")


class FileCheckpointEngine(CheckpointEngine):
    """Saves and finds files, whatever framework they belong to."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        deletion_strategy: object = None,
        save_timeout: float = 600.0,
        **options: Any,
    ) -> None:
        """`options` are the engine's own: `storage`, `num_slots`, `replica_count`."""
        ranks = own_ranks()
        super().__init__(
            checkpoint_dir,
            local_shard_num=max(1, ranks.local_world_size),
            global_shard_num=max(1, ranks.world_size),
            deletion_strategy=deletion_strategy,
            save_timeout=save_timeout,
            **options,
        )

    def save_files(
        self,
        step: int,
        files: Mapping[str, object],
        *,
        target: str,
        is_storage: bool,
        memory_only: Iterable[str] = (),
        trackers: Mapping[str, str] | None = None,
        on_busy: str = "skip",
        metric: float | None = None,
    ) -> SaveResult:
        """The files of the checkpoint `target`, by their path in it. What is `memory_only` another rank writes to storage."""
        kept = set(memory_only)
        paths = {name: name for name in files if name not in kept}
        return self.save(
            step,
            files,
            paths,
            is_storage=is_storage,
            on_busy=on_busy,
            target=target,
            trackers=trackers,
            metric=metric,
        )

    def snapshots(self) -> NodeSnapshots:
        """What is in this node's memory for this job's checkpoints."""
        self._agree_late()
        return NodeSnapshots(self.outlet.home, self.checkpoint_dir, self._agreement.share.num_shards)

    def common_saves(self, own: Sequence[Snapshot]) -> list[Snapshot]:
        """
        Those of them of which every rank has its own part, in the order given. All ranks call this.

        The save is compared and not only its step: a step that was trained twice is two states.
        """
        keys = [_key(snapshot.request.attempt) for snapshot in own]
        common = self._agreement.common(keys)
        return [snapshot for snapshot, key in zip(own, keys, strict=True) if key in common]

    def open_storage(self) -> Storage:
        return storage_of(self.checkpoint_dir, self._storage)

    def stored_step(self) -> int | None:
        """
        The newest committed step, as global rank 0 sees it. All ranks call this.

        None: nothing was ever committed. Raises ManifestInvalid, on all ranks, when the storage cannot be read or holds damaged checkpoints only.
        """
        self._agree_late()
        told = told_by_first(self._agreement, self._find_step)
        return told[0] if told else None

    def step_beside_memory(self) -> int | None:
        """The same for a caller that looks at memory first: a storage that cannot be used costs a warning, because memory may do."""
        try:
            return self.stored_step()
        except ManifestInvalid as error:
            log.warning("The storage cannot be used: %s", error)
            return None

    def _find_step(self) -> list[int]:
        storage = self.open_storage()
        newest = newest_step(storage, self.checkpoint_dir)
        if newest is None:
            return []
        complete = complete_up_to(storage, self.checkpoint_dir, newest)
        return [complete[0].manifest.step if complete else newest]  # without any of ours it is another software's

    def newest_whole(self, at_most: int) -> Committed | None:
        """In storage, up to that step, and every byte as it was written; see there. All ranks call this."""
        self._agree_late()
        return newest_whole(self._agreement, self.open_storage(), self.checkpoint_dir, at_most)

    def refuse_damaged(self, path: str) -> None:
        """A checkpoint that the user named; see there. All ranks call this."""
        self._agree_late()
        refuse_damaged(self._agreement, storage_of(path, self._storage), path)

    def is_so_for_all(self, is_so: bool) -> bool:
        """What global rank 0 finds. All ranks call this."""
        self._agree_late()
        return self._agreement.tell_all([int(is_so)]) == [1]

    def have_all(self, is_fine: bool) -> bool:
        """Whether it is fine on every rank; until all have said so no rank goes on."""
        return self._agreement.have_all(is_fine)

    def read(self, snapshots: NodeSnapshots, own: Snapshot, files: Iterable[str]) -> dict[str, Any] | None:
        """These files of one save, from our snapshot or a neighbour's. None, with a warning, when one is missing or damaged."""
        by_holder: dict[int, tuple[Snapshot, list[str]]] = {}
        for file in files:
            holder = snapshots.holder_of(file, own)
            if holder is None:
                log.warning(
                    "Step %d cannot be restored from memory, because no snapshot on this node has the file %s.",
                    own.name.step,
                    file,
                )
                return None
            by_holder.setdefault(holder.request.shard, (holder, []))[1].append(file)
        found: dict[str, Any] = {}
        try:
            for holder, names in by_holder.values():
                found.update(read_files(holder, names, self._copier))
        except (OSError, DLRoverError) as error:
            log.warning("%s", error)
            return None
        return found

    def wait_latest_checkpoint(self, timeout: float = 1800, max_steps: int | None = None) -> bool:
        """
        Until the newest checkpoint that this rank asked for is committed.

        `max_steps` is accepted: who waits for the last step of a training waits for the newest save anyway.
        """
        return self.wait_for_storage(timeout)


def _key(attempt: str) -> int:
    """A save's id as a number that ranks can compare."""
    return int.from_bytes(hashlib.blake2b(attempt.encode(), digest_size=7).digest(), "little")


class DeepSpeedCheckpointEngine(FileCheckpointEngine):
    """The same under the name and with the arguments that DeepSpeed scripts know."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        storage: Any = None,
        global_shard_num: int = 1,
        zero_stage: int = 0,
        comm_backend: str = "",
        save_timeout: float = 600,
        deletion_strategy: object = None,
        **options: Any,
    ) -> None:
        """The numbers of shards follow from the ranks, so `global_shard_num` and `zero_stage` are accepted and not needed."""
        super().__init__(
            checkpoint_dir,
            deletion_strategy=deletion_strategy,
            save_timeout=save_timeout,
            storage=storage,
            **options,
        )
        self.zero_stage = zero_stage
