"""
What the agent needs of others, where tests put something else: the stream to the master, workers, replicas, the watch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from msgspec import UnsetType

from dlrover.agent.monitor.progress import FirstStep
from dlrover.agent.relay import SnapshotRelay
from dlrover.agent.workers.driver import DrivenGroup
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.messages.job import (
    AgentCommand,
    Attach,
    Attached,
    Desired,
    Heartbeat,
    Incarnation,
    Micros,
    NodeId,
    NodeRank,
    Query,
    Reply,
    Round,
    WorldSpec,
)
from dlrover.protocol.messages.watch import StepShape, WatchObservation, WatchOrder


class AgentPatience(NamedTuple):
    """Seconds that the agent gives to things; how long workers train on without a master is the user's to say."""

    heartbeat: float = 5.0
    """Between two heartbeats, roughly."""
    warm_up: float = 60.0
    """A node whose imports take longer joins all the same."""
    lease: float = 30.0
    """An agent that did not run for so long (stopped, machine suspended) kills its workers before it talks to any other process."""
    farewell: float = 2.0
    """To tell the master that we go. Best effort: never worth a longer wait."""
    finished: float = 30.0
    """A finished training is a success even if the master is gone for good: wait so long for it, then leave with 0."""
    first_connection: float = 120.0
    """For the master to appear at all, however short its later absences may be."""
    wait_told: float = 20.0
    """A node that waits for its first world for so long says so: in silence it would be taken for one that hangs."""


class BuildGroup(Protocol):
    def __call__(self, world: WorldSpec, *, node_rank: NodeRank, master_now: Callable[[], Micros]) -> DrivenGroup: ...


class MasterChannel(Protocol):
    """What the agent needs of an `AgentChannel`, whose docstrings say what it means."""

    async def run(self) -> None: ...

    async def call(self, command: AgentCommand | Query, *, timeout: float) -> Reply: ...

    def beat(self, heartbeat: Heartbeat) -> None: ...

    def observe(self, observation: WatchObservation) -> None: ...

    def outage(self) -> float: ...

    async def close(self) -> None: ...

    async def reattach(self) -> None: ...


class Exchange(Protocol):
    """What the agent needs of `Replicas`."""

    address: str

    @property
    def copied_step(self) -> int | None:
        """The newest step of which other nodes keep what this one has."""

    async def enter(
        self,
        world: WorldSpec,
        *,
        node: NodeId,
        node_rank: NodeRank,
        ask: SnapshotRelay,
    ) -> None: ...


class Connect(Protocol):
    def __call__(
        self,
        address: str,
        *,
        token: str,
        tls: TlsConfig | None,
        attach: Callable[[], Attach],
        on_attached: Callable[[Attached], None],
        on_desired: Callable[[Desired], None],
        on_order: Callable[[WatchOrder], None] | None = None,
        on_blocked: Callable[[str], None] | None = None,
        find_address: Callable[[], str] | None = None,
    ) -> MasterChannel: ...


class WatchProtocol(Protocol):
    """What the agent needs of `Watch`."""

    def connect(
        self,
        observe: Callable[[WatchObservation], None],
        who: Callable[[], tuple[NodeId, Incarnation]],
        master_now: Callable[[], Micros],
    ) -> None: ...

    def report(self) -> None: ...

    def first_step(self, after: Round) -> FirstStep | None: ...

    def shape(self, round_: Round, global_rank: int) -> StepShape | UnsetType: ...

    def attached(self) -> None: ...

    def take_order(self, order: WatchOrder) -> None: ...

    async def run(self) -> None: ...
