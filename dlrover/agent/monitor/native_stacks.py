"""
Stacks of workers that need no help from them, where the sampler `py-spy` (extra `stacks`) is installed and the kernel lets us trace.

For native frames it stops a process for as long as it reads, so nothing else may judge the process meanwhile: the caller waits for the end, which has a
limit. The Python stack of a process that is stopped, or waits inside the kernel, can be read as it is. Without the sampler, or without the right, there is
neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from dlrover.protocol.messages.watch import MAX_FRAMES, MAX_TEXT

_LEAST = 0.5
"""Seconds. Reading the symbols of torch alone takes longer than less."""
_MAX_OUTPUT = 1 << 22


class NativeStacks:
    def __init__(self) -> None:
        beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
        self._program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
        self._frames: dict[int, tuple[str, ...]] = {}

    def of(self, pid: int) -> tuple[str, ...]:
        return self._frames.get(pid, ())

    async def sample(self, pids: Sequence[int], *, within: float) -> None:
        """Never longer than `within` seconds. What it found is there afterwards."""
        self._frames = {}
        if self._program is None or within < _LEAST:
            return
        samples = [asyncio.ensure_future(self._sample(self._program, pid, within)) for pid in pids]
        for pid, frames in zip(pids, await asyncio.gather(*samples), strict=True):
            self._frames[pid] = frames

    async def read_deaf(self, pids: Sequence[int], *, within: float) -> dict[int, tuple[str, ...]]:
        """Python frames of the main threads of processes that cannot answer and do not move; without those that could not be read."""
        if self._program is None or not pids:
            return {}
        found = await asyncio.gather(*(self._sample(self._program, pid, within, "--nonblocking") for pid in pids))
        return {pid: frames for pid, frames in zip(pids, found, strict=True) if frames}

    async def _sample(self, program: str, pid: int, within: float, how: str = "--native") -> tuple[str, ...]:
        try:
            process = await asyncio.create_subprocess_exec(
                program, "dump", "--pid", str(pid), how, "--json",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_MAX_OUTPUT,
            )  # fmt: skip
        except OSError:
            return ()
        try:
            async with asyncio.timeout(within):
                output, _ = await process.communicate()
        except TimeoutError:
            return ()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # whom it traced goes on
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAST):
                    await process.wait()  # not before it is gone
        return main_frames(output[:_MAX_OUTPUT])


def main_frames(output: bytes) -> tuple[str, ...]:
    """Of the main thread, innermost first."""
    try:
        threads: Any = json.loads(output)
        main = next(each for each in threads if each.get("thread_name") == "MainThread")
        frames = [f"{frame.get('filename')}:{frame.get('line')} {frame.get('name')}" for frame in main["frames"]]
    except (ValueError, StopIteration, AttributeError, KeyError, TypeError):
        return ()
    return tuple(frame[:MAX_TEXT] for frame in frames[:MAX_FRAMES])
