"""Dividing a room: what holds whatever jobs tell."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.core.scaling.history.allotting import CurvePoint, JobCurve, allot

speeds = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12)


def curve(uid: str, least: int, gains: list[float], *, now: int = 0, work: float = 1000.0) -> JobCurve:
    """Each further unit adds its gain."""
    points, speed = [], 0.0
    for index, gain in enumerate(gains):
        speed += gain
        points.append(CurvePoint(least + index, speed))
    return JobCurve(uid=uid, points=tuple(points), work=work, now=now)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), speeds, st.integers(0, 15), st.floats(1.0, 1e6)), max_size=8),
    st.integers(0, 60),
)
def test_the_sum_fits_and_each_job_has_its_minimum_while_it_fits(
    told: list[tuple[int, list[float], int, float]], room: int
) -> None:
    jobs = [curve(str(index), least, gains, now=now, work=work) for index, (least, gains, now, work) in enumerate(told)]
    shares = allot(jobs, room)
    assert sum(share.units for share in shares) <= room
    free = room
    for job, share in zip(jobs, shares, strict=True):
        least, most = job.points[0].units, job.points[-1].units
        assert share.units == 0 or least <= share.units <= most
        if least <= free:
            assert share.units >= least
            free -= least


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), speeds, st.integers(2, 6), st.integers(0, 80), st.floats(1.0, 1e6))
def test_equal_jobs_differ_by_at_most_one_unit(
    least: int, gains: list[float], count: int, room: int, work: float
) -> None:
    falling = sorted(gains, reverse=True)  # each further unit brings less
    shares = allot([curve(str(index), least, falling, work=work) for index in range(count)], room)
    given_units = [share.units for share in shares if share.units]
    assert not given_units or max(given_units) - min(given_units) <= 1
    if room >= count * least:
        assert len(given_units) == count
