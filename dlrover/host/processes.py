"""
The processes of this machine, each from its line in `/proc/PID/stat`.

Read by hand and not with psutil: the launcher and the first lines of agent and worker use this, and psutil opens several files per
process where one will do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

HAS_PIDFD = hasattr(os, "pidfd_open")
"""Python was built with it; the kernel is asked at the first use."""

_PF_EXITING = 0x4
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class RunningProcess(NamedTuple):
    """As it was when we looked."""

    pid: int
    parent_pid: int
    state: str
    """A letter: R, S, D, T, t; Z and X are dead, and only their status is left."""
    session: int
    started_at_ticks: int
    """Since boot; with the pid it names a process for good."""
    cpu_seconds: float
    major_faults: int
    resident_bytes: int
    command_line: tuple[int, int]
    """Where in its memory it begins and ends; zeros if we are not told."""
    is_exiting: bool = False
    """It runs no more of its program: the kernel takes it apart. Its descriptors and its memory may still be there."""
    wait_status: int = 0
    """Of one that exits, as `waitpid` will tell it; 0 as well if we are not told."""

    @property
    def is_dead(self) -> bool:
        return self.state in ("Z", "X")

    def is_same(self, other: RunningProcess | None) -> bool:
        """And not a later one with the same pid."""
        return other is not None and (other.pid, other.started_at_ticks) == (self.pid, self.started_at_ticks)


def look_up(pid: int) -> RunningProcess | None:
    """None: no such process, or another user's where /proc shows only one's own (`hidepid`)."""
    return _read(pid, f"/proc/{pid}/stat")


def main_thread(pid: int) -> RunningProcess | None:
    """The same, but state and processor time are those of its first thread alone."""
    return _read(pid, f"/proc/{pid}/task/{pid}/stat")


def all_processes() -> Iterator[RunningProcess]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and (process := look_up(int(name))) is not None:
            yield process


def descendants(of: int, *, keep: Collection[int] = ()) -> list[RunningProcess]:
    """Children, their children and so on, parents first; without the `keep` ones and all that is below them."""
    return below(of, all_processes(), keep)


def below(of: int, processes: Iterable[RunningProcess], keep: Collection[int] = ()) -> list[RunningProcess]:
    """The descendants among these."""
    by_parent: dict[int, list[RunningProcess]] = {}
    for process in processes:
        by_parent.setdefault(process.parent_pid, []).append(process)
    found: list[RunningProcess] = []
    layer = [of]
    while layer:
        children = [child for pid in layer for child in by_parent.get(pid, ()) if child.pid not in keep]
        found += children
        layer = [child.pid for child in children]
    return found


def open_pidfd(pid: int) -> int | None:
    """None where the kernel has no pidfds. Raises ProcessLookupError."""
    if not HAS_PIDFD:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return None  # an old kernel, or a sandbox that forbids the call
        raise


def _read(pid: int, path: str) -> RunningProcess | None:
    try:
        with open(path, "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = line[line.rindex(b")") + 2 :].split()  # the name before may hold blanks and brackets
    return RunningProcess(
        pid=pid,
        parent_pid=int(fields[1]),
        state=fields[0].decode(),
        session=int(fields[3]),
        started_at_ticks=int(fields[19]),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
        major_faults=int(fields[9]),
        resident_bytes=max(0, int(fields[21])) * _PAGE,
        command_line=(int(fields[45]), int(fields[46])) if len(fields) > 46 else (0, 0),
        is_exiting=bool(int(fields[6]) & _PF_EXITING),
        wait_status=int(fields[49]) if len(fields) > 49 else 0,
    )
