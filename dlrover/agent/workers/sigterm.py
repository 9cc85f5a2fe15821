"""
Does a worker react to SIGTERM? Decides how long it is waited for when the job must go on without it.

A Python handler does not run when the signal arrives, but when the main thread comes back to the interpreter's loop. Inside
a collective that waits for a dead peer it never does, be it called by name or hidden in `backward()`, so every second of grace
for such a worker is lost. Three ways were weighed to tell it from one that is busy saving its state:

* hooks around the collectives miss those that C++ starts by itself (DDP's), and cost something in every step;
* the place where the main thread sleeps (/proc/PID/syscall, wchan) is the same for a collective and for a lock;
* whether the handler *began*: exactly the question, costs nothing before the signal, and any blocking call is covered.

So the library in the worker announces two facts (see `dlrover.trainer.worker.sigterm`): a Python handler for SIGTERM is installed,
and it has begun. They stand where no process has to clean up after them and where the agent looks anyway, in the mask of caught
signals in /proc/PID/status: two real-time signals that no process sends are caught or not. A fork cannot blur them, because only the
worker's own pid is read; an `exec` resets them.

A handler that has not begun after a fifth of a second is given up unless the main thread is computing: one long call into C++
is no collective and will come back. A process with an accelerator spins while it waits for it, so there computing means nothing.

Handlers of C code, of programs and of workers that another interpreter runs announce nothing and get the full time.
"""

from __future__ import annotations

import enum
import os
import signal

from dlrover.host.lifeline import HANDLER_BEGAN, HANDLER_INSTALLED
from dlrover.host.processes import main_thread

LOOK_EVERY = 0.2
"""Seconds for a handler to begin, and between two looks at a main thread that computes: nothing announces its return."""
_COMPUTING = 0.1
"""Part of the time that the main thread must have run. One that waits in a collective runs for none of it."""
ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/davinci", "/dev/accel")


class Handler(enum.Enum):
    """What a process does about SIGTERM, as far as it can be seen from outside."""

    NONE = enum.auto()
    """The default action, or ignored: there is nothing to wait for."""
    SILENT = enum.auto()
    """There is one, and no answer will tell whether it runs."""
    ANNOUNCED = enum.auto()
    """It will be seen when it begins."""


class Reaction:
    """What a worker makes of SIGTERM. Built before the signal is sent."""

    def __init__(self, pid: int, *, accelerators: tuple[str, ...] = ACCELERATORS) -> None:
        self._pid = pid
        self._accelerators = accelerators
        caught = caught_signals(pid)
        if signal.SIGTERM not in caught:
            self.handler = Handler.NONE
        elif HANDLER_INSTALLED in caught and HANDLER_BEGAN not in caught:
            self.handler = Handler.ANNOUNCED
        else:
            self.handler = Handler.SILENT  # or it has begun before, for somebody else's signal
        self._seen = main_thread(pid)

    def has_begun(self) -> bool:
        return HANDLER_BEGAN in caught_signals(self._pid)

    def is_on_its_way(self, elapsed: float) -> bool:
        """Whether the main thread has been at work in the `elapsed` seconds since the last look, so that it may come back."""
        before, now = self._seen, main_thread(self._pid)
        self._seen = now
        if before is None or now is None:
            return False
        if now.state == "D":
            return True  # in the middle of a disk's or a network file system's work
        is_running = now.state == "R" or now.cpu_seconds - before.cpu_seconds >= _COMPUTING * elapsed
        return is_running and not _uses_any(self._pid, self._accelerators)


def caught_signals(pid: int) -> frozenset[int]:
    """Numbers of the signals for which the process has a handler; empty if it is gone, or hidden from us since it changed its user."""
    try:
        with open(f"/proc/{pid}/status") as file:
            mask = next((int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")), 0)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return frozenset()
    return frozenset(number for number in range(1, 65) if mask >> (number - 1) & 1)


def _uses_any(pid: int, devices: tuple[str, ...]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{name}").startswith(devices) for name in os.listdir(folder))
    except OSError:
        return False  # gone, or a descriptor closed under our eyes
