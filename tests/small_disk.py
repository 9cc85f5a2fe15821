"""A real file system that is soon full."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(point: Path) -> Iterator[Path]:
    """Of 1 MiB; the test is skipped where nobody may mount one."""
    point.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root to mount a small file system")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(point)], check=False, timeout=10)
    if done.returncode != 0:
        pytest.skip("this environment does not allow mounting a small file system")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True, timeout=10)


def fill(disk: Path) -> Path:
    """The file to remove when there shall be space again."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler
