"""
Statistics: what nodes tell of their steps and resources becomes runs, which are the evidence for the size of the job.

A run is a stretch in which the configuration did not change. One worker sets the pace: in a world all do the same steps, in a cluster of parameter servers the
chief counts the steps of all. What it tells are sums since its start, so each report gives the mean of the steps since the one before, and the median of these is
the step time. Saving and evaluating are not in these sums; nor does the start of a worker count.

Volatile like all observations. What was told is in the journal; a new master begins a new run.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from dlrover.core.state import JobState
from dlrover.protocol.messages.data import TaskType
from dlrover.protocol.messages.fleet import NodePhase, NodeType, Resource
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, Micros, NodeId, NodeRank, PlatformId, Round
from dlrover.protocol.messages.scaling import (
    MAX_MEMORY_POINTS,
    MAX_RUN_NODES,
    Configuration,
    GroupSize,
    MemoryPoint,
    NodeUse,
    RunMeasured,
    TypeUse,
)
from dlrover.protocol.messages.watch import Phase, ProgressReport, ResourceReport, StepShape, WorkerProgress
from dlrover.protocol.units import in_mib

WARM_STEPS, WARM_SECONDS = 20, 10.0
"""The first steps of a worker do not count: so many, or so long, whichever is over first."""
LEAST_STEPS, LEAST_SECONDS = 20, 20.0
"""A shorter run is not told."""
MAX_BYTES = 2048
"""Of what is told of a run, whatever the size of the job."""
PERIOD = 60.0
"""Seconds between two words about a run that goes on."""
MOVED = 0.02
"""Share by which an estimate must have moved to be told again."""
WINDOW = 180.0
"""Seconds over which the use of one node is told."""
NUM_SAMPLES = 256
"""Newest ones of which the median is taken: twenty minutes of heartbeats."""
STANDS_OUT = 0.1
"""Share of a step that the others must wait for a node to make it stand out."""
DISTURBED = 0.5
"""Share of stalled time in a run that makes its speed a bad estimate."""
_TRAINING = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COLLECTIVE)


@dataclass(slots=True)
class _Pace:
    """What the worker that sets the pace said last, in one life."""

    key: tuple[NodeId, Round, int]
    """Node, round and process."""
    count: float
    seconds: float
    """That the counted steps took."""
    data_seconds: float
    training_seconds: float
    consumed: int
    at: Micros
    first_count: float
    first_at: Micros
    """Of this life, as it was first heard of."""
    is_warm: bool = False


@dataclass(slots=True)
class _Compute:
    """Of one node in one round: computing in plain steps."""

    round: Round
    num_first: int
    first: float
    num_newest: int = 0
    newest: float = 0.0

    @property
    def per_step(self) -> float | None:
        num = self.num_newest - self.num_first
        return (self.newest - self.first) / num if num > 0 else None


@dataclass(slots=True)
class _Usage:
    """Of one node: its newest readings of CPU (with their time) and its greatest memory."""

    cpu: deque[tuple[Micros, float]] = field(default_factory=lambda: deque(maxlen=128))
    cpu_sum: float = 0.0
    num: int = 0
    memory_mib: float = 0.0
    newest_mib: float = 0.0


@dataclass
class _RunSums:
    number: int
    configuration: Configuration
    began_at: Micros
    seconds: float = 0.0
    steps: float = 0.0
    stalled: float = 0.0
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    """Step time and number of steps that it is the mean of."""
    records: float = 0.0
    data_seconds: float = 0.0
    training_seconds: float = 0.0
    last_step: int | None = None
    loader_workers: int = -1
    usage: dict[NodeId, _Usage] = field(default_factory=dict)
    compute: dict[NodeId, _Compute] = field(default_factory=dict)
    devices: dict[NodeType, tuple[float, float, float, int]] = field(default_factory=dict)
    """Greatest memory, total of the smallest, sum of use in percent, number of readings."""
    points: dict[NodeType, list[MemoryPoint]] = field(default_factory=dict)
    """Of memory, over the whole run, thinned out."""
    news: dict[NodeType, list[MemoryPoint]] = field(default_factory=dict)
    """Those since the run was last told."""
    told: RunMeasured | None = None
    told_at: Micros | None = None


class RunStatistics:
    """Hears observations, gives the runs that are to be journalled. Costs a dictionary look-up for most reports."""

    def __init__(self) -> None:
        self._run: _RunSums | None = None
        self._pace: _Pace | None = None
        self._shape = StepShape()
        self._due_at = Micros(0)
        self._world: tuple[Round, bool] | None = None
        self._last_number = 0

    def began(self, state: JobState) -> None:
        """A master begins, or its state was read anew: what it took for told may not be."""
        self._run = self._pace = self._world = None
        self._due_at = Micros(0)
        self._last_number = newest_number(state)

    # Observations.

    def heard_progress(self, report: ProgressReport, state: JobState, now: Micros) -> None:
        run = self._run
        if run is None or not report.workers:
            return
        worker = report.workers[0]
        compute = run.compute.get(report.node)
        if compute is None or compute.round != report.round:
            if worker.num_plain_steps:
                run.compute[report.node] = _Compute(report.round, worker.num_plain_steps, worker.plain_seconds)
        else:
            compute.num_newest, compute.newest = worker.num_plain_steps, worker.plain_seconds
        if report.node == self._pacer(state) and (state.cluster is not None or report.round == state.rendezvous.round):
            self._note_pace(run, report, worker, state, now)

    def heard_resources(self, report: ResourceReport, state: JobState, now: Micros) -> None:
        run = self._run
        if run is None:
            return
        usage = run.usage.get(report.node)
        if usage is None:
            usage = run.usage[report.node] = _Usage()
        cpu = float(report.cpu)
        usage.cpu.append((now, cpu))
        usage.cpu_sum, usage.num = usage.cpu_sum + cpu, usage.num + 1
        usage.newest_mib = in_mib(report.memory_bytes)
        usage.memory_mib = max(usage.memory_mib, usage.newest_mib)
        if report.devices:
            node_type = _type_of(state, report.node)
            most, least, total, num = run.devices.get(node_type, (0.0, math.inf, 0.0, 0))
            most = max(most, *(in_mib(device.used_memory_bytes) for device in report.devices))
            least = min(least, *(in_mib(device.total_memory_bytes) for device in report.devices))
            total += sum(device.utilization for device in report.devices)
            run.devices[node_type] = (most, least, total, num + len(report.devices))

    def _pacer(self, state: JobState) -> NodeId | None:
        if state.cluster is not None:
            return _chief(state)
        world = state.rendezvous.world
        return None if world is None or not world.members else world.members[0].node

    def _note_pace(
        self, run: _RunSums, report: ProgressReport, worker: WorkerProgress, state: JobState, now: Micros
    ) -> None:
        newest = _pace_of(report, worker, state, now)
        before = self._pace
        self._shape = worker.shape
        run.last_step = worker.step if worker.is_step_comparable else run.last_step
        run.loader_workers = worker.shape.loader_workers
        if before is None or before.key != newest.key or newest.count < before.count:
            self._pace = newest
            newest.is_warm = _is_warm(worker, newest)
            return
        newest.first_count, newest.first_at = before.first_count, before.first_at
        newest.is_warm = before.is_warm or _is_warm(worker, newest)
        num, spent = newest.count - before.count, newest.seconds - before.seconds
        if num <= 0:
            return  # no step has ended: its time belongs to the next one
        self._pace = newest
        if not before.is_warm or spent <= 0:
            return
        if worker.is_stalled:
            run.stalled += spent
            return
        run.samples.append((spent / num, num))
        run.seconds, run.steps = run.seconds + spent, run.steps + num
        run.records += max(0, newest.consumed - before.consumed)
        run.data_seconds += max(0.0, newest.data_seconds - before.data_seconds)
        run.training_seconds += max(0.0, newest.training_seconds - before.training_seconds)

    # Runs.

    def measure(self, state: JobState, now: Micros) -> RunMeasured | None:
        """What is to be journalled now: the end of a run, or news of the one that goes on."""
        world = (state.rendezvous.round, state.rendezvous.opening is None)
        if now < self._due_at and world == self._world:
            return None
        self._world = world
        terms = state.scaling.terms
        period = min(PERIOD, terms.stable_for)
        self._due_at = Micros(now + round(min(5.0, period / 2) * MICROS_PER_SECOND))
        configuration = configuration_of(state, self._shape)
        run = self._run
        if configuration is None:
            return None
        if run is None or run.configuration != configuration:
            ended = None if run is None else self._told(run, state, now, is_over=True)
            self._last_number = max(self._last_number, newest_number(state)) + 1
            self._run = _RunSums(self._last_number, configuration, now)
            self._pace = None
            return ended
        self._note_memory(run, state, now)
        last_at = run.began_at if run.told_at is None else run.told_at
        if now - last_at < period * MICROS_PER_SECOND or run.seconds < period:
            return None
        measured = self._told(run, state, now)
        if measured is None or not has_moved(run.told, measured):
            return None
        return self._note_told(run, measured, now)

    def _note_told(self, run: _RunSums, measured: RunMeasured, now: Micros) -> RunMeasured:
        run.told, run.told_at = measured, now
        run.news.clear()
        return measured

    def _told(self, run: _RunSums, state: JobState, now: Micros, *, is_over: bool = False) -> RunMeasured | None:
        shortest = min(LEAST_SECONDS, state.scaling.terms.stable_for)
        if run.steps < min(LEAST_STEPS, state.scaling.terms.stable_steps) or run.seconds < shortest:
            return None
        low, median, high = quartiles(run.samples)
        workers = run.configuration.num_workers if state.cluster is not None else 1  # the chief counts the steps of all
        measured = RunMeasured(
            number=run.number,
            configuration=run.configuration,
            seconds=run.seconds,
            steps=max(1, round(run.steps)),
            step_time=median * workers,
            step_time_low=low * workers,
            step_time_high=high * workers,
            records_per_second=_records_per_second(run, state, median),
            last_step=run.last_step,
            types=tuple(self._type_use(run, state, node_type) for node_type in _types(run.configuration)),
            nodes=self._nodes_that_stand_out(run, state, now, median),
            is_over=is_over,
            is_disturbed=run.stalled > DISTURBED * run.seconds,
            data_wait=min(1.0, run.data_seconds / run.training_seconds) if run.training_seconds > 0 else 0.0,
            loader_workers=run.loader_workers,
        )
        return fitted(measured)

    def _note_memory(self, run: _RunSums, state: JobState, now: Micros) -> None:
        for gone in [node for node in (*run.usage, *run.compute) if node not in state.nodes.live]:
            run.usage.pop(gone, None)
            run.compute.pop(gone, None)
        greatest: dict[NodeType, float] = {}
        for node, usage in run.usage.items():
            node_type = _type_of(state, node)
            greatest[node_type] = max(greatest.get(node_type, 0.0), usage.newest_mib)
        for node_type, mib in greatest.items():
            if not mib:
                continue
            point = MemoryPoint(now, run.last_step or 0, round(mib, 1))
            for points in (run.points.setdefault(node_type, []), run.news.setdefault(node_type, [])):
                points.append(point)
                if len(points) > MAX_MEMORY_POINTS:
                    del points[1:-1:2]  # the first and the newest stay

    def _type_use(self, run: _RunSums, state: JobState, node_type: NodeType) -> TypeUse:
        usages = [usage for node, usage in run.usage.items() if usage.num and _type_of(state, node) is node_type]
        readings = sorted(cpu for usage in usages for _, cpu in usage.cpu)
        means = [usage.cpu_sum / usage.num for usage in usages]
        most, least, total, num = run.devices.get(node_type, (0.0, 0.0, 0.0, 0))
        return TypeUse(
            node_type=node_type,
            cpu=round(statistics.fmean(means), 3) if means else 0.0,
            cpu_most=round(readings[math.ceil(0.95 * len(readings)) - 1], 3) if readings else 0.0,
            cpu_max=round(max(means, default=0.0), 3),
            memory_mb=round(max((usage.memory_mib for usage in usages), default=0.0), 1),
            memory_slope=slope(run.points.get(node_type, [])),
            memory=tuple(run.news.get(node_type, ())),
            device_memory_mb=round(most, 1),
            device_total_mb=round(least, 1) if math.isfinite(least) else 0.0,
            device_use=round(total / num, 1) if num else 0.0,
        )

    def _nodes_that_stand_out(
        self, run: _RunSums, state: JobState, now: Micros, step_time: float
    ) -> tuple[NodeUse, ...]:
        waits = {} if state.cluster is not None else _waits(run, state.rendezvous.round)
        found: list[tuple[float, NodeUse]] = []
        for node, usage in run.usage.items():
            if node not in state.nodes.live:
                continue
            node_type = _type_of(state, node)
            wait = waits.get(node, 0.0)
            if node_type is not NodeType.PS and wait < STANDS_OUT * step_time:
                continue
            found.append((math.inf if node_type is NodeType.PS else wait, _node_use(state, node, usage, wait, now)))
        for node, wait in waits.items():
            if wait >= STANDS_OUT * step_time and node not in run.usage and node in state.nodes.live:
                found.append((wait, _node_use(state, node, _Usage(), wait, now)))
        found.sort(key=lambda each: (-each[0], -each[1].cpu, each[1].rank))
        return tuple(use for _, use in found[:MAX_RUN_NODES])


def newest_number(state: JobState) -> int:
    newest = state.scaling.newest
    return max((run.number for run in state.scaling.runs), default=0) if newest is None else newest.number


def configuration_of(state: JobState, shape: StepShape) -> Configuration | None:
    """What trains now; None: nothing does, or no platform gives the job its nodes."""
    fleet = state.fleet
    if fleet is None or state.end is not None:
        return None
    groups: list[GroupSize] = []
    workers_per_node = 1
    if state.cluster is not None:
        for node_type in (NodeType.WORKER, NodeType.CHIEF, NodeType.EVALUATOR, NodeType.PS):
            nodes = [node for node in fleet.live_nodes(node_type) if node.phase is NodePhase.RUNNING]
            if nodes:
                groups.append(_group(node_type, [node.resource for node in nodes]))
        if not any(group.node_type in (NodeType.WORKER, NodeType.CHIEF) for group in groups):
            return None
    else:
        rendezvous = state.rendezvous
        if rendezvous.world is None or rendezvous.opening is not None or not rendezvous.world.members:
            return None
        members = [member.node for member in rendezvous.world.members]
        placed = [node.resource for member in members if (node := fleet.of_agent(member)) is not None]
        groups.append(_group(NodeType.WORKER, placed, count=len(members)))
        workers_per_node = max(1, rendezvous.world.world_size // len(members))
    order = list(NodeType)
    groups.sort(key=lambda group: order.index(group.node_type))
    return Configuration(
        groups=tuple(groups),
        workers_per_node=workers_per_node,
        micro_batch=shape.micro_batch,
        accumulation=shape.accumulation,
        total_batch=shape.total_batch,
    )


def fitted(measured: RunMeasured) -> RunMeasured:
    """At most 2 KB: fewer points of memory, then fewer nodes."""
    while len(msgspec.msgpack.encode(measured)) > MAX_BYTES:
        if any(len(use.memory) > 2 for use in measured.types):
            types = tuple(
                replace(
                    use,
                    memory=(*use.memory[:-1:2], use.memory[-1])[-MAX_MEMORY_POINTS:]
                    if len(use.memory) > 2
                    else use.memory,
                )
                for use in measured.types
            )
            measured = replace(measured, types=types)
        else:
            measured = replace(measured, nodes=measured.nodes[:-1])
    return measured


def quartiles(samples: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of values, each with its weight."""
    ordered = sorted(samples)
    total = math.fsum(weight for _, weight in ordered)
    found, passed, wanted = [], 0.0, [0.25, 0.5, 0.75]
    for value, weight in ordered:
        passed += weight
        while wanted and passed >= wanted[0] * total:
            found.append(value)
            wanted.pop(0)
    found += [ordered[-1][0]] * len(wanted)
    return found[0], found[1], found[2]


