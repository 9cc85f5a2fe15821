"""
A stage with a platform: what the job asks for becomes a node of a small cloud, and a test says what the cloud shows.

Nodes are called by their platform id, which for a job of workers alone begins with its rank. The agent on node 3 is
called "n3". After each command the fleet is checked against itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from dlrover.core.fleet.fleet import Fleet
from dlrover.core.fleet.relaunch import LIVE
from dlrover.core.fleet.replicas import FleetNode
from dlrover.core.job import Origin, Outcome
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    FleetSpec,
    LaunchNode,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    RemoveNode,
    ReplicaSpec,
    Resource,
    Strategy,
)
from dlrover.protocol.messages.job import Attached, Command, PlatformId
from tests.core.scene import Scene, terms


def workers(count: int, **details: Any) -> dict[NodeType, ReplicaSpec]:
    return {NodeType.WORKER: ReplicaSpec(count=count, **details)}


def ps_job(num_workers: int = 2, num_ps: int = 2, *, worker: dict[str, Any] | None = None, **ps: Any) -> FleetSpec:
    """With a chief made of the first worker. Ids: the servers, the chief, the other workers."""
    return FleetSpec(
        replicas={
            NodeType.WORKER: ReplicaSpec(count=num_workers, **(worker or {})),
            NodeType.PS: ReplicaSpec(count=num_ps, **ps),
        },
        strategy=Strategy.PS,
    )


@dataclass
class FleetScene(Scene):
    cloud: dict[int, PlatformNode] = field(default_factory=dict)
    """What the platform has now."""
    launched: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    launches: dict[int, LaunchNode] = field(default_factory=dict)
    removals: dict[int, RemoveNode] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        count: int,
        min_nodes: int | None = None,
        *,
        limits: dict[str, float] | None = None,
        is_checked: bool = True,
        **spec: Any,
    ) -> FleetScene:
        """An all-reduce job whose platform has been asked for all its workers."""
        job_terms = terms(count if min_nodes is None else min_nodes, count, **(limits or {}))
        scene = cls(job_terms, is_checked=is_checked)
        replica = {key: spec.pop(key) for key in ("resource", "max_relaunches", "critical", "priority") if key in spec}
        return scene.begin(FleetSpec(replicas=workers(count, **replica), **spec))

    def begin(self, spec: FleetSpec) -> FleetScene:
        self.do(DefineFleet(spec=spec))
        self.list()
        return self

    def do(self, command: Command, origin: Origin | None = None) -> Outcome:
        outcome = super().do(command, origin)
        for effect in outcome.effects:
            if isinstance(effect, LaunchNode):
                self._launch(effect)
            elif isinstance(effect, RemoveNode):
                self.removed.append(effect.id)
                self.removals[effect.id] = effect
                self.cloud.pop(effect.id, None)
        check_fleet(self.job.state.fleet)
        return outcome

    def _launch(self, effect: LaunchNode) -> None:
        assert effect.master_epoch == self.job.master_epoch
        if effect.id not in self.launches:
            self.launched.append(effect.id)
            self.cloud[effect.id] = PlatformNode(
                id=effect.id,
                node_type=effect.node_type,
                rank=effect.rank,
                phase=NodePhase.PENDING,
                name=effect.name,
                relaunch_count=effect.relaunch_count,
                group=effect.group,
                service_address=effect.service_address,
            )
        self.launches[effect.id] = effect

    def tick(self, seconds: float | None = None) -> list[Outcome]:
        outcomes = super().tick(seconds)
        assert not self.job.due(self.now), "a deadline that has passed is dealt with"
        return outcomes

    def list(self) -> Outcome:
        """The platform tells everything that it has."""
        return self.do(NodesListed(nodes=tuple(self.cloud[id_] for id_ in sorted(self.cloud))))

    def show(self, node: int, phase: NodePhase, **details: Any) -> Outcome:
        """The platform tells that a node has changed."""
        known = self.cloud[node]
        self.cloud[node] = replace(known, phase=phase, **details)
        return self.do(NodeChanged(kind=NodeEventKind.MODIFIED, node=self.cloud[node]))

    def fail(self, node: int | str, *failures: Any, **details: Any) -> Outcome:  # type: ignore[override]
        """A node of the platform (by number) or the workers of an agent (by name) failed."""
        if isinstance(node, str):
            return super().fail(node, *failures, **details)
        return self.show(node, NodePhase.FAILED, **details)

    def vanish(self, node: int, **details: Any) -> Outcome:
        """The platform tells that a node was deleted."""
        last = replace(self.cloud.pop(node), **details)
        return self.do(NodeChanged(kind=NodeEventKind.DELETED, node=last))

    def run(self, *nodes: int) -> FleetScene:
        """These run on the platform; all that it has, if none is named."""
        for node in nodes or tuple(self.cloud):
            self.show(node, NodePhase.RUNNING, host=f"host-{node}")
        return self

    def come(self, *nodes: int) -> FleetScene:
        """Agents on these attach."""
        for node in nodes:
            self.attach(f"n{node}", platform_node=PlatformId(node), rank=self.fleet.nodes[PlatformId(node)].rank)
        return self

    def train(self, *nodes: int) -> FleetScene:
        """These run, their agents attach and join."""
        self.run(*nodes)
        self.come(*nodes)
        return self.rejoin_nodes(*nodes)

    def rejoin_nodes(self, *nodes: int) -> FleetScene:
        self.rejoin(*(f"n{node}" for node in nodes))
        return self

    def attach(self, name: str, **details: Any) -> Attached:
        if name.startswith("n"):
            details.setdefault("platform_node", PlatformId(int(name[1:])))
        return super().attach(name, **details)

    @property
    def fleet(self) -> Fleet:
        assert self.job.state.fleet is not None
        return self.job.state.fleet

    def node(self, node: int) -> FleetNode:
        return self.fleet.nodes[PlatformId(node)]

    def phase(self, node: int) -> NodePhase:
        return self.node(node).phase

    def spent(self, rank: int = 0, node_type: NodeType = NodeType.WORKER) -> int:
        return self.fleet.replicas[node_type].spent.get(rank, 0)


def check_fleet(fleet: Fleet | None) -> None:
    """What the fleet promises about itself, and I7."""
    if fleet is None:
        return
    for node_type, replicas in fleet.replicas.items():
        live = [node for node in fleet.nodes.values() if node.node_type is node_type and node.is_live]
        assert sorted(replicas.pending) == sorted(node.id for node in live if node.phase is not NodePhase.RUNNING)
        assert sorted(replicas.running) == sorted(node.id for node in live if node.phase is NodePhase.RUNNING)
        settled = [node for node in live if node.id not in fleet.migrations]
        assert sorted(node.rank for node in settled) == sorted(replicas.holders), (
            "one live node per rank, and all known"
        )
        assert {node.rank: node.id for node in settled} == replicas.holders
        assert replicas.num_done == sum(1 for rank in replicas.finished if rank not in replicas.holders)
        for rank, spent in replicas.spent.items():
            assert spent <= replicas.budget(rank), f"I7: {node_type} {rank} was relaunched {spent} times"
    for node in fleet.nodes.values():
        assert node.id < fleet.next_id
        assert node.phase in LIVE or node.phase in (NodePhase.DELETED, NodePhase.FAILED, NodePhase.SUCCEEDED)
        assert not (node.is_released and node.phase in LIVE), "whom nobody wants is not live"
        if node.agent is not None:
            assert fleet.agents.get(node.agent) == node.id
        assert node.removal is None or node.is_released
    for old, new in fleet.migrations.items():
        assert fleet.nodes[old].is_live
        assert fleet.nodes[new].is_live
        assert fleet.nodes[old].rank == fleet.nodes[new].rank
    for id_ in fleet.to_launch:
        assert fleet.nodes[id_].phase is NodePhase.INITIAL
        assert fleet.nodes[id_].is_live


OOM = NodeExit.OOM
SMALL = Resource(cpu=1, memory_mb=655)
