"""
The node host: the truth about the nodes of a job that no cluster's own objects tell of.

It runs beside the master and not in it: in `dlrover local`, or in an actor of a Ray cluster. When the master is killed, no
node notices, and what ended in between is told to the next one. What a node is made of is its starter's business. The
host serves a unix socket in a closed directory, to processes of its own user only.

A node that ended stays in the list with its exit code until it is removed, so a watch that begins late misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import astuple, replace

from dlrover.host.ownership import peer_credentials
from dlrover.platforms.base import (
    Intent,
    LaunchNotTaken,
    RoomChanged,
    StaleMaster,
    check_intent,
    check_same,
    phase_of,
)
from dlrover.platforms.hosted.messages import (
    ANSWER,
    REQUEST,
    AskRoom,
    HostAnswer,
    HostRequest,
    IntentRefused,
    LimitNodes,
    ListNodes,
    RefusalKind,
    RoomFound,
    Taken,
    WatchNodes,
)
from dlrover.platforms.hosted.starter import FoundNode, HostLedger, NodeStarter, StartedNode
from dlrover.protocol.errors import Rejected, Unavailable
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
    Resource,
)
from dlrover.protocol.messages.identity import PlatformId

log = logging.getLogger(__name__)

MAX_UNSENT = 10_000
"""Events for a watch that does not read. Then it is hung up on, and begins anew with a list when it reads again."""
LOOK_AGAIN = 1.0
"""Seconds between two looks at a node that still writes checkpoints: it may say meanwhile that it needs less time."""
END_TIMEOUT = 10.0
"""Seconds for what is left of killed nodes to vanish; longer only if the kernel does not let a process go."""
REQUEST_TIMEOUT = 10.0
"""Seconds for a request to arrive whole."""
_ENDING = "the process that starts this job's nodes is shutting down"


class HostConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    directory: str
    """0700, of this host alone: the socket, and the nodes' log files if `log_dir` is empty."""
    program: tuple[str, ...]
    """What a node runs. The node's own values come by the environment, as on every platform."""
    environ: dict[str, str] = {}
    log_dir: str = ""
    capacity: int = 0
    """How many nodes may run at a time; 0: as many as are asked for. `LimitNodes` changes it."""
    room: int = 0
    """How many nodes are offered to those who ask for room, where `capacity` says nothing; 0: as many as fit on the machine."""
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
    process: StartedNode
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
    first_free_id: int = 0
    """Ids below were used in a former life of this host, too."""
    launches: dict[PlatformId, LaunchNode | None] = field(default_factory=dict)
    """Every id ever heard of: none is used twice. None: a removal came before any launch."""
    watches: list[_Watcher] = field(default_factory=list)

    @property
    def next_id(self) -> PlatformId:
        return PlatformId(max(self.first_free_id, max(self.launches, default=-1) + 1))


OnLine = Callable[[str, bytes, bool], None]
"""Short name of the node, one line of its output with its end, whether it is of stderr."""
OnChange = Callable[[NodeChanged], None]


