"""
Memory limits of local nodes: one cgroup per node, below our own.

The kernel then ends what exceeds the limit, and counts it: so that a node that ran out of memory is told from one that
was killed. Only where we may create cgroups: root, with the memory controller at hand (v1, or v2 if our own group
passes it on).
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from dlrover.host import cgroup
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.units import in_bytes

_V1 = Path(cgroup.ROOT, "memory")
_PREFIX = "dlrover-"


class MemoryLimits:
    """Of one node host. `available` says whether there is any point in having one."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._parent = _parent()

    @staticmethod
    def available() -> bool:
        parent = _parent()
        return parent is not None and os.geteuid() == 0 and os.access(parent, os.W_OK)

    def create(self, key: str, memory_mb: int) -> str:
        """The file to write one's pid to. Raises `Unavailable`."""
        group = self._group(key)
        limit = str(in_bytes(memory_mb))
        try:
            group.mkdir(exist_ok=True)
            (group / ("memory.limit_in_bytes" if _is_v1(group) else "memory.max")).write_text(limit)
            swap = group / ("memory.memsw.limit_in_bytes" if _is_v1(group) else "memory.swap.max")
            if swap.exists():
                swap.write_text(limit if _is_v1(group) else "0")
        except OSError as error:
            raise Unavailable(f"the memory of a node cannot be limited: {group}: {error.strerror}") from error
        return str(group / "cgroup.procs")

    def num_kills(self, key: str) -> int:
        """How many processes of the node the kernel ended for want of memory."""
        group = self._group(key)
        return cgroup.num_oom_kills(cgroup.Group(str(group), is_unified=not _is_v1(group))) or 0

    def remove(self, key: str) -> None:
        with contextlib.suppress(OSError):  # somebody is still in it: `dlrover clean` tries again
            self._group(key).rmdir()

    def _group(self, key: str) -> Path:
        assert self._parent is not None, "asked for a limit where none are available"
        return self._parent / f"{_PREFIX}{self._tag}-{key}"


def remove_groups(tag: str) -> list[str]:
    """Those of a dead host."""
    parent = _parent()
    removed = []
    for group in sorted(parent.glob(f"{_PREFIX}{tag}-*")) if parent is not None else []:
        try:
            group.rmdir()
            removed.append(f"cgroup {group.name}")
        except OSError as error:
            if error.errno != errno.EBUSY:
                continue
    return removed


def _is_v1(group: Path) -> bool:
    return _V1 in group.parents


def _parent() -> Path | None:
    """Our own group, where it has a memory controller that a group below would have, too."""
    own = next(iter(cgroup.groups("memory")), None)
    if own is None:
        return None
    is_passed_on = "memory" in cgroup.read(f"{own.directory}/cgroup.subtree_control").split()
    return Path(own.directory) if is_passed_on or not own.is_unified else None
