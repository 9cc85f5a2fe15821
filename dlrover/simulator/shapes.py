"""
What is simulated: the shape of a job and what things cost in it.

A shape says how many nodes there are and what the job asks of them; costs say how long things take. Both are plain
data, so that a forecast for people and a campaign against the core run the same engine with other numbers.
"""

from __future__ import annotations

import random

from msgspec import Struct
from msgspec.structs import replace

from dlrover.protocol.messages.check import CheckTerms
from dlrover.protocol.messages.data import DatasetSpec, StorageKind
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Resource, Strategy
from dlrover.protocol.messages.job import Detection, JobTerms, Limits, RestartPolicy
from dlrover.protocol.messages.scaling import Optimizer, ScaleFor, ScaleMode, ScaleTerms


class Costs(Struct, frozen=True, kw_only=True):
    """How long things take, in seconds. A pair is a range from which each case is drawn."""

    step: float = 1.0
    """One step of a full world; a smaller one is slower in proportion."""
    worker_start: tuple[float, float] = (0.05, 0.4)
    """Forked from a warm zygote."""
    first_start: tuple[float, float] = (2.0, 5.0)
    """The first workers of a fresh agent wait for its imports."""
    restore: float = 0.3
    """From the start of the last worker of a world to its first step: connect, load the state."""
    stop: tuple[float, float] = (0.05, 0.6)
    """Workers that are told to stop."""
    stubborn_stop: tuple[float, float] = (3.0, 5.0)
    """The same for those that ignore the signal until they are killed."""
    agent_restart: tuple[float, float] = (0.3, 3.0)
    """The launcher starts a killed agent again."""
    replacement: tuple[float, float] = (1.0, 90.0)
    """The platform starts a node in place of a lost one."""
    master_restart: tuple[float, float] = (0.1, 3.0)
    network: tuple[float, float] = (0.0002, 0.002)
    """One way."""
    commit: tuple[float, float] = (0.0004, 0.003)
    """One transaction of the journal."""


class Shape(Struct, frozen=True, kw_only=True):
    """One job and the nodes it has."""

    min_nodes: int = 2
    max_nodes: int = 4
    node_unit: int = 1
    spares: int = 0
    """Nodes beyond the maximum, that wait."""
    local_world_size: int = 1
    has_fixed_ranks: bool = False
    """Nodes ask for their node rank, as with --node-rank; with a fleet: the platform tells them theirs."""
    restarts: RestartPolicy = RestartPolicy()
    last_call: float = 30.0
    first_call: float = 3.0
    join_timeout: float = 600.0
    detection: Detection = Detection()
    num_steps: int = 3600
    checkpoint_every: int = 100
    """Steps between two checkpoints in storage."""
    has_replicas: bool = True
    """Snapshots in memory survive the loss of a node, because another one holds a copy."""
    costs: Costs = Costs()
    fleet: FleetSpec | None = None
    """The job asks its platform for nodes; None: they come by themselves."""
    has_pods: bool = False
    """With a fleet: its nodes are pods of a Kubernetes cluster."""
    check: CheckTerms | None = None
    bad_odds: float = 0.1
    """With a check: how often a node is broken, and how often it is slow."""
    has_store_traffic: bool = False
    has_sync_traffic: bool = False
    dataset: DatasetSpec | None = None
    """What the workers read; None: nothing that is counted."""
    has_warm_up: bool = False
    """Agents import what their workers need before they join; else their first workers start more slowly."""
    has_tasks: bool = False
    """With a fleet of a parameter-server job: each of its nodes has an agent, and their processes form a cluster. Needs a dataset."""
    has_coordinator: bool = False
    """With such a cluster: its chief cannot go on beside living variables, and asks for the next version."""
    has_exact_saves: bool = False
    """With such a cluster: all park for each save of the chief."""
    has_failover: bool = False
    """Agents ask an extension of the user what shall follow a failure."""
    has_guard: bool = False
    """Workers leave their last step behind when one of them is lost."""
    scaling: ScaleTerms | None = None
    """The job finds its own size; None: people and faults alone change it."""
    law: tuple[float, float, float] = (0.0, 1.0, 0.0)
    """Parts of a step that stay, that are divided among the nodes, and that each further node adds."""
    law_knee: int = 0
    """From so many nodes on each further one adds five times as much; 0: nowhere."""
    law_noise: float = 0.0
    """Of a measurement, as a share."""

    def step_time(self, nodes: int) -> float:
        """Seconds of one step in a world of so many nodes."""
        fixed, divided, added = self.law
        num_beyond = max(0, nodes - self.law_knee) if self.law_knee else 0
        return self.costs.step * (fixed + divided * self.max_nodes / nodes + added * (nodes - 1 + 4 * num_beyond))

    @property
    def slowest_step(self) -> float:
        return max(self.step_time(nodes) for nodes in (self.node_unit, self.max_nodes))

    @property
    def num_nodes(self) -> int:
        return self.max_nodes + self.spares

    @property
    def is_one_world(self) -> bool:
        """Whether the job ends when its workers are too few for a world, and is scaled by the limits of that."""
        return self.fleet is None or self.fleet.strategy is Strategy.ALLREDUCE

    @property
    def has_servers(self) -> bool:
        return self.fleet is not None and NodeType.PS in self.fleet.replicas

    @property
    def kinds_to_scale(self) -> list[NodeType]:
        """Types of which a person may want another number. There is one chief."""
        fixed = (NodeType.CHIEF, NodeType.WORKER) if self.is_one_world else (NodeType.CHIEF,)
        return [] if self.fleet is None else [kind for kind in self.fleet.replicas if kind not in fixed]

    @property
    def terms(self) -> JobTerms:
        return JobTerms(
            limits=Limits(
                min_nodes=self.min_nodes,
                max_nodes=self.max_nodes,
                node_unit=self.node_unit,
                last_call=self.last_call,
                first_call=self.first_call,
                join_timeout=self.join_timeout,
            ),
            restarts=self.restarts,
            detection=self.detection,
            standby=0 if self.fleet is None else self.fleet.standby,
            check=self.check,
            strategy=Strategy.PS if self.has_tasks else Strategy.ALLREDUCE,
        )


