"""
How an agent hears of the death of a worker before the kernel frees the worker's memory.

A pidfd becomes readable, and sockets close, at the end of an exit, after the memory is freed: that takes 0.1 to 0.7 s per resident GiB. Robust
futexes are handed over at its beginning. So the main thread of a worker locks a robust mutex in a page that it shares with its agent, and
never unlocks it; a thread of the agent waits for the word of that mutex.

The mutex is the C library's, because the list of robust futexes belongs to the C library: a list of our own would replace it. The agent
needs no mutex. It waits for the word alone, which the worker marks as waited for, because only then the kernel wakes a waiter.

An `exec` hands the mutex over as well, and so does a main thread that ends alone. The notice therefore says "look", and `/proc/PID/stat` says
whether the process is exiting and with which status: `dlrover.host.processes`. Where any of this is missing (another C library, a worker that is no
Python program, a sandbox without futexes) no notice comes, and the pidfd tells as before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable

from dlrover.host.shared_page import futex

_WAITERS = 0x8000_0000
_OWNER_DIED = 0x4000_0000
_CLOSED = 0x3FFF_FFFF
"""Written by the agent when it has no more use for the notice; no thread has this number."""
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
_ROOM = 128
"""Bytes for `pthread_mutex_t` and its attributes; 40 and 4 on x86-64."""


def hold(path: str, offset: int) -> bool:
    """
    In the worker, by its main thread: from now on its death is told to the process that waits at this place of this file.

    False: this C library or kernel does not do it. The mapping stays for the life of the process, because the C library keeps a pointer into it.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # the agent is gone
    try:
        start, _length = futex.map_file(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    address = start + offset
    libc = ctypes.CDLL(None)
    mutex = ctypes.c_void_p(address)
    attributes = ctypes.create_string_buffer(_ROOM)
    steps: tuple[Callable[[], int], ...] = (
        lambda: libc.pthread_mutexattr_init(attributes),
        lambda: libc.pthread_mutexattr_setpshared(attributes, _PTHREAD_PROCESS_SHARED),
        lambda: libc.pthread_mutexattr_setrobust(attributes, _PTHREAD_MUTEX_ROBUST),
        lambda: libc.pthread_mutex_init(mutex, attributes),
        lambda: libc.pthread_mutex_trylock(mutex),
    )
    try:
        if any(step() for step in steps):
            return False
    except AttributeError:
        return False  # no such function in this C library
    word = ctypes.c_uint32.from_address(address)
    if word.value != threading.get_native_id():
        libc.pthread_mutex_unlock(mutex)  # the word of this C library's mutex is elsewhere
        return False
    word.value |= _WAITERS
    futex.wake(address)
    return True


class DeathNotice:
    """The agent's side, for one worker. Waits in a thread of its own, which ends with the worker or by `close`."""

    def __init__(self, descriptor: int, offset: int, tell: Callable[[], None]) -> None:
        """`tell` is called once, in that thread, when the mutex has lost its owner. Raises OSError where there can be no notice."""
        futex.check_kernel()
        self._mapping = futex.map_file(descriptor)
        self._address = self._mapping[0] + offset
        self._word = ctypes.c_uint32.from_address(self._address)
        self._tell = tell
        self._is_closed = False
        self._guard = threading.Lock()
        """For the mapping: the thread unmaps it when it ends, `close` writes to it."""
        self._is_mapped = True
        try:
            threading.Thread(target=self._wait, name="death notice", daemon=True).start()
        except RuntimeError as error:
            futex.unmap(*self._mapping)
            raise OSError(errno.EAGAIN, "no thread can be started") from error

    def close(self) -> None:
        """May be called again, and from `tell`."""
        with self._guard:
            self._is_closed = True
            if self._is_mapped:
                self._word.value = _CLOSED
                futex.wake(self._address)

    def _wait(self) -> None:
        has_died = False
        while not self._is_closed and not has_died:
            value = self._word.value
            has_died = bool(value & _OWNER_DIED)
            if not has_died and not futex.wait_while(self._address, value):
                break
        with self._guard:
            self._is_mapped = False
            futex.unmap(*self._mapping)
        if has_died and not self._is_closed:
            self._tell()
