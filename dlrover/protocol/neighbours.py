"""
Processes below us that are not the job's, because they were there before it.

After `sh -c 'helper & exec dlrover-run ...'` the helper is a child of the launcher, and in a container the launcher may be the
parent of everybody. Whoever ends "everything below us" has to leave them alone, and what they start.

What a neighbour starts may be left to us when the neighbour ends. It is known by its session then: the job runs in sessions that we made
for it, and no process can enter one that exists already, so whoever is in our own is not of the job.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import NamedTuple


class _Process(NamedTuple):
    pid: int
    parent_pid: int
    session: int
    started_at_ticks: int
    """With the pid it names a process for good."""


class Neighbours:
    """Made before the job has any process here."""

    def __init__(self, *, besides: Collection[int] = ()) -> None:
        """`besides`: who is of the job all the same, because it has just been started."""
        by_parent: dict[int, list[_Process]] = {}
        for process in _processes():
            by_parent.setdefault(process.parent_pid, []).append(process)
        known: set[_Process] = set()
        layer = [os.getpid()]
        while layer:
            children = [child for pid in layer for child in by_parent.get(pid, ()) if child.pid not in besides]
            known.update(children)
            layer = [child.pid for child in children]
        self._known = {(process.pid, process.started_at_ticks) for process in known}

    def pids(self) -> set[int]:
        """Those that still live. What is below them is theirs as well."""
        own_session = os.getsid(0)
        return {
            process.pid
            for process in _processes()
            if (process.pid, process.started_at_ticks) in self._known
            or (process.session == own_session and process.pid != os.getpid())
        }


def _processes() -> Iterator[_Process]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()  # the name before may hold blanks and brackets
        except OSError:
            continue  # it has ended
        yield _Process(int(name), int(fields[1]), int(fields[3]), int(fields[19]))
