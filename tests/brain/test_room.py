"""A cluster's room between the jobs that ask for their share of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.brain.desk import BrainDesk
from dlrover.brain.room import LASTS, ROOM_KEY, divide
from dlrover.brain.settings import change_setting
from dlrover.brain.store.store import BrainStore
from dlrover.brain.tenants import TokenHolder, TokenRole
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.brain import Allowance, AllowanceAsked, AskedGroup, ClusterSeen, MachinesSeen
from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.scaling import SpeedPoint
from tests.brain.jobs import Clock, ask, began, ended, ref

STEEP = tuple(SpeedPoint(nodes, float(nodes)) for nodes in range(1, 9))
FLAT = tuple(SpeedPoint(nodes, 1.0 + nodes / 100) for nodes in range(1, 9))


def wish(uid: str, **more: object) -> AllowanceAsked:
    values = {"job": ref(uid), "min_nodes": 1, "max_nodes": 8, "points": STEEP, "remaining": 10_000.0, **more}
    return AllowanceAsked(**values)  # type: ignore[arg-type]


async def share(desk: BrainDesk, uid: str, **more: object) -> Allowance:
    found = await ask(desk, wish(uid, **more))
    assert isinstance(found, Allowance)
    return found


async def test_without_a_known_room_nothing_limits_a_job(desk: BrainDesk) -> None:
    await ask(desk, began())
    assert (await share(desk, "job-1")).nodes is None


async def test_a_room_goes_to_those_who_gain_from_it(desk: BrainDesk, store: BrainStore) -> None:
    await store.write(lambda connection: change_setting(connection, 1, [f"{ROOM_KEY}=8"], None, None))
    for uid in ("steep", "flat"):
        await ask(desk, began(uid))
        await share(desk, uid, points=STEEP if uid == "steep" else FLAT)
    steep, flat = await share(desk, "steep"), await share(desk, "flat", points=FLAT)
    assert steep.nodes is not None
    assert flat.nodes is not None
    assert steep.nodes > flat.nodes >= 1
    assert steep.nodes + flat.nodes <= 8
    assert steep.sentence


async def test_a_job_that_ended_or_is_silent_has_no_share(desk: BrainDesk, store: BrainStore, clock: Clock) -> None:
    await store.write(lambda connection: change_setting(connection, 1, [f"{ROOM_KEY}=4"], None, None))
    for uid in ("one", "two"):
        await ask(desk, began(uid))
        await share(desk, uid)
    assert (await share(desk, "one")).nodes == 2
    await ask(desk, ended("two"))
    assert (await share(desk, "one")).nodes == 4
    await ask(desk, began("two"))
    await share(desk, "two")
    assert (await share(desk, "one")).nodes == 2
    clock.now += LASTS + 1
    assert (await share(desk, "one")).nodes == 4


async def test_a_monitor_tells_the_room(desk: BrainDesk, clock: Clock) -> None:
    asked = (AskedGroup(node_type=NodeType.WORKER, count=2, resource=Resource(cpu=4.0, memory_mb=1000)),)
    machines = MachinesSeen(count=2, cpu=32.0, memory_mb=100_000, claimed_cpu=20.0, claimed_memory_mb=10_000)
    await ask(desk, ClusterSeen(cluster="c", machines=machines), TokenHolder(tenant="team", role=TokenRole.MONITOR))
    await ask(desk, began(cluster="c", asked=asked))
    assert (await share(desk, "job-1", nodes=2)).nodes == 5, "two that it has, and three of 4 cores in 12 free ones"
    clock.now += 3600
    assert (await share(desk, "job-1", nodes=2)).nodes is None, "old news is no room"


async def test_a_minimum_above_the_maximum_is_refused(desk: BrainDesk) -> None:
    await ask(desk, began())
    with pytest.raises(Rejected):
        await share(desk, "job-1", min_nodes=9)


curves = st.lists(st.tuples(st.integers(-1, 40), st.floats(allow_nan=True, allow_infinity=True)), max_size=6)
jobs = st.builds(
    lambda least, more, unit, now, points, work: (least, least + more, unit, now, points, work),
    st.integers(1, 10),
    st.integers(0, 20),
    st.integers(1, 5),
    st.integers(0, 40),
    curves,
    st.floats(0, 1e9),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(jobs, min_size=1, max_size=6), st.integers(0, 80))
def test_shares_fit_into_the_room_and_the_bounds_whatever_is_told(told: list[tuple], room: int) -> None:  # type: ignore[type-arg]
    asked = [
        wish(
            f"job-{index}",
            min_nodes=least,
            max_nodes=most,
            node_unit=unit,
            nodes=now,
            points=tuple(SpeedPoint(nodes, speed) for nodes, speed in points),
            remaining=work,
        )
        for index, (least, most, unit, now, points, work) in enumerate(told)
    ]
    shares = divide(asked, room)
    assert sum(nodes for nodes, _ in shares) <= room
    free = room
    for job, (nodes, sentence) in zip(asked, shares, strict=True):
        unit = job.node_unit if job.node_unit <= job.max_nodes else 1
        least = -(-job.min_nodes // unit) * unit
        assert nodes == 0 or least <= nodes <= max(least, job.max_nodes)
        assert nodes % unit == 0
        assert sentence
        if least <= free:
            assert nodes >= least, "each its minimum while it fits, in the order of the jobs"
            free -= least
