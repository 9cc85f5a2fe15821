"""
The notice that this machine will be taken away: a file that appears.

Clouds and schedulers announce a preemption in many ways; a file is what every small script beside us can make. The
kernel tells when something in its directory changes (inotify), so nobody looks again and again. There is a slow look all
the same: a file made on another machine of a network file system is told to nobody, and a directory that does not exist
yet cannot be watched.

inotify is called through the C library, because the standard library has no interface to it and its three calls are not
worth a dependency.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os

log = logging.getLogger("dlrover.agent")

SLOW_LOOK = 5.0
"""Seconds between two looks that nobody asked for. A preemption notice comes at least half a minute ahead."""

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE, _IN_ATTRIB = 0x2, 0x80, 0x100, 0x4
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK


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
                        log.info("%s is looked for every %g s: %s", path, slow_look, error.strerror)
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
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "inotify_init1"):
        raise OSError(errno.ENOSYS, "this C library has no inotify")
    descriptor: int = library.inotify_init1(_FLAGS)
    if descriptor < 0:
        raise _last_error()
    mask = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE | _IN_ATTRIB
    if library.inotify_add_watch(descriptor, os.fsencode(directory), mask) < 0:
        error = _last_error()
        os.close(descriptor)
        raise error

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(descriptor, 65536)  # what happened does not matter: the file is looked at
        changed.set()

    asyncio.get_running_loop().add_reader(descriptor, read)
    return descriptor


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
