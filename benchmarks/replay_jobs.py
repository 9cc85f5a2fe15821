"""
How a job with parameter servers decides on its size, under each policy of the cluster replay.

`FittedJob` is the real core: its commands, brakes, probation and plans, with a platform that obeys at once. `HistoricalJob` asks the historical algorithms
in the order and at the moments of spec 07 §9 and §11.2. Both see what a master would have measured, and nothing of the law.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace
from replay_laws import LEAST_CORES, LEAST_MEMORY, MOST_CORES, MOST_MEMORY, MOST_SERVERS, MOST_WORKERS, Size

from dlrover.core.fleet.fleet import Fleet
from dlrover.core.fleet.replicas import FleetNode
from dlrover.core.goodput.accountant import BookedFault
from dlrover.core.job import Job
from dlrover.core.scaling import facts
from dlrover.core.scaling.history.parameters import PHASE_KEY
from dlrover.core.scaling.history.seen import (
    COMPLETED,
    FormerRun,
    HistoryPlan,
    JobSeen,
    NodeSeen,
    NodeUsed,
    Recipe,
    UseRecord,
    former_run,
)
from dlrover.core.scaling.history.selection import (
    CREATE,
    PS_INITIAL,
    PS_RUNNING,
    WORKER_INITIAL,
    WORKER_RUNNING,
    HistoryAsked,
    answer,
)
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
    PsReady,
    RemoveNode,
    ReplicaSpec,
    Resource,
    Strategy,
)
from dlrover.protocol.messages.goodput import TimeClass
from dlrover.protocol.messages.identity import Micros, NodeRank, PlatformId, Round, micros
from dlrover.protocol.messages.job import Command, MasterStarted
from dlrover.protocol.messages.scaling import (
    Configuration,
    DefineScaling,
    GroupSize,
    JobFacts,
    NodeUse,
    PlannedGroup,
    PlanOffered,
    RunMeasured,
    ScaleMode,
    ScaleOutcome,
    ScaleTerms,
    SizePlan,
    TypeUse,
)

FIRST_LOOK = 75.0
"""Seconds: 10 to warm up, 60 that are measured, and the report."""
SECOND_LOOK = 60.0
SLOW_LOOK = 600.0
"""A report comes when speed has moved by 2 %, which the drift does about as often; or when a brake opens."""


@dataclass(frozen=True)
class Seen:
    """What a master has measured since the job has its size."""

    now: float
    seconds: float
    """Since the job has this size."""
    step_time: float
    """Of one worker."""
    done: float
    """Batches so far."""
    work: float
    worker_cores: float
    server_cores: tuple[float, ...]
    worker_memory: float
    server_memory: float
    most_cores: float
    """That the job may have now: its own, and those that no job waits for."""


class ServerJob(Protocol):
    """A job that is asked for its size when something was measured."""

    size: Size

    def look(self, seen: Seen) -> float:
        """May change `size`. Seconds until the next measurement."""
        ...

    def remember(self, began_at: float) -> JobSeen:
        """For jobs that come later."""
        ...


def configuration_of(size: Size) -> Configuration:
    groups = (
        GroupSize(NodeType.WORKER, size.workers, size.worker_cores, size.worker_memory),
        GroupSize(NodeType.PS, size.servers, statistics.median(size.server_cores), size.server_memory),
    )
    return Configuration(groups=groups)


def run_of(seen: Seen, number: int, configuration: Configuration, servers: tuple[PlatformId, ...]) -> RunMeasured:
    nodes = tuple(
        NodeUse(
            platform_node=id_,
            node_type=NodeType.PS,
            rank=NodeRank(rank),
            cpu=cpu,
            cpu_max=cpu,
            memory_mb=seen.server_memory,
            seconds=min(180.0, seen.seconds),
        )
        for rank, (id_, cpu) in enumerate(zip(servers, seen.server_cores, strict=True))
    )
    busiest = max(seen.server_cores)
    uses = tuple(
        TypeUse(node_type=group.node_type, cpu=cpu, cpu_most=cpu * 1.05, cpu_max=cpu, memory_mb=memory)
        for group in configuration.groups
        for cpu, memory in [
            (busiest, seen.server_memory) if group.node_type is NodeType.PS else (seen.worker_cores, seen.worker_memory)
        ]
    )
    return RunMeasured(
        number=number,
        configuration=configuration,
        seconds=max(1.0, seen.seconds),
        steps=max(20, int(seen.seconds / seen.step_time)),
        step_time=seen.step_time,
        last_step=int(seen.done),
        types=uses,
        nodes=nodes,
    )


@dataclass
class FixedJob:
    """As its user or history sized it at the start."""

    uid: str
    recipe: Recipe
    size: Size
    runs: list[FormerRun] = field(default_factory=list)

    def look(self, seen: Seen) -> float:
        ids = tuple(PlatformId(rank) for rank in range(self.size.servers))
        run = run_of(seen, len(self.runs) + 1, configuration_of(self.size), ids)
        self.runs.append(former_run(run, ended_at=seen.now))
        return SLOW_LOOK

    def remember(self, began_at: float) -> JobSeen:
        return JobSeen(
            uid=self.uid, recipe=self.recipe, began_at=began_at, exit_reason=COMPLETED, runs=tuple(self.runs)
        )


class FittedJob:
    """The real core. The user gave bounds instead of numbers: the first size is a start plan."""

    def __init__(self, uid: str, recipe: Recipe, first: Size, *, work: float, pause: float, now: float) -> None:
        self._uid, self._recipe, self._pause, self._began_at = uid, recipe, pause, now
        self._first = first
        self._number = 0
        self._runs: dict[int, FormerRun] = {}
        self._shown: dict[PlatformId, PlatformNode] = {}
        self._now = Micros(0)
        self.job = Job()
        self._do(MasterStarted(1, uid))
        largest = Resource(cpu=float(MOST_CORES), memory_mb=MOST_MEMORY)
        smallest = Resource(cpu=min(float(LEAST_CORES), first.worker_cores, *first.server_cores), memory_mb=1024)
        self._do(DefineScaling(terms=ScaleTerms(mode=ScaleMode.ON, smallest=smallest, largest=largest)))
        groups = (
            PlannedGroup(node_type=NodeType.WORKER, count=first.workers, cpu=first.worker_cores),
            PlannedGroup(node_type=NodeType.PS, count=first.servers, cpu=first.server_cores[0]),
        )
        self._do(PlanOffered(plan=SizePlan(groups=groups), source="the replay"))
        replicas = {
            NodeType.WORKER: ReplicaSpec(count=MOST_WORKERS, resource=Resource(memory_mb=first.worker_memory)),
            NodeType.PS: ReplicaSpec(count=MOST_SERVERS, resource=Resource(memory_mb=first.server_memory)),
        }
        self._do(DefineFleet(spec=FleetSpec(replicas=replicas, strategy=Strategy.PS)))
        self._do(NodesListed(nodes=()))
        self._do(JobFacts(max_steps=int(work)))
        self.size = self._size_now()

    def look(self, seen: Seen) -> float:
        self._now = max(self._now, micros(seen.now - self._began_at))
        fleet = self._fleet
        fleet.spec = replace(fleet.spec, limits=Resource(cpu=seen.most_cores))
        self._tell_pause()
        self._number += 1
        run = run_of(seen, self._number, self._configuration(), tuple(node.id for node in self._nodes(NodeType.PS)))
        self._runs[self._number] = former_run(run, ended_at=seen.now)
        self._do(run)
        for deadline in self.job.due(self._now):
            self._do(deadline)
        last = self.job.state.scaling.decisions[-1:]
        if last and last[0].outcome is ScaleOutcome.TAKEN_BACK and last[0].at == self._now:
            self._runs[self._number] = former_run(run, ended_at=seen.now, has_paid=False)
        before = self.size
        memory = {"worker_memory": before.worker_memory, "server_memory": before.server_memory}
        self.size = self._size_now()._replace(**memory)  # nodes that ran out of memory keep what they got
        if self.size != before:
            return FIRST_LOOK
        at = self.job.next_deadline()
        wait = SLOW_LOOK if at is None else (at - self._now) / 1e6 + 1.0
        return min(SLOW_LOOK, max(SECOND_LOOK, wait))

    def remember(self, began_at: float) -> JobSeen:
        runs = tuple(self._runs.values())
        return JobSeen(uid=self._uid, recipe=self._recipe, began_at=began_at, exit_reason=COMPLETED, runs=runs)

    def _tell_pause(self) -> None:
        """As if the job had measured what a change of its kind costs."""
        spent = {TimeClass.RENDEZVOUS: round(self._pause * 1e6 * max(1, facts.num_training(self.job.state)))}
        fault = BookedFault(1, Micros(0), "membership", "", Round(1), micros=spent, recovered_at=Micros(1))
        self.job.state.goodput.faults = [fault]

    # The platform obeys at once.

    def _do(self, command: Command) -> None:
        waiting: list[Command] = [command]
        while waiting:
            told = waiting.pop(0)
            outcome = self.job.apply(told, self._now)
            for effect in outcome.effects:
                if isinstance(effect, LaunchNode) and effect.id not in self._shown:
                    node = PlatformNode(
                        id=effect.id,
                        node_type=effect.node_type,
                        rank=effect.rank,
                        phase=NodePhase.RUNNING,
                        name=effect.name,
                        service_address=effect.service_address,
                        host=f"machine-{effect.id}",
                    )
                    self._shown[effect.id] = node
                    waiting.append(NodeChanged(kind=NodeEventKind.MODIFIED, node=node))
                elif isinstance(effect, RemoveNode) and effect.id in self._shown:
                    gone = replace(self._shown.pop(effect.id), phase=NodePhase.DELETED)
                    waiting.append(NodeChanged(kind=NodeEventKind.DELETED, node=gone))
            fleet = self.job.state.fleet
            is_changed = fleet is not None and fleet.servers.is_changed
            if is_changed and not waiting and not isinstance(told, PsReady):
                waiting.append(PsReady())

    @property
    def _fleet(self) -> Fleet:
        assert self.job.state.fleet is not None, "it was defined"
        return self.job.state.fleet

    def _nodes(self, kind: NodeType) -> list[FleetNode]:
        return sorted(self._fleet.live_nodes(kind), key=lambda node: (node.rank, node.id))

    def _configuration(self) -> Configuration:
        groups = []
        for kind in (NodeType.PS, NodeType.CHIEF, NodeType.WORKER):
            resources = [node.resource for node in self._nodes(kind)]
            if resources:
                cores = statistics.median(resource.cpu for resource in resources)
                groups.append(GroupSize(kind, len(resources), cores, resources[0].memory_mb))
        order = list(NodeType)
        return Configuration(groups=tuple(sorted(groups, key=lambda group: order.index(group.node_type))))

    def _size_now(self) -> Size:
        workers = [node.resource for kind in (NodeType.CHIEF, NodeType.WORKER) for node in self._nodes(kind)]
        servers = [node.resource for node in self._nodes(NodeType.PS)]
        return Size(
            len(workers),
            len(servers),
            sum(resource.cpu for resource in workers) / len(workers),
            tuple(resource.cpu for resource in servers),
            self._first.worker_memory,
            self._first.server_memory,
        )


LOOP = 30.0
BETWEEN_PLANS, BETWEEN_SERVERS = 300.0, 3600.0
FIRST_RECORDS = 5


class HistoricalJob:
    """
    Spec 07 in full: the job begins with what the CREATE stage gives, then WORKER_INITIAL, PS_INITIAL, RUNNING.

    A loop of 30 s, once five samples are there; 300 s between plans, 3,600 s between changes of servers; phases `initial`, `sample`, `stable`. The
    user gives no numbers, which favours these rules: given numbers would win and stay (§9.2).
    """

    def __init__(
        self, uid: str, recipe: Recipe, first: Size, *, work: float, operations: int, former: list[JobSeen], now: float
    ) -> None:
        self._uid, self._recipe, self._former, self._began_at = uid, recipe, former, now
        self._facts = JobFacts(max_steps=int(work), recv_op_count=operations)
        self._runs: list[FormerRun] = []
        self._records: list[UseRecord] = []
        self._stage = WORKER_INITIAL
        self._phase = "sample"
        self._planned_at = self._servers_at = -math.inf
        self._chance = random.Random(uid)
        self.size = first
        plan = self._ask(CREATE, now)
        if plan is not None:
            self.size = merged(self.size, plan)

    def look(self, seen: Seen) -> float:
        self._runs.append(
            former_run(run_of(seen, len(self._runs) + 1, configuration_of(self.size), self._ids()), ended_at=seen.now)
        )
        self._note(seen)
        if len(self._records) < FIRST_RECORDS or seen.now - self._planned_at < BETWEEN_PLANS:
            return LOOP
        before = self.size
        plan = self._next(seen.now)
        if plan is not None:
            wanted = merged(self.size, plan)
            if wanted.cores <= seen.most_cores and wanted != self.size:
                self.size = wanted
                self._planned_at = seen.now
        if (self.size.servers, self.size.server_cores) != (before.servers, before.server_cores):
            self._servers_at = seen.now
        if self.size != before:
            return FIRST_LOOK
        return BETWEEN_PLANS if self._stage == "running" else LOOP

    def remember(self, began_at: float) -> JobSeen:
        return JobSeen(
            uid=self._uid,
            recipe=self._recipe,
            began_at=began_at,
            exit_reason=COMPLETED,
            facts=self._facts,
            runs=tuple(self._runs),
            records=tuple(self._records[-60:]),
            nodes=self._nodes(),
        )

    def _next(self, now: float) -> HistoryPlan | None:
        if self._stage == WORKER_INITIAL:
            self._stage = PS_INITIAL
            return self._ask(WORKER_INITIAL, now, "initial")
        may_move = now - self._servers_at > BETWEEN_SERVERS
        if self._stage == PS_INITIAL:
            self._stage = "running"
            return self._ask(PS_INITIAL, now) if may_move else None
        plan = self._ask(PS_RUNNING, now) if may_move else None
        if plan is None:
            phase, self._phase = self._phase, "stable"
            plan = self._ask(WORKER_RUNNING, now, phase)
        return plan

    def _ask(self, stage: str, now: float, phase: str = "") -> HistoryPlan | None:
        job = JobSeen(
            uid=self._uid,
            recipe=self._recipe,
            began_at=self._began_at,
            facts=self._facts,
            records=tuple(self._records[-60:]),
            nodes=self._nodes() if self._records else (),
        )
        asked = HistoryAsked(stage=stage, config={PHASE_KEY: phase} if phase else {}, now=now)
        return answer(asked, job, self._former, {}).plan

    def _ids(self) -> tuple[PlatformId, ...]:
        return tuple(PlatformId(rank) for rank in range(self.size.servers))

    def _nodes(self) -> tuple[NodeSeen, ...]:
        size = self.size
        servers = [
            NodeSeen(id=rank, node_type=NodeType.PS, cpu=cores, memory_mb=float(size.server_memory))
            for rank, cores in enumerate(size.server_cores)
        ]
        workers = [
            NodeSeen(
                id=1000 + rank, node_type=NodeType.WORKER, cpu=size.worker_cores, memory_mb=float(size.worker_memory)
            )
            for rank in range(size.workers)
        ]
        return (*servers, *workers)

    def _note(self, seen: Seen) -> None:
        servers = tuple(NodeUsed(rank, cpu, seen.server_memory) for rank, cpu in enumerate(seen.server_cores))
        workers = tuple(
            NodeUsed(1000 + rank, seen.worker_cores, seen.worker_memory) for rank in range(self.size.workers)
        )
        speed = self.size.workers / seen.step_time
        self._records.append(UseRecord(step=int(seen.done), speed=speed, workers=workers, servers=servers))


def merged(size: Size, plan: HistoryPlan) -> Size:
    """None keeps; every number within what a node and a type may have (§2.2)."""
    workers, servers = plan.group(NodeType.WORKER), plan.group(NodeType.PS)
    if workers is not None:
        size = size._replace(
            workers=min(MOST_WORKERS, max(1, workers.count or size.workers)),
            worker_cores=_cores(workers.cpu, size.worker_cores),
            worker_memory=_memory(workers.memory_mb, size.worker_memory),
        )
    if servers is not None:
        count = min(MOST_SERVERS, max(1, servers.count or size.servers))
        cores = _cores(servers.cpu, statistics.median(size.server_cores))
        memory = _memory(servers.memory_mb, size.server_memory)
        size = size._replace(servers=count, server_cores=(cores,) * count, server_memory=memory)
    for node in plan.nodes:
        if 0 <= node.id < size.servers:
            each = list(size.server_cores)
            each[node.id] = _cores(node.cpu, each[node.id])
            memory = _memory(node.memory_mb, size.server_memory)
            size = size._replace(server_cores=tuple(each), server_memory=max(size.server_memory, memory))
    return size


def _cores(wanted: float | None, had: float) -> float:
    return had if wanted is None else float(min(MOST_CORES, max(LEAST_CORES, math.ceil(wanted))))


def _memory(wanted: float | None, had: int) -> int:
    return had if wanted is None else int(min(MOST_MEMORY, max(LEAST_MEMORY, wanted)))
