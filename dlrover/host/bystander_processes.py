"""
Processes below us that are not the job's, because they were there before it.

After `sh -c 'helper & exec dlrover-run ...'` the helper is a child of the launcher, and in a container the launcher may be the
parent of every process. A program that ends "everything below us" has to leave them alone, and what they start.

What a neighbour starts may be left to us when the neighbour ends. It is known by its session then: the job runs in sessions that we made
for it, and no process can enter one that exists already, so a process that is in our own is not of the job.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from dlrover.host.processes import all_processes, below


class BystanderProcesses:
    """Made before the job has any process here."""

    def __init__(self, *, besides: Collection[int] = ()) -> None:
        """`besides`: who is of the job all the same, because it has just been started."""
        known = below(os.getpid(), all_processes(), besides)
        self._known = {(process.pid, process.started_at_ticks) for process in known}

    def pids(self) -> set[int]:
        """Those that still live. What is below them is theirs as well."""
        own_session = os.getsid(0)
        return {
            process.pid
            for process in all_processes()
            if (process.pid, process.started_at_ticks) in self._known
            or (process.session == own_session and process.pid != os.getpid())
        }
