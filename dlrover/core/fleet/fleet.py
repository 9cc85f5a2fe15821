"""
The fleet: the nodes that the job wants of its platform, and what it knows of them.

A node is wanted first and seen later. A wanted node that the platform has not shown yet is an open intent, and so is the
removal of one that it still shows; both are state, so a new master asks for them again, after it has heard what exists.
The platform is right about what exists, the fleet about what was counted.

A rank outlives its nodes: what was spent on relaunches is kept by rank. At most one node of a rank is live and wanted,
except while a node is being exchanged for another one (`migrations`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from msgspec import Struct, field

from dlrover.core.fleet.relaunch import ENDED
from dlrover.core.fleet.replicas import FailedNode, FleetNode, ParameterServers, Removal, Replicas
from dlrover.protocol.messages.fleet import (
    FleetNodeStatus,
    FleetSpec,
    LaunchNode,
    NodePhase,
    NodeType,
    RemoveNode,
    Resource,
)
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Micros, NodeId, PlatformId, Stage

NUM_FORMER = 64
"""So many nodes that ended and are not there any more are remembered, for people who ask what became of a rank."""
NUM_AVOIDED_HOSTS = 64
FIRST_NEW_GROUP = 1001
MAX_MESSAGE = 2048
"""Characters of what a platform or an agent says about the end of a node."""
_SHOWN_MESSAGE = 200
"""Characters of it in a status, which has to fit into one message for thousands of nodes."""


class Fleet(Struct, kw_only=True):
    """All nodes of the platform."""

    spec: FleetSpec
    job_name: str
    replicas: dict[NodeType, Replicas] = {}
    nodes: dict[PlatformId, FleetNode] = {}
    agents: dict[NodeId, PlatformId] = {}
    """Live agent to the node it said it is on; the platform may not have shown that one yet. Until the first list also those that were sent away."""
    next_id: PlatformId = PlatformId(0)
    forget_from: int = 2 * NUM_FORMER
    """With so many ended nodes in the table it is worth looking whom to forget."""
    to_launch: dict[PlatformId, None] = {}
    """Open launches that this master has not asked for yet."""
    to_remove: dict[PlatformId, None] = {}
    is_listed: bool = False
    """This master has heard what exists. Before, it asks for nothing."""
    was_ever_listed: bool = False
    migrations: dict[PlatformId, PlatformId] = {}
    """Old node to the one that shall take its place as soon as it can."""
    suspended_from: Stage | None = None
    """The stage to return to; None: not suspended."""
    is_released: bool = False
    """The suspension lets the running nodes go, too."""
    num_restarts: int = 0
    """Of the whole job, on request."""
    next_group: int = FIRST_NEW_GROUP
    relaunched_groups: dict[int, None] = {}
    failures: list[FailedNode] = []
    """Within the failure window, oldest first."""
    checks_failed: dict[int, None] = {}
    """Worker ranks whose first node failed the node check, and that have not trained since."""
    avoid_hosts: list[str] = []
    short_since: Micros | None = None
    """Since when fewer workers are alive than a world needs."""
    idle_since: Micros | None = None
    """Since when no worker works any more while a chief or an evaluator still waits for its resources."""
    verdict: str = ""
    """Whether enough workers run, in words; said when it changes."""
    servers: ParameterServers = field(default_factory=ParameterServers)

    @property
    def workers(self) -> Replicas:
        return self.replicas[NodeType.WORKER]

    @property
    def is_suspended(self) -> bool:
        return self.suspended_from is not None

    def of_agent(self, agent: NodeId) -> FleetNode | None:
        node = self.agents.get(agent)
        return None if node is None else self.nodes.get(node)

    def holder(self, node_type: NodeType, rank: int) -> FleetNode | None:
        """The newest live node of the rank."""
        replicas = self.replicas.get(node_type)
        node = None if replicas is None else replicas.holders.get(rank)
        return None if node is None else self.nodes[node]

    def is_forgotten(self, node: PlatformId) -> bool:
        """One of ours that ended and was dropped from the table. Ids are never used again.

        Before the first list nothing can have been dropped: a node that is not in the table is of a life whose journal was
        lost, and may have a lower id than one that was heard of already.
        """
        return self.was_ever_listed and node < self.next_id and node not in self.nodes

    def coming_ranks(self) -> list[int]:
        """Worker ranks from which an agent can still come: a node of theirs is live and no agent has attached from it."""
        ranks = self.workers.holders.items()
        return [rank for rank, node in ranks if self.nodes[node].agent is None and not self.nodes[node].is_finished]

    def live_nodes(self, node_type: NodeType) -> Iterator[FleetNode]:
        replicas = self.replicas.get(node_type)
        for node in () if replicas is None else (*replicas.pending, *replicas.running):
            yield self.nodes[node]

    def want(
        self,
        node_type: NodeType,
        rank: int,
        *,
        resource: Resource,
        group: int = -1,
        priority: str = "",
        service_address: str = "",
        is_critical: bool = False,
        is_replacement: bool = False,
        id_: PlatformId | None = None,
        name: str = "",
    ) -> FleetNode:
        """There shall be one more node; it gets an id of its own unless the platform shows one that it has already."""
        node_id = self.next_id if id_ is None else id_
        self.next_id = max(self.next_id, PlatformId(node_id + 1))
        name = name or f"{self.job_name}-{node_type.value}-{node_id}"
        node = FleetNode(
            id=node_id,
            node_type=node_type,
            rank=rank,
            name=name,
            resource=resource,
            group=group,
            priority=priority,
            service_address=service_address or (name if node_type is NodeType.PS else ""),
            is_critical=is_critical,
            is_replacement=is_replacement,
        )
        replicas = self.replicas[node_type]
        self.nodes[node_id] = node
        self.to_launch[node_id] = None
        replicas.pending[node_id] = None
        replicas.hold(rank, node_id)
        replicas.abandoned.pop(rank, None)
        return node

    def want_like(self, old: FleetNode, resource: Resource) -> FleetNode:
        """A node that takes the place of another one."""
        return self.want(
            old.node_type,
            old.rank,
            resource=resource,
            group=old.group,
            priority=old.priority,
            service_address=old.service_address,
            is_critical=old.is_critical,
            is_replacement=True,
        )

    def enter(self, node: FleetNode, phase: NodePhase, now: Micros) -> None:
        """The one place where a phase changes, so that the lists always agree with it."""
        replicas = self.replicas[node.node_type]
        node.phase = phase
        if phase is not NodePhase.INITIAL:
            self.to_launch.pop(node.id, None)
        if phase is NodePhase.RUNNING and node.running_since is None:
            node.running_since = now
        if phase in ENDED and node.ended_at is None:
            node.ended_at = now
        if node.is_pending:
            return  # it keeps its place among those that wait
        replicas.pending.pop(node.id, None)
        if node.is_live:
            replicas.running[node.id] = None
            return
        replicas.running.pop(node.id, None)
        self.to_launch.pop(node.id, None)
        if replicas.holders.get(node.rank) == node.id:
            replicas.let_fall(node.rank)
        self.migrations.pop(node.id, None)
        for old in [old for old, new in self.migrations.items() if new == node.id]:
            # The exchange is called off: the old node goes on.
            del self.migrations[old]
            replicas.hold(node.rank, old)

    def finish(self, node: FleetNode) -> None:
        node.is_finished = True
        self.replicas[node.node_type].finish(node.rank)

    def release(self, node: FleetNode, now: Micros) -> None:
        """The job does not want the node any more; it is never relaunched."""
        node.is_released = True
        self.enter(node, node.phase if node.phase in ENDED else NodePhase.DELETED, now)

    def remove(self, node: FleetNode, removal: Removal) -> None:
        """Ask the platform to have it no more. One that was never asked for cannot be there."""
        if node.removal is None and node.asked_at is not None and not node.is_gone:
            node.removal = removal
            self.to_remove[node.id] = None

    def gone(self, node: FleetNode) -> None:
        """The platform does not show it any more."""
        node.is_gone = node.is_over = True
        node.removal = None
        self.to_remove.pop(node.id, None)

    def forget_oldest(self) -> None:
        """Keep the table from growing with each node that ever was. Looked at only now and then: it is a long table."""
        num_live = sum(replicas.num_live for replicas in self.replicas.values())
        if len(self.nodes) - num_live < self.forget_from:
            return
        former = [
            node.id for node in self.nodes.values() if node.is_released and (node.is_gone or node.asked_at is None)
        ]
        for node in former[: max(0, len(former) - NUM_FORMER)]:
            del self.nodes[node]
        self.forget_from = len(self.nodes) - num_live + NUM_FORMER

    def forget_absent_agents(self, live: Container[NodeId]) -> None:
        """What exists is known by now: who was sent away before needs no mention."""
        self.agents = {agent: node for agent, node in self.agents.items() if agent in live}

    def launch_of(self, node: FleetNode, master_epoch: int) -> LaunchNode:
        return LaunchNode(
            id=node.id,
            node_type=node.node_type,
            rank=node.rank,
            name=node.name,
            resource=node.resource,
            relaunch_count=self.replicas[node.node_type].spent.get(node.rank, 0),
            num_former=self.replicas[node.node_type].num_former(node.rank),
            group=node.group,
            priority=node.priority,
            avoid_hosts=tuple(self.avoid_hosts),
            service_address=node.service_address,
            master_epoch=master_epoch,
        )

    def removal_of(self, node: FleetNode, master_epoch: int) -> RemoveNode:
        assert node.removal is not None, f"{node.label} is not to be removed"
        return RemoveNode(
            id=node.id,
            name=node.name,
            reason=node.removal.reason,
            grace=node.removal.grace,
            cordon_host=node.removal.cordon_host,
            master_epoch=master_epoch,
        )

    def charge(self, node: FleetNode) -> None:
        """A failure of its rank; the budget is never exceeded, also by what turns out to be one only later (I7)."""
        replicas = self.replicas[node.node_type]
        replicas.spent[node.rank] = min(replicas.spent.get(node.rank, 0) + 1, replicas.budget(node.rank))

    def avoid(self, host: str) -> None:
        if host and host not in self.avoid_hosts:
            self.avoid_hosts = [*self.avoid_hosts, host][-NUM_AVOIDED_HOSTS:]

    def note_failure(self, node: FleetNode, now: Micros) -> int:
        """How many nodes have failed within the window, this one included."""
        oldest = now - micros(self.spec.failure_window)
        self.failures = [failed for failed in self.failures if failed.at >= oldest and failed.node != node.id]
        self.failures.append(FailedNode(node.id, now))
        return len(self.failures)

    def forgive(self, node: FleetNode) -> None:
        """It was taken for failed, and had not."""
        self.failures = [failed for failed in self.failures if failed.node != node.id]

    def master_restarted(self) -> None:
        """Neither what exists nor what the former master asked for is known any more."""
        self.is_listed = False
        self.to_remove = {node.id: None for node in self.nodes.values() if node.removal is not None}
        self.to_launch = {node.id: None for node in self.nodes.values() if node.is_live and _is_unseen(node)}

    def status(self) -> tuple[FleetNodeStatus, ...]:
        """By type and rank, newest node of a rank last."""
        nodes = sorted(self.nodes.values(), key=lambda node: (node.node_type.value, node.rank, node.id))
        return tuple(self._status_of(node) for node in nodes)

    def _status_of(self, node: FleetNode) -> FleetNodeStatus:
        replicas = self.replicas[node.node_type]
        return FleetNodeStatus(
            id=node.id,
            node_type=node.node_type,
            rank=node.rank,
            name=node.name,
            phase=node.phase,
            host=node.host,
            exit_reason=node.exit_reason,
            message=node.message[:_SHOWN_MESSAGE],
            num_relaunches=replicas.spent.get(node.rank, 0),
            num_evictions=replicas.evictions.get(node.rank, 0),
            max_relaunches=replicas.budget(node.rank),
            is_critical=node.is_critical,
            is_released=node.is_released,
            group=node.group,
        )


def _is_unseen(node: FleetNode) -> bool:
    return node.phase is NodePhase.INITIAL


def group_of(rank: int, affinity: dict[int, int]) -> int:
    """Groups in ascending order take consecutive ranks; beyond the last there is none."""
    for group, count in sorted(affinity.items()):
        if rank < count:
            return group
        rank -= count
    return -1