def slope(points: Sequence[MemoryPoint]) -> float:
    """MiB per step, as the median over all pairs of points (Theil and Sen)."""
    slopes = [
        (late.memory_mb - early.memory_mb) / (late.step - early.step)
        for index, early in enumerate(points)
        for late in points[index + 1 :]
        if late.step > early.step
    ]
    return round(statistics.median(slopes), 6) if slopes else 0.0


def has_moved(before: RunMeasured | None, now: RunMeasured) -> bool:
    """Speed or memory by more than 2 %; of servers the cores in use too, and how long each was watched."""
    if before is None or _differ(before.step_time, now.step_time):
        return True
    known = {use.node_type: use for use in before.types}
    for use in now.types:
        former = known.get(use.node_type)
        if former is None or _differ(former.memory_mb, use.memory_mb):
            return True
    servers = {node.platform_node: node for node in before.nodes}
    for node in now.nodes:
        known_node = servers.get(node.platform_node)
        if known_node is None or _differ(known_node.seconds, node.seconds) or _differ(known_node.cpu, node.cpu, 0.1):
            return True
    return len(servers) != len(now.nodes)


def _differ(before: float, now: float, share: float = MOVED) -> bool:
    return abs(now - before) > share * max(abs(before), 1e-9)


def _is_warm(worker: WorkerProgress, pace: _Pace) -> bool:
    if worker.num_timed_steps >= WARM_STEPS or worker.timed_seconds >= WARM_SECONDS:
        return True
    lasted = (pace.at - pace.first_at) / MICROS_PER_SECOND
    return pace.count - pace.first_count >= WARM_STEPS or lasted >= WARM_SECONDS


