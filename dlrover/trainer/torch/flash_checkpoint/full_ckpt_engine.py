"""
`FullCheckpointEngine`: the engine for whole states, with the methods that extensions of the original call.

`DdpCheckpointer` is the same with fewer words; use that in new scripts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dlrover.snapshot.storage.storage import full_path
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveResult
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine


class FullCheckpointEngine:
    """The parts of a state are named by `paths`: which file each becomes, given as the caller knows it."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        storage: object = None,
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        comm_backend: str = "",
        save_timeout: float = 600,
        replica_count: int = 0,
        *,
        deletion_strategy: object = None,
    ) -> None:
        self.engine = CheckpointEngine(
            checkpoint_dir,
            local_shard_num=local_shard_num,
            global_shard_num=global_shard_num,
            deletion_strategy=deletion_strategy,
            save_timeout=save_timeout,
            storage=storage,
            replica_count=replica_count,
        )
        self.storage = self.engine.storage
        self._shard_nums = (local_shard_num, max(local_shard_num, global_shard_num))

    @property
    def checkpoint_dir(self) -> str:
        return self.engine.checkpoint_dir

    def save_to_memory(
        self,
        step: int,
        state_dict: Mapping[str, object],
        paths: Mapping[str, str | os.PathLike[str]],
        blocking: bool = False,
    ) -> SaveResult:
        return self._save(step, state_dict, paths, is_storage=False, blocking=blocking)

    def save_to_storage(
        self,
        step: int,
        state_dict: Mapping[str, object],
        paths: Mapping[str, str | os.PathLike[str]],
        blocking: bool = False,
    ) -> SaveResult:
        return self._save(step, state_dict, paths, is_storage=True, blocking=blocking)

    def load(self, resume_path: str | os.PathLike[str] = "") -> dict[str, Any]:
        """The state of the only part; {} when there is none anywhere."""
        if resume_path:
            state = self.engine.load_file(resume_path)
            return {} if state is None else state
        parts = self.engine.load_parts() or {}
        if len(parts) > 1:
            raise ValueError(
                f"This engine restores checkpoints with one part, but this checkpoint has the parts {sorted(parts)}."
            )
        return next(iter(parts.values()), {})

    def wait_latest_checkpoint(self, timeout: float = 1800, max_steps: int | None = None) -> bool:
        return self.engine.wait_for_storage(timeout)

    def get_local_shard_num(self) -> int:
        return self._shard_nums[0]

    def get_global_shard_num(self) -> int:
        return self._shard_nums[1]

    def close(self) -> None:
        self.engine.close()

    def _save(
        self,
        step: int,
        parts: Mapping[str, object],
        paths: Mapping[str, str | os.PathLike[str]],
        *,
        is_storage: bool,
        blocking: bool,
    ) -> SaveResult:
        target, files = _inside(self.engine.checkpoint_dir, step, paths)
        return self.engine.save(
            step, parts, files, is_storage=is_storage, on_busy="block" if blocking else "skip", target=target
        )


def _inside(directory: str, step: int, paths: Mapping[str, str | os.PathLike[str]]) -> tuple[str, dict[str, str]]:
    """The checkpoint's name and its files' in it. What lies elsewhere goes below the step by its own file name."""
    files: dict[str, str] = {}
    targets = set()
    for name, path in paths.items():
        full = full_path(path)
        inside = full.removeprefix(directory.rstrip("/") + "/").split("/")
        is_inside = full.startswith(directory.rstrip("/") + "/") and len(inside) > 1
        targets.add(inside[0] if is_inside else str(step))
        files[name] = "/".join(inside[1:]) if is_inside else os.path.basename(full)
    if len(targets) > 1:
        raise ValueError(f"All files of a save must have the same directory (got {sorted(targets)}).")
    return next(iter(targets), str(step)), files
