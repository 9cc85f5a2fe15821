"""
Whose files and sockets these are: the one check for names that other users of this machine can take first.

In a shared directory (`/tmp`, `/dev/shm`) any user can make a file, a link or a directory under a name that we are going to use. So what
is found there counts only if its owner, its type and its mode say that it is ours. Root counts as us: root can do
everything anyway. Outside of shared directories the permissions of the system are enough, and nothing is checked.

What fails a check is neither read nor written. A socket is judged by the process behind it, as the kernel knows it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct

_CREDENTIALS = struct.Struct("3i")
_FOR_OTHERS = stat.S_IWOTH
_MAX_TRIES = 100


class NotOurs(PermissionError):
    """It belongs to another user of this machine, or could be changed by one."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(errno.EPERM, f"{path} {reason}, so its content is not trusted")


def check_directory(path: str) -> bool:
    """
    Raises NotOurs when another user could have put this directory, or something in it, under its name; OSError when it is not
    there. Otherwise: whether it lies in a shared directory, so that each file in it has to be looked at, too.
    """
    is_shared = False
    current = os.sep
    for part in filter(None, os.path.abspath(path).split(os.sep)):
        current = os.path.join(current, part)
        found = os.lstat(current)
        if is_shared:
            _check_owner(current, found)
        if stat.S_ISLNK(found.st_mode):
            current = os.path.realpath(current)
            is_shared = check_directory(current) or is_shared
            found = os.stat(current)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), current)
        if found.st_mode & _FOR_OTHERS:
            if is_shared and not found.st_mode & stat.S_ISVTX:
                raise NotOurs(current, "is writable by every user")
            is_shared = True
    return is_shared


def make_directory(path: str) -> bool:
    """The same for a directory that is made if it is not there."""
    os.makedirs(path, exist_ok=True)
    return check_directory(path)


def make_private(path: str | os.PathLike[str]) -> None:
    """A directory that only this user may look into. Raises NotOurs, and OSError when it cannot be made."""
    name = os.fspath(path)
    for num_left in range(_MAX_TRIES, -1, -1):
        try:
            os.makedirs(name, mode=0o700, exist_ok=True)
            found = os.lstat(name)
            if found.st_uid != os.geteuid():
                raise NotOurs(name, f"belongs to another user (uid {found.st_uid})")
            if not stat.S_ISDIR(found.st_mode):
                raise NotOurs(name, "is a link and not a directory")
            check_directory(os.path.dirname(name))
            if found.st_mode & 0o077:
                os.chmod(name, 0o700)
            return
        except FileNotFoundError:  # it was empty, and a process that ended has removed it between two of our steps
            if not num_left:
                raise
        except FileExistsError:
            if not num_left or (os.path.lexists(name) and not os.path.isdir(name)):
                raise  # something else has the name


def open_checked(path: str, flags: int, mode: int = 0o600) -> int:
    """
    `os.open`, but in a shared directory only of a file that is ours alone. It is emptied (O_TRUNC) after the check.

    Raises NotOurs, and OSError as `os.open` does.
    """
    flags |= os.O_CLOEXEC
    if not check_directory(os.path.dirname(os.path.abspath(path))):
        return os.open(path, flags, mode)
    try:
        # Without waiting: a pipe that somebody has put there would hold us up.
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(path, "is a symbolic link") from error
        raise
    try:
        found = os.fstat(descriptor)
        _check_owner(path, found)
        if not stat.S_ISREG(found.st_mode):
            raise NotOurs(path, "is not a regular file")
        if found.st_mode & _FOR_OTHERS:
            raise NotOurs(path, "is writable by every user")
        if found.st_nlink > 1:
            raise NotOurs(path, "has another hard link")
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the process at the other end of a unix socket, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def check_server(sock: socket.socket) -> None:
    """For a client that has connected and sent nothing yet. Raises NotOurs when another user listens there."""
    _pid, uid, _gid = peer_credentials(sock)
    if uid != os.geteuid():
        name = sock.getpeername()
        shown = os.fsdecode(name).replace("\0", "@") or "the socket"
        raise NotOurs(shown, f"is served by another user (uid {uid})")


def _check_owner(path: str, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise NotOurs(path, f"belongs to another user (uid {found.st_uid})")
