"""
A job that scales itself, with a platform that obeys at once and workers whose step time follows a law.

Light, because properties run thousands of them: commands go straight into the job, and after each one the agents do what they are told.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from dlrover.core.job import Job, Outcome
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    FleetSpec,
    LaunchNode,
    NodeChanged,
    NodeEventKind,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    RemoveNode,
    ReplicaSpec,
    Resource,
)
from dlrover.protocol.messages.identity import Incarnation, NodeId, PlatformId, Round, micros
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    Command,
    JobTerms,
    Join,
    JoinRendezvous,
    Leave,
    LeaveJob,
    LeaveReason,
    Limits,
    MasterStarted,
    Micros,
)
from dlrover.protocol.messages.scaling import (
    AskScaling,
    Configuration,
    DefineScaling,
    GroupSize,
    PlanOffered,
    RoomSeen,
    RunMeasured,
    ScaleMode,
    ScaleTerms,
    ScalingStatus,
    SizePlan,
)

START = Micros(0)
Law = Callable[[int], float]
"""Step time of a world of so many nodes."""


def family(thetas: tuple[float, float, float, float], batch: int = 32) -> Law:
    """A law of the family that is fitted."""

    def step_time(nodes: int) -> float:
        network = 1.0 if nodes > 1 else 0.0
        return thetas[0] + thetas[1] * batch + thetas[2] * network + thetas[3] * network * (nodes - 2)

    return step_time


@dataclass
class Driver:
    law: Law
    min_nodes: int = 1
    max_nodes: int = 8
    unit: int = 1
    start: int = 0
    terms: ScaleTerms = field(default_factory=lambda: ScaleTerms(mode=ScaleMode.ON))
    noise: float = 0.0
    seed: int = 0
    batch: int = 32
    room: int | None = 1_000
    fleet_count: int = 0
    """Workers that the fleet is defined with; 0: the maximum."""
    limits: Resource = field(default_factory=Resource)
    resource: Resource = field(default_factory=Resource)
    is_platform_quick: bool = True
    start_plan: SizePlan | None = None
    """Offered before the fleet is defined."""
    now: Micros = START
    number: int = 0
    agents: dict[NodeId, Incarnation] = field(default_factory=dict)
    offers: int = 0
    sizes: list[int] = field(default_factory=list)
    """Of each world."""
    verdicts: list[str] = field(default_factory=list)
    launches: list[LaunchNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.job = Job()
        self.job_terms = JobTerms(
            limits=Limits(min_nodes=self.min_nodes, max_nodes=self.max_nodes, node_unit=self.unit, first_call=0.0)
        )
        terms = replace(self.terms, nodes_start=self.start or self.min_nodes)
        self.do(MasterStarted(1, "a-job"))
        self.do(DefineScaling(terms=terms))
        if self.start_plan is not None:
            self.do(PlanOffered(plan=self.start_plan))
        replicas = {NodeType.WORKER: ReplicaSpec(count=self.fleet_count or self.max_nodes, resource=self.resource)}
        self.do(DefineFleet(spec=FleetSpec(replicas=replicas, limits=self.limits)))
        self.do(NodesListed(nodes=()))
        if self.room is not None:
            self.do(RoomSeen(most=self.room))

    def do(self, command: Command) -> Outcome:
        outcome = self.job.apply(command, self.now)
        self.verdicts.extend(outcome.verdicts)
        for effect in outcome.effects:
            if isinstance(effect, LaunchNode):
                self.launches.append(effect)
                if self.is_platform_quick:
                    self.bring(effect)
            elif isinstance(effect, RemoveNode):
                self._show(effect.id, 0, NodePhase.DELETED, NodeEventKind.DELETED)
        self._obey()
        return outcome

    def bring(self, launch: LaunchNode) -> None:
        """The platform starts it, and its agent comes."""
        fleet = self.job.state.fleet
        assert fleet is not None
        node = fleet.nodes.get(launch.id)
        if node is None or not node.is_live:
            return
        self._show(launch.id, launch.rank, NodePhase.RUNNING, NodeEventKind.MODIFIED)
        self._attach(launch)

    def bring_late(self, launch: LaunchNode) -> None:
        """What is still pending."""
        fleet = self.job.state.fleet
        assert fleet is not None
        node = fleet.nodes.get(launch.id)
        if node is not None and node.is_pending:
            self.bring(launch)

    def _show(self, id_: PlatformId, rank: int, phase: NodePhase, kind: NodeEventKind) -> None:
        shown = PlatformNode(id=id_, node_type=NodeType.WORKER, rank=rank, phase=phase, host=f"m{id_}")
        self.do(NodeChanged(kind=kind, node=shown))

    def _attach(self, launch: LaunchNode) -> None:
        attach = Attach(
            launch=f"l{launch.id}",
            host=f"h{launch.id}",
            terms=self.job_terms,
            local_world_size=1,
            platform_node=launch.id,
            node_rank=None,
            life=f"f{launch.id}",
        )
        outcome = self.job.apply(attach, self.now)
        reply = outcome.reply
        assert isinstance(reply, Attached)
        self.agents[reply.node] = reply.incarnation
        self._obey()

    def _obey(self) -> None:
        """Agents join and leave as they are told, until nothing changes."""
        for _ in range(4 * (len(self.agents) + 1)):
            moved = False
            for id_, incarnation in list(self.agents.items()):
                if id_ not in self.job.state.nodes.live:
                    del self.agents[id_]
                    continue
                match self.job.desired(id_).wish:
                    case Join():
                        self.offers += 1
                        join = JoinRendezvous(
                            node=id_,
                            incarnation=incarnation,
                            round=Round(self.job.state.rendezvous.next_round),
                            local_world_size=1,
                            offer=f"h:{self.offers}",
                        )
                        self._apply(join)
                        moved = True
                    case Leave():
                        self._apply(LeaveJob(node=id_, incarnation=incarnation, reason=LeaveReason.DISMISSED))
                        del self.agents[id_]
                        moved = True
            if not moved:
                break
        world = self.job.state.rendezvous.world
        is_active = world is not None and self.job.state.rendezvous.is_active
        if world is not None and is_active and (not self.sizes or self.sizes[-1] != len(world.members)):
            self.sizes.append(len(world.members))

    def _apply(self, command: Command) -> None:
        outcome = self.job.apply(command, self.now)
        self.verdicts.extend(outcome.verdicts)
        for effect in outcome.effects:
            if isinstance(effect, LaunchNode):
                self.launches.append(effect)
                if self.is_platform_quick:
                    self.bring(effect)

    @property
    def nodes(self) -> int:
        world = self.job.state.rendezvous.world
        return 0 if world is None else len(world.members)

    @property
    def target(self) -> int:
        return self.job.state.limits.max_nodes

    def wait(self, seconds: float) -> Driver:
        """Time passes, and deadlines with it."""
        until = Micros(self.now + micros(seconds))
        while True:
            at = self.job.next_deadline()
            if at is None or at > until:
                break
            self.now = max(self.now, at)
            for deadline in self.job.due(self.now):
                self.do(deadline)
        self.now = until
        return self

    def configuration(self, nodes: int | None = None) -> Configuration:
        count = self.nodes if nodes is None else nodes
        size = GroupSize(NodeType.WORKER, count, self.resource.cpu, self.resource.memory_mb)
        return Configuration(groups=(size,), micro_batch=self.batch)

    def measured(self, seconds: float = 60.0, **details: object) -> RunMeasured:
        """As the statistics would tell of the world as it is."""
        step_time = self.law(self.nodes)
        steps = max(20, int(seconds / step_time))
        seen = sorted(step_time * max(0.05, self.chance.gauss(1.0, self.noise)) for _ in range(min(steps, 61)))
        self.number += 1
        values = {
            "number": self.number,
            "configuration": self.configuration(),
            "seconds": seconds,
            "steps": steps,
            "step_time": seen[len(seen) // 2],
        }
        return RunMeasured(**{**values, **details})  # type: ignore[arg-type]

    def minute(self, **details: object) -> Driver:
        """Warm up, train, and tell of it."""
        self.wait(75.0)
        self.do(self.measured(**details))
        return self

    def minutes(self, count: int) -> Driver:
        for _ in range(count):
            self.minute()
        return self

    @property
    def status(self) -> ScalingStatus:
        answer = self.job.ask(AskScaling())
        assert isinstance(answer, ScalingStatus)
        return answer

    def speed(self, nodes: int) -> float:
        return nodes * self.batch / self.law(nodes)


def worthwhile(driver: Driver, share: float) -> Iterable[int]:
    """Sizes that can be reached from the start by steps each of which brings its share."""
    nodes = driver.start or driver.min_nodes
    yield nodes
    while nodes + driver.unit <= driver.max_nodes:
        ratio = driver.speed(nodes + driver.unit) / driver.speed(nodes)
        if ratio - 1 < share * driver.unit / nodes:
            return
        nodes += driver.unit
        yield nodes