def draw_shape(chance: random.Random, hours: float) -> Shape:
    """A small job, for depth: every way in which few nodes can meet, fail and finish."""
    unit = chance.choice([1, 1, 1, 2])
    low = chance.randint(1, 3)
    more = chance.randint(0, 2)
    num_steps = round(3600 * hours * chance.choice([0.3, 0.7, 0.9, 1.0]))
    policy = chance.choice(
        [
            RestartPolicy(max_restarts=1000),
            RestartPolicy(max_restarts=1000),
            RestartPolicy(max_without_progress=50, max_same_crash=50),
            RestartPolicy(),
            RestartPolicy(max_restarts=chance.randint(0, 12)),
        ]
    )
    return Shape(
        min_nodes=low * unit,
        max_nodes=(low + more) * unit,
        node_unit=unit,
        spares=chance.choice([0, 0, 1, 2]),
        local_world_size=chance.choice([1, 2, 8]),
        has_fixed_ranks=chance.random() < 0.3,
        restarts=policy,
        last_call=chance.choice([5.0, 30.0]),
        join_timeout=chance.choice([600.0, 600.0, 120.0]),
        num_steps=max(10, num_steps),
        checkpoint_every=chance.choice([20, 100]),
        has_replicas=chance.random() < 0.5,
    )


