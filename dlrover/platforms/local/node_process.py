"""
One local node as the kernel sees it: a process in a session of its own, its output, and everything below it.

A node is over when nothing of it is left. Its launcher normally sees to that; where the launcher itself was killed, what
it leaves is adopted by the node host, which knows it by a mark in the environment: it cannot be lost by a fork, a new
session or a new parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from dlrover.host.processes import look_up
from dlrover.protocol.errors import Unavailable

MARK = "DLROVER_LOCAL_NODE"
"""Environment variable of every process of a node: unique for the host's life and the node."""
SWEEP_TIMEOUT = 5.0
"""Seconds for processes to vanish after SIGKILL; longer only if the kernel does not let them go."""
_ENTRY = str(Path(__file__).with_name("node_entry.py"))
_PIPE_BYTES = 64 * 1024
_MAX_LINE_BYTES = 64 * 1024

OnLine = Callable[[bytes, bool], None]
"""One line with its end, and whether it is of stderr."""


class NodeCommand(Struct, frozen=True, kw_only=True):
    """What to run, and where."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    mark: str
    log_file: str
    network: str = ""
    """File of the network namespace to enter; empty: the host's."""
    cgroup: str = ""
    """`cgroup.procs` to enter; empty: the host's."""


class NodeProcess:
    """Started on construction. The host calls `ended` with the wait status, since it alone hears of its children."""

    def __init__(self, command: NodeCommand, *, on_line: OnLine) -> None:
        """Raises `Unavailable` when the machine has no process to give."""
        self.mark = command.mark
        self._output = _Output(command.log_file, on_line)
        try:
            self.pid = _spawn(command, self._output.write_ends)
        except OSError as error:
            self._output.close()
            raise Unavailable(f"no process could be started: {error.strerror}") from error
        finally:
            self._output.close_write_ends()
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """128 + n for signal n."""

    def ended(self, status: int) -> None:
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if not self.exit_code.done():
            self.exit_code.set_result(code)

    def hold_output(self) -> None:
        """Read no more of it. When its pipes are full the node waits."""
        self._output.hold()

    def release_output(self) -> None:
        self._output.release()

    def signal(self, number: int) -> None:
        if not self.exit_code.done():  # else the pid may be anybody's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def wait(self, timeout: float) -> None:
        """Until the node's program has ended, or the timeout."""
        await asyncio.wait([self.exit_code], timeout=timeout)

    async def kill(self) -> None:
        """SIGKILL to everything of the node, if its program has not ended."""
        if not self.exit_code.done():
            for pid in marked(self.mark):
                send(pid, signal.SIGKILL)
            await self.wait(SWEEP_TIMEOUT)

    async def sweep_processes(self, grace: float, strangers: Callable[[], Sequence[int]]) -> None:
        """
        After the launcher's end: until nothing of the node is left, by force when the grace is over.

        `strangers` tells who lost the node's mark. They are asked for after the marked ones: a process that clears its
        environment in between is found then, and none gets a mark back.
        """
        loop = asyncio.get_running_loop()
        kill_at = loop.time() + grace
        give_up_at = kill_at + SWEEP_TIMEOUT
        while True:
            ours, others = marked(self.mark), strangers()
            now = loop.time()
            if not (ours or others) or now >= give_up_at:
                break
            for pid in (*ours, *others) if now >= kill_at else others:
                send(pid, signal.SIGKILL)
            await wait_gone((*ours, *others), (kill_at if now < kill_at else give_up_at) - now)
        self._output.close()


def marked(mark: str) -> list[int]:
    """Living processes whose environment carries the mark."""
    needle = f"\0{MARK}={mark}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if needle not in b"\0" + file.read() + b"\0":
                    continue
        except OSError:
            continue  # it ended, or it is not ours to look at
        process = look_up(int(name))
        if process is not None and not process.is_dead:
            found.append(process.pid)
    return found


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


async def wait_gone(pids: Sequence[int], timeout: float) -> None:
    """Until all of them have ended, or the timeout; the kernel tells."""
    loop = asyncio.get_running_loop()
    ends: list[asyncio.Future[None]] = []
    descriptors: list[int] = []
    try:
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except OSError as error:
                if error.errno == errno.ENOSYS:
                    await asyncio.sleep(min(timeout, 0.02))  # an old kernel, where nothing can tell of a non-child
                    return
                continue
            descriptors.append(descriptor)
            gone: asyncio.Future[None] = loop.create_future()
            ends.append(gone)
            loop.add_reader(descriptor, _settle, gone)
        if ends:
            await asyncio.wait(ends, timeout=timeout)
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _spawn(command: NodeCommand, outputs: tuple[int, int]) -> int:
    entry = [sys.executable, "-I", "-S", _ENTRY, "--host-pid", str(os.getpid())]
    if command.network:
        entry += ["--network", command.network]
    if command.cgroup:
        entry += ["--cgroup", command.cgroup]
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, outputs[0], 1),
        (os.POSIX_SPAWN_DUP2, outputs[1], 2),
    ]
    return os.posix_spawn(
        entry[0],
        [*entry, "--", *command.argv],
        {**command.environ, MARK: command.mark},
        file_actions=actions,
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGINT, signal.SIGHUP],
    )


class _Output:
    """Two pipes: what comes goes to the node's log file whole, and line by line to the program that shows it."""

    def __init__(self, log_file: str, on_line: OnLine) -> None:
        self._on_line = on_line
        self._loop = asyncio.get_running_loop()
        self._log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._rest = {True: b"", False: b""}
        self._readers: dict[bool, int] = {}
        writers = []
        for is_error in (False, True):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_NONBLOCK)
            self._readers[is_error] = reader
            writers.append(writer)
        self.write_ends = (writers[0], writers[1])
        self.release()

    def close_write_ends(self) -> None:
        for descriptor in self.write_ends:
            os.close(descriptor)

    def hold(self) -> None:
        for reader in self._readers.values():
            self._loop.remove_reader(reader)

    def release(self) -> None:
        for is_error, reader in self._readers.items():
            self._loop.add_reader(reader, self._read, is_error)

    def close(self) -> None:
        """What is in the pipes is taken along; a process that holds them open from elsewhere is not waited for."""
        for is_error in tuple(self._readers):
            while is_error in self._readers and self._read(is_error):
                pass
            self._end(is_error)
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _read(self, is_error: bool) -> bool:
        """Whether there was something."""
        try:
            data = os.read(self._readers[is_error], _PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end(is_error)
            return False
        with contextlib.suppress(OSError):  # a full disk costs the log, not the node
            os.write(self._log, data)
        *lines, rest = (self._rest[is_error] + data).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._rest[is_error] = rest
        for line in lines:
            self._on_line(line + b"\n", is_error)
        return True

    def _end(self, is_error: bool) -> None:
        reader = self._readers.pop(is_error, None)
        if reader is None:
            return
        self._loop.remove_reader(reader)
        os.close(reader)
        if self._rest[is_error]:
            self._on_line(self._rest[is_error] + b"\n", is_error)
            self._rest[is_error] = b""
