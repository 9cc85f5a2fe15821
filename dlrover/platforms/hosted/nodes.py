"""
The nodes of one job on a host: each from its launch until nothing of it is left and the master knows.

A node that ended stays in the list with its exit code until it is removed, so a watch that begins late misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from dlrover.platforms.base import Intent, LaunchNotTaken, RoomChanged, StaleMaster, check_same, phase_of
from dlrover.platforms.hosted.messages import HostAnswer
from dlrover.platforms.hosted.starter import FoundNode, HostLedger, NodeStarter, StartedNode
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.fleet import (
    LaunchNode,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    PlatformNode,
    RemoveNode,
)
from dlrover.protocol.messages.identity import PlatformId

MAX_UNSENT = 10_000
"""Events for a watch that does not read. Then it is hung up on, and begins anew with a list when it reads again."""
LOOK_AGAIN = 1.0
"""Seconds between two looks at a node that still writes checkpoints: it may say meanwhile that it needs less time."""

OnChange = Callable[[NodeChanged], None]
NodeEvents = asyncio.Queue[HostAnswer | None]
"""For one watch; None: it does not read."""


@dataclass(eq=False)
class HostedNode:
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

    def stop(self, grace: float, *, is_urgent: bool) -> None:
        """Again with less patience: the shorter one counts."""
        now = asyncio.get_running_loop().time()
        stops_at = now + grace
        if self.stopping is not None:
            if stops_at >= self.stops_at and self.is_urgent >= is_urgent:
                return
            self.stopping.cancel()
            stops_at = min(stops_at, self.stops_at)
        self.stops_at, self.is_urgent = stops_at, self.is_urgent or is_urgent
        self.stopping = asyncio.ensure_future(self._end(max(0.0, stops_at - now)))

    async def _end(self, grace: float) -> None:
        """
        SIGTERM, the grace, SIGKILL to everything of the node. Cancelled by a shorter grace of another caller.

        The master lets go of a node as soon as its agent has left the job, and that may still write what the job was for. The
        signal would tell it to be quick, so it comes only when that time is over. Nor is a node killed while it writes after
        the signal, unless it shall end at once.
        """
        if not self.is_urgent:
            await self._let_save()
        self.stops_at = asyncio.get_running_loop().time() + grace
        self.was_saving = self.was_saving or self.time_to_save() > 0
        self.process.signal(signal.SIGTERM)
        await self.process.wait(grace)
        if grace:
            await self._let_save()
        await self.process.kill()

    async def _let_save(self) -> None:
        while (left := self.time_to_save()) > 0:
            self.stops_at = math.inf
            await self.process.wait(min(left, LOOK_AGAIN))

    def time_to_save(self) -> float:
        """Seconds that it may still write checkpoints."""
        if self.process.exit_code.done():
            return 0.0
        return self.process.saving_until() - asyncio.get_running_loop().time()


class HostedJob:
    """The list of one job: its nodes, every id that was ever heard of, and who watches."""

    def __init__(
        self,
        uid: str,
        number: int,
        starter: NodeStarter,
        *,
        on_change: OnChange,
        cut_off: Callable[[str], None],
        orphan_grace: float,
    ) -> None:
        """`cut_off` is told the name of a node that was told to end while it wrote checkpoints, and did not end well."""
        self.uid = uid
        self.number = number
        self._starter = starter
        self._on_change = on_change
        self._cut_off = cut_off
        self._orphan_grace = orphan_grace
        self.master_epoch = 0
        self.nodes: dict[PlatformId, HostedNode] = {}
        self.first_free_id = 0
        """Ids below were used in a former life of this host, too."""
        self.launches: dict[PlatformId, LaunchNode | None] = {}
        """Every id ever heard of: none is used twice. None: a removal came before any launch."""
        self._watches: list[NodeEvents] = []

    @property
    def next_id(self) -> PlatformId:
        return PlatformId(max(self.first_free_id, max(self.launches, default=-1) + 1))

    def seen(self) -> tuple[PlatformNode, ...]:
        return tuple(node.seen for _, node in sorted(self.nodes.items()))

    def listing(self) -> NodesListed:
        """With what a master that lost its journal has to know before it asks for anything."""
        return NodesListed(nodes=self.seen(), master_epoch=self.master_epoch, next_id=self.next_id)

    def restore(self, ledger: HostLedger, found: list[FoundNode]) -> None:
        """What a former life of this host has left running."""
        self.master_epoch, self.first_free_id = ledger.master_epoch, ledger.next_id
        for each in sorted(found, key=lambda each: each.intent.id):
            self.launches[each.intent.id] = each.intent
            self._take_in(each.intent, each.node)

    # Intents.

    def apply(self, intent: Intent, *, check_room: Callable[[LaunchNode], None], holds_output: bool) -> None:
        """`check_room` raises LaunchNotTaken if no further node may run now. `holds_output`: a new one shall not print now."""
        if intent.master_epoch < self.master_epoch:
            raise StaleMaster(intent, self.master_epoch)
        ledger = HostLedger(intent.master_epoch, max(self.next_id, intent.id + 1))
        if ledger != HostLedger(self.master_epoch, self.next_id):
            self._starter.remember(self.uid, ledger)
        self.master_epoch = intent.master_epoch
        if isinstance(intent, LaunchNode):
            self._launch(intent, check_room, holds_output=holds_output)
        else:
            self._remove(intent)

    def _launch(self, intent: LaunchNode, check_room: Callable[[LaunchNode], None], *, holds_output: bool) -> None:
        known = self.launches.get(intent.id)
        if known is not None:
            check_same(known, intent)
        if intent.id in self.launches or intent.id < self.first_free_id:
            return
        check_room(intent)
        try:
            self._starter.check(intent, self.number)
            started = self._starter.start(
                self.uid,
                intent,
                key=f"{self.number}-{intent.id}",
                on_waiting=lambda why: self._tell_waiting(intent.id, why),
            )
        except Unavailable as error:
            raise LaunchNotTaken(f"{intent.name}: {error}") from error
        self.launches[intent.id] = intent
        node = self._take_in(intent, started)
        if holds_output:
            node.process.hold_output()

    def _take_in(self, intent: LaunchNode, started: StartedNode) -> HostedNode:
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
        node = HostedNode(intent, seen, started)
        node.life = asyncio.ensure_future(self._live(node))
        self.nodes[intent.id] = node
        self._tell(NodeChanged(kind=NodeEventKind.ADDED, node=seen))
        if started.running.done():
            self._change(node, replace(seen, phase=NodePhase.RUNNING))
        else:
            started.running.add_done_callback(lambda running: self._on_running(node, running))
        return node

    def _on_running(self, node: HostedNode, running: asyncio.Future[str]) -> None:
        if not running.cancelled() and not node.life.done():
            self._change(node, replace(node.seen, phase=NodePhase.RUNNING, host=running.result(), message=""))

    def _tell_waiting(self, node_id: PlatformId, why: str) -> None:
        node = self.nodes.get(node_id)
        if node is not None and node.seen.phase is NodePhase.PENDING and node.seen.message != why:
            self._change(node, replace(node.seen, message=why))

    async def _live(self, node: HostedNode) -> None:
        """From the start of a node's process until nothing of it is left."""
        exit_code = await asyncio.shield(node.process.exit_code)
        was_stopped = node.stopping is not None
        if node.was_saving and exit_code != 0:
            self._cut_off(node.seen.name)
        await node.process.sweep(0.0 if was_stopped else self._orphan_grace)
        ending = node.process.ending()
        if node.removal is not None:
            # How it ended after our own signal says nothing of it.
            self._vanish(node, exit_code, NodeExit.NONE if was_stopped else ending.reason)
        else:
            ended = replace(
                node.seen,
                phase=phase_of(exit_code),
                exit_code=exit_code,
                exit_reason=ending.reason,
                message=ending.message,
            )
            self._change(node, ended)

    def _remove(self, intent: RemoveNode) -> None:
        self.launches.setdefault(intent.id, None)
        if intent.cordon_host:
            self._starter.cordon(intent.cordon_host)
        node = self.nodes.get(intent.id)
        if node is None:
            return
        if node.life.done():
            assert node.seen.exit_code is not None, f"{node.seen.name} ended without an exit code"
            node.removal = intent
            self._vanish(node, node.seen.exit_code, node.seen.exit_reason)
            return
        node.removal = node.removal or intent
        node.stop(intent.grace, is_urgent=not intent.grace)

    def _vanish(self, node: HostedNode, exit_code: int, reason: NodeExit) -> None:
        del self.nodes[node.intent.id]
        self._starter.forget(node.intent.id)
        last = replace(
            node.seen,
            phase=NodePhase.DELETED,
            exit_code=exit_code,
            exit_reason=reason,
            message="" if node.removal is None else node.removal.reason,
        )
        self._tell(NodeChanged(kind=NodeEventKind.DELETED, node=last))

    # Events.

    @contextlib.contextmanager
    def watch(self) -> Iterator[NodeEvents]:
        """All nodes first, then every change until the end of the block."""
        events: NodeEvents = asyncio.Queue()
        self._watches.append(events)
        events.put_nowait(self.listing())
        try:
            yield events
        finally:
            if events in self._watches:
                self._watches.remove(events)

    def notify(self, change: NodeChanged | RoomChanged) -> None:
        for events in tuple(self._watches):
            if events.qsize() < MAX_UNSENT:
                events.put_nowait(change)
            else:
                self._watches.remove(events)
                events.put_nowait(None)

    def _change(self, node: HostedNode, seen: PlatformNode) -> None:
        node.seen = seen
        self._tell(NodeChanged(kind=NodeEventKind.MODIFIED, node=seen))

    def _tell(self, change: NodeChanged) -> None:
        self._on_change(change)
        self.notify(change)
