"""Node hosts for tests: a real one in a process of its own, because it adopts and reaps every orphan below it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from dlrover.platforms.hosted.client import LocalOptions, LocalPlatform
from dlrover.platforms.hosted.table import HostConfig
from dlrover.platforms.local.starter import remove_left_behind
from tests.platforms.contract import DEADLINE, JOB

OBEDIENT = Path(__file__).with_name("obedient.py")
SAVING_HOST = Path(__file__).with_name("saving_host.py")


class LocalLab:
    def __init__(
        self,
        directory: Path,
        *,
        capacity: int = 3,
        program: tuple[str, ...] = (),
        host: tuple[str, ...] = ("-m", "dlrover.platforms.local"),
    ) -> None:
        self.directory = directory
        config = HostConfig(
            directory=str(directory),
            program=program or (sys.executable, "-I", "-S", str(OBEDIENT), str(directory)),
            environ={"PATH": os.environ["PATH"]},
            capacity=capacity,
            grace=2.0,
            orphan_grace=0.2,
        )
        path = directory / "host.json"
        path.write_bytes(msgspec.json.encode(config))
        self.process = subprocess.Popen([sys.executable, *host, path], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], DEADLINE)[0], "the node host does not start"
        ready = msgspec.json.decode(self.process.stdout.readline())
        self._options = LocalOptions(socket=config.socket, can_limit_memory=ready["memory"])
        self._pipes: list[int] = []

    def platform(self, job_uid: str = JOB) -> LocalPlatform:
        return LocalPlatform(self._options, job_uid)

    def order(self, node: int, text: str, job_uid: str = JOB) -> None:
        path = self.directory / f"{job_uid}.{node}"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        pipe = os.open(path, os.O_RDWR)  # never waits for a reader, and stays until one has come
        self._pipes.append(pipe)
        os.write(pipe, f"{text}\n".encode())

    def end(self, node: int, exit_code: int, job_uid: str = JOB) -> None:
        self.order(
            node, f"exit {exit_code}" if exit_code < 128 or exit_code > 192 else f"signal {exit_code - 128}", job_uid
        )

    def exhaust_memory(self, node: int) -> None:
        self.order(node, "exhaust")

    def log(self, node: int) -> str:
        return (self.directory / f"worker-{node}-{node}.log").read_text()

    def processes(self) -> list[int]:
        """Everything of any node, whatever it did to its environment and session: its command names our directory."""
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{name}/cmdline").read_bytes() if name.isdigit() else b""
                if str(self.directory).encode() in command and int(name) != self.process.pid:
                    found.append(int(name))
        return found

    def close(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self.process.terminate()
        try:
            self.process.wait(DEADLINE)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            remove_left_behind()  # of hosts that a test has killed


async def until(condition: Callable[[], object], explain: Callable[[], str] = lambda: "condition not met") -> None:
    """For what only a look from outside can tell: processes and files."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 (there is no event for it)
            await asyncio.sleep(0.01)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """pytest's own directories are too deep for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="dlr-") as path:
        yield Path(path)


@pytest.fixture
def saving_lab(short_dir: Path) -> Iterator[LocalLab]:
    """Its nodes say in the file `saving` until when they write."""
    lab = LocalLab(short_dir, host=(str(SAVING_HOST),))
    yield lab
    lab.close()


@pytest.fixture
def local_lab(short_dir: Path) -> Iterator[LocalLab]:
    lab = LocalLab(short_dir)
    yield lab
    lab.close()
