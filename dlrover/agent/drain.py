"""
The last saves of an agent that ends: they have their time, unless the platform wants the node gone.

Who could end the agent meanwhile must know that it still writes: its launcher, and the platform, which takes a node away as soon as its
agent has left the job. They read it from a mark in the runtime directory. The saver renews it while it writes; it
stands there from before the farewell on, because a platform may be quicker than the way from the farewell to the first write.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from dlrover.agent.checkpoints.saver import SAVING_FILE, Saver, write_mark

ANNOUNCED = 30.0
"""Seconds for which the mark stands before the saver renews it: far longer than a farewell and closing the channel take."""


class Drain:
    """What is left to do when the agent has its result."""

    def __init__(self, saver: Saver, runtime_dir: str) -> None:
        self._saver = saver
        self._mark = Path(runtime_dir) / SAVING_FILE

    def announce(self) -> None:
        """This node is about to leave the job by itself, and writes what is queued before it ends."""
        write_mark(self._mark, time.monotonic() + ANNOUNCED)

    async def finish(self, told_to_end: asyncio.Event, *, is_hurried: bool) -> bool:
        """
        Write what is queued. When we are told to end, before or meanwhile, the patience is the short one. False: something is lost.
        """
        try:
            if not is_hurried and not told_to_end.is_set():
                is_whole = await self._drain_until(told_to_end)
                if is_whole is not None:
                    return is_whole
            return await self._saver.drain(is_hurried=True)
        finally:
            with contextlib.suppress(OSError):
                self._mark.unlink()

    async def _drain_until(self, told_to_end: asyncio.Event) -> bool | None:
        """How it came to its end. None: it did not. The saves themselves go on in any case."""
        draining = asyncio.ensure_future(self._saver.drain(is_hurried=False))
        telling = asyncio.ensure_future(told_to_end.wait())
        try:
            await asyncio.wait([draining, telling], return_when=asyncio.FIRST_COMPLETED)
            return await draining if draining.done() else None  # a bug in it shall be heard of
        finally:
            telling.cancel()
            draining.cancel()
            await asyncio.wait([draining, telling])