def _pace_of(report: ProgressReport, worker: WorkerProgress, state: JobState, now: Micros) -> _Pace:
    """Counted steps and their seconds: as the worker sums them, or by our clock for steps of all workers together, and for shards."""
    if state.cluster is None and worker.num_timed_steps and worker.timed_seconds > 0:
        count, seconds = float(worker.num_timed_steps), worker.timed_seconds
    else:
        beside = sum(worker.seconds.get(phase, 0.0) for phase in (Phase.CHECKPOINT, Phase.EVALUATION, Phase.RESTORE))
        count = _shards_done(state) if worker.step is None else float(worker.step)
        seconds = now / MICROS_PER_SECOND - beside
    return _Pace(
        key=(report.node, report.round, worker.pid),
        count=count,
        seconds=seconds,
        data_seconds=worker.seconds.get(Phase.DATA, 0.0),
        training_seconds=sum(worker.seconds.get(phase, 0.0) for phase in _TRAINING),
        consumed=_consumed(state),
        at=now,
        first_count=count,
        first_at=now,
    )


def _records_per_second(run: _RunSums, state: JobState, step_time: float) -> float:
    """By what the libraries say of a step, else by what was read of the job's datasets; 0: records are not counted."""
    configuration = run.configuration
    if configuration.total_batch:
        return configuration.total_batch / step_time
    if configuration.micro_batch:
        workers = 1 if state.cluster is not None else configuration.num_workers * configuration.workers_per_node
        return configuration.micro_batch * configuration.accumulation * workers / step_time
    if run.records:
        return run.records / run.seconds
    if state.cluster is not None and state.scaling.facts.batch_size:
        return state.scaling.facts.batch_size / step_time
    return 0.0


