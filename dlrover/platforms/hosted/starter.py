"""
What starts a node for a node host, and the started node as the host sees it.

The host's table keeps ids, master epochs, watches and removals. It does not know what a node is made of: a process
on this machine (`platforms.local`) or an actor in a Ray cluster (`platforms.ray`). That is a `NodeStarter`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from dlrover.platforms.base import NodeRoom
from dlrover.protocol.messages.fleet import LaunchNode, NodeExit, PlatformNode, Resource, exit_reason_of
from dlrover.protocol.messages.identity import PlatformId


class NodeEnding(Struct, frozen=True):
    """How a node ended, as far as its starter can tell."""

    reason: NodeExit
    message: str


class StartedNode(Protocol):
    exit_code: asyncio.Future[int]
    """128 + n for signal n. Set once the node's program has ended; something of it may still live."""
    running: asyncio.Future[str]
    """The host that the node runs on. Pending while the node waits for room; cancelled if it never runs."""

    def signal(self, number: int) -> None:
        """To the node's program. A node that still waits for room gives up its place instead."""
        ...

    async def wait(self, timeout: float) -> None:
        """Until the node's program has ended, or the timeout."""
        ...

    async def kill(self) -> None:
        """SIGKILL to everything of the node, if its program has not ended."""
        ...

    async def sweep(self, grace: float) -> None:
        """After `exit_code`: until nothing of the node is left, by force when the grace is over."""
        ...

    def ending(self) -> NodeEnding:
        """After `sweep`."""
        ...

    def saving_until(self) -> float:
        """Until when (this process's monotonic clock) the node may still write checkpoints; 0: it does not."""
        ...

    def hold_output(self) -> None: ...

    def release_output(self) -> None: ...


class HostLedger(Struct, frozen=True):
    """What must survive the host itself, so that no id is used twice and no old master is obeyed."""

    master_epoch: int = 0
    next_id: int = 0


class FoundNode(Struct, frozen=True):
    """A node that a former life of this host started."""

    intent: LaunchNode
    node: StartedNode


OnWaiting = Callable[[str], None]
"""A sentence: why the node still waits for room."""


class NodeStarter(Protocol):
    def check(self, intent: LaunchNode, job_number: int) -> None:
        """Raises `Unavailable` with the reason if the node cannot be started now or here."""
        ...

    def start(self, job_uid: str, intent: LaunchNode, *, key: str, on_waiting: OnWaiting) -> StartedNode:
        """`key` is unique on this host. Raises `Unavailable`, and leaves nothing then."""
        ...

    def remember(self, job_uid: str, ledger: HostLedger) -> None:
        """Before the effect that the ledger is about."""
        ...

    def cordon(self, host: str) -> None:
        """Start no more nodes on this machine, where there are several."""
        ...

    def forget(self, node: PlatformId) -> None:
        """It was removed: it will not be asked for again."""
        ...

    async def room(self, resource: Resource, living: Sequence[Resource], *, capacity: int) -> NodeRoom: ...


def ending_of(exit_code: int, *, is_out_of_memory: bool = False, cause: str = "") -> NodeEnding:
    """From the kernel's view; `cause`: what else is known."""
    message = f"exit code {exit_code}" + (", out of memory" if is_out_of_memory else "")
    return NodeEnding(
        exit_reason_of(exit_code, is_out_of_memory=is_out_of_memory), f"{message}: {cause}" if cause else message
    )


def node_environ(intent: LaunchNode) -> dict[str, str]:
    """What each node is told about itself, on every machine."""
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
    return own


def short_name(node: LaunchNode | PlatformNode) -> str:
    """For people, in whose eyes a replacement is the same node."""
    return f"{node.node_type.value}-{node.rank}"
