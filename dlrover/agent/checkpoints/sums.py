"""Checksums of the slots that workers saved, made one by one in a thread: copies of a slot are only made when it has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dlrover.agent.checkpoints.commits import nice_pool
from dlrover.snapshot.memory.segment import SlotName
from dlrover.snapshot.storage.summing import Summer


class SlotSums:
    """Of one node. Called by the event loop."""

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self._on_error = on_error
        self._waiting: dict[str, SlotName] = {}
        """By segment: only the newest slot is worth it."""
        self._task: asyncio.Task[None] | None = None
        self._summer = Summer()
        self._thread = nice_pool("dlrover-sums")
        self.on_summed: Callable[[SlotName], None] | None = None
        """Told of each slot that has its checksums."""

    def add(self, name: SlotName) -> None:
        """`start` begins with what was added."""
        self._waiting[name.path] = name

    def start(self) -> None:
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="sums")

    async def wait(self) -> None:
        """Until all that was added has its sums."""
        if self._task is not None:
            await self._task

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            _path, name = self._waiting.popitem()
            try:
                is_summed = await loop.run_in_executor(self._thread, self._summer.sum, name)
                if is_summed and self.on_summed is not None:
                    self.on_summed(name)
            except OSError as error:
                self._on_error(f"the checksums of a snapshot could not be computed: {error}")
