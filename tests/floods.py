"""A stranger who floods a port, as a process of its own: `benchmarks/floods.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pytest

from dlrover.protocol.rpc.door import SYNCOOKIES

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "floods.py"
STRANGER = "127.0.0.2"
"""An address of this machine that no honest caller of a test has."""
FEW_CONNECTIONS = {"reset": 1, "open": 1, "bodies": 10, "idle": 1000, "settled": 1000, "handshakes": 500}
"""Kinds of floods of the master's port, and how many connections at a time a short test has. `make chaos` has up to 4,000."""

needs_cookies = pytest.mark.skipif(
    not SYNCOOKIES.exists() or SYNCOOKIES.read_text().strip() == "0", reason="this kernel sends no SYN cookies"
)
"""Only with them does the kernel keep connections that say nothing."""


def connections_to(port: int) -> int:
    """That this process has taken."""
    mine = psutil.Process().net_connections("tcp")
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in mine)


class Flooding:
    """From the beginning of the block to its end, or for so many seconds."""

    def __init__(self, kind: str, address: str, *, seconds: float, connections: int = 0) -> None:
        argv = [sys.executable, str(SCRIPT), kind, address, "--seconds", f"{seconds:g}", "--source", STRANGER]
        self._process = subprocess.Popen(
            [*argv, "--connections", str(connections)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def wait_until_it_began(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"flooding\n"

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> dict[str, int]:
        """What it has done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with self._process.stdout as output:
            told = output.read()
        assert self._process.wait(60) == 0
        count: dict[str, int] = json.loads(told.splitlines()[-1])
        return count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(60)
