"""
The node host: parent of all local nodes, and the truth about them.

It runs in `dlrover local`, beside the master and not in it: when the master is killed, no node notices, and what ended in
between is told to the next one. Being a subreaper it adopts whatever a killed node leaves. It serves a unix socket in a
closed directory, to processes of its own user only.

A node that ended stays in the list with its exit code until it is removed, so a watch that begins late misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.host.bystander_processes import Neighbours
from dlrover.host.lifeline import follow_parent
from dlrover.host.ownership import peer_credentials
from dlrover.host.processes import all_processes
from dlrover.platforms.base import (
    Intent,
    LaunchNotTaken,
    StaleMaster,
    check_intent,
    check_same,
    phase_of,
)
from dlrover.platforms.hosted.messages import (
    ANSWER,
    REQUEST,
    HostAnswer,
    HostRequest,
    IntentRefused,
    ListNodes,
    RefusalKind,
    Taken,
    WatchNodes,
)
from dlrover.platforms.local.kernel_claims import KernelTag, dead_tags
from dlrover.platforms.local.memory_limits import MemoryLimits, remove_groups
from dlrover.platforms.local.namespaces import NODE_INTERFACE, Namespaces, NodeNamespaces, remove_namespaces
from dlrover.platforms.local.node_process import MARK, SWEEP_TIMEOUT, NodeCommand, NodeProcess, send, wait_gone
from dlrover.protocol.addresses import LOOPBACK
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.local_frames import pack, read_frame
from dlrover.protocol.messages.fleet import (
    LaunchNode,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    PlatformNode,
    RemoveNode,
    exit_reason_of,
)
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.units import in_mib

log = logging.getLogger(__name__)

MAX_UNSENT = 10_000
"""Events for a watch that does not read. Then it is hung up on, and begins anew with a list when it reads again."""
LOOK_AGAIN = 1.0
"""Seconds between two looks at a node that still writes checkpoints: it may say meanwhile that it needs less time."""
REQUEST_TIMEOUT = 10.0
"""Seconds for a request to arrive whole."""
_PR_SET_CHILD_SUBREAPER = 36


class HostConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    directory: str
    """0700, of this host alone: the socket, and the nodes' log files if `log_dir` is empty."""
    program: tuple[str, ...]
    """What a node runs. The node's own values come by the environment, as on every platform."""
    environ: dict[str, str] = {}
    log_dir: str = ""
    capacity: int = 0
    """How many nodes may run at a time; 0: as many as are asked for."""
    grace: float = 30.0
    """Seconds that nodes have for ending when the host ends."""
    orphan_grace: float = 3.0
    """Seconds that an agent has for stopping its workers when its launcher was killed: the kernel has told it."""

    @property
    def socket(self) -> str:
        return os.path.join(self.directory, "host.sock")


@dataclass(eq=False)
class _Node:
    intent: LaunchNode
    seen: PlatformNode
    process: NodeProcess
    key: str
    """Names its cgroup: unique on this host."""
    life: asyncio.Task[None] = field(init=False)
    """Ends when nothing of the node is left."""
    stopping: asyncio.Task[None] | None = None
    stops_at: float = 0.0
    """When it will be killed; infinite as long as it is let write."""
    is_urgent: bool = False
    """It was told to end even if it writes."""
    was_saving: bool = False
    """It still wrote checkpoints when it was told to end."""
    removal: RemoveNode | None = None
    """Set: it shall vanish from the list as soon as it has ended."""


@dataclass(eq=False)
class _Watcher:
    queue: asyncio.Queue[HostAnswer | None]


@dataclass
class _Job:
    number: int
    master_epoch: int = 0
    nodes: dict[PlatformId, _Node] = field(default_factory=dict)
    launches: dict[PlatformId, LaunchNode | None] = field(default_factory=dict)
    """Every id ever heard of: none is used twice. None: a removal came before any launch."""
    watches: list[_Watcher] = field(default_factory=list)


OnLine = Callable[[str, bytes, bool], None]
"""Short name of the node, one line of its output with its end, whether it is of stderr."""
OnChange = Callable[[NodeChanged], None]
SavingUntil = Callable[[int], float]
"""By the pid of a node's program: until when (monotonic) it may still write checkpoints; 0: it does not."""


