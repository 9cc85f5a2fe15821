"""
A node of a job in a Ray cluster: an actor whose only work is to be the parent of one `dlrover-run`.

Everything below it is as on a laptop: the node's processes are in a session of their own, follow the actor when it dies, and carry a
mark by which they are found. Ray is not imported by any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque

from dlrover.host.bystander_processes import BystanderProcesses
from dlrover.host.processes import all_processes
from dlrover.platforms.hosted.starter import node_environ, short_name
from dlrover.platforms.local.kernel_claims import KernelTag
from dlrover.platforms.local.memory_limits import MemoryLimits
from dlrover.platforms.local.node_process import MARK, NodeCommand, NodeProcess
from dlrover.platforms.local.starter import become_subreaper
from dlrover.platforms.ray.directory import ActorDirectory
from dlrover.platforms.ray.messages import (
    MASTER_FILE,
    ORDER,
    PREEMPTION_FILE,
    TOKEN_FILE,
    ActorAccount,
    ActorEnd,
    NodeOrder,
    NodeOutput,
    pack,
)
from dlrover.platforms.ray.raylet import on_raylet_end
from dlrover.protocol.errors import ConfigError, Rejected

MAX_HELD_BYTES = 1 << 20
"""Output that the host has not taken yet. Then the node's pipes are left full, and the node waits."""
OUTPUT_WAIT = 1.0
"""Seconds after which a question for output is answered without any, so that the host hears of saving."""
RAYLET_GRACE = 5.0
"""Seconds that a node has for ending when the raylet above it is gone."""
TIDY_TIMEOUT = 0.5
"""Seconds after that for what a killed launcher leaves in memory. The next start on the machine removes the rest."""


