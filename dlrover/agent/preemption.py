"""
The notice that this machine will be taken away: a file that appears.

Clouds and schedulers announce a preemption in many ways; a file is what every small script beside us can make. The
kernel tells when something in its directory changes (inotify), so no thread looks again and again. There is a slow look all
the same: a file made on another machine of a network file system is not announced, and a directory that does not exist
yet cannot be watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from dlrover.host import inotify

log = logging.getLogger("dlrover.agent")

SLOW_LOOK = 5.0
"""Seconds between two looks that no event asked for. A preemption notice comes at least half a minute ahead."""


async def wait_for_notice(path: str, *, slow_look: float = SLOW_LOOK) -> None:
    """Until the file exists. Never ends otherwise; cancel it."""
    changed = asyncio.Event()
    descriptor: int | None = None
    try:
        is_warned = False
        while not os.path.exists(path):
            if descriptor is None:
                try:
                    descriptor = _watch(os.path.dirname(os.path.abspath(path)), changed)
                    continue  # it may have appeared just before the watch began
                except OSError as error:
                    if not is_warned:
                        is_warned = True
                        log.info("The agent looks for %s every %g s instead: %s", path, slow_look, error.strerror)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(slow_look):
                    await changed.wait()
            changed.clear()
    finally:
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)


def _watch(directory: str, changed: asyncio.Event) -> int:
    """Set the event whenever something appears in the directory. Raises OSError where that cannot be had."""
    mask = inotify.MODIFIED | inotify.MOVED_IN | inotify.CREATED | inotify.ATTRIBUTES
    descriptor = inotify.watch(directory, mask)

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(descriptor, 65536)  # what happened does not matter: the file is looked at
        changed.set()

    asyncio.get_running_loop().add_reader(descriptor, read)
    return descriptor
