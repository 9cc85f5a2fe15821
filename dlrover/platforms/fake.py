"""
A platform in memory, for tests of the master and for the contract that real ones keep.

`FakeCloud` is the machine room: tests make its nodes run, end and vanish, its doors close and its lines break.
`FakePlatform` is one job's view of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from dlrover.platforms.base import (
    Capabilities,
    Intent,
    LaunchNotTaken,
    NodeRoom,
    RoomChanged,
    Sight,
    StaleMaster,
    check_intent,
    check_same,
    check_size,
    phase_of,
)
from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.protocol.messages.fleet import (
    LaunchNode,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    PlatformNode,
    Resource,
    exit_reason_of,
)
from dlrover.protocol.messages.identity import PlatformId


@dataclass
class _FakeJob:
    master_epoch: int = 0
    nodes: dict[PlatformId, PlatformNode] = field(default_factory=dict)
    launches: dict[PlatformId, LaunchNode | None] = field(default_factory=dict)
    """Every id that was ever heard of; None: it was removed, or never launched."""
    watches: list[asyncio.Queue[Sight | None]] = field(default_factory=list)


class FakeCloud:
    """All jobs' nodes. Nodes stay pending until `run` unless `runs_at_once`."""

    def __init__(self, *, runs_at_once: bool = True) -> None:
        self._runs_at_once = runs_at_once
        self._jobs: dict[str, _FakeJob] = {}
        self.refusal = ""
        """Set: no launch is taken, for this reason."""
        self.capacity = 0
        """How many nodes may run at a time; 0: any number."""
        self.memory_mb = 1 << 20
        """Of each machine: a larger node has no room on any of them."""
        self.is_reachable = True
        self.gate = asyncio.Event()
        """Cleared: every call hangs."""
        self.gate.set()
        self.applied: list[Intent] = []
        """Every intent that arrived, also those that changed nothing."""

    # What tests do to it.

    def run(self, job: str, node: PlatformId) -> None:
        self._change(job, replace(self._jobs[job].nodes[node], phase=NodePhase.RUNNING))

    def exit(self, job: str, node: PlatformId, exit_code: int, *, is_out_of_memory: bool = False) -> None:
        reason = exit_reason_of(exit_code, is_out_of_memory=is_out_of_memory)
        ended = self._jobs[job].nodes[node]
        self._change(job, replace(ended, phase=phase_of(exit_code), exit_code=exit_code, exit_reason=reason))

    def evict(self, job: str, node: PlatformId) -> None:
        """The node vanishes although its removal was not asked for."""
        self._delete(job, node, "evicted", NodeExit.KILLED)

    def break_watches(self) -> None:
        for job in self._jobs.values():
            for watch in job.watches:
                watch.put_nowait(None)

    # What platforms do.

    async def enter(self) -> None:
        await self.gate.wait()
        if not self.is_reachable:
            raise Unavailable("the fake cloud cannot be reached")

    def job(self, uid: str) -> _FakeJob:
        return self._jobs.setdefault(uid, _FakeJob())

    def apply(self, uid: str, intent: Intent) -> None:
        self.applied.append(intent)
        check_intent(intent)
        job = self.job(uid)
        if intent.master_epoch < job.master_epoch:
            raise StaleMaster(intent, job.master_epoch)
        job.master_epoch = intent.master_epoch
        if isinstance(intent, LaunchNode):
            self._launch(uid, job, intent)
        elif intent.id in job.nodes:
            self._delete(uid, intent.id, intent.reason, NodeExit.NONE)
        else:
            job.launches.setdefault(intent.id, None)

    def _launch(self, uid: str, job: _FakeJob, intent: LaunchNode) -> None:
        if intent.id in job.launches:
            known = job.launches[intent.id]
            if known is not None:
                check_same(known, intent)
            return
        if self.refusal:
            raise LaunchNotTaken(self.refusal)
        running = self._num_running()
        if self.capacity and running >= self.capacity:
            raise LaunchNotTaken(f"{intent.name}: {running} of at most {self.capacity} nodes run already")
        job.launches[intent.id] = intent
        node = PlatformNode(
            id=intent.id,
            node_type=intent.node_type,
            rank=intent.rank,
            phase=NodePhase.PENDING,
            host="cloud",
            name=intent.name,
            relaunch_count=intent.relaunch_count,
            group=intent.group,
            service_address=intent.service_address,
        )
        self._change(uid, node)
        if self._runs_at_once:
            self.run(uid, intent.id)

    def resize(self, capacity: int) -> None:
        """So many nodes may run from now on. Those that run stay until their job lets them go."""
        self.capacity = capacity
        for job in self._jobs.values():
            for queue in job.watches:
                queue.put_nowait(RoomChanged())

    def room(self, resource: Resource) -> NodeRoom:
        check_size(resource, "a question for room")
        if self.refusal:
            return NodeRoom(0, self.refusal)
        if resource.memory_mb > self.memory_mb:
            return NodeRoom(0, f"each machine has {self.memory_mb} MiB, and the node asks for {resource.memory_mb} MiB")
        if not self.capacity:
            return NodeRoom(None, "the fake cloud takes any number of nodes")
        running = self._num_running()
        return NodeRoom(self.capacity - running, f"{running} of at most {self.capacity} nodes run")

    def _num_running(self) -> int:
        return sum(node.exit_code is None for job in self._jobs.values() for node in job.nodes.values())

    def _change(self, uid: str, node: PlatformNode) -> None:
        job = self._jobs[uid]
        kind = NodeEventKind.MODIFIED if node.id in job.nodes else NodeEventKind.ADDED
        job.nodes[node.id] = node
        self._tell(job, NodeChanged(kind=kind, node=node))

    def _delete(self, uid: str, node: PlatformId, message: str, reason: NodeExit) -> None:
        job = self._jobs[uid]
        gone = job.nodes.pop(node)
        reason = gone.exit_reason or reason
        job.launches[node] = None
        last = replace(gone, phase=NodePhase.DELETED, exit_reason=reason, message=message)
        self._tell(job, NodeChanged(kind=NodeEventKind.DELETED, node=last))

    def _tell(self, job: _FakeJob, event: NodeChanged) -> None:
        for watch in job.watches:
            watch.put_nowait(event)