def _consumed(state: JobState) -> int:
    return sum(
        dataset.num_consumed
        for dataset in state.data.datasets.values()
        if dataset.spec.task_type is not TaskType.EVALUATION
    )


def _shards_done(state: JobState) -> float:
    return sum(
        dataset.num_consumed / max(1, dataset.spec.shard_size)
        for dataset in state.data.datasets.values()
        if dataset.spec.task_type is not TaskType.EVALUATION
    )


def _waits(run: _RunSums, round_: Round) -> dict[NodeId, float]:
    """What a node computes in each step beyond the median of all: so long the others wait for it."""
    times = {
        node: per_step
        for node, compute in run.compute.items()
        if compute.round == round_ and (per_step := compute.per_step) is not None
    }
    if len(times) < 2:
        return {}
    usual = statistics.median_low(times.values())
    return {node: seconds - usual for node, seconds in times.items() if seconds > usual}


def _node_use(state: JobState, node: NodeId, usage: _Usage, wait: float, now: Micros) -> NodeUse:
    placed = None if state.fleet is None else state.fleet.of_agent(node)
    since = now - round(WINDOW * MICROS_PER_SECOND)
    cores = [cpu for at, cpu in usage.cpu if at >= since]
    began_at = (
        max(since, usage.cpu[0][0]) if usage.cpu else now
    )  # a reading is the mean of the time since the one before
    return NodeUse(
        platform_node=PlatformId(-1) if placed is None else placed.id,
        node_type=_type_of(state, node),
        rank=state.nodes.live[node].rank if placed is None else NodeRank(placed.rank),
        cpu=round(statistics.fmean(cores), 3) if cores else 0.0,
        cpu_max=round(max(cores, default=0.0), 3),
        memory_mb=round(usage.newest_mib, 1),
        seconds=round((now - began_at) / MICROS_PER_SECOND, 1) if cores else 0.0,
        wait_per_step=round(wait, 6),
    )


def _type_of(state: JobState, node: NodeId) -> NodeType:
    placed = None if state.fleet is None else state.fleet.of_agent(node)
    return NodeType.WORKER if placed is None else placed.node_type


def _types(configuration: Configuration) -> list[NodeType]:
    return [group.node_type for group in configuration.groups]


def _group(node_type: NodeType, resources: Sequence[Resource], *, count: int | None = None) -> GroupSize:
    """The smallest of each: what all of them have. Cores of workers beside servers: what most have, because critical ones keep theirs."""
    cores = [each.cpu for each in resources]
    is_beside_servers = node_type is NodeType.WORKER and count is None
    return GroupSize(
        node_type,
        len(resources) if count is None else count,
        statistics.median_high(cores) if cores and is_beside_servers else min(cores, default=0.0),
        min((each.memory_mb for each in resources), default=0),
        min((each.gpus for each in resources), default=0),
    )


def _chief(state: JobState) -> NodeId | None:
    fleet = state.fleet
    if fleet is None:
        return None
    for node_type in (NodeType.CHIEF, NodeType.WORKER):
        placed = fleet.holder(node_type, 0)
        if placed is not None and placed.agent is not None:
            return placed.agent
    return None
