"""
Waiting until something changes in a directory.

The kernel reports changes made on this machine. On a network file system it cannot know what another machine writes, so a wait
also ends by itself now and then; the caller looks at the directory in any case.
"""

from __future__ import annotations

import os
import select
import time

from dlrover.host import inotify
from dlrover.trainer.data_sources.source import SourceError

LOOK_ANYWAY = 10.0
"""Seconds after which a wait ends, for writers on other machines."""
_NEW = inotify.CREATED | inotify.MOVED_IN | inotify.CLOSED_AFTER_WRITE | inotify.MODIFIED
_GONE = inotify.DELETED | inotify.MOVED_AWAY | inotify.SELF_DELETED


class DirectoryEvents:
    def __init__(self, folder: str) -> None:
        try:
            self._fd = inotify.watch(folder, _NEW | _GONE)
        except OSError as error:
            raise SourceError(f"{folder} cannot be watched: {error.strerror}.") from error
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wait(self, timeout: float) -> set[str] | None:
        """Names of files that changed; none after the time. None: look at everything, any file may have changed."""
        ends_at = time.monotonic() + timeout
        while True:
            left = min(max(0.0, ends_at - time.monotonic()), LOOK_ANYWAY)
            ready = select.select([self._fd, self._wake_in], [], [], left)[0]
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
                return set()
            if self._fd in ready:
                return inotify.read_names(self._fd)
            return None if time.monotonic() < ends_at else set()

    def wake(self) -> None:
        """End a wait, from any thread."""
        os.write(self._wake_out, b"w")

    def close(self) -> None:
        for fd in (self._fd, self._wake_in, self._wake_out):
            os.close(fd)
