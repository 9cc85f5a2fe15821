"""
Where a job starts: where the last ones of its kind ended (`start_like`), or by the usual percentile of use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from dlrover.core.scaling.evidence import speed_of
from dlrover.core.scaling.fit.model import fit_servers, fit_world, median
from dlrover.core.scaling.history.alike import AlikeJobs
from dlrover.core.scaling.history.seen import FormerRun, GroupWish, HistoryPlan, JobSeen
from dlrover.core.scaling.history.server_start import ServerNumbers, numbers_of, start_numbers
from dlrover.core.scaling.state import MeasuredRun
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import Configuration

NEWEST = 5
"""Jobs that are looked at."""
MEMORY_MARGIN = 1.2
PERCENTILE = 0.95
PERCENTILE_MARGIN = 1.15
LEAST_STEPS, LEAST_SECONDS = 20, 20.0
"""A shorter run is no evidence."""
MOST_NODES, MOST_CPU, MOST_MEMORY = 100_000, 4096.0, 2.0**26
"""Beyond, a number is absurd and its run is ignored. Memory in MiB (64 TiB)."""


class StartFound(Struct, frozen=True, kw_only=True):
    plan: HistoryPlan
    level: int
    similar: int
    """Completed jobs on that level."""
    confidence: float
    """0 to 1: how many of the newest jobs ended near this start."""
    configuration: Configuration
    """In which the newest of them ended."""
    speed: float = 0.0
    """Records per second that it reached with it; 0: no life had this size."""
    features: tuple[str, ...] = ()
    thetas: tuple[float, ...] = ()
    """The step time as the runs of all of them fit it; empty: they do not."""


def start_like(alike: AlikeJobs) -> StartFound | None:
    """The last configuration that paid in the newest jobs that are alike, with the memory that the largest of them needed."""
    ended: list[tuple[JobSeen, FormerRun]] = []
    for job in alike.completed:
        last = last_that_paid(job)
        if last is not None:
            ended.append((job, last))
        if len(ended) == NEWEST:
            break
    if not ended:
        return None
    configuration = ended[0][1].configuration
    groups = []
    jobs = [job for job, _ in ended]
    numbers = _server_numbers(jobs) if configuration.count(NodeType.PS) else None
    for kind, wanted in _typical(ended, numbers).items():
        memory = _memory(alike, jobs, kind, wanted.count)
        groups.append(GroupWish(node_type=kind, count=wanted.count, cpu=wanted.cpu or None, memory_mb=memory or None))
    near = sum(_is_near(run.configuration, configuration) for _, run in ended)
    fit = _fit_of([job for job, _ in ended], configuration)
    sentence = f"As the newest of {alike.text} ended."
    speed = _speed(ended[0][1])
    if numbers is not None:
        speeds = [run.speed for run in _server_runs(jobs) if numbers_of(run) == numbers]
        speed = median(speeds) if speeds else 0.0
        how = "The best size of" if speeds else "A step from the best size of"
        sentence = f"{how} the newest lives of {alike.text}."
    return StartFound(
        plan=HistoryPlan(algorithm="start_like", sentence=sentence, groups=tuple(groups)),
        level=alike.level,
        similar=len(alike.completed),
        confidence=near / NEWEST,
        configuration=configuration,
        speed=speed,
        features=() if fit is None else fit[0],
        thetas=() if fit is None else fit[1],
    )


def percentile(alike: AlikeJobs) -> HistoryPlan | None:
    """Each node gets what nodes of its type used in 95 % of the time, and 15 % more; their number stays."""
    groups = []
    for kind in (NodeType.CHIEF, NodeType.WORKER, NodeType.PS):
        uses = [
            (use.cpu_most or use.cpu, use.memory_mb, run.seconds)
            for job in alike.completed[:NEWEST]
            for run in job.runs
            if is_sane(run)
            for use in run.uses
            if use.node_type is kind
        ]
        if not uses:
            continue
        cpu = _weighted([(cpu, seconds) for cpu, _, seconds in uses])
        memory = _weighted([(memory, seconds) for _, memory, seconds in uses])
        groups.append(
            GroupWish(
                node_type=kind,
                cpu=PERCENTILE_MARGIN * cpu or None,
                memory_mb=PERCENTILE_MARGIN * memory or None,
            )
        )
    if not groups:
        return None
    sentence = f"{PERCENTILE:.0%} of the use of {alike.text}, and {PERCENTILE_MARGIN - 1:.0%} more."
    return HistoryPlan(algorithm="percentile", sentence=sentence, groups=tuple(groups))


def last_that_paid(job: JobSeen) -> FormerRun | None:
    """None: no run of it is evidence."""
    return next((run for run in reversed(job.runs) if run.has_paid and is_sane(run)), None)


def is_sane(run: FormerRun) -> bool:
    """What no machine has, and what is not a number, says nothing. What a store holds may have come from anywhere."""
    groups, uses = run.configuration.groups, run.uses
    figures = [run.seconds, run.step_time, run.records_per_second]
    figures += [number for use in uses for number in (use.cpu, use.cpu_most, use.cpu_max, use.memory_mb)]
    return (
        all(math.isfinite(number) and number >= 0 for number in figures)
        and run.steps >= LEAST_STEPS
        and run.seconds >= LEAST_SECONDS
        and run.step_time > 0
        and run.configuration.num_workers >= 1
        and all(0 <= group.count <= MOST_NODES and 0 <= group.cpu <= MOST_CPU for group in groups)
        and all(0 <= group.memory_mb <= MOST_MEMORY for group in groups)
        and all(use.memory_mb <= MOST_MEMORY and use.cpu <= MOST_CPU and use.cpu_max <= MOST_CPU for use in uses)
    )


class _Typical(Struct, frozen=True):
    count: int
    cpu: float


def _server_numbers(jobs: Sequence[JobSeen]) -> ServerNumbers | None:
    """None: no run of them is evidence."""
    return start_numbers(_server_runs(jobs), _server_runs(jobs, have_paid=True))


def _server_runs(jobs: Sequence[JobSeen], *, have_paid: bool = False) -> list[MeasuredRun]:
    """Of sizes that were not taken back, or of all."""
    return [
        measured(run)
        for job in jobs
        for run in job.runs
        if is_sane(run) and run.configuration.count(NodeType.PS) and (run.has_paid or not have_paid)
    ]


def _typical(ended: Sequence[tuple[JobSeen, FormerRun]], numbers: ServerNumbers | None) -> dict[NodeType, _Typical]:
    """As the newest one ended; with servers, what the runs of all of them say."""
    found = {group.node_type: _Typical(group.count, group.cpu) for group in ended[0][1].configuration.groups}
    if numbers is None:
        return found
    chiefs = found[NodeType.CHIEF].count if NodeType.CHIEF in found else 0
    if NodeType.CHIEF in found:
        found[NodeType.CHIEF] = _Typical(chiefs, numbers.worker_cpu)
    if numbers.workers > chiefs:
        found[NodeType.WORKER] = _Typical(numbers.workers - chiefs, numbers.worker_cpu)
    else:
        found.pop(NodeType.WORKER, None)
    found[NodeType.PS] = _Typical(numbers.servers, numbers.server_cpu)
    return found


def _memory(alike: AlikeJobs, jobs: Sequence[JobSeen], kind: NodeType, count: int) -> float:
    """
    The most that any of them used, with a margin, and more than was too little for one that ran out of it.

    Fewer servers hold more each: where runs with at least as many servers were seen, a use with fewer of them does not count.
    """
    uses = [
        (run.configuration.count(kind), use.memory_mb)
        for job in jobs
        for run in job.runs
        if is_sane(run)
        for use in run.uses
        if use.node_type is kind
    ]
    used = [memory for _, memory in uses]
    if kind is NodeType.PS and uses:
        nearest = max((number for number, _ in uses if number <= count), default=0)
        fewest = min(number for number, _ in uses)
        # With fewer servers than any run had, each holds more: at most as many times as they are fewer.
        used = [max(1.0, fewest / max(1, count)) * memory for number, memory in uses if number >= nearest]
    oldest = min(job.began_at for job in jobs)
    too_little = [
        node.memory_mb
        for job in alike.jobs
        if job.began_at >= oldest
        for node in job.nodes
        if node.is_oom and node.node_type is kind and 0 <= node.memory_mb <= MOST_MEMORY
    ]
    return MEMORY_MARGIN * max([*used, *too_little], default=0.0)


def _is_near(one: Configuration, other: Configuration) -> bool:
    """By at most a fifth in each number."""
    kinds = {group.node_type: None for group in (*one.groups, *other.groups)}
    return all(
        _differ(one.count(kind), other.count(kind)) <= 0.2 and _differ(_cpu(one, kind), _cpu(other, kind)) <= 0.2
        for kind in kinds
    )


def _differ(one: float, other: float) -> float:
    return abs(one - other) / max(one, other) if max(one, other) > 0 else 0.0


def _cpu(configuration: Configuration, kind: NodeType) -> float:
    group = configuration.group(kind)
    return 0.0 if group is None else group.cpu


def _fit_of(jobs: Sequence[JobSeen], like: Configuration) -> tuple[tuple[str, ...], tuple[float, ...]] | None:
    runs = [measured(run) for job in jobs for run in job.runs if is_sane(run)]
    fit = fit_servers(runs) if like.count(NodeType.PS) else fit_world(runs)
    return None if fit is None or fit.why_unused else (fit.features, fit.thetas)


def measured(run: FormerRun) -> MeasuredRun:
    """As the fit of a running job takes it."""
    return MeasuredRun(
        number=run.number,
        configuration=run.configuration,
        seconds=run.seconds,
        steps=run.steps,
        step_time=run.step_time,
        records_per_second=run.records_per_second,
        cpu=tuple((use.node_type, use.cpu, use.cpu_max) for use in run.uses),
        speed=_speed(run),
    )


def _speed(run: FormerRun) -> float:
    return speed_of(run.configuration, run.step_time, run.records_per_second)


def _weighted(found: Sequence[tuple[float, float]]) -> float:
    """The percentile over time."""
    ordered = sorted(found)
    reached, total = 0.0, sum(seconds for _, seconds in ordered)
    for number, seconds in ordered:
        reached += seconds
        if reached >= PERCENTILE * total:
            return number
    return ordered[-1][0]