def draw_large_shape(chance: random.Random, hours: float, *, size: int) -> Shape:
    """A large job, for scale. It may go on with nine tenths of its nodes."""
    return Shape(
        min_nodes=max(1, size * 9 // 10),
        max_nodes=size,
        spares=max(1, size // 50),
        local_world_size=8,
        restarts=RestartPolicy(max_restarts=1000),
        num_steps=max(10, round(3600 * hours)),
    )


FLEET_ODDS = 0.25
CHECK_ODDS = 0.15
STORE_ODDS = 0.2
DATA_ODDS = 0.2
SYNC_ODDS = 0.15
WARM_UP_ODDS = 0.5
FAILOVER_ODDS = 0.15
GUARD_ODDS = 0.5
MOST_TO_SYNC = 40
"""Nodes: all workers come to each meeting, which costs a large job too much."""


def add_rooms(chance: random.Random, shape: Shape) -> Shape:
    """Some jobs have a fleet, or a node check, or workers that use the store, or a dataset."""
    if chance.random() < FLEET_ODDS:
        shape = replace(shape, fleet=draw_fleet(chance, shape))
    if chance.random() < CHECK_ODDS:
        shape = replace(shape, check=draw_check(chance), bad_odds=chance.choice([0.0, 0.05, 0.2]))
    shape = replace(shape, has_store_traffic=chance.random() < STORE_ODDS)
    return replace(shape, dataset=draw_dataset(chance)) if chance.random() < DATA_ODDS else shape


def add_syncs(chance: random.Random, shape: Shape) -> Shape:
    """In some jobs the workers meet by name."""
    return replace(shape, has_sync_traffic=chance.random() < SYNC_ODDS and shape.num_nodes <= MOST_TO_SYNC)


def add_agents(chance: random.Random, shape: Shape) -> Shape:
    """With agents that have more to decide."""
    return replace(shape, has_warm_up=chance.random() < WARM_UP_ODDS, has_failover=chance.random() < FAILOVER_ODDS)


def add_guards(chance: random.Random, shape: Shape) -> Shape:
    """In some jobs the survivors of a loss leave their last step behind."""
    return replace(shape, has_guard=chance.random() < GUARD_ODDS)


def draw_fleet(chance: random.Random, shape: Shape) -> FleetSpec:
    workers = ReplicaSpec(
        count=shape.max_nodes,
        max_relaunches=chance.choice([0, 1, 3, 5, 5]),
        critical=chance.choice(["", "", "", "all", "0:2"]),
    )
    return FleetSpec(
        replicas={NodeType.WORKER: workers},
        standby=shape.spares,
        remove_exited=chance.random() < 0.7,
        pending_timeout=chance.choice([600.0, 900.0, 0.0]),
        failure_window=chance.choice([60.0, 3600.0]),
    )


SCALING_ODDS = 0.25


def add_scaling(chance: random.Random, shape: Shape) -> Shape:
    """Some jobs find their own size: they begin small, in a fleet that could give them more."""
    if chance.random() >= SCALING_ODDS or (shape.fleet is not None and not shape.is_one_world):
        return shape
    more = chance.randint(1, 4) * shape.node_unit
    shape = replace(shape, max_nodes=max(shape.max_nodes, shape.min_nodes + more))
    fleet = draw_fleet(chance, shape)
    if shape.fleet is not None:
        replicas = shape.fleet.replicas | {NodeType.WORKER: replace(fleet.replicas[NodeType.WORKER])}
        fleet = replace(shape.fleet, replicas=replicas)
    terms = ScaleTerms(
        mode=chance.choice([ScaleMode.ON, ScaleMode.ON, ScaleMode.ON, ScaleMode.DRY_RUN]),
        scale_for=chance.choice(list(ScaleFor)),
        nodes_start=shape.min_nodes,
        stable_for=chance.choice([20.0, 60.0]),
        longest_probation=chance.choice([120.0, 600.0]),
        manual_hold=chance.choice([0.0, 60.0, 600.0]),
        ignore_room=chance.random() < 0.1,
    )
    law = (chance.uniform(0.0, 0.5), chance.uniform(0.2, 1.0), chance.choice([0.0, 0.0, 0.02, 0.2]))
    knee = (shape.min_nodes + shape.max_nodes) // 2 if law[2] == 0.02 else 0
    noise = chance.choice([0.0, 0.02, 0.1])
    return replace(shape, fleet=fleet, scaling=terms, law=law, law_knee=knee, law_noise=noise)


def add_server_scaling(chance: random.Random, shape: Shape) -> Shape:
    """Some jobs with parameter servers change their servers and workers by themselves."""
    if chance.random() >= SCALING_ODDS or shape.fleet is None:
        return shape
    limits = chance.choice([Resource(), Resource(cpu=chance.choice([40.0, 80.0]))])
    terms = ScaleTerms(
        mode=chance.choice([ScaleMode.ON, ScaleMode.ON, ScaleMode.ON, ScaleMode.DRY_RUN]),
        optimizer=chance.choice([Optimizer.FITTED, Optimizer.RULES]),
        stable_for=20.0,
        server_pause=chance.choice([60.0, 300.0]),
        longest_probation=chance.choice([120.0, 600.0]),
        manual_hold=chance.choice([0.0, 60.0]),
        slow_start=chance.choice([60.0, 1800.0, 1800.0]),
        gives_sizes=True,
    )
    return replace(shape, fleet=replace(shape.fleet, limits=limits), scaling=terms)


TYPES_ODDS = 0.4


def add_types(chance: random.Random, shape: Shape) -> Shape:
    """Some fleets have other nodes beside the workers; some are those of a job with parameter servers."""
    fleet = shape.fleet
    if fleet is None or chance.random() >= TYPES_ODDS:
        return shape
    budget = chance.choice([0, 3, 5, 5])
    replicas = dict(fleet.replicas)
    if chance.random() < 0.6:
        replicas[NodeType.EVALUATOR] = ReplicaSpec(count=1, max_relaunches=budget)
    if chance.random() < 0.5 or len(replicas) == 1:
        replicas[NodeType.CHIEF] = ReplicaSpec(count=1, max_relaunches=budget)
    if chance.random() < 0.4:
        return replace(shape, fleet=replace(fleet, replicas=replicas))
    replicas[NodeType.PS] = ReplicaSpec(
        count=chance.randint(1, 3),
        resource=Resource(cpu=chance.choice([1.0, 8.0]), memory_mb=chance.choice([0, 4096])),
        max_relaunches=chance.choice([0, 3, 5, 5]),
        critical=chance.choice(["", "", "all"]),
    )
    if chance.random() < 0.3:
        return replace(shape, fleet=replace(fleet, replicas=replicas))
    replicas.setdefault(NodeType.CHIEF, ReplicaSpec(count=1, max_relaunches=budget))
    ps_job = replace(
        fleet,
        replicas=replicas,
        strategy=Strategy.PS,
        standby=0,
        pending_strategy=chance.choice([0, 1, 2]),
    )
    return replace(shape, fleet=ps_job, spares=0)


def draw_task_shape(chance: random.Random, hours: float) -> Shape:
    """A small job with parameter servers, a chief, workers and perhaps an evaluator, all of them with agents."""
    budget = chance.choice([3, 5, 100, 100])
    num_workers = chance.randint(1, 3)
    replicas = {
        NodeType.PS: ReplicaSpec(count=chance.randint(1, 3), max_relaunches=budget),
        NodeType.CHIEF: ReplicaSpec(count=1, max_relaunches=budget),
        NodeType.WORKER: ReplicaSpec(count=num_workers, max_relaunches=budget),
    }
    if chance.random() < 0.5:
        replicas[NodeType.EVALUATOR] = ReplicaSpec(count=1, max_relaunches=budget)
    policies = [RestartPolicy(max_restarts=1000), RestartPolicy(max_without_progress=50), RestartPolicy()]
    dataset = draw_dataset(chance)
    while dataset.storage is StorageKind.STREAM:
        dataset = draw_dataset(chance)
    return Shape(
        min_nodes=1,
        max_nodes=num_workers,
        restarts=chance.choice(policies),
        num_steps=max(10, round(3600 * hours)),
        fleet=FleetSpec(replicas=replicas, strategy=Strategy.PS, remove_exited=chance.random() < 0.7),
        dataset=replace(dataset, is_required=None, max_errors=0),
        has_tasks=True,
        has_exact_saves=chance.random() < 0.3,
        has_warm_up=chance.random() < WARM_UP_ODDS,
        has_coordinator=chance.random() < COORDINATOR_ODDS,
    )


COORDINATOR_ODDS = 0.25
POD_ODDS = 0.5


def add_pods(chance: random.Random, shape: Shape) -> Shape:
    """Some fleets are pods of a cluster, which keeps those that failed."""
    if shape.fleet is None or chance.random() >= POD_ODDS:
        return shape
    return replace(shape, has_pods=True, fleet=replace(shape.fleet, remove_exited=False))


def draw_dataset(chance: random.Random) -> DatasetSpec:
    """Each way to cut one, of some dozens to some hundreds of records."""
    storage = chance.choice(list(StorageKind))
    is_stream = storage is StorageKind.STREAM
    return DatasetSpec(
        name="clicks",
        size=chance.randint(20, 150),
        shard_size=chance.randint(2, 20),
        num_epochs=1 if is_stream else chance.randint(1, 3),
        is_required=chance.choice([None, False]),
        shuffle=not is_stream and chance.random() < 0.7,
        seed=chance.randrange(1000),
        storage=storage,
        partitions={f"p{part}": chance.randrange(100) for part in range(chance.randint(1, 4))} if is_stream else {},
        max_errors=chance.choice([0, 3]),
    )


def draw_check(chance: random.Random) -> CheckTerms:
    return CheckTerms(
        module="virtual",
        is_perf_test=chance.random() < 0.3,
        excludes_stragglers=chance.random() < 0.3,
        timeout=60.0,
        fresh_for=chance.choice([0.0, 60.0, 600.0]),
    )
