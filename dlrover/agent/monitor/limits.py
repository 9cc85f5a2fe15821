"""What this container may use, and what it uses: cgroup version 2 or 1, else the machine's own figures."""

from __future__ import annotations

import os
from typing import NamedTuple

_NO_LIMIT = 1 << 60
"""Version 1 says "none" by a number near the greatest."""


class MemoryUse(NamedTuple):
    used_bytes: int | None
    """Without file cache that could be dropped. None: there is no limit of our own, so nobody counts for us."""
    limit_bytes: int


class ResourceLimits:
    """Read anew each time: a limit may be changed under way."""

    def __init__(self, cgroup_file: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> None:
        self._root = root
        self._paths: dict[str, list[str]] = {"memory": [], "cpu": []}
        """Our directory and those above it, for each controller; of whichever version has it."""
        self._is_unified: dict[str, bool] = {}
        for line in _read(cgroup_file).splitlines():
            _number, controllers, path = line.split(":", 2)
            for name in self._paths:
                if controllers == "" and not self._paths[name]:
                    self._note(name, path, f"{root}", is_unified=True)
                elif name in controllers.split(","):
                    self._note(name, path, f"{root}/{name}", is_unified=False)

    def memory(self) -> MemoryUse:
        total = _mem_total()
        best: MemoryUse | None = None
        is_unified = self._is_unified.get("memory", False)
        names = ("memory.max", "memory.current") if is_unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for directory in self._paths["memory"]:
            limit = _number(f"{directory}/{names[0]}")
            used = _number(f"{directory}/{names[1]}")
            if limit is None or used is None or limit >= min(_NO_LIMIT, total):
                continue
            if best is None or limit < best.limit_bytes:
                best = MemoryUse(max(0, used - _droppable(directory)), limit)
        return best or MemoryUse(None, total)

    def cores(self) -> float:
        cores = float(len(os.sched_getaffinity(0)))
        for directory in self._paths["cpu"]:
            if self._is_unified.get("cpu", False):
                words = _read(f"{directory}/cpu.max").split()
                quota, period = (_integer(words[0]), _integer(words[1])) if len(words) == 2 else (None, None)
            else:
                quota = _number(f"{directory}/cpu.cfs_quota_us")
                period = _number(f"{directory}/cpu.cfs_period_us")
            if quota is not None and period and quota > 0:
                cores = min(cores, quota / period)
        return cores

    def _note(self, name: str, path: str, top: str, *, is_unified: bool) -> None:
        if not is_unified and self._is_unified.get(name):
            self._paths[name] = []  # the line of version 2 came first and knows nothing of this controller
        self._is_unified[name] = is_unified
        while True:
            directory = os.path.normpath(f"{top}/{path}")
            # Inside a container the mount shows our own cgroup at its top.
            self._paths[name].append(directory)
            if path in ("/", ""):
                return
            path = os.path.dirname(path)


def _droppable(directory: str) -> int:
    """Version 1 counts with and without the cgroups below."""
    found = {}
    for line in _read(f"{directory}/memory.stat").splitlines():
        name, _, value = line.partition(" ")
        found[name] = _integer(value) or 0
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def _mem_total() -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _number(path: str) -> int | None:
    return _integer(_read(path))


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None  # "max", or nothing


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536)
    except OSError:
        return ""
