"""
Changes in a directory, as the kernel reports them (inotify).

The three calls go through libc, because the standard library has no interface to them and they are not worth a dependency.
The kernel reports changes made on this machine only: callers on a network file system look at the directory now and then too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

MODIFIED, ATTRIBUTES, CLOSED_AFTER_WRITE = 0x2, 0x4, 0x8
MOVED_AWAY, MOVED_IN, CREATED, DELETED, SELF_DELETED = 0x40, 0x80, 0x100, 0x200, 0x400
_OVERFLOW = 0x4000
_EVENT = struct.Struct("iIII")


def watch(directory: str, mask: int) -> int:
    """A non-blocking descriptor that becomes readable when one of these changes happens in the directory. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "inotify_init1"):
        raise OSError(errno.ENOSYS, "this C library has no inotify")
    descriptor: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise _last_error("see fs.inotify.max_user_instances")
    if library.inotify_add_watch(descriptor, os.fsencode(directory), mask) < 0:
        error = _last_error()
        os.close(descriptor)
        raise error
    return descriptor


def read_names(descriptor: int) -> set[str] | None:
    """Names of the files that changed. None: the kernel dropped events, so any file may have changed."""
    data = os.read(descriptor, 1 << 16)
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


def _last_error(hint: str = "") -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number) + (f" ({hint})" if hint else ""))