class NodeHost:
    """`start` serves the socket, `stop` ends all nodes."""

    def __init__(self, config: HostConfig, starter: NodeStarter, *, on_change: OnChange = lambda change: None) -> None:
        self._config = config
        self._starter = starter
        self._on_change = on_change
        self.cut_off: list[str] = []
        """Names of nodes that were told to end while they wrote checkpoints, and did not end well."""
        self._jobs: dict[str, _Job] = {}
        self._capacity = config.capacity
        self._is_ending = False
        self._holds_output = False
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._talk, self._config.socket)
        os.chmod(self._config.socket, 0o600)

    def restore(self, job_uid: str, ledger: HostLedger, found: Iterable[FoundNode]) -> None:
        """Before `start`: what a former life of this host has left running."""
        job = self._job(job_uid)
        job.master_epoch, job.first_free_id = ledger.master_epoch, ledger.next_id
        for each in sorted(found, key=lambda each: each.intent.id):
            job.launches[each.intent.id] = each.intent
            self._take_in(job, each.intent, each.node)

    async def wait(self, timeout: float) -> None:
        """Until all nodes have ended by themselves, or the timeout."""
        if living := self._living():
            await asyncio.wait([node.life for node in living], timeout=timeout)

    def hold_output(self) -> None:
        """Take no more of what nodes print: the program that shows it cannot keep up. They wait when their pipes are full."""
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
            await asyncio.wait([node.life for node in living], timeout=END_TIMEOUT)

    async def close(self) -> None:
        """After `stop`: no client is served any more."""
        if self._server is not None:
            self._server.close()
        for talk in tuple(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        with contextlib.suppress(OSError):
            os.unlink(self._config.socket)

    def seen(self, job_uid: str) -> tuple[PlatformNode, ...]:
        return tuple(node.seen for _, node in sorted(self._job(job_uid).nodes.items()))

    def _listing(self, job_uid: str) -> NodesListed:
        """With what a master that lost its journal has to know before it asks for anything."""
        job = self._job(job_uid)
        return NodesListed(nodes=self.seen(job_uid), master_epoch=job.master_epoch, next_id=job.next_id)

    # Intents.

    def apply(self, job_uid: str, intent: Intent) -> None:
        check_intent(intent)
        job = self._job(job_uid)
        if intent.master_epoch < job.master_epoch:
            raise StaleMaster(intent, job.master_epoch)
        self._remember(job_uid, job, intent)
        job.master_epoch = intent.master_epoch
        if isinstance(intent, LaunchNode):
            self._launch(job_uid, job, intent)
        else:
            self._remove(job, intent)

    def _remember(self, job_uid: str, job: _Job, intent: Intent) -> None:
        ledger = HostLedger(intent.master_epoch, max(job.next_id, intent.id + 1))
        if ledger != HostLedger(job.master_epoch, job.next_id):
            self._starter.remember(job_uid, ledger)

    def _launch(self, job_uid: str, job: _Job, intent: LaunchNode) -> None:
        known = job.launches.get(intent.id)
        if known is not None:
            check_same(known, intent)
        if intent.id in job.launches or intent.id < job.first_free_id:
            return
        self._check_room(job, intent)
        try:
            started = self._starter.start(
                job_uid,
                intent,
                key=f"{job.number}-{intent.id}",
                on_waiting=lambda why: self._tell_waiting(job, intent.id, why),
            )
        except Unavailable as error:
            raise LaunchNotTaken(f"{intent.name}: {error}") from error
        job.launches[intent.id] = intent
        node = self._take_in(job, intent, started)
        if self._holds_output:
            node.process.hold_output()

    def _take_in(self, job: _Job, intent: LaunchNode, started: StartedNode) -> _Node:
        seen = PlatformNode(
            id=intent.id,
            node_type=intent.node_type,
            rank=intent.rank,
            phase=NodePhase.PENDING,
            host=started.running.result() if started.running.done() else "",
            name=intent.name,
            relaunch_count=intent.relaunch_count,
            group=intent.group,
            service_address=intent.service_address,
        )
        node = _Node(intent, seen, started)
        node.life = asyncio.ensure_future(self._live(job, node))
        job.nodes[intent.id] = node
        self._tell(job, NodeChanged(kind=NodeEventKind.ADDED, node=seen))
        if started.running.done():
            self._change(job, node, replace(seen, phase=NodePhase.RUNNING))
        else:
            started.running.add_done_callback(lambda running: self._on_running(job, node, running))
        return node

    def _on_running(self, job: _Job, node: _Node, running: asyncio.Future[str]) -> None:
        if not running.cancelled() and not node.life.done():
            self._change(job, node, replace(node.seen, phase=NodePhase.RUNNING, host=running.result(), message=""))

    def _tell_waiting(self, job: _Job, node_id: PlatformId, why: str) -> None:
        node = job.nodes.get(node_id)
        if node is not None and node.seen.phase is NodePhase.PENDING and node.seen.message != why:
            self._change(job, node, replace(node.seen, message=why))

    def _check_room(self, job: _Job, intent: LaunchNode) -> None:
        running = len(self._living())
        if self._is_ending:
            raise LaunchNotTaken(f"{intent.name} is not started: {_ENDING}")
        if self._capacity and running >= self._capacity:
            raise LaunchNotTaken(f"{intent.name}: {running} of at most {self._capacity} nodes run already")
        try:
            self._starter.check(intent, job.number)
        except Unavailable as error:
            raise LaunchNotTaken(f"{intent.name}: {error}") from error

    async def _room(self, resource: Resource) -> RoomFound:
        if self._is_ending:
            return RoomFound(0, _ENDING)
        living = [node.intent.resource for node in self._living()]
        room = await self._starter.room(resource, living, capacity=self._capacity or self._config.room)
        return RoomFound(*astuple(room))

    def limit_nodes(self, most: int) -> None:
        """From now on; 0: any number. Nodes that run stay until their job lets them go."""
        if most < 0:
            raise Rejected(
                f"The greatest number of nodes on a host must be at least 0 (got {most}). 0 stands for any number."
            )
        self._capacity = most
        for job in self._jobs.values():
            self._notify(job, RoomChanged())

    async def _live(self, job: _Job, node: _Node) -> None:
        """From the start of a node's process until nothing of it is left."""
        exit_code = await asyncio.shield(node.process.exit_code)
        was_stopped = node.stopping is not None
        if node.was_saving and exit_code != 0:
            self.cut_off.append(node.seen.name)
        await node.process.sweep(0.0 if was_stopped else self._config.orphan_grace)
        ending = node.process.ending()
        if node.removal is not None:
            # How it ended after our own signal says nothing of it.
            self._vanish(job, node, exit_code, NodeExit.NONE if was_stopped else ending.reason)
        else:
            ended = replace(
                node.seen,
                phase=phase_of(exit_code),
                exit_code=exit_code,
                exit_reason=ending.reason,
                message=ending.message,
            )
            self._change(job, node, ended)

    def _remove(self, job: _Job, intent: RemoveNode) -> None:
        job.launches.setdefault(intent.id, None)
        if intent.cordon_host:
            self._starter.cordon(intent.cordon_host)
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
        SIGTERM, the grace, SIGKILL to everything of the node. Cancelled by a shorter grace of another caller.

        The master lets go of a node as soon as its agent has left the job, and that may still write what the job was for. The
        signal would tell it to be quick, so it comes only when that time is over. Nor is a node killed while it writes after
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
        return node.process.saving_until() - asyncio.get_running_loop().time()

    def _vanish(self, job: _Job, node: _Node, exit_code: int, reason: NodeExit) -> None:
        del job.nodes[node.intent.id]
        self._starter.forget(node.intent.id)
        last = replace(
            node.seen,
            phase=NodePhase.DELETED,
            exit_code=exit_code,
            exit_reason=reason,
            message="" if node.removal is None else node.removal.reason,
        )
        self._tell(job, NodeChanged(kind=NodeEventKind.DELETED, node=last))

    # Events.

    def _change(self, job: _Job, node: _Node, seen: PlatformNode) -> None:
        node.seen = seen
        self._tell(job, NodeChanged(kind=NodeEventKind.MODIFIED, node=seen))

    def _tell(self, job: _Job, change: NodeChanged) -> None:
        self._on_change(change)
        self._notify(job, change)

    def _notify(self, job: _Job, change: NodeChanged | RoomChanged) -> None:
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
            raise Rejected(f"a process of user {uid} may not use this node host; only root and user {os.geteuid()} may")
        async with asyncio.timeout(REQUEST_TIMEOUT):
            frame = await read_frame(reader)
        if frame is None:
            return
        request = REQUEST.decode(frame)
        if isinstance(request.body, WatchNodes):
            await self._serve_watch(request.job_uid, reader, writer)
        else:
            await _send(writer, await self._answer(request))

    async def _answer(self, request: HostRequest) -> HostAnswer:
        body = request.body
        if isinstance(body, ListNodes):
            return self._listing(request.job_uid)
        assert not isinstance(body, WatchNodes), "watches are served elsewhere"
        try:
            if isinstance(body, AskRoom):
                return await self._room(body.resource)
            if isinstance(body, LimitNodes):
                self.limit_nodes(body.most)
                return Taken()
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
