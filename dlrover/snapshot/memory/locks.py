"""
Who may touch a slot now: byte locks that the kernel keeps and takes back when their holder dies.

A trainer writes a slot while the agent may want to read it, and either of them may be killed at any instant. A counter in shared
memory would need an owner, a barrier and a process that repairs it; a lock of the kernel needs none of that. We use locks of an
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
import threading
import weakref

from dlrover.host.processes import all_processes


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
        """Hold the byte alone; False when another process holds it."""
        return self._set(fcntl.F_WRLCK, byte)

    def is_held_by_dead(self, byte: int) -> bool:
        """
        Whether its owner has ended, and the kernel is still taking it apart. It frees memory before it closes files, so that for up to
        seconds the lock of a dead process is there that can do nothing more.
        """
        inode = os.fstat(self._fd).st_ino
        return any(_owns(process.pid, inode, byte) for process in all_processes() if process.is_exiting)

    def own_when_free(self, byte: int) -> threading.Thread:
        """Returns at once; a thread waits in the kernel for the byte, and ends when it is ours."""
        # Another descriptor of the same description: ours may be closed meanwhile, and its number used again.
        descriptor = os.dup(self._fd)

        def wait() -> None:
            try:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _request(fcntl.F_WRLCK, byte))
            finally:
                os.close(descriptor)

        waiting = threading.Thread(target=wait, name="lock of a dead writer", daemon=True)
        waiting.start()
        return waiting

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
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _request(kind, byte))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True


def _request(kind: int, byte: int) -> bytes:
    """`struct flock` of 64-bit Linux: type, whence, start, length, pid; the pid must be 0 for these locks."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, byte, 1, 0)


def _owns(pid: int, inode: int, byte: int) -> bool:
    """Whether one of the files that this process has open is locked for writing at this byte."""
    folder = f"/proc/{pid}/fdinfo"
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        try:
            with open(f"{folder}/{name}") as file:
                lines = [line.split() for line in file if line.startswith("lock:")]
        except OSError:
            continue  # closed meanwhile
        # lock: 1: OFDLCK ADVISORY WRITE -1 00:1b:2819 0 0
        if any(words[4] == "WRITE" and words[6].endswith(f":{inode}") and words[7] == str(byte) for words in lines):
            return True
    return False


_open_locks: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _forget_in_child() -> None:
    for locks in list(_open_locks):
        locks.close()


os.register_at_fork(after_in_child=_forget_in_child)
