"""
I10 to I12 for generated laws, evidence, rooms and commands.

`EXAMPLES` examples each; `DLROVER_EXAMPLES=10000` runs what the figures in the docs are from.
"""

from __future__ import annotations

import itertools
import math
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.core.scaling.allreduce import SHARE
from dlrover.core.scaling.brakes import REVERSAL_WINDOW
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import LaunchRefused, NodeType, Resource, ScaleJob
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.scaling import (
    PlannedGroup,
    PlanOffered,
    RoomSeen,
    ScaleFor,
    ScaleMode,
    ScaleOutcome,
    ScaleTerms,
    ScaleTo,
    SetScaling,
    SizePlan,
)
from tests.core.scaling.driver import Driver, Law, family, worthwhile

EXAMPLES = int(os.environ.get("DLROVER_EXAMPLES", "150"))


def check_target(driver: Driver) -> None:
    """I10: between the bounds, a multiple of the unit, and no change costs a relaunch."""
    state = driver.job.state
    assert state.terms is not None
    limits, target = state.terms.limits, driver.target
    assert limits.min_nodes <= target <= limits.max_nodes
    assert target % limits.node_unit == 0
    assert state.fleet is not None
    assert not state.fleet.workers.spent
    assert not state.fleet.workers.evictions


class Watch:
    """I10 and I11 over a life: looks at what was decided by each command."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.seen = 0
        self.moves: list[tuple[int, int]] = []
        self.banned: dict[int, int] = {}

    def look(self) -> None:
        driver, scaling = self.driver, self.driver.job.state.scaling
        check_target(driver)
        for made in scaling.decisions:
            if made.number <= self.seen:
                continue
            self.seen = made.number
            group = made.plan.group(NodeType.WORKER)
            nodes = 0 if group is None or group.count is None else group.count
            is_order = made.sentence.startswith("The platform has room")
            if made.outcome is ScaleOutcome.PLANNED and not is_order:
                assert made.at >= self.banned.get(nodes, 0), f"{nodes} nodes were taken back: {made}"
                assert nodes <= (math.inf if driver.room is None else max(driver.room, driver.min_nodes))
                self.moves.append((made.at, 1 if made.nodes_after > made.nodes_before else -1))
            elif made.outcome is ScaleOutcome.TAKEN_BACK:
                refused = next(each for each in scaling.refused if each.plan == made.plan)
                self.banned[refused.nodes] = refused.until
                self.moves.append((made.at, -1 if refused.nodes > made.nodes_before else 1))
        turns = [at for (_, one), (at, other) in itertools.pairwise(self.moves) if one != other]
        for first, _, third in zip(turns, turns[1:], turns[2:], strict=False):
            assert third - first > micros(REVERSAL_WINDOW), f"I11: three reversals within 30 min: {self.moves}"


thetas = st.tuples(
    st.floats(0.001, 1.0), st.floats(0.0, 0.05), st.floats(0.0, 0.5), st.one_of(st.just(0.0), st.floats(0.0, 0.2))
)
laws_of_the_family = thetas.map(family)


@st.composite
def any_law(draw: st.DrawFn) -> Law:
    """A step time for each size, with nothing in common."""
    times = draw(st.lists(st.floats(0.05, 3.0), min_size=17, max_size=17))
    return lambda nodes: times[min(nodes, 16)]


@st.composite
def orders(draw: st.DrawFn) -> list[tuple[str, float]]:
    kinds = ["minute", "minute", "minute", "room", "person", "bounds", "offer", "mode", "refuse", "wait"]
    return draw(st.lists(st.tuples(st.sampled_from(kinds), st.floats(0, 1)), min_size=1, max_size=24))


@settings(max_examples=EXAMPLES, deadline=None)
@given(any_law(), orders(), st.sampled_from(list(ScaleFor)), st.sampled_from([1, 2]), st.integers(0, 9), st.booleans())
def test_i10_and_i11_hold_for_whatever_is_measured_seen_and_wanted(
    law: Law, todo: list[tuple[str, float]], scale_for: ScaleFor, unit: int, seed: int, knows_room: bool
) -> None:
    terms = ScaleTerms(mode=ScaleMode.ON, scale_for=scale_for)
    driver = Driver(law, unit, 8 * unit, unit, terms=terms, noise=0.1, seed=seed, room=100 if knows_room else None)
    watch = Watch(driver)
    for kind, number in todo:
        try:
            act(driver, kind, number)
        except Rejected:
            pass
        watch.look()


def act(driver: Driver, kind: str, number: float) -> None:
    some = max(1, round(number * 10))
    match kind:
        case "minute":
            driver.minute()
        case "room":
            driver.room = round(number * 12)
            driver.do(RoomSeen(most=driver.room, reason="a quota"))
        case "person":
            driver.do(ScaleTo(nodes=some * driver.unit))
        case "bounds":
            most = max(some, 2) * driver.unit
            driver.do(ScaleJob(min_nodes=driver.unit, max_nodes=most))
        case "offer":
            group = PlannedGroup(node_type=NodeType.WORKER, count=some)
            driver.do(PlanOffered(plan=SizePlan(groups=(group,)), expected_speed=number * 1000))
        case "mode":
            driver.do(SetScaling(mode=list(ScaleMode)[min(2, int(number * 3))]))
        case "refuse":
            driver.is_platform_quick = number < 0.5
            fleet = driver.job.state.fleet
            assert fleet is not None
            for node in list(fleet.workers.pending)[:1]:
                driver.do(LaunchRefused(node=node, reason="no quota"))
            if driver.is_platform_quick:
                for launch in list(driver.launches):
                    driver.bring_late(launch)
        case "wait":
            driver.wait(number * 3600)


@settings(max_examples=EXAMPLES, deadline=None)
@given(laws_of_the_family, st.sampled_from(list(ScaleFor)), st.integers(1, 16), st.floats(0, 0.1), st.integers(0, 999))
def test_i12_a_law_that_stands_still_leads_to_rest_near_the_best_size(
    law: Law, scale_for: ScaleFor, most: int, noise: float, seed: int
) -> None:
    terms = ScaleTerms(mode=ScaleMode.ON, scale_for=scale_for)
    driver = Driver(law, max_nodes=most, terms=terms, noise=noise, seed=seed)
    for _ in range(120):
        driver.minute()
    changes = len(driver.sizes) - 1
    assert changes <= math.log2(most) + 6, driver.sizes
    rested = driver.sizes[-1]
    best = max(driver.speed(nodes) for nodes in worthwhile(driver, SHARE[scale_for]))
    assert driver.speed(rested) >= 0.9 * best, (driver.sizes, list(worthwhile(driver, SHARE[scale_for])))


@settings(max_examples=EXAMPLES, deadline=None)
@given(any_law(), st.integers(1, 16), st.sampled_from([ScaleFor.SPEED, ScaleFor.BALANCED]))
def test_without_noise_no_law_ends_worse_than_it_began(law: Law, most: int, scale_for: ScaleFor) -> None:
    driver = Driver(law, max_nodes=most, terms=ScaleTerms(mode=ScaleMode.ON, scale_for=scale_for))
    driver.minutes(30)
    assert driver.job.state.scaling.probation is not None or driver.speed(driver.nodes) >= 0.97 * driver.speed(1)


def test_with_noise_of_10_percent_19_of_20_laws_end_no_worse_than_they_began() -> None:
    chance, num_worse, num_laws = random.Random(11), 0, int(os.environ.get("DLROVER_LAWS", "200"))
    for seed in range(num_laws):
        times = [chance.uniform(0.05, 3.0) for _ in range(17)]
        driver = Driver(lambda nodes, times=times: times[min(nodes, 16)], max_nodes=8, noise=0.1, seed=seed)  # type: ignore[misc]
        driver.minutes(30)
        is_watched = driver.job.state.scaling.probation is not None
        num_worse += not is_watched and driver.speed(driver.nodes) < 0.97 * driver.speed(1)
    assert num_worse <= 0.05 * num_laws


@pytest.mark.parametrize("seed", range(5))
def test_dry_run_launches_nothing(seed: int) -> None:
    chance = random.Random(seed)
    for each in range(int(os.environ.get("DLROVER_LAWS", "200")) // 5):
        law = family((chance.random(), chance.random() / 20, chance.random() / 2, chance.random() / 10))
        driver = Driver(law, max_nodes=8, terms=ScaleTerms(mode=ScaleMode.DRY_RUN), noise=0.1, seed=each)
        num_launched = len(driver.launches)
        driver.minutes(3).do(RoomSeen(most=chance.randint(0, 12)))
        driver.minutes(3)
        assert len(driver.launches) == num_launched == 8
        assert driver.nodes == 8
        assert driver.status.num_outcomes.get(ScaleOutcome.PLANNED, 0) == 0


def test_limits_of_the_job_hold() -> None:
    law = family((1, 0, 0, 0))
    driver = Driver(law, max_nodes=8, fleet_count=4, resource=Resource(cpu=4), limits=Resource(cpu=18))
    driver.minutes(20)
    assert driver.nodes == 4
