"""
The raylet above an actor: when it dies, Ray calls the actor dead, but the actor and everything below it live on.

So each actor holds a pidfd of its raylet and ends what is below it by itself, within milliseconds of the raylet's end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from dlrover.host.processes import look_up, open_pidfd

_LOOK_AGAIN = 1.0
"""Seconds, on kernels without pidfds only: nothing else tells of the end of a process that is no child."""


def on_raylet_end(then: Callable[[], None]) -> None:
    """In the actor's event loop, once."""
    pid = raylet_pid()
    loop = asyncio.get_running_loop()
    try:
        descriptor = open_pidfd(pid)
    except ProcessLookupError:
        loop.call_soon(then)
        return
    if descriptor is None:
        _look(pid, then)
        return

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        then()

    loop.add_reader(descriptor, ended)


def raylet_pid() -> int:
    """The nearest ancestor of that name; a runtime environment may put a shell in between."""
    pid = os.getppid()
    while pid > 1:
        if _name(pid) == "raylet":
            return pid
        process = look_up(pid)
        if process is None:
            break
        pid = process.parent_pid
    return os.getppid()


def _look(pid: int, then: Callable[[], None]) -> None:
    process = look_up(pid)
    if process is None or process.is_dead or os.getppid() == 1:
        then()
    else:
        asyncio.get_running_loop().call_later(_LOOK_AGAIN, _look, pid, then)


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