OnGone = Callable[[int], Awaitable[None]]
"""By the pid that a node's program had: nothing of it is left, and the node is over when this has been done."""


async def _nothing(pid: int) -> None:
    """Nodes of this host leave nothing but processes."""


def _never(pid: int) -> float:
    return 0.0


class NodeHost:
    """`start` it in the main thread of a process that has no other way of reaping its children; `stop` ends all nodes."""

    def __init__(
        self,
        config: HostConfig,
        *,
        networks: Namespaces | None = None,
        memory: MemoryLimits | None = None,
        on_line: OnLine = lambda name, line, is_error: None,
        on_change: OnChange = lambda change: None,
        saving_until: SavingUntil = _never,
        on_gone: OnGone = _nothing,
    ) -> None:
        self._config = config
        self._networks = networks
        self._memory = memory
        self._on_line = on_line
        self._on_change = on_change
        self._saving_until = saving_until
        self.cut_off: list[str] = []
        """Names of nodes that were told to end while they wrote checkpoints, and did not end well."""
        self._on_gone = on_gone
        self._jobs: dict[str, _Job] = {}
        self._run = os.urandom(4).hex()
        self._children: dict[int, Callable[[int], None]] = {}
        self._neighbours = Neighbours()
        self._is_ending = False
        self._holds_output = False
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        become_subreaper()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        self._server = await asyncio.start_unix_server(self._talk, self._config.socket)
        os.chmod(self._config.socket, 0o600)

    def adopt(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """A child that is no node (the master): have its wait status told. Nobody else may wait for it."""
        self._children[pid] = on_exit

    async def wait(self, timeout: float) -> None:
        """Until all nodes have ended by themselves, or the timeout."""
        if living := self._living():
            await asyncio.wait([node.life for node in living], timeout=timeout)

    async def wait_child(self, pid: int, timeout: float) -> None:
        """Until an adopted child has ended, or the timeout; then it is killed."""
        await wait_gone([pid], timeout)
        if pid in self._children:
            send(pid, signal.SIGKILL)
            await wait_gone([pid], SWEEP_TIMEOUT)

    def hold_output(self) -> None:
        """Take no more of what nodes print: whoever shows it cannot keep up. They wait when their pipes are full."""
        self._holds_output = True
        for node in self._nodes():
            node.process.hold_output()

    def release_output(self) -> None:
        self._holds_output = False
        for node in self._nodes():
            node.process.release_output()

    @property
    def num_saving(self) -> int:
        """Nodes that still write checkpoints before they end."""
        return sum(self._time_to_save(node) > 0 for node in self._living())

    async def stop(self, grace: float | None = None, *, is_urgent: bool = True) -> None:
        """
        End all nodes, each with the grace it has; take no more launches. A shorter grace than before counts.

        Not urgent: nodes that end by themselves and write their last checkpoints are let.
        """
        self._is_ending = True
        living = self._living()
        grace = self._config.grace if grace is None else grace
        for node in living:
            self._stop_node(node, grace, is_urgent=is_urgent)
        for node in living:
            while node.stopping is not None and not node.stopping.done():
                await asyncio.wait([node.stopping])  # maybe cancelled for a more urgent one
        if living:
            # Longer only if the kernel does not let a process go: whoever stops us must not wait for that.
            await asyncio.wait([node.life for node in living], timeout=2 * SWEEP_TIMEOUT)

    async def close(self) -> None:
        """After `stop`: nobody is served any more."""
        if self._server is not None:
            self._server.close()
        for talk in tuple(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        with contextlib.suppress(OSError):
            os.unlink(self._config.socket)

    def seen(self, job_uid: str) -> tuple[PlatformNode, ...]:
        return tuple(node.seen for _, node in sorted(self._job(job_uid).nodes.items()))

    def _listing(self, job_uid: str) -> NodesListed:
        """With what a master that lost its journal has to know before it asks for anything."""
        job = self._job(job_uid)
        next_id = PlatformId(max(job.launches, default=-1) + 1)
        return NodesListed(nodes=self.seen(job_uid), master_epoch=job.master_epoch, next_id=next_id)

    # Intents.

    def apply(self, job_uid: str, intent: Intent) -> None:
        check_intent(intent)
        job = self._job(job_uid)
        if intent.master_epoch < job.master_epoch:
            raise StaleMaster(intent, job.master_epoch)
        job.master_epoch = intent.master_epoch
        if isinstance(intent, LaunchNode):
            self._launch(job_uid, job, intent)
        else:
            self._remove(job, intent)

    def _launch(self, job_uid: str, job: _Job, intent: LaunchNode) -> None:
        if intent.id in job.launches:
            known = job.launches[intent.id]
            if known is not None:
                check_same(known, intent)
            return
        self._check_room(job, intent)
        key = f"{job.number}-{intent.id}"
        try:
            process, place = self._start(job_uid, intent, key)
        except Unavailable as error:
            raise LaunchNotTaken(f"{intent.name}: {error}") from error
        job.launches[intent.id] = intent
        seen = PlatformNode(
            id=intent.id,
            node_type=intent.node_type,
            rank=intent.rank,
            phase=NodePhase.PENDING,
            host=place.address if place is not None else LOOPBACK,
            name=intent.name,
            relaunch_count=intent.relaunch_count,
            group=intent.group,
            service_address=intent.service_address,
        )
        node = _Node(intent, seen, process, key)
        node.life = asyncio.ensure_future(self._live(job, node))
        job.nodes[intent.id] = node
        self._tell(job, NodeChanged(kind=NodeEventKind.ADDED, node=seen))
        self._change(job, node, replace(seen, phase=NodePhase.RUNNING))

    def _check_room(self, job: _Job, intent: LaunchNode) -> None:
        running = len(self._living())
        if self._is_ending:
            raise LaunchNotTaken(f"{intent.name}: this machine's node host is ending")
        if self._networks is not None and job.number > 0:
            raise LaunchNotTaken(f"{intent.name}: the namespaces of this node host are for its first job alone")
        if self._config.capacity and running >= self._config.capacity:
            raise LaunchNotTaken(f"{intent.name}: {running} of at most {self._config.capacity} nodes run already")
        total_mb = int(in_mib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
        if intent.resource.memory_mb > total_mb:
            raise LaunchNotTaken(
                f"{intent.name}: asks for {intent.resource.memory_mb} MiB, and this machine has {total_mb} MiB"
            )
        num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        if intent.resource.gpus > num_gpus:
            raise LaunchNotTaken(
                f"{intent.name}: asks for {intent.resource.gpus} GPUs, and this machine has {num_gpus}"
            )

    def _start(self, job_uid: str, intent: LaunchNode, key: str) -> tuple[NodeProcess, NodeNamespaces | None]:
        """Raises `Unavailable`, and leaves nothing then."""
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
            process = NodeProcess(
                command, on_line=lambda line, is_error: self._on_line(short_name(intent), line, is_error)
            )
        except OSError as error:
            self._release(intent.id, key)
            raise Unavailable(f"its log file {log_file} cannot be written: {error.strerror}") from error
        except BaseException:
            self._release(intent.id, key)
            raise
        self._children[process.pid] = process.ended
        if self._holds_output:
            process.hold_output()
        return process, place

    def _environ(self, intent: LaunchNode, place: NodeNamespaces | None) -> dict[str, str]:
        own = {
            "DLROVER_NODE_ID": str(intent.id),
            "NODE_ID": str(intent.id),
            "NODE_RANK": str(intent.rank),
            "NODE_TYPE": intent.node_type.value,
            # The names that nodes had before.
            "WORKER_ID": str(intent.id),
            "WORKER_RANK": str(intent.rank),
            "WORKER_TYPE": intent.node_type.value,
            "POD_NAME": intent.name,
            "MONITOR_ENABLED": "true",
            "DLROVER_NODE_GROUP": str(intent.group),
        }
        if intent.relaunch_count:
            own["RELAUNCHED_POD"] = "true"
        if place is not None:
            own["POD_IP"] = place.address
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
                own[variable] = self._config.environ.get(variable, NODE_INTERFACE)
        return {**self._config.environ, **intent.environ, **own}

    async def _live(self, job: _Job, node: _Node) -> None:
        """From the start of a node's process until nothing of it is left."""
        exit_code = await asyncio.shield(node.process.exit_code)
        was_stopped = node.stopping is not None
        if node.was_saving and exit_code != 0:
            self.cut_off.append(node.seen.name)
        await node.process.sweep(0.0 if was_stopped else self._config.orphan_grace, self._strangers)
        await self._on_gone(node.process.pid)
        is_out_of_memory = self._memory is not None and bool(
            node.intent.resource.memory_mb and self._memory.num_kills(node.key)
        )
        self._release(node.intent.id, node.key)
        reason = exit_reason_of(exit_code, is_out_of_memory=is_out_of_memory)
        if node.removal is not None:
            # How it ended after our own signal says nothing of it.
            self._vanish(job, node, exit_code, NodeExit.NONE if was_stopped else reason)
        else:
            message = f"exit code {exit_code}" + (", out of memory" if is_out_of_memory else "")
            ended = replace(
                node.seen, phase=phase_of(exit_code), exit_code=exit_code, exit_reason=reason, message=message
            )
            self._change(job, node, ended)

    def _remove(self, job: _Job, intent: RemoveNode) -> None:
        job.launches.setdefault(intent.id, None)
        node = job.nodes.get(intent.id)
        if node is None:
            return
        if node.life.done():
            assert node.seen.exit_code is not None, f"{node.seen.name} ended without an exit code"
            node.removal = intent
            self._vanish(job, node, node.seen.exit_code, node.seen.exit_reason)
            return
        node.removal = node.removal or intent
        self._stop_node(node, intent.grace, is_urgent=not intent.grace)

    def _stop_node(self, node: _Node, grace: float, *, is_urgent: bool) -> None:
        """Again with less patience: the shorter one counts."""
        now = asyncio.get_running_loop().time()
        stops_at = now + grace
        if node.stopping is not None:
            if stops_at >= node.stops_at and node.is_urgent >= is_urgent:
                return
            node.stopping.cancel()
            stops_at = min(stops_at, node.stops_at)
        node.stops_at, node.is_urgent = stops_at, node.is_urgent or is_urgent
        node.stopping = asyncio.ensure_future(self._end_node(node, max(0.0, stops_at - now)))

    async def _end_node(self, node: _Node, grace: float) -> None:
        """
        SIGTERM, the grace, SIGKILL to everything of the node. Cancelled by a shorter grace of somebody else.

        The master lets go of a node as soon as its agent has left the job, and that may still write what the job was for. The
        signal would tell it to be quick, so it comes only when that time is over. Nor is anybody killed while it writes after
        the signal, unless it shall end at once.
        """
        if not node.is_urgent:
            await self._let_save(node)
        node.stops_at = asyncio.get_running_loop().time() + grace
        node.was_saving = node.was_saving or self._time_to_save(node) > 0
        node.process.signal(signal.SIGTERM)
        await node.process.wait(grace)
        if grace:
            await self._let_save(node)
        await node.process.kill()

    async def _let_save(self, node: _Node) -> None:
        while (left := self._time_to_save(node)) > 0:
            node.stops_at = math.inf
            await node.process.wait(min(left, LOOK_AGAIN))

    def _time_to_save(self, node: _Node) -> float:
        if node.process.exit_code.done():
            return 0.0
        return self._saving_until(node.process.pid) - asyncio.get_running_loop().time()

    def _vanish(self, job: _Job, node: _Node, exit_code: int, reason: NodeExit) -> None:
        del job.nodes[node.intent.id]
        last = replace(
            node.seen,
            phase=NodePhase.DELETED,
            exit_code=exit_code,
            exit_reason=reason,
            message="" if node.removal is None else node.removal.reason,
        )
        self._tell(job, NodeChanged(kind=NodeEventKind.DELETED, node=last))

    def _release(self, node: PlatformId, key: str) -> None:
        if self._networks is not None:
            self._networks.remove(node)
        if self._memory is not None:
            self._memory.remove(key)

    # Events.

    def _change(self, job: _Job, node: _Node, seen: PlatformNode) -> None:
        node.seen = seen
        self._tell(job, NodeChanged(kind=NodeEventKind.MODIFIED, node=seen))

    def _tell(self, job: _Job, change: NodeChanged) -> None:
        self._on_change(change)
        for watch in tuple(job.watches):
            if watch.queue.qsize() < MAX_UNSENT:
                watch.queue.put_nowait(change)
            else:
                job.watches.remove(watch)
                watch.queue.put_nowait(None)

    def _job(self, uid: str) -> _Job:
        return self._jobs.setdefault(uid, _Job(len(self._jobs)))

    def _living(self) -> list[_Node]:
        return [node for node in self._nodes() if not node.life.done()]

    def _nodes(self) -> Iterator[_Node]:
        for job in self._jobs.values():
            yield from job.nodes.values()

    # Children.

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

    def _strangers(self) -> list[int]:
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

    # The socket.

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            await self._converse(reader, writer)
        except (OSError, Rejected, TimeoutError) as error:
            log.info("a client of the node host was hung up on reason=%s", error)
        except asyncio.CancelledError:
            pass  # the host closes; a task that asyncio's server started must not end as cancelled
        finally:
            self._talks.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        _, uid, _ = peer_credentials(peer)
        if uid not in (0, os.geteuid()):
            raise Rejected(f"a process of user {uid} has no business here")
        async with asyncio.timeout(REQUEST_TIMEOUT):
            frame = await read_frame(reader)
        if frame is None:
            return
        request = REQUEST.decode(frame)
        if isinstance(request.body, WatchNodes):
            await self._serve_watch(request.job_uid, reader, writer)
        else:
            await _send(writer, self._answer(request))

    def _answer(self, request: HostRequest) -> HostAnswer:
        body = request.body
        if isinstance(body, ListNodes):
            return self._listing(request.job_uid)
        assert isinstance(body, LaunchNode | RemoveNode), "watches are served elsewhere"
        try:
            self.apply(request.job_uid, body)
        except StaleMaster as error:
            newest = self._job(request.job_uid).master_epoch
            return IntentRefused(kind=RefusalKind.OLD_MASTER, message=str(error), newest_master_epoch=newest)
        except Rejected as error:
            return IntentRefused(kind=RefusalKind.BAD, message=str(error), code=error.code)
        except Unavailable as error:
            return IntentRefused(kind=RefusalKind.NOT_NOW, message=str(error))
        return Taken()

    async def _serve_watch(self, job_uid: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        job = self._job(job_uid)
        watch = _Watcher(asyncio.Queue())
        job.watches.append(watch)
        watch.queue.put_nowait(self._listing(job_uid))
        sending = asyncio.ensure_future(_send_all(writer, watch.queue))
        hanging_up = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([sending, hanging_up], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if watch in job.watches:
                job.watches.remove(watch)
            sending.cancel()
            hanging_up.cancel()
            await asyncio.gather(sending, hanging_up, return_exceptions=True)


async def _send_all(writer: asyncio.StreamWriter, queue: asyncio.Queue[HostAnswer | None]) -> None:
    while (answer := await queue.get()) is not None:
        await _send(writer, answer)


async def _send(writer: asyncio.StreamWriter, answer: HostAnswer) -> None:
    writer.write(pack(ANSWER.encode(answer)))
    await writer.drain()


def short_name(node: LaunchNode | PlatformNode) -> str:
    """For people, in whose eyes a replacement is the same node."""
    return f"{node.node_type.value}-{node.rank}"


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


def main(saving_until: SavingUntil = _never) -> int:
    """`python -m dlrover.platforms.hosted.table CONFIG`: a host on its own, until SIGTERM or the end of its parent."""
    import sys

    if not follow_parent(signal.SIGTERM):
        return 1
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=HostConfig)
    asyncio.run(_serve(config, saving_until))
    return 0


async def _serve(config: HostConfig, saving_until: SavingUntil) -> None:
    wants_memory = MemoryLimits.available()
    claim, networks, memory = claim_kernel_names(wants_networks=False, wants_memory=wants_memory)
    host = NodeHost(config, networks=networks, memory=memory, saving_until=saving_until)
    await host.start()
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    print(msgspec.json.encode({"socket": config.socket, "memory": memory is not None}).decode(), flush=True)
    try:
        await over.wait()
    finally:
        await host.stop()
        await host.close()
        if claim is not None:
            claim.release()


if __name__ == "__main__":
    raise SystemExit(main())
