"""
Who may touch a slot now: byte locks that the kernel keeps and takes back when their holder dies.

A trainer writes a slot while the agent may want to read it, and either of them may be killed at any instant. A counter in shared
memory would need an owner, a barrier and somebody who repairs it; a lock of the kernel needs none of that. We use locks of an
open file description (not of a process): each pin opens its own description, so several readers in one process do not
release each other's, and closing the file elsewhere does not drop them.

A forked child shares its parent's descriptions, so a data-loading process could keep a lock of a trainer that is dead. Every
`ByteLocks` therefore closes itself in a forked child.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import weakref


class ByteLocks:
    """Locks on single bytes of one file. The bytes are names only: their content does not matter."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _open_locks.add(self)

    @classmethod
    def of_descriptor(cls, fd: int) -> ByteLocks:
        """Another description of an open file, which may have lost its name meanwhile."""
        return cls(f"/proc/self/fd/{fd}")

    def try_share(self, byte: int) -> bool:
        """Hold the byte together with other readers; False when a writer has it."""
        return self._set(fcntl.F_RDLCK, byte)

    def try_own(self, byte: int) -> bool:
        """Hold the byte alone; False when anybody else holds it."""
        return self._set(fcntl.F_WRLCK, byte)

    def release(self, byte: int) -> None:
        self._set(fcntl.F_UNLCK, byte)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """The file that is locked still has this name."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release everything."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _set(self, kind: int, byte: int) -> bool:
        assert self._fd >= 0, "these locks were closed (or belong to the process this one was forked from)"
        # struct flock of 64-bit Linux: type, whence, start, length, pid; the pid must be 0 for these locks.
        request = struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True


_open_locks: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _forget_in_child() -> None:
    for locks in list(_open_locks):
        locks.close()


os.register_at_fork(after_in_child=_forget_in_child)
