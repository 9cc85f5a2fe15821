"""
What the fleet consists of: its nodes, those of one type by rank, and the servers that the workers use.
"""

from __future__ import annotations

import itertools

from msgspec import Struct

from dlrover.core.fleet.relaunch import LIVE, MAX_BUDGET
from dlrover.protocol.messages.fleet import NodeExit, NodePhase, NodeType, ReplicaSpec, Resource, VersionType
from dlrover.protocol.messages.job import Micros, NodeId, PlatformId

REMOVAL_GRACE = 30.0
NEVER_RESTORED = -1


class Removal(Struct, frozen=True):
    """The platform shall not have this node any more."""

    reason: str
    grace: float = REMOVAL_GRACE
    cordon_host: str = ""


class FleetNode(Struct, kw_only=True):
    """One node of the platform."""

    id: PlatformId
    node_type: NodeType
    rank: int
    name: str
    resource: Resource
    phase: NodePhase = NodePhase.INITIAL
    """Changed by `Fleet.enter` only."""
    priority: str = ""
    group: int = -1
    service_address: str = ""
    host: str = ""
    message: str = ""
    """What the platform or the agent said last. Free text, and therefore apart from the reason."""
    exit_reason: NodeExit = NodeExit.NONE
    asked_at: Micros | None = None
    """When the platform was first asked for it: it waits since then."""
    refused_at: Micros | None = None
    """When the platform last said that it does not launch it now; `message` has the reason."""
    running_since: Micros | None = None
    ended_at: Micros | None = None
    agent: NodeId | None = None
    """Attached from it; None: no agent, or not any more."""
    is_finished: bool = False
    """All its workers ended well: whatever becomes of it now, no other node has to do its work again."""
    is_critical: bool = False
    is_released: bool = False
    """The job does not want it any more. Never taken back."""
    is_first: bool = False
    """Of a worker that the job was defined with, and the first of its rank."""
    is_replacement: bool = False
    """Another node of the rank ended before."""
    is_oom_replacement: bool = False
    is_presumed: bool = False
    """We took it for gone before the platform said anything; what it says later decides what that costs."""
    is_over: bool = False
    """The platform itself says that its processes have ended."""
    is_gone: bool = False
    """The platform does not show it any more."""
    is_wait_over: bool = False
    """A parameter server that did not come in time: the workers go on without it."""
    removal: Removal | None = None
    """Open until the platform does not show the node any more."""

    @property
    def is_live(self) -> bool:
        """Whether it does, or will do, what it was launched for."""
        return not self.is_released and self.phase in LIVE

    @property
    def is_pending(self) -> bool:
        return not self.is_released and self.phase in (NodePhase.INITIAL, NodePhase.PENDING)

    @property
    def label(self) -> str:
        return f"{self.node_type} {self.rank} ({self.name})"


class Replicas(Struct, kw_only=True):
    """The nodes of one type, as lists that are counted and never searched."""

    spec: ReplicaSpec
    target: int
    """So many shall be there. Who has finished counts as there when nodes are added, and not when some are taken away."""
    pending: dict[PlatformId, None] = {}
    """Live ones that do not run yet, the oldest first."""
    running: dict[PlatformId, None] = {}
    holders: dict[int, PlatformId] = {}
    """Rank to its newest live node. Changed by `hold` and `let_fall` only."""
    finished: dict[int, None] = {}
    """Ranks whose work is done. Changed by `finish` and `start_over` only."""
    abandoned: dict[int, None] = {}
    """Ranks that ended for good without having done it."""
    budgets: dict[int, int] = {}
    """Of critical ranks with a budget of their own."""
    spent: dict[int, int] = {}
    """Relaunches after failures."""
    evictions: dict[int, int] = {}
    """Relaunches of nodes that were taken away."""
    num_done: int = 0
    """Ranks that finished and have no node any more. Kept, because each command asks for it."""

    def __post_init__(self) -> None:
        """Also when a snapshot is read, which may be of a master that did not keep it."""
        self.num_done = sum(1 for rank in self.finished if rank not in self.holders)

    def budget(self, rank: int) -> int:
        return self.budgets.get(rank, min(self.spec.max_relaunches, MAX_BUDGET))

    def num_former(self, rank: int) -> int:
        """How often the rank got another node."""
        return self.spent.get(rank, 0) + self.evictions.get(rank, 0)

    @property
    def num_live(self) -> int:
        return len(self.pending) + len(self.running)

    def hold(self, rank: int, node: PlatformId) -> None:
        if rank in self.finished and rank not in self.holders:
            self.num_done -= 1
        self.holders[rank] = node

    def let_fall(self, rank: int) -> None:
        """The rank has no node any more."""
        del self.holders[rank]
        if rank in self.finished:
            self.num_done += 1

    def finish(self, rank: int) -> None:
        if rank not in self.finished and rank not in self.holders:
            self.num_done += 1
        self.finished[rank] = None

    def start_over(self) -> None:
        """The work of all ranks is to be done again."""
        self.finished, self.abandoned = {}, {}
        self.num_done = 0

    def lacking(self) -> list[int]:
        """The lowest ranks that need a node for the target to be met."""
        num_missing = self.target - len(self.holders) - self.num_done
        free = (rank for rank in itertools.count() if rank not in self.holders and rank not in self.finished)
        return list(itertools.islice(free, max(0, num_missing)))


class FailedNode(Struct, frozen=True):
    node: PlatformId
    at: Micros


class ParameterServers(Struct):
    """What the workers use, and what was decided about it since."""

    current: list[PlatformId] = []
    """The cluster the workers use now, in rank order; a replacement has taken the place of the server it replaces."""
    is_changed: bool = True
    """Something happened since the workers last said that they are ready. True at the start: they never said so."""
    dropped: dict[PlatformId, None] = {}
    """Still there, but not in the next cluster."""
    global_version: int = 0
    local_versions: dict[str, int] = {}
    restored_versions: dict[str, int] = {}

    def replaced(self, old: PlatformId, new: PlatformId) -> None:
        self.current = [new if node == old else node for node in self.current]
        self.is_changed = True

    def lost(self) -> None:
        """A server is not there any more: what the workers computed with it is of an older version."""
        self.global_version += 1
        self.is_changed = True

    def dismissed(self) -> None:
        """There are none any more, and none is missed."""
        self.current, self.dropped = [], {}

    def version(self, kind: VersionType, node_type: NodeType, rank: int) -> int:
        match kind:
            case VersionType.GLOBAL:
                return self.global_version
            case VersionType.LOCAL:
                return self.local_versions.get(_key(node_type, rank), 0)
            case VersionType.RESTORED:
                return self.restored_versions.get(_key(node_type, rank), NEVER_RESTORED)

    def set_version(self, kind: VersionType, node_type: NodeType, rank: int, version: int) -> None:
        match kind:
            case VersionType.GLOBAL:
                self.global_version = version
            case VersionType.LOCAL:
                self.local_versions[_key(node_type, rank)] = version
            case VersionType.RESTORED:
                self.restored_versions[_key(node_type, rank)] = version


def _key(node_type: NodeType, rank: int) -> str:
    return f"{node_type.value}-{rank}"
