"""
Nodes as processes of this machine: the first thing that can start a node for a node host.

The starter must live in the main thread of a process that has no other way of reaping its children. Being a subreaper it
adopts whatever a killed node leaves, and kills it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Awaitable, Callable, Sequence

from dlrover.host.bystander_processes import BystanderProcesses
from dlrover.host.processes import all_processes
from dlrover.platforms.base import NodeRoom
from dlrover.platforms.hosted.machine_room import room_on, this_machine
from dlrover.platforms.hosted.starter import HostLedger, NodeEnding, OnWaiting, ending_of, node_environ, short_name
from dlrover.platforms.hosted.table import HostConfig, OnLine
from dlrover.platforms.local.kernel_claims import KernelTag, dead_tags
from dlrover.platforms.local.memory_limits import MemoryLimits, remove_groups
from dlrover.platforms.local.namespaces import NODE_INTERFACE, Namespaces, NodeNamespaces, remove_namespaces
from dlrover.platforms.local.node_process import MARK, SWEEP_TIMEOUT, NodeCommand, NodeProcess, send, wait_gone
from dlrover.protocol.addresses import LOOPBACK
from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.protocol.messages.fleet import LaunchNode, Resource
from dlrover.protocol.messages.identity import PlatformId

_PR_SET_CHILD_SUBREAPER = 36

SavingUntil = Callable[[int], float]
"""By the pid of a node's program: until when (monotonic) it may still write checkpoints; 0: it does not."""
OnGone = Callable[[int], Awaitable[None]]
"""By the pid that a node's program had: nothing of it is left, and the node is over when this has been done."""


def never_saving(pid: int) -> float:
    return 0.0


async def _nothing(pid: int) -> None:
    """Nodes of this host leave nothing but processes."""


class LocalNode(NodeProcess):
    """A process in a session of its own, with its network namespace and its memory cgroup."""

    def __init__(
        self, command: NodeCommand, *, starter: LocalStarter, intent: LaunchNode, key: str, place: str, on_line: OnLine
    ) -> None:
        super().__init__(command, on_line=lambda line, is_error: on_line(short_name(intent), line, is_error))
        self._starter = starter
        self._intent = intent
        self._key = key
        self._is_out_of_memory = False
        self.running: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.running.set_result(place)

    def saving_until(self) -> float:
        return self._starter.saving_until(self.pid)

    async def sweep(self, grace: float) -> None:
        await self.sweep_processes(grace, self._starter.strangers)
        await self._starter.on_gone(self.pid)
        self._is_out_of_memory = self._starter.was_out_of_memory(self._intent, self._key)
        self._starter.release(self._intent.id, self._key)

    def ending(self) -> NodeEnding:
        return ending_of(self.exit_code.result(), is_out_of_memory=self._is_out_of_memory)


