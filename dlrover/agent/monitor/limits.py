"""What this container may use, and what it uses: the limits of its cgroups, else the machine's own figures."""

from __future__ import annotations

import os
from typing import NamedTuple

from dlrover.host import cgroup


class MemoryShare(NamedTuple):
    used_bytes: int | None
    """Without file cache that could be dropped. None: no cgroup limits us, so the kernel does not count for us."""
    limit_bytes: int


class ResourceLimits:
    """Read anew each time: a limit may be changed under way."""

    def __init__(self, cgroup_file: str = cgroup.CGROUP_FILE, root: str = cgroup.ROOT) -> None:
        self._memory = cgroup.groups("memory", cgroup_file=cgroup_file, root=root)
        self._cpu = cgroup.groups("cpu", cgroup_file=cgroup_file, root=root)

    def memory(self) -> MemoryShare:
        total = _mem_total()
        limits = [use for use in cgroup.memory_limits(self._memory) if use.limit_bytes < total]
        narrowest = min(limits, key=lambda use: use.limit_bytes, default=None)
        return MemoryShare(narrowest.used_bytes, narrowest.limit_bytes) if narrowest else MemoryShare(None, total)

    def cores(self) -> float:
        cores = float(len(os.sched_getaffinity(0)))
        for group in self._cpu:
            quota, period = _quota(group)
            if quota is not None and period and quota > 0:
                cores = min(cores, quota / period)
        return cores


def _quota(group: cgroup.Group) -> tuple[int | None, int | None]:
    """CPU time in each period, in microseconds; None: no limit."""
    if not group.is_unified:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, period = (cgroup.number(f"{group.directory}/{name}") for name in names)
        return quota, period
    words = cgroup.read(f"{group.directory}/cpu.max").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 and words[0].isdigit() else (None, None)


def _mem_total() -> int:
    for line in cgroup.read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return cgroup.NO_LIMIT