class FakePlatform:
    def __init__(self, cloud: FakeCloud, job_uid: str) -> None:
        self._cloud = cloud
        self._uid = job_uid
        self.capabilities = Capabilities(can_limit_memory=True, knows_room=True)

    @classmethod
    def from_options(cls, job_uid: str, options: Mapping[str, object]) -> FakePlatform:
        """A cloud of its own; tests that want to steer it build the platform themselves."""
        if options:
            raise ConfigError(f"The fake platform has no options, but {', '.join(options)} was given.")
        return cls(FakeCloud(), job_uid)

    async def apply(self, intent: Intent) -> None:
        await self._cloud.enter()
        self._cloud.apply(self._uid, intent)

    async def list(self) -> tuple[PlatformNode, ...]:
        await self._cloud.enter()
        return self._nodes()

    async def watch(self) -> AsyncIterator[Sight]:
        job = self._cloud.job(self._uid)
        while True:
            await self._cloud.enter()
            queue: asyncio.Queue[Sight | None] = asyncio.Queue()
            job.watches.append(queue)
            try:
                next_id = PlatformId(max(job.launches, default=-1) + 1)
                yield NodesListed(nodes=self._nodes(), master_epoch=job.master_epoch, next_id=next_id)
                while (sight := await queue.get()) is not None:
                    yield sight
            finally:
                job.watches.remove(queue)

    async def room(self, resource: Resource) -> NodeRoom:
        await self._cloud.enter()
        return self._cloud.room(resource)

    async def close(self) -> None:
        """Nothing is held."""

    def _nodes(self) -> tuple[PlatformNode, ...]:
        return tuple(node for _, node in sorted(self._cloud.job(self._uid).nodes.items()))