class LocalStarter:
    """`open` it before the first node, `close` it after the last."""

    def __init__(
        self,
        config: HostConfig,
        *,
        networks: Namespaces | None = None,
        memory: MemoryLimits | None = None,
        on_line: OnLine = lambda name, line, is_error: None,
        saving_until: SavingUntil = never_saving,
        on_gone: OnGone = _nothing,
    ) -> None:
        self._config = config
        self._networks = networks
        self._memory = memory
        self._on_line = on_line
        self.saving_until = saving_until
        self.on_gone = on_gone
        self._run = os.urandom(4).hex()
        self._children: dict[int, Callable[[int], None]] = {}
        self._neighbours = BystanderProcesses()

    def open(self) -> None:
        become_subreaper()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)

    def close(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    def adopt(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """A child that is no node (the master): have its wait status told. No other code may wait for it."""
        self._children[pid] = on_exit

    async def wait_child(self, pid: int, timeout: float) -> None:
        """Until an adopted child has ended, or the timeout; then it is killed."""
        await wait_gone([pid], timeout)
        if pid in self._children:
            send(pid, signal.SIGKILL)
            await wait_gone([pid], SWEEP_TIMEOUT)

    def check(self, intent: LaunchNode, job_number: int) -> None:
        if self._networks is not None and job_number > 0:
            raise Unavailable("the namespaces of this node host are for its first job alone")
        machine = this_machine()
        if intent.resource.memory_mb > machine.memory_mb:
            raise Unavailable(f"asks for {intent.resource.memory_mb} MiB, and this machine has {machine.memory_mb} MiB")
        if intent.resource.gpus > machine.num_gpus:
            raise Unavailable(f"asks for {intent.resource.gpus} GPUs, and this machine has {machine.num_gpus}")

    def start(self, job_uid: str, intent: LaunchNode, *, key: str, on_waiting: OnWaiting) -> LocalNode:
        log_file = os.path.join(self._config.log_dir or self._config.directory, f"{short_name(intent)}-{intent.id}.log")
        place = self._networks.add(intent.id) if self._networks is not None else None
        try:
            cgroup = ""
            if self._memory is not None and intent.resource.memory_mb:
                cgroup = self._memory.create(key, intent.resource.memory_mb)
            command = NodeCommand(
                argv=self._config.program,
                environ=self._environ(intent, place),
                mark=f"{self._run}.{job_uid}.{intent.id}",
                log_file=log_file,
                network=place.network if place is not None else "",
                cgroup=cgroup,
            )
            node = LocalNode(
                command,
                starter=self,
                intent=intent,
                key=key,
                place=place.address if place is not None else LOOPBACK,
                on_line=self._on_line,
            )
        except OSError as error:
            self.release(intent.id, key)
            raise Unavailable(f"its log file {log_file} cannot be written: {error.strerror}") from error
        except BaseException:
            self.release(intent.id, key)
            raise
        self._children[node.pid] = node.ended
        return node

    def remember(self, job_uid: str, ledger: HostLedger) -> None:
        """The nodes end with this host, so nothing has to survive it."""

    def cordon(self, host: str) -> None:
        """There is one machine."""

    def forget(self, node: PlatformId) -> None:
        """As above."""

    async def room(self, resource: Resource, living: Sequence[Resource], *, capacity: int) -> NodeRoom:
        return room_on(this_machine(), resource, living, capacity=capacity)

    def was_out_of_memory(self, intent: LaunchNode, key: str) -> bool:
        return self._memory is not None and bool(intent.resource.memory_mb and self._memory.num_kills(key))

    def release(self, node: PlatformId, key: str) -> None:
        if self._networks is not None:
            self._networks.remove(node)
        if self._memory is not None:
            self._memory.remove(key)

    def strangers(self) -> list[int]:
        """
        Children that came after us, that we did not start and that carry no mark of ours: a node left them, and cleared
        their environment.

        While its launcher and agent live they would adopt them, so these are of a node that is gone.
        """
        known = self._children.keys() | self._neighbours.pids()
        return [
            process.pid
            for process in all_processes()
            if process.parent_pid == os.getpid()
            and not process.is_dead
            and process.pid not in known
            and not _has_mark(process.pid, self._run)
        ]

    def _environ(self, intent: LaunchNode, place: NodeNamespaces | None) -> dict[str, str]:
        own = node_environ(intent)
        if place is not None:
            own["POD_IP"] = place.address
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
                own[variable] = self._config.environ.get(variable, NODE_INTERFACE)
        return {**self._config.environ, **intent.environ, **own}

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            tell = self._children.pop(pid, None)
            if tell is not None:
                tell(status)


def become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def remove_left_behind() -> list[str]:
    """What killed node hosts left in the kernel under a name: for `dlrover clean`. Tells what was removed."""
    removed: list[str] = []
    with dead_tags() as tags:
        for tag in tags:
            removed += [*remove_namespaces(tag), *remove_groups(tag)]
    return removed


def claim_kernel_names(
    *, wants_networks: bool, wants_memory: bool
) -> tuple[KernelTag | None, Namespaces | None, MemoryLimits | None]:
    """What this host may use of namespaces and cgroups. Raises `ConfigError` if namespaces are wanted and fail."""
    if not (wants_networks or wants_memory):
        return None, None, None
    claim = KernelTag()
    try:
        networks = Namespaces.create(claim.tag) if wants_networks else None
    except Unavailable as error:
        claim.release()
        raise ConfigError(f"Network namespaces could not be made: {error}. Use --netns off.") from error
    return claim, networks, MemoryLimits(claim.tag) if wants_memory else None


def _has_mark(pid: int, run: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"\0{MARK}={run}.".encode() in b"\0" + file.read()
    except OSError:
        return True  # gone, or not to be told
