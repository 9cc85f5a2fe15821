"""A node actor whose node is a `dlrover-run`: it knows where that keeps its files."""

from __future__ import annotations

import asyncio
import contextlib
import os

from dlrover.cli.launch.runtime_dir import (
    directory_of,
    job_directory,
    remove_left,
    saving_until,
    snapshot_root,
    user_root,
)
from dlrover.cli.options.environment import read_environment
from dlrover.platforms.ray.messages import NodeOrder
from dlrover.platforms.ray.node_actor import NodeActor


class LauncherActor(NodeActor):
    def saving_until(self, pid: int) -> float:
        path = self._directory_of(pid)
        return 0.0 if path is None else saving_until(path)

    async def tidy_up(self, order: NodeOrder, pid: int) -> None:
        """Its launcher was killed if anything is left: snapshots are large, and in memory that the next node needs."""
        path = self._directory_of(pid)
        if path is not None:
            with contextlib.suppress(OSError, RuntimeError):  # the next start tries it again
                snapshots = snapshot_root(read_environment(os.environ))
                await asyncio.to_thread(remove_left, path, order.job_name, snapshots)

    def _directory_of(self, pid: int) -> str | None:
        if self.order is None:
            return None
        root = user_root(read_environment(os.environ))
        return directory_of(job_directory(root, self.order.job_name), pid)
