"""
What a process that has ended still holds until the kernel has taken it apart.

The kernel frees memory first, then descriptors: a worker with gigabytes of state keeps its device, its ports and its locks for up to seconds
after its end. New workers that would find a device, an address or a lock in use wait for that; others need not. Ports of the kernel's own
choice do not count, nor do snapshot segments: the next workers use other ports, and a segment knows that its writer has ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence

from dlrover.agent.monitor.limits import ResourceLimits
from dlrover.agent.workers.sigterm import ACCELERATORS

_LISTENING = "0A"
_USUAL_PORTS = (32768, 60999)


def held_by(pid: int, unneeded_ports: Collection[int] = ()) -> str:
    """For people: what its successors may need, but for these ports; empty: nothing that can be seen."""
    opened = _opened_by(pid)
    if device := next((name for name in opened if name.startswith(ACCELERATORS)), ""):
        return f"device {device}"
    sockets = {name.removeprefix("socket:[").removesuffix("]") for name in opened if name.startswith("socket:[")}
    lowest, highest = _ports_of_kernel()
    for port, inode in _listening():
        if inode in sockets and port not in unneeded_ports and not lowest <= port <= highest:
            return f"port {port}"
    return "a file lock" if _has_lock(pid) else ""


def has_memory_for(num_workers: int, resident_bytes: Sequence[int | None]) -> bool:
    """
    Whether so many workers as large as these fit beside them. If the size of one is not known, it counts as the largest of the others; if
    none is known, all of them together count as the memory that is in use.
    """
    total, available = _machine_memory()
    known = [size for size in resident_bytes if size]
    needed = num_workers * max(known) if known else total - available
    own = ResourceLimits().memory()
    if own.used_bytes is not None:
        available = min(available, max(0, own.limit_bytes - own.used_bytes))
    return needed <= available


def _opened_by(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    opened = []
    with contextlib.suppress(OSError):  # it is gone
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                opened.append(os.readlink(f"{folder}/{name}"))
    return opened


def _listening() -> Iterator[tuple[int, str]]:
    """Port and inode of each socket that listens."""
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _lines(path)[1:]:
            words = line.split()
            if words[3] == _LISTENING:
                yield int(words[1].rpartition(":")[2], 16), words[9]


def _ports_of_kernel() -> tuple[int, int]:
    words = " ".join(_lines("/proc/sys/net/ipv4/ip_local_port_range")).split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else _USUAL_PORTS


def _has_lock(pid: int) -> bool:
    """Locks of an open file, which snapshot segments use, name no process there."""
    return any(line.split()[4] == str(pid) for line in _lines("/proc/locks") if "->" not in line)


def _machine_memory() -> tuple[int, int]:
    """Total and available bytes."""
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.endswith("kB")}
    return found.get("MemTotal", 0), found.get("MemAvailable", 0)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
