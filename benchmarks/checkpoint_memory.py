"""
How much memory a system takes beyond the training itself: the processes' own pages and the shared memory of the machine.

Private pages (RssAnon of the whole process tree) and shared memory (Shmem of the machine, since segments may belong to nobody's mapping) are read from
/proc, which costs microseconds. Proportional sizes would be exact to the page, but counting them stops the process for as long as its tables are long.
"""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

LOOK_EVERY = 0.05
_TREE_EVERY = 10
"""Looks between two looks at who belongs to the tree."""


class MemoryWatch:
    """Samples from `baseline` on; `peak_extra` is the most above it."""

    def __init__(self, root_pid: int) -> None:
        self._root = root_pid
        self._stop = threading.Event()
        self._baseline: int | None = None
        self._peak = 0
        self._is_baseline_wanted = False
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
        self._thread.start()

    def baseline(self) -> None:
        """From here on more is extra."""
        self._is_baseline_wanted = True

    def peak_extra(self) -> int | None:
        """Bytes; None if the baseline was never seen. Ends the watch."""
        self._stop.set()
        self._thread.join()
        return None if self._baseline is None else max(0, self._peak - self._baseline)

    def _run(self) -> None:
        pids: list[int] = []
        number = 0
        while not self._stop.wait(LOOK_EVERY):
            if number % _TREE_EVERY == 0:
                pids = tree(self._root)
            number += 1
            now = shared_bytes() + sum(map(private_bytes, pids))
            if self._baseline is None and self._is_baseline_wanted:
                self._baseline = now
            if self._baseline is not None:
                self._peak = max(self._peak, now)


def tree(root_pid: int) -> list[int]:
    try:
        root = psutil.Process(root_pid)
        return [root_pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def private_bytes(pid: int) -> int:
    try:
        return field_bytes(Path(f"/proc/{pid}/status").read_text(), "RssAnon")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def shared_bytes() -> int:
    return field_bytes(Path("/proc/meminfo").read_text(), "Shmem")


def field_bytes(text: str, name: str) -> int:
    """Of a file such as /proc/meminfo, whose lines read `Shmem:   1234 kB`; 0 where the field is missing (a zombie has none)."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0
