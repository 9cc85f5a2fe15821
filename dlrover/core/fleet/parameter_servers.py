"""
The cluster of parameter servers: which of them the workers shall use, and how they change over without losing a variable.

A change takes two phases. First the next cluster is prepared beside the current one: what is added must run, what is
dropped or exchanged stays. Then the workers switch by themselves, when it suits them (they save, rebuild, restore), and
say so; only then the servers that the new cluster does not contain may go. A replacement keeps the service address of the
server that it replaces, so losing one is no change of the addresses, only of their content; the versions tell that.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.core.fleet.fleet import Fleet
from dlrover.core.fleet.replicas import FleetNode
from dlrover.protocol.messages.fleet import NodePhase, NodeType, PsNode, PsNodes
from dlrover.protocol.messages.job import PlatformId

WAIT_FOR_PS = 600.0
"""Seconds that the workers wait for a server which the platform does not even show, before they go on without it."""


class ServerPlan(Struct, frozen=True):
    """How another number of servers is reached."""

    taken_back: tuple[PlatformId, ...] = ()
    """Had been dropped, and the workers have not switched yet."""
    added_ranks: tuple[int, ...] = ()
    dropped: tuple[PlatformId, ...] = ()
    """Stay until the workers have switched."""
    removed: tuple[PlatformId, ...] = ()
    """Never ran, so no worker uses them."""


def plan_scale(fleet: Fleet, count: int) -> ServerPlan:
    """Add or drop at the end; dropping twice before a switch drops both."""
    servers = fleet.servers
    by_rank = sorted(_newest_of_each_rank(fleet), key=lambda node: node.rank)
    kept = [node for node in by_rank if node.id not in servers.dropped]
    num_more = count - len(kept)
    if num_more >= 0:
        taken_back = [node.id for node in by_rank if node.id in servers.dropped][:num_more]
        used = {node.rank: None for node in by_rank}
        free = [rank for rank in range(len(by_rank) + num_more) if rank not in used]
        return ServerPlan(taken_back=tuple(taken_back), added_ranks=tuple(free[: num_more - len(taken_back)]))
    surplus = kept[num_more:]
    return ServerPlan(
        dropped=tuple(node.id for node in surplus if node.phase is NodePhase.RUNNING),
        removed=tuple(node.id for node in surplus if node.phase is not NodePhase.RUNNING),
    )


def next_cluster(fleet: Fleet) -> list[FleetNode]:
    """What the workers shall use next, in rank order. The current one, until everything that was asked for is there."""
    servers = fleet.servers
    if not servers.is_changed or is_somebody_awaited(fleet):
        known = [fleet.nodes[node] for node in servers.current if node in fleet.nodes]
        return [node for node in known if not node.is_released]  # nobody comes who was given up
    running = [
        node
        for node in fleet.live_nodes(NodeType.PS)
        if node.phase is NodePhase.RUNNING and node.id not in servers.dropped
    ]
    newest: dict[int, FleetNode] = {}
    for node in sorted(running, key=lambda node: node.id):
        newest[node.rank] = node
    return [newest[rank] for rank in sorted(newest)]


def ps_nodes(fleet: Fleet) -> PsNodes:
    """The answer to a worker."""
    return PsNodes(
        nodes=tuple(
            PsNode(id=node.id, rank=node.rank, service_address=node.service_address, resource=node.resource)
            for node in next_cluster(fleet)
        ),
        is_ready=not fleet.servers.is_changed,
        has_failure=any(node.is_wait_over for node in fleet.live_nodes(NodeType.PS)),
    )


def switch(fleet: Fleet) -> list[FleetNode]:
    """The workers use the next cluster from now on. Returns those that are not needed any more."""
    assert not is_somebody_awaited(fleet), "who shall go is needed until all that shall come is there"
    servers = fleet.servers
    cluster = next_cluster(fleet)
    servers.current = [node.id for node in cluster]
    servers.is_changed = False
    # An exchange whose target did not come in time goes on; the others are done.
    exchanged = [old for old, new in fleet.migrations.items() if new in servers.current]
    leaving = [fleet.nodes[node] for node in (*servers.dropped, *exchanged) if node in fleet.nodes]
    servers.dropped = {}
    return [node for node in leaving if not node.is_released]


def is_somebody_awaited(fleet: Fleet) -> bool:
    """Whether the next cluster is not complete yet: the workers stay with the current one, and all of it is needed."""
    replicas = fleet.replicas.get(NodeType.PS)
    return replicas is not None and any(not fleet.nodes[node].is_wait_over for node in replicas.pending)


def _newest_of_each_rank(fleet: Fleet) -> list[FleetNode]:
    replicas = fleet.replicas.get(NodeType.PS)
    return [] if replicas is None else [fleet.nodes[node] for node in replicas.holders.values()]
