"""Servers under measure: each a process of its own, whose CPU time and memory are read from outside, and that never outlives us."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
from control_plane_clients import cpu_seconds
from process_tree import end

START_TIMEOUT = 60.0
CLIENTS = Path(__file__).resolve().parent / "control_plane_clients.py"
RELAY = Path(__file__).resolve().parent / "relay_agent.py"


class ServerError(Exception):
    """It did not start, or ended; the message carries the end of its output."""


class Server:
    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self.process = process
        self.address = address

    @property
    def cpu(self) -> float:
        """Seconds so far."""
        return cpu_seconds(self.process.pid)

    @property
    def rss_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20


class OurMaster(Server):
    """`python -m dlrover.master` as a launcher starts it; may be killed and started again from its journal."""

    def __init__(self, folder: Path, token: str) -> None:
        self._folder = folder
        self._port = 0
        self._token = token
        super().__init__(*self._start())

    def restart(self) -> float:
        """When it served again, after a SIGKILL, by the monotonic clock."""
        self.process.kill()
        self.process.wait(10)
        self.process, self.address = self._start()
        return time.monotonic()

    def _start(self) -> tuple[subprocess.Popen[bytes], str]:
        read, write = os.pipe()
        config = {
            "job_name": "bench",
            "journal": str(self._folder / "journal.sqlite"),
            "port": self._port,
            "log_file": str(self._folder / "master.log"),
            "ready_fd": write,
        }
        if self._token:
            config["token_file"] = str(self._folder / "token")
            (self._folder / "token").touch(0o600)
            (self._folder / "token").write_text(self._token)
        (self._folder / "master.json").write_text(json.dumps(config))
        process = subprocess.Popen(
            [sys.executable, "-m", "dlrover.master", "--config", str(self._folder / "master.json")],
            stdin=subprocess.DEVNULL,
            pass_fds=(write,),
        )
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            self._port = int(read_line(pipe, process)["port"])
        return process, f"127.0.0.1:{self._port}"


@contextlib.contextmanager
def our_master(folder: Path, token: str = "") -> Iterator[OurMaster]:
    folder.mkdir(parents=True)
    master = OurMaster(folder, token)
    try:
        yield master
    finally:
        end(master.process, grace=10.0)


@contextlib.contextmanager
def relay_agent(master: OurMaster, folder: Path, *, num_workers: int = 16) -> Iterator[dict[str, str]]:
    """A node of the job whose workers we play: gives what is added to their environment."""
    process = subprocess.Popen(
        [sys.executable, str(RELAY), master.address, str(folder), str(num_workers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        said = read_line(process.stdout, process)
        yield {"DLROVER_AGENT_SOCKET": str(said["socket"]), "DLROVER_ROUND": str(said["round"])}
    finally:
        end_by_input(process)


@contextlib.contextmanager
def tcp_store() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, str(CLIENTS), "tcpstore", "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield Server(process, f"127.0.0.1:{read_line(process.stdout, process)['port']}")
    finally:
        end_by_input(process)


@contextlib.contextmanager
def dlrover_061_master(python: Path, folder: Path, *, num_nodes: int) -> Iterator[Server]:
    """Its local master, as its launcher starts it."""
    folder.mkdir(parents=True)
    port = free_port()
    log = folder / "master.log"
    command = [str(python), "-m", "dlrover.python.master.main", "--platform", "local", "--job_name", "bench"]
    command += ["--port", str(port), "--node_num", str(num_nodes)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=peer_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        await_listener(port, process, log)
        yield Server(process, f"127.0.0.1:{port}")
    finally:
        end(process, grace=1.0)  # it ends at SIGKILL only


def peer_environment() -> dict[str, str]:
    """It has our package's name: nothing of ours may be found on its path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def read_line(pipe: IO[bytes], process: subprocess.Popen[bytes]) -> dict[str, int | str]:
    poll = select.poll()  # descriptors above 1024 are beyond select()
    poll.register(pipe, select.POLLIN)
    if not poll.poll(START_TIMEOUT * 1000):
        raise ServerError(f"nothing said within {START_TIMEOUT:g} s")
    line = pipe.readline()
    if not line:
        raise ServerError(f"ended with exit code {process.wait(10)} before it served")
    said: dict[str, int | str] = json.loads(line)
    return said


def end_by_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def await_listener(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end_at = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end_at and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)  # it tells nobody when it serves
    raise ServerError(f"nobody listens on port {port}: {log.read_text(errors='replace')[-300:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
