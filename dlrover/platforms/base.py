"""
Where nodes come from: the one interface that a laptop, Kubernetes and Ray fill in.

The master asks for nodes by intents and hears what exists by lists and events. An intent says what shall be, not what
to do: it may be applied twice, and again by the next master. A platform that cannot take it now says so by
`LaunchNotTaken`, and the master goes on trying; one that never will, by `Rejected`.

What a platform must keep to beyond the signatures is written as tests in `tests/platforms/contract.py`; every
implementation passes them.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.fleet import (
    LaunchNode,
    NodeChanged,
    NodePhase,
    NodesListed,
    PlatformNode,
    RemoveNode,
    Resource,
)

Intent = LaunchNode | RemoveNode


class RoomChanged(Struct, tag=True, frozen=True):
    """The room of the job may be another now: ask for it."""


Sight = NodesListed | NodeChanged | RoomChanged
"""What a watch sees. Room that changes is told where the platform hears of it by itself; elsewhere it is asked for now and then."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """What a platform can do beyond starting and ending nodes. Shown at the start, so that no user has to guess."""

    can_relaunch: bool = True
    """A lost node can be replaced by a new one; False where people start nodes by hand."""
    own_addresses: bool = False
    """Each node has an address of its own, so that it can be cut off alone."""
    can_limit_memory: bool = False
    """`Resource.memory_mb` is held, and a node that exceeds it ends as `OOMKilled`."""
    can_cordon: bool = False
    """`cordon_host` and `avoid_hosts` are followed: there are several machines."""
    knows_room: bool = False
    """`room` answers with numbers, as far as the platform's rights and its users' sizes allow."""


class NodeRoom(Struct, frozen=True):
    """How many nodes of one size the platform could take now, beside those that it has."""

    free: int | None
    """None: unknown. Ask for a node, and see. Below 0: the job has more than it may, so many have to go."""
    reason: str = ""
    """What bounds it, or why it is unknown: a sentence for people."""


class JobGlance(Struct, frozen=True, kw_only=True):
    """How a job does, for people who look at the platform and not at the job's page."""

    round: int
    goodput: float
    """From 0 to 1."""
    last_step: int | None = None
    """None: no worker has reported a step."""


@runtime_checkable
class ShowsJobs(Protocol):
    """A platform that has a place where people look at jobs."""

    async def show(self, glance: JobGlance) -> None:
        """Raises `Unavailable`."""
        ...


@runtime_checkable
class TakesOrders(Protocol):
    """A platform in which people write what they want of a job: other numbers, a pause, its end."""

    async def begin_orders(self, ask: Callable[[Any], Awaitable[object]], master_epoch: int) -> None:
        """What stands written before anything is launched. `ask` is the job. Raises `Unavailable`."""
        ...

    async def take_orders(self, ask: Callable[[Any], Awaitable[object]], master_epoch: int) -> None:
        """Whatever is written from now on, until cancelled."""
        ...


class LaunchNotTaken(Unavailable):
    """The platform does not take a launch now: no room, an unknown resource. The reason is for people."""


class StaleMaster(Rejected):
    """The intent is of a master that another one has followed."""

    def __init__(self, intent: Intent, newest: int) -> None:
        super().__init__(
            f"The platform rejected {type(intent).__name__} of {intent.name}: it comes from a master of epoch "
            f"{intent.master_epoch}, but a newer master of epoch {newest} runs the job. Nothing was changed.",
            code=ErrorCode.OLD_MASTER,
        )


class Platform(Protocol):
    """Nodes of one job. All methods raise `Unavailable` while the platform cannot be reached."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def apply(self, intent: Intent) -> None:
        """
        Take the intent; returning means that the platform will see to it, not that it is done.

        Idempotent by job and id: a launch of a node that is or was there, and a removal of one that is not, do
        nothing. Raises `StaleMaster`, `LaunchNotTaken`, and `Rejected` for an intent that makes no sense.
        """
        ...

    async def list(self) -> tuple[PlatformNode, ...]:
        """Every node of the job, ended ones included until they are removed, by ascending id."""
        ...

    def watch(self) -> AsyncIterator[Sight]:
        """
        A full list, then every change in order; after a lost connection again a full list, and so on for ever.

        What ended while no watch ran is in the list, so nothing is missed.
        """
        ...

    async def room(self, resource: Resource) -> NodeRoom:
        """
        For nodes of this size, now. Nothing is reserved: a launch may still find no room.

        Raises `Rejected` for a size that makes no sense.
        """
        ...

    async def close(self) -> None:
        """Let go of connections. The nodes stay."""
        ...


def check_intent(intent: Intent) -> None:
    """Raises `Rejected` for what no platform could do."""
    kind = type(intent).__name__
    if intent.id < 0:
        raise _bad(f"{kind} names the node {intent.id}: node ids must be 0 or more")
    if not intent.name or not intent.name.isprintable():
        raise _bad(
            f"{kind} of node {intent.id} gives it the name {intent.name!r}: the name must have printable characters"
        )
    if isinstance(intent, RemoveNode):
        if not (0 <= intent.grace < math.inf):
            raise _bad(f"{kind} of {intent.name} gives it {intent.grace} s to end: give 0 or more")
        return
    if intent.rank < 0:
        raise _bad(f"{kind} of {intent.name} gives it the rank {intent.rank}: ranks are 0 or more")
    check_size(intent.resource, f"{kind} of {intent.name}")


def check_size(resource: Resource, who: str) -> None:
    """Raises `Rejected` for a node that would be smaller than nothing."""
    if not (resource.cpu >= 0 and resource.memory_mb >= 0 and resource.gpus >= 0):
        raise _bad(f"{who}: resources must be at least 0 (got {resource})")


def check_same(known: LaunchNode, intent: LaunchNode) -> None:
    """A repeated launch may differ in what is counted, never in what the node is."""
    if (known.node_type, known.rank) != (intent.node_type, intent.rank):
        raise _bad(
            f"node {intent.id} was launched as {known.node_type} {known.rank} and shall now be {intent.node_type} "
            f"{intent.rank}: give a new node a new id"
        )


def phase_of(exit_code: int) -> NodePhase:
    return NodePhase.SUCCEEDED if exit_code == 0 else NodePhase.FAILED


def _bad(what: str) -> Rejected:
    return Rejected(f"{what}. Nothing was changed.", code=ErrorCode.BAD_INTENT)
