"""
The cgroups that this process is in: where the kernel keeps their files, and what it counts and limits there.

Versions 1 and 2 may be mounted side by side, and a container's mount shows the container's own group at its top. So each question
goes to all directories that can be ours, the innermost first, and a directory without the file has no say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

CGROUP_FILE = "/proc/self/cgroup"
MOUNTS_FILE = "/proc/self/mountinfo"
ROOT = "/sys/fs/cgroup"
NO_LIMIT = 1 << 60
"""Version 1 writes a number above this one where there is no limit."""


class Group(NamedTuple):
    directory: str
    is_unified: bool
    """Version 2."""


class MemoryUse(NamedTuple):
    used_bytes: int
    """Without file pages that the kernel can drop."""
    limit_bytes: int
    limit_file: str


def groups(controller: str, *, cgroup_file: str = CGROUP_FILE, root: str = ROOT) -> list[Group]:
    """Our directory for this controller and those above it, the innermost first, first those of version 1."""
    version_1: list[str] = []
    unified: list[str] = []
    for line in read(cgroup_file).splitlines():
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            unified += [*_upwards(root, path), *_upwards(f"{root}/unified", path)]
        elif controller in controllers.split(","):
            version_1 += _upwards(f"{root}/{controller}", path)
    found = [Group(directory, False) for directory in version_1] + [Group(directory, True) for directory in unified]
    return [group for group in found if os.path.isdir(group.directory)]


def memory_limits(found: list[Group]) -> Iterator[MemoryUse]:
    """Of each of these groups that has a limit."""
    for directory, is_unified in found:
        limit_name = "memory.max" if is_unified else "memory.limit_in_bytes"
        limit = number(f"{directory}/{limit_name}")
        used = number(f"{directory}/{'memory.current' if is_unified else 'memory.usage_in_bytes'}")
        if limit is not None and used is not None and limit < NO_LIMIT:
            yield MemoryUse(max(0, used - _droppable(directory)), limit, f"{directory}/{limit_name}")


def num_oom_kills(group: Group) -> int | None:
    """How many processes of the group the kernel has killed for memory so far. None: it does not count them."""
    counters = read(f"{group.directory}/{'memory.events' if group.is_unified else 'memory.oom_control'}")
    return _fields(counters).get("oom_kill")


def unified_directory(cgroup_file: str = CGROUP_FILE, mounts_file: str = MOUNTS_FILE) -> str | None:
    """Where our own cgroup of version 2 is mounted; None if it is not."""
    own = next((line[3:] for line in read(cgroup_file).splitlines() if line.startswith("0::")), None)
    if own is None:
        return None
    for line in read(mounts_file).splitlines():
        words = line.split()
        root, point, kind = words[3], words[4], words[words.index("-") + 1]
        if kind == "cgroup2" and (root == "/" or own == root or own.startswith(root + "/")):
            inside = own if root == "/" else own[len(root) :]
            return os.path.normpath(_unescape(point) + "/" + inside)
    return None


def number(path: str) -> int | None:
    """None: no limit, or nothing to read."""
    try:
        return int(read(path))
    except ValueError:
        return None


def read(path: str) -> str:
    """Empty where there is nothing to read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _upwards(top: str, path: str) -> Iterator[str]:
    while True:
        yield os.path.normpath(f"{top}/{path}")
        if path in ("/", ""):
            return
        path = os.path.dirname(path)


def _droppable(directory: str) -> int:
    """Version 1 counts with and without the groups below."""
    found = _fields(read(f"{directory}/memory.stat"))
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def _fields(text: str) -> dict[str, int]:
    pairs = (line.partition(" ") for line in text.splitlines())
    return {name: int(value) for name, _, value in pairs if value.strip().isdigit()}


def _unescape(text: str) -> str:
    """Blanks in a mount point are written in octal."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
