"""
Processes of a cluster that were stopped (SIGSTOP): alive for the kernel, and of no use.

TensorFlow says nothing about a parameter server that is stopped: steps just do not end. The kernel knows it, so the agent of the node looks with each
heartbeat. A process that is found stopped twice in a row is killed, and that is a loss like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrover.host.processes import look_up

_STOPPED = ("T", "t")


class StoppedProcesses:
    def __init__(self) -> None:
        self._seen: tuple[int, ...] = ()

    def look(self, pids: Sequence[int]) -> tuple[int, ...]:
        """Those that are stopped now and were so the last time."""
        found = [process for pid in pids if (process := look_up(pid)) is not None]
        stopped = tuple(process.pid for process in found if process.state in _STOPPED)
        again = tuple(pid for pid in stopped if pid in self._seen)
        self._seen = stopped
        return again
