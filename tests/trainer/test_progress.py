from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrover.agent.workers.socket import WorkerSocket
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.local_frames import pack
from dlrover.protocol.messages.job import Round
from dlrover.trainer import environment
from dlrover.trainer.progress import ProgressReporter
from tests.agent.lab import until


def where(socket_path: str, local_rank: int = 0, number: int = 1) -> environment.WorkerEnvironment:
    values = {
        "DLROVER_AGENT_SOCKET": socket_path,
        "DLROVER_ROUND": str(number),
        "DLROVER_LOCAL_RANK": str(local_rank),
        "LOCAL_RANK": "0",
    }
    found = environment.read(values)
    assert found is not None
    return found


async def test_the_agent_knows_the_greatest_step_of_the_round(tmp_path: Path) -> None:
    server = await WorkerSocket.open(str(tmp_path))
    server.open_round(Round(1))
    assert server.step() is None
    reporters = [ProgressReporter(where(server.path, rank)) for rank in range(2)]
    for step in range(5):
        reporters[0].report(step)
    reporters[1].report(7)
    await until(lambda: server.step() == 7)
    assert server.step(Round(2)) is None
    server.open_round(Round(2))
    reporters[1].report(8)  # a late worker of the former round
    fresh = ProgressReporter(where(server.path, 0, 2))
    fresh.report(3)
    await until(lambda: server.step() == 3)
    for reporter in (*reporters, fresh):
        reporter.close()
    await server.close()
    assert os.listdir(tmp_path) == []


async def test_nonsense_ends_only_that_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = await WorkerSocket.open(str(tmp_path))
    server.open_round(Round(1))
    broken = ProgressReporter(where(server.path))
    broken.report(1)
    await until(lambda: server.step() == 1)
    assert broken._socket is not None
    broken._socket.sendall(pack(b"\xc1 is no message"))
    await until(lambda: "invalid message" in caplog.text)
    good = ProgressReporter(where(server.path))
    good.report(2)
    await until(lambda: server.step() == 2)
    broken.close()
    good.close()
    await server.close()


async def test_reports_never_raise_whatever_happens_to_the_agent(tmp_path: Path) -> None:
    absent = ProgressReporter(where(str(tmp_path / "none")))
    for step in range(10):
        absent.report(step)
    server = await WorkerSocket.open(str(tmp_path))
    reporter = ProgressReporter(where(server.path))
    began_at = time.monotonic()
    for step in range(20_000):  # nobody reads: this test never yields to the server
        reporter.report(step)
    assert time.monotonic() - began_at < 60
    await server.close()
    for step in range(3):
        reporter.report(step)
    reporter.close()


async def test_after_a_jam_the_newest_step_arrives(tmp_path: Path) -> None:
    server = await WorkerSocket.open(str(tmp_path))
    server.open_round(Round(1))
    reporter = ProgressReporter(where(server.path))
    for step in range(20_000):
        reporter.report(step)

    def catches_up() -> bool:
        reporter.report(30_000)
        return server.step() == 30_000

    await until(catches_up)
    reporter.close()
    await server.close()


async def test_a_fork_opens_its_own_connection(tmp_path: Path) -> None:
    server = await WorkerSocket.open(str(tmp_path))
    server.open_round(Round(1))
    code = """
import os, sys
import dlrover.trainer
dlrover.trainer.report(1)
if os.fork() == 0:
    dlrover.trainer.report(2)
    os._exit(0)
os.wait()
dlrover.trainer.report(3)
"""
    environ = {**os.environ, "DLROVER_AGENT_SOCKET": server.path, "DLROVER_ROUND": "1", "DLROVER_LOCAL_RANK": "0"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environ)  # noqa: ASYNC220 (waited for below)
    await until(lambda: server.step() == 3)
    assert process.wait(timeout=10) == 0
    await server.close()


def test_outside_dlrover_run_nothing_happens_and_little_is_imported() -> None:
    code = """
import sys
import dlrover.trainer
dlrover.trainer.report(1)
heavy = {"grpc", "asyncio", "torch", "psutil", "rich", "typer", "prometheus_client", "dlrover.agent", "dlrover.core"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DLROVER_")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=30)


async def test_a_runtime_directory_with_a_long_name_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TMPDIR"):
        await WorkerSocket.open(str(tmp_path / ("x" * 100)))


async def test_a_socket_left_by_a_killed_agent_is_replaced(tmp_path: Path) -> None:
    first = await WorkerSocket.open(str(tmp_path))
    second = await WorkerSocket.open(str(tmp_path))
    assert os.stat(second.path).st_mode & 0o777 == 0o600
    await first.close()
    await second.close()
