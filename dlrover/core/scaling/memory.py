"""
Memory of nodes: a forecast from what was seen, and what follows when workers of a world ran out of it.

The forecast is the line of Theil and Sen through (step, memory): the median of the slopes of all pairs, which a few odd samples do not move.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dlrover.core.scaling import rules
from dlrover.core.scaling.facts import is_world
from dlrover.core.scaling.fit.model import median
from dlrover.core.scaling.state import Scaling
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import MICROS_PER_SECOND
from dlrover.protocol.messages.scaling import MemoryPoint, ScaleMode

AHEAD = 1800.0
"""Seconds; the end of the job, if that is sooner."""
LEAST_POINTS = 8
LEAST_SPAN = 300.0
LEAST_RISING = 0.9
"""Share of the pairs that have to rise."""
DANGER = 0.9
"""Of the limit."""
MARGIN = 1.2


class MemoryForecast(Struct, frozen=True):
    now_mb: float
    then_mb: float
    seconds: float
    """From now to then."""


def forecast(points: Sequence[MemoryPoint], step_time: float, seconds_left: float | None) -> MemoryForecast | None:
    """None: too little was seen, or memory does not grow."""
    if len(points) < LEAST_POINTS or (points[-1].at - points[0].at) / MICROS_PER_SECOND < LEAST_SPAN:
        return None
    slopes = [
        (later.memory_mb - one.memory_mb) / (later.step - one.step)
        for index, one in enumerate(points)
        for later in points[index + 1 :]
        if later.step > one.step
    ]
    if not slopes or sum(slope > 0 for slope in slopes) < LEAST_RISING * len(slopes):
        return None
    seconds = AHEAD if seconds_left is None else min(AHEAD, seconds_left)
    slope = median(slopes)
    newest = max(point.memory_mb for point in points[-2:])
    return MemoryForecast(newest, newest + slope * seconds / step_time, seconds)


def forecast_of(scaling: Scaling, node_type: NodeType, seconds_left: float | None) -> MemoryForecast | None:
    if scaling.newest is None:
        return None
    return forecast(scaling.memory.get(node_type, []), scaling.newest.step_time, seconds_left)


def is_danger(found: MemoryForecast, limit_mb: int) -> bool:
    return bool(limit_mb) and found.then_mb > DANGER * limit_mb


def more_for_server(found: MemoryForecast, memory_mb: int, most: int) -> int:
    """For one whose memory will not last."""
    return min(most, max(rules.after_oom(memory_mb, most=most), int(found.then_mb * MARGIN)))


def warn(state: JobState, seconds_left: float | None) -> None:
    """Workers are not exchanged before they fail: they are named."""
    scaling, fleet = state.scaling, state.fleet
    scaling.warnings.pop("memory", None)
    if fleet is None or NodeType.WORKER not in fleet.replicas:
        return
    limit = fleet.replicas[NodeType.WORKER].spec.resource.memory_mb
    found = forecast_of(scaling, NodeType.WORKER, seconds_left)
    if found is not None and is_danger(found, limit):
        scaling.warnings["memory"] = (
            f"A worker uses {found.now_mb:.0f} of {limit} MiB and will use {found.then_mb:.0f} MiB in "
            f"{found.seconds / 60:.0f} min if its memory grows as it does."
        )


def grown_workers(state: JobState) -> int | None:
    """MiB of each worker after one of a world ran out of memory; None: they stay as they are."""
    scaling, fleet = state.scaling, state.fleet
    is_own = scaling.mode is ScaleMode.ON and NodeType.WORKER in scaling.terms.types
    if fleet is None or not is_world(state) or not is_own or scaling.memory_grown:
        return None
    workers = fleet.replicas[NodeType.WORKER]
    size = workers.spec.resource
    grown = rules.after_oom(size.memory_mb, most=scaling.terms.largest.memory_mb)
    limit = fleet.spec.limits.memory_mb
    if limit:
        others = sum(
            replicas.target * replicas.spec.resource.memory_mb
            for kind, replicas in fleet.replicas.items()
            if kind is not NodeType.WORKER
        )
        grown = min(grown, (limit - others) // max(1, workers.target))
    return grown if size.memory_mb and grown > size.memory_mb else None


def why_no_more(state: JobState) -> str:
    """The end of a job whose workers had got more memory, and ran out of it again."""
    scaling, fleet = state.scaling, state.fleet
    assert fleet is not None, "a job without a fleet gives its nodes no memory"
    had = fleet.replicas[NodeType.WORKER].spec.resource.memory_mb
    uses = () if scaling.newest is None else scaling.newest.types
    used = max((use.memory_mb for use in uses if use.node_type is NodeType.WORKER), default=0.0)
    seen = f"{used:.0f} MiB were the most that was measured" if used else "what it used was not measured"
    return (
        f"A worker ran out of memory again, after all workers had got more: it had {had} MiB, and {seen}; "
        f"with {scaling.memory_before} MiB one had run out of it before. "
        "Give the workers more memory, or make the model or the batch smaller."
    )
