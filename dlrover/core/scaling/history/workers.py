"""
How many workers a job with parameter servers should have, by the use of its servers (spec 07 §13.7).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

from dlrover.core.scaling.history.numbers import (
    mean,
    most_use,
    newest_servers,
    over_window,
    single_worker_seconds,
    uses,
    workers_of,
)
from dlrover.core.scaling.history.parameters import (
    FIRST_WORKERS,
    MOST_WORKER_MARGIN,
    SHORT_STEPS,
    START_RECORDS,
    WINDOW,
    HistoryParameters,
)
from dlrover.core.scaling.history.seen import GroupWish, HistoryPlan, JobSeen, UseRecord
from dlrover.protocol.messages.fleet import NodeType


class WorkerPhase(enum.StrEnum):
    INITIAL = "initial"
    SAMPLE = "sample"
    STABLE = "stable"


class _Trend(enum.Enum):
    """What the last change of the number of workers brought."""

    STABLE = enum.auto()
    INCREASED = enum.auto()
    DECELERATED = enum.auto()


def size_workers(
    job: JobSeen,
    former: Sequence[JobSeen],
    given: HistoryParameters,
    phase: WorkerPhase = WorkerPhase.STABLE,
) -> HistoryPlan | None:
    """`optimize_job_worker_resource`."""
    records = _cleaned(job, newest_servers(job.records), given)
    if len(records) < max(1, given.compared) or not records[-1].workers:
        return None
    now = len(records[-1].workers)
    count = min(given.most_workers, _count(job, records, given, phase))
    used = over_window(records, workers_of, max if len(records) < START_RECORDS else mean)
    most_cpu = max(used.values(), default=0.0)
    most_memory = max(node.memory_mb for record in records for node in record.workers)
    memory = most_memory + min(most_memory * given.worker_memory_margin, MOST_WORKER_MARGIN)
    return HistoryPlan(
        algorithm="optimize_job_worker_resource",
        sentence=f"The busiest server uses {_use(job, records):.0%} of its cores with {now} workers.",
        groups=(
            GroupWish(
                node_type=NodeType.WORKER,
                count=count,
                cpu=float(math.ceil(most_cpu + given.worker_cpu_margin)) if most_cpu else None,
                memory_mb=memory or None,
            ),
        ),
    )


def _count(job: JobSeen, records: Sequence[UseRecord], given: HistoryParameters, phase: WorkerPhase) -> int:
    now, use, trend = len(records[-1].workers), _use(job, records), _trend(records, given)
    if use > given.exhausted:
        return now - given.worker_decrease if now > given.worker_decrease else now
    if use >= given.overload or trend is _Trend.DECELERATED:
        return now
    count = now + given.workers_per_step if use == 0 else math.ceil(given.overload / use * now)
    if phase is WorkerPhase.STABLE:
        return min(count, now + given.workers_per_step) if trend is _Trend.INCREASED else now
    seconds = single_worker_seconds(job, WINDOW)
    if seconds is None:
        return min(count, now + given.workers_per_step)
    return FIRST_WORKERS if seconds <= SHORT_STEPS else min(given.first_workers_most, count)


def _use(job: JobSeen, records: Sequence[UseRecord]) -> float:
    """Of the busiest server, in the mean of the newest records."""
    found: dict[int, list[float]] = {}
    for record in records[-WINDOW:]:
        for id_, use in uses(job, record).items():
            found.setdefault(id_, []).append(use)
    return max((mean(each) for each in found.values()), default=0.0)


def _cleaned(job: JobSeen, records: list[UseRecord], given: HistoryParameters) -> list[UseRecord]:
    """Without single moments of great use, which say nothing. The first and the newest record stay."""
    use = [most_use(job, record) for record in records]
    kept = []
    for index, record in enumerate(records):
        is_edge = index in (0, len(records) - 1)
        around = use[max(0, index - given.compared) : index] + use[index + 1 : index + 1 + given.compared]
        is_outlier = use[index] > given.overload and all(
            each <= use[index] * (1 - given.outlier_share) for each in around
        )
        if is_edge or not is_outlier:
            kept.append(record)
    return kept


def _trend(records: Sequence[UseRecord], given: HistoryParameters) -> _Trend:
    numbers = [len(record.workers) for record in records]
    changed = max((index for index in range(1, len(numbers)) if numbers[index] != numbers[index - 1]), default=0)
    before, after = records[:changed], records[changed:]
    window = max(1, given.step_count)
    if len(after) < window and before:
        return _Trend.STABLE
    if len(before) < window:
        return _Trend.INCREASED
    was = mean([record.speed for record in before[-window:]])
    is_now = mean([record.speed for record in after[-window:]])
    if is_now <= was * (1 - given.slower_share):
        return _Trend.DECELERATED
    return _Trend.INCREASED if is_now > was else _Trend.STABLE