class NodeActor:
    """Made without arguments: Ray would keep them. What to run comes by `run`."""

    def __init__(self) -> None:
        self.order: NodeOrder | None = None
        self._host_epoch = 0
        self._process: NodeProcess | None = None
        self._directory: ActorDirectory | None = None
        self._lines: deque[tuple[bytes, bool]] = deque()
        self._held_bytes = 0
        self._has_news = asyncio.Event()
        self._is_closed = False
        """The last line is in `_lines`."""
        self._end: asyncio.Future[ActorEnd] = asyncio.get_running_loop().create_future()
        self._is_fenced = asyncio.Event()
        self._claim: KernelTag | None = None
        self._memory: MemoryLimits | None = None
        become_subreaper()
        self._neighbours = BystanderProcesses()
        on_raylet_end(self._on_raylet_end)

    # What the host asks for.

    async def run(self, data: bytes) -> str:
        """Ray's id of this machine. Raises `ConfigError` if the machine cannot run the node at all."""
        order = ORDER.decode(data)
        self._obey(order.host_epoch)
        if self.order is None:
            self.order = order
            self._start(order)
        return _machine_id()

    async def wait(self) -> bytes:
        """Until nothing of the node is left."""
        return pack(await asyncio.shield(self._end))

    async def output(self) -> bytes:
        """The next lines, at once if there are any. One question at a time."""
        if not self._lines and not self._is_closed:
            self._has_news.clear()
            try:
                async with asyncio.timeout(OUTPUT_WAIT):
                    await self._has_news.wait()
            except TimeoutError:
                pass
        lines = tuple(self._lines)
        self._lines.clear()
        self._held_bytes = 0
        if self._process is not None and not self._is_closed:
            self._process.release_output()
        return pack(NodeOutput(lines=lines, saving_for=self._saving_for(), is_over=self._is_closed))

    async def signal(self, host_epoch: int, number: int) -> None:
        self._obey(host_epoch)
        if self._process is not None:
            self._process.signal(number)

    async def kill(self, host_epoch: int) -> None:
        self._obey(host_epoch)
        if self._process is not None:
            await self._process.kill()

    async def set_master(self, host_epoch: int, address: str) -> None:
        """The master serves there now. The agent reads the file before each attempt to reach it."""
        self._obey(host_epoch)
        if self._directory is not None:
            self._directory.write(MASTER_FILE, address)

    async def preempt(self, host_epoch: int) -> None:
        """This machine will be taken away: the agent saves and leaves."""
        self._obey(host_epoch)
        if self._directory is not None:
            self._directory.write(PREEMPTION_FILE, "drained by Ray\n")

    async def describe(self, host_epoch: int) -> bytes:
        self._obey(host_epoch)
        return pack(ActorAccount(order=self.order, machine=_machine_id(), is_over=self._end.done()))

    async def fenced(self, host_epoch: int) -> None:
        """Ends when a newer host has spoken to this node: the one that asks is outdated."""
        while self._host_epoch <= host_epoch:
            self._is_fenced.clear()
            await self._is_fenced.wait()

    # For those who know more of what runs below.

    def saving_until(self, pid: int) -> float:
        return 0.0

    async def tidy_up(self, order: NodeOrder, pid: int) -> None:
        """Nothing of the node's processes is left."""

    # The node.

    def _obey(self, host_epoch: int) -> None:
        if host_epoch < self._host_epoch:
            raise Rejected(f"host {host_epoch} of this job was replaced by host {self._host_epoch}")
        self._host_epoch = host_epoch
        self._is_fenced.set()

    def _start(self, order: NodeOrder) -> None:
        intent = order.intent
        if order.script and not os.path.exists(order.script):
            raise ConfigError(
                f"The script {order.script} does not exist on the machine {_own_address()} (looked from "
                f"{os.getcwd()}). Put it there, or send your code with --working-dir DIR."
            )
        self._directory = directory = ActorDirectory(f"n{intent.id}")
        mark = f"{os.urandom(4).hex()}.{order.job_uid}.{intent.id}"
        cgroup = ""
        if intent.resource.memory_mb and MemoryLimits.available():
            self._claim = KernelTag()
            self._memory = MemoryLimits(self._claim.tag)
            cgroup = self._memory.create("node", intent.resource.memory_mb)
        directory.write(MASTER_FILE, order.master_address)
        token_file = directory.write(TOKEN_FILE, order.secrets.token)
        log_file = os.path.join(
            directory.logs, f"{order.job_name}-{order.job_uid}-{short_name(intent)}-{intent.id}.log"
        )
        argv = tuple(word.replace(TOKEN_WORD, token_file) for word in order.argv)
        command = NodeCommand(
            argv=(sys.executable, *argv), environ=self._environ(order), mark=mark, log_file=log_file, cgroup=cgroup
        )
        self._process = NodeProcess(command, on_line=self._on_line)
        self._await_end(self._process, order)

    def _environ(self, order: NodeOrder) -> dict[str, str]:
        """The machine's own variables first: paths and proxies differ between machines."""
        assert self._directory is not None
        machine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != MARK}
        own = node_environ(order.intent)
        own["DLROVER_MASTER_FILE"] = os.path.join(self._directory.path, MASTER_FILE)
        own["DLROVER_PREEMPTION_FILE"] = os.path.join(self._directory.path, PREEMPTION_FILE)
        if order.master_address:
            own["DLROVER_MASTER_ADDR"] = order.master_address
        if not (machine.get("POD_IP") or machine.get("MY_POD_IP")):  # a pod of KubeRay knows better
            own["POD_IP"] = _own_address()
        return {**machine, **order.environ, **order.secrets.environ, **order.intent.environ, **own}

    def _on_line(self, line: bytes, is_error: bool) -> None:
        self._lines.append((line, is_error))
        self._held_bytes += len(line)
        self._has_news.set()
        if self._held_bytes > MAX_HELD_BYTES and self._process is not None:
            self._process.hold_output()

    def _await_end(self, process: NodeProcess, order: NodeOrder) -> None:
        """SIGCHLD is the main thread's, and that one is Ray's."""
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(process.pid)

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(process.pid, 0)
            process.ended(status)
            self._finishing = asyncio.ensure_future(self._finish(process, order))

        loop.add_reader(descriptor, ended)

    async def _finish(self, process: NodeProcess, order: NodeOrder) -> None:
        await process.sweep_processes(order.orphan_grace, self._strangers)
        self._is_closed = True
        self._has_news.set()
        await self.tidy_up(order, process.pid)
        is_out_of_memory = self._memory is not None and self._memory.num_kills("node") > 0
        self._release()
        if not self._end.done():
            self._end.set_result(ActorEnd(exit_code=process.exit_code.result(), is_out_of_memory=is_out_of_memory))

    def _strangers(self) -> list[int]:
        """Children that we did not start: the node left them, and cleared their environment."""
        known = self._neighbours.pids()
        found = []
        for process in all_processes():
            if process.parent_pid == os.getpid() and process.pid not in known:
                if process.is_dead:
                    os.waitpid(process.pid, os.WNOHANG)
                elif not _has_mark(process.pid):
                    found.append(process.pid)
        return found

    def _release(self) -> None:
        memory, claim, directory = self._memory, self._claim, self._directory
        self._memory = self._claim = self._directory = None
        if memory is not None:
            memory.remove("node")
        if claim is not None:
            claim.release()
        if directory is not None:
            directory.remove()

    def _saving_for(self) -> float:
        if self._process is None or self._process.exit_code.done():
            return 0.0
        return max(0.0, self.saving_until(self._process.pid) - time.monotonic())

    def _on_raylet_end(self) -> None:
        """Ray will start this node elsewhere: it must not go on here."""
        self._ending = asyncio.ensure_future(self._end_here())

    async def _end_here(self) -> None:
        process = self._process
        if process is not None and not self._end.done():
            process.signal(signal.SIGTERM)
            await process.wait(RAYLET_GRACE)
            await process.kill()
            await process.sweep_processes(0.0, self._strangers)
            if self.order is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TIDY_TIMEOUT):
                        await self.tidy_up(self.order, process.pid)
        self._release()
        os._exit(1)


TOKEN_WORD = "@token-file@"
"""Stands in the arguments for the file that the actor makes."""


def _has_mark(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"\0{MARK}=".encode() in b"\0" + file.read()
    except OSError:
        return True  # gone, or not to be told


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _machine_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
