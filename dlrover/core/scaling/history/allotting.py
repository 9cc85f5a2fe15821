"""
Dividing a room between jobs: units go one at a time to the job whose remaining time falls most by it.

Each job has its minimum first, in the given order, while it fits. Beyond, what a job gains is measured along the lower envelope of its remaining time, so that a
step that pays only together with the next one is taken. Equal jobs end at most one unit apart. Advice: a job takes its share as room.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

MOST_POINTS = 256
PAYS = 2.0
"""A change has to save so many times what it costs, as everywhere (`brakes.PAYS`)."""
LEAST_FALL = 1e-9
"""Seconds per unit: less is nothing."""


class CurvePoint(Struct, frozen=True, array_like=True):
    units: int
    speed: float
    """Records per second with so many."""


class JobCurve(Struct, frozen=True, kw_only=True):
    """What a job says of itself. A unit is a node, a core, or whatever the room is counted in."""

    uid: str
    points: tuple[CurvePoint, ...]
    """Sizes that it may have, growing; the first is its minimum."""
    work: float
    """Records that remain."""
    now: int = 0
    """Units that it has; 0: it waits."""
    cost: float = 0.0
    """Seconds that a change pauses it."""

    def speed(self, units: int) -> float:
        """With so many, some of which may be idle."""
        return max((point.speed for point in self.points if point.units <= units), default=0.0)


class Allotment(Struct, frozen=True, kw_only=True):
    uid: str
    units: int
    """0: there is no room for its minimum."""
    sentence: str


class _Stretch(Struct, frozen=True):
    """A piece of the lower envelope of the remaining time."""

    until: int
    fall: float
    """Seconds less per unit."""


def allot(jobs: Sequence[JobCurve], room: int) -> tuple[Allotment, ...]:
    """A share for each job, in the order of the jobs. The sum is never above the room."""
    granted = [0] * len(jobs)
    free = max(0, room)
    for index, job in enumerate(jobs):
        least = job.points[0].units if job.points else 0
        if 0 < least <= free:
            granted[index] = least
            free -= least
    envelopes = [_envelope(job) for job in jobs]
    while free > 0:
        best = _next(jobs, granted, envelopes, free)
        if best is None:
            break
        index, units = best
        granted[index] += units
        free -= units
    granted = _without_small_changes(jobs, granted, free)
    return tuple(
        Allotment(uid=job.uid, units=units, sentence=_sentence(job, units, room))
        for job, units in zip(jobs, granted, strict=True)
    )


def _next(
    jobs: Sequence[JobCurve], granted: Sequence[int], envelopes: Sequence[list[_Stretch]], free: int
) -> tuple[int, int] | None:
    """Whose turn it is, and the units of its next size. Among equals it is the one that has least."""
    best: tuple[float, int, int] | None = None
    found: tuple[int, int] | None = None
    for index, job in enumerate(jobs):
        units = _step(job, granted[index])
        if not granted[index] or not units or units > free:
            continue
        fall = next((stretch.fall for stretch in envelopes[index] if granted[index] < stretch.until), 0.0)
        key = (-fall, granted[index], index)
        if fall > LEAST_FALL and (best is None or key < best):
            best, found = key, (index, units)
    return found


def _step(job: JobCurve, units: int) -> int:
    """Units to its next size; 0: it has its largest."""
    return next((point.units - units for point in job.points if point.units > units), 0)


def _envelope(job: JobCurve) -> list[_Stretch]:
    """From the minimum on, the straight pieces below the remaining time, each less steep than the one before."""
    times = [(point.units, job.work / point.speed) for point in job.points[:MOST_POINTS] if point.speed > 0]
    if not times:
        return []
    found: list[_Stretch] = []
    at = 0
    while at < len(times) - 1:
        units, seconds = times[at]
        falls = [((seconds - later) / (more - units), index) for index, (more, later) in enumerate(times) if index > at]
        fall, to = max(falls)
        if fall <= LEAST_FALL:
            break
        found.append(_Stretch(times[to][0], fall))
        at = to
    return found


def _without_small_changes(jobs: Sequence[JobCurve], granted: list[int], free: int) -> list[int]:
    """A running job whose growth does not pay keeps what it has, and one that would shrink keeps it where that is free."""
    settled = list(granted)
    for index, job in enumerate(jobs):
        if not 0 < job.now < settled[index]:
            continue
        saved = job.work / job.speed(job.now) - job.work / job.speed(settled[index]) if job.speed(job.now) > 0 else None
        if saved is not None and saved < PAYS * job.cost:
            free += settled[index] - job.now
            settled[index] = job.now
    for index, job in enumerate(jobs):
        most = job.points[-1].units if job.points else 0
        if 0 < settled[index] < job.now <= most and job.now - settled[index] <= free:
            free -= job.now - settled[index]
            settled[index] = job.now
    return settled


def _sentence(job: JobCurve, units: int, room: int) -> str:
    if not job.points:
        return "The job told no size that it may have."
    least = job.points[0].units
    if not units:
        return f"There is no room for its minimum of {least} among {room}."
    speed = job.speed(units)
    left = f"{job.work / speed / 60:.0f} min remain with them" if speed > 0 else "its speed is not known"
    return (
        f"{units} of {room}: {left}; the others gain more from the rest."
        if units > least
        else f"Its minimum of {units} of {room}: {left}."
    )
