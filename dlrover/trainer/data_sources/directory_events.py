"""
Waiting until something changes in a directory: inotify, called through libc because Python has no module for it and the calls are three.

The kernel tells of changes made on this machine. On a network file system it cannot know what another machine writes, so a wait
also ends by itself now and then; whoever waits looks at the directory in any case.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time

from dlrover.trainer.data_sources.source import SourceError

LOOK_ANYWAY = 10.0
"""Seconds after which a wait ends, for writers on other machines."""
_NEW = 0x00000100 | 0x00000080 | 0x00000008 | 0x00000002
"""IN_CREATE, IN_MOVED_TO, IN_CLOSE_WRITE, IN_MODIFY"""
_GONE = 0x00000200 | 0x00000040 | 0x00000400
"""IN_DELETE, IN_MOVED_FROM, IN_DELETE_SELF"""
_OVERFLOW = 0x00004000
_EVENT = struct.Struct("iIII")


class DirectoryEvents:
    def __init__(self, folder: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise SourceError(
                f"{folder} cannot be watched: {os.strerror(ctypes.get_errno())} (see fs.inotify.max_user_instances)."
            )
        if libc.inotify_add_watch(self._fd, os.fsencode(folder), _NEW | _GONE) < 0:
            os.close(self._fd)
            raise SourceError(f"{folder} cannot be watched: {os.strerror(ctypes.get_errno())}.")
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wait(self, timeout: float) -> set[str] | None:
        """Names of files that changed; none after the time. None: look at everything, somebody may have changed."""
        ends_at = time.monotonic() + timeout
        while True:
            left = min(max(0.0, ends_at - time.monotonic()), LOOK_ANYWAY)
            ready = select.select([self._fd, self._wake_in], [], [], left)[0]
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
                return set()
            if self._fd in ready:
                return self._names(os.read(self._fd, 1 << 16))
            return None if time.monotonic() < ends_at else set()

    def wake(self) -> None:
        """End a wait, from any thread."""
        os.write(self._wake_out, b"w")

    def close(self) -> None:
        for fd in (self._fd, self._wake_in, self._wake_out):
            os.close(fd)

    @staticmethod
    def _names(data: bytes) -> set[str] | None:
        names: set[str] = set()
        at = 0
        while at < len(data):
            _watch, mask, _cookie, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            name = data[at : at + length].rstrip(b"\0")
            at += length
            if mask & _OVERFLOW:
                return None
            if name:
                names.add(os.fsdecode(name))
        return names
