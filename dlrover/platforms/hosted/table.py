"""
The node host: the truth about the nodes of a job that no cluster's own objects tell of.

It runs beside the master and not in it: in `dlrover local`, or in an actor of a Ray cluster. When the master is killed, no
node notices, and what ended in between is told to the next one. What a node is made of is its starter's business. The
host serves a unix socket in a closed directory, to processes of its own user only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct
from msgspec.structs import astuple

from dlrover.platforms.base import Intent, LaunchNotTaken, RoomChanged, check_intent
from dlrover.platforms.hosted.messages import RoomFound
from dlrover.platforms.hosted.nodes import HostedJob, HostedNode, OnChange
from dlrover.platforms.hosted.serving import HostSocket
from dlrover.platforms.hosted.starter import FoundNode, HostLedger, NodeStarter
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import LaunchNode, PlatformNode, Resource

END_TIMEOUT = 10.0
"""Seconds for what is left of killed nodes to vanish; longer only if the kernel does not let a process go."""
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


OnLine = Callable[[str, bytes, bool], None]
"""Short name of the node, one line of its output with its end, whether it is of stderr."""


class NodeHost:
    """`start` serves the socket, `stop` ends all nodes."""

    def __init__(self, config: HostConfig, starter: NodeStarter, *, on_change: OnChange = lambda change: None) -> None:
        self._config = config
        self._starter = starter
        self._on_change = on_change
        self.cut_off: list[str] = []
        """Names of nodes that were told to end while they wrote checkpoints, and did not end well."""
        self._jobs: dict[str, HostedJob] = {}
        self._capacity = config.capacity
        self._is_ending = False
        self._holds_output = False
        self._socket = HostSocket(config.socket, self)

    async def start(self) -> None:
        await self._socket.start()

    def restore(self, job_uid: str, ledger: HostLedger, found: Iterable[FoundNode]) -> None:
        """Before `start`: what a former life of this host has left running."""
        self.job(job_uid).restore(ledger, list(found))

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
        return sum(node.time_to_save() > 0 for node in self._living())

    async def stop(self, grace: float | None = None, *, is_urgent: bool = True) -> None:
        """
        End all nodes, each with the grace it has; take no more launches. A shorter grace than before counts.

        Not urgent: nodes that end by themselves and write their last checkpoints are let.
        """
        self._is_ending = True
        living = self._living()
        grace = self._config.grace if grace is None else grace
        for node in living:
            node.stop(grace, is_urgent=is_urgent)
        for node in living:
            while node.stopping is not None and not node.stopping.done():
                await asyncio.wait([node.stopping])  # maybe cancelled for a more urgent one
        if living:
            # Longer only if the kernel does not let a process go: whoever stops us must not wait for that.
            await asyncio.wait([node.life for node in living], timeout=END_TIMEOUT)

    async def close(self) -> None:
        """After `stop`: no client is served any more."""
        await self._socket.close()

    def seen(self, job_uid: str) -> tuple[PlatformNode, ...]:
        return self.job(job_uid).seen()

    # Intents.

    def apply(self, job_uid: str, intent: Intent) -> None:
        check_intent(intent)
        self.job(job_uid).apply(intent, check_room=self._check_room, holds_output=self._holds_output)

    def _check_room(self, intent: LaunchNode) -> None:
        running = len(self._living())
        if self._is_ending:
            raise LaunchNotTaken(f"{intent.name} is not started: {_ENDING}")
        if self._capacity and running >= self._capacity:
            raise LaunchNotTaken(f"{intent.name}: {running} of at most {self._capacity} nodes run already")

    async def room(self, resource: Resource) -> RoomFound:
        if self._is_ending:
            return RoomFound(0, _ENDING)
        living = [node.intent.resource for node in self._living()]
        room = await self._starter.room(resource, living, capacity=self._capacity or self._config.room)
        return RoomFound(*astuple(room))

    def limit_nodes(self, most: int) -> None:
        """From now on; 0: any number. Nodes that run stay until their job lets them go."""
        if most < 0:
            raise Rejected(f"The largest number of nodes on a host must be at least 0 (got {most}). 0 means no limit.")
        self._capacity = most
        for job in self._jobs.values():
            job.notify(RoomChanged())

    def job(self, uid: str) -> HostedJob:
        if uid not in self._jobs:
            self._jobs[uid] = HostedJob(
                uid,
                len(self._jobs),
                self._starter,
                on_change=self._on_change,
                cut_off=self.cut_off.append,
                orphan_grace=self._config.orphan_grace,
            )
        return self._jobs[uid]

    def _living(self) -> list[HostedNode]:
        return [node for node in self._nodes() if not node.life.done()]

    def _nodes(self) -> Iterator[HostedNode]:
        for job in self._jobs.values():
            yield from job.nodes.values()
