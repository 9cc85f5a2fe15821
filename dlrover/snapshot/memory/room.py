"""
Is there room for a segment? Asked before anything is reserved.

Shared memory that is not there shows itself only when a page is touched, and then as SIGBUS in the middle of a save. The
usual reasons are known beforehand: a container's `/dev/shm` of 64 MiB, a memory limit of the cgroup, a limit of the process.
What does not fit goes to a file in a directory that the caller names, which is slower but works; without one, the error says which
limit is in the way and how to raise it.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from msgspec import Struct

from dlrover.host import cgroup
from dlrover.protocol.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
MARGIN_BYTES = 1024 * 1024
"""Left free in a file system, for directories and other people's small files."""


class Obstacle(Struct, frozen=True):
    """One limit that is too small."""

    what: str
    available_bytes: int
    remedy: str


class SegmentRoom(Struct, frozen=True):
    """Where a segment can be put."""

    directory: str
    is_shared_memory: bool
    obstacles: tuple[Obstacle, ...] = ()
    """Why it is not shared memory, if it is not."""


def find_room(
    num_bytes: int,
    directory: Path = SHARED_MEMORY,
    fallback: Path | None = None,
    *,
    reclaimable_bytes: int = 0,
    cgroup_root: Path = Path(cgroup.ROOT),
) -> SegmentRoom:
    """
    The directory for a segment of this size: shared memory if it fits, else the fallback.

    `reclaimable_bytes` is what will be given back when the new segment is in use (the old one), but only then: it does not help.
    """
    needed = num_bytes + MARGIN_BYTES
    obstacles = [*_file_system(directory, needed, is_memory=True), *_memory(needed, cgroup_root), *_process(num_bytes)]
    if not obstacles:
        return SegmentRoom(str(directory), is_shared_memory=True)
    if fallback is not None:
        fallback.mkdir(mode=0o700, parents=True, exist_ok=True)
        blocking = [*_file_system(fallback, needed, is_memory=False), *_process(num_bytes)]
        if not blocking:
            return SegmentRoom(str(fallback), is_shared_memory=False, obstacles=tuple(obstacles))
        obstacles += blocking
    reasons = "; ".join(f"{each.what} leaves {_size(each.available_bytes)}: {each.remedy}" for each in obstacles)
    kept = f" ({_size(reclaimable_bytes)} are still held by the previous segment)" if reclaimable_bytes else ""
    hint = "" if fallback is not None else " Or set DLROVER_SNAPSHOT_DIR to a directory on a fast disk."
    raise ConfigError(f"There is no room for a snapshot segment of {_size(num_bytes)}{kept}. {reasons}.{hint}")


def _file_system(directory: Path, needed: int, *, is_memory: bool) -> list[Obstacle]:
    try:
        status = os.statvfs(directory)
    except OSError as error:
        return [Obstacle(f"{directory} ({error.strerror})", 0, "create it, writable for this user")]
    free = status.f_bavail * status.f_frsize
    if free >= needed:
        return []
    if is_memory:
        remedy = "enlarge it (docker: --shm-size; Kubernetes: an emptyDir of medium Memory mounted there)"
    else:
        remedy = "free some space or name another directory"
    return [Obstacle(str(directory), free, remedy)]


def _memory(needed: int, cgroup_root: Path) -> list[Obstacle]:
    """Limits of the cgroups; pages of tmpfs count against them."""
    obstacles = []
    for use in cgroup.memory_limits(cgroup.groups("memory", root=str(cgroup_root))):
        left = max(0, use.limit_bytes - use.used_bytes)
        if left < needed:
            what = f"the memory limit of the cgroup ({use.limit_file})"
            obstacles.append(Obstacle(what, left, "raise the container's memory limit"))
    return obstacles


def _process(num_bytes: int) -> list[Obstacle]:
    obstacles = []
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < num_bytes:
        obstacles.append(Obstacle("the limit on file sizes", limit, "raise `ulimit -f`"))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if limit - used < num_bytes:
            obstacles.append(Obstacle("the limit on address space", max(0, limit - used), "raise `ulimit -v`"))
    return obstacles


def _size(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"
