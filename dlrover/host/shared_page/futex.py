"""
Waiting for a word of shared memory, in the kernel and across processes.

The mapping is made by hand: Python's own is released when no object refers to it any more, also at the end of the interpreter, and another thread may still
wait there.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98, "s390x": 238}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def check_kernel() -> None:
    """Raises OSError where waiting is not possible."""
    if _SYS_FUTEX is None:
        raise OSError(errno.ENOSYS, f"the number of the futex call on {platform.machine()} is not known here")


def map_file(descriptor: int) -> tuple[int, int]:
    """Address and length of the whole file in memory. Raises OSError."""
    length = os.fstat(descriptor).st_size
    address = _libc().mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(address), length


def unmap(address: int, length: int) -> None:
    _libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(length))


def wait_while(address: int, value: int, timeout: float | None = None) -> bool:
    """Until the word at the address is another, another process wakes us, or the time is over: look again. False: the kernel refuses."""
    limit = None
    if timeout is not None:
        seconds, rest = divmod(max(0.0, timeout), 1.0)
        limit = ctypes.byref(_Timespec(int(seconds), int(rest * 1e9)))
    _futex(address, _FUTEX_WAIT, value, limit)
    return ctypes.get_errno() in (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


def wake(address: int) -> None:
    """All that wait there."""
    if _SYS_FUTEX is not None:
        _futex(address, _FUTEX_WAKE, _EVERYBODY, None)


def _futex(address: int, operation: int, value: int, limit: object) -> None:
    ctypes.set_errno(0)
    _libc().syscall(
        ctypes.c_long(_SYS_FUTEX or 0),
        ctypes.c_void_p(address),
        ctypes.c_int(operation),
        ctypes.c_uint32(value),
        limit,
        None,
        ctypes.c_int(0),
    )


@functools.cache
def _libc() -> ctypes.CDLL:
    """One for all calls: each makes a class of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    return libc
