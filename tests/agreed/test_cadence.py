"""How often to save: the rule, its bounds, and that ranks never differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.agreed.cadence import (
    ASSUMED_AGE,
    MOST_STEPS,
    Cadence,
    CadencePlan,
    Measurements,
    SaveCosts,
    best_interval,
    make_plan,
    mean_time_between,
)

SECONDS = st.floats(0.0, 1e5)


def test_the_rule_of_young_and_daly_within_the_budget() -> None:
    assert best_interval(2.0, 10_000.0, 0.5) == pytest.approx(200.0)
    assert best_interval(2.0, 10_000.0, 0.001) == 2000.0, "the budget is dearer than what an interruption costs"


def test_a_young_job_assumes_and_an_old_one_knows() -> None:
    assert mean_time_between(0, 0.0) == ASSUMED_AGE
    assert mean_time_between(99, 86_400.0) == pytest.approx((86_400 + ASSUMED_AGE) / 100)


def test_who_is_interrupted_more_often_saves_more_often() -> None:
    costs = SaveCosts(step=0.5, memory=0.1, storage=0.2, persist=20.0)
    calm, stormy = make_plan(costs, 0, 36_000.0, 0.5), make_plan(costs, 200, 36_000.0, 0.5)
    assert stormy.memory_every < calm.memory_every
    assert stormy.storage_every < calm.storage_every


def test_a_save_that_costs_nothing_is_made_every_step_and_storage_is_not_overrun() -> None:
    plan = make_plan(SaveCosts(step=1.0, memory=0.0, persist=300.0), 1000, 0.0)
    assert plan.memory_every == 1
    assert plan.storage_every >= 600


@given(
    step=st.floats(1e-4, 1e3),
    memory=SECONDS,
    storage=SECONDS,
    persist=SECONDS,
    interruptions=st.integers(0, 10_000),
    age=st.floats(0.0, 1e8),
    budget=st.floats(1e-4, 0.5),
)
def test_the_budget_holds_whatever_is_measured(
    step: float, memory: float, storage: float, persist: float, interruptions: int, age: float, budget: float
) -> None:
    costs = SaveCosts(step=step, memory=memory, storage=storage, persist=persist)
    plan = make_plan(costs, interruptions, age, budget)
    assert 1 <= plan.memory_every <= plan.storage_every < 2 * MOST_STEPS
    assert plan.storage_every % plan.memory_every == 0
    if plan.memory_every < MOST_STEPS:
        assert memory <= budget / 2 * plan.memory_every * step * (1 + 1e-9)


def test_nothing_can_be_planned_before_it_was_measured() -> None:
    measured = Measurements()
    assert measured.costs() is None
    measured.note_step(1.0)
    assert measured.costs() is None
    measured.note_save(5.0, is_storage=False)  # cold
    measured.note_save(0.5, is_storage=False)
    measured.note_save(0.4, is_storage=False)
    measured.note_persist(30.0)
    costs = measured.costs()
    assert costs == SaveCosts(step=1.0, memory=0.5, storage=0.5, persist=30.0)


def test_the_first_steps_are_saved_to_memory_and_the_plan_begins_with_a_storage_save() -> None:
    cadence = Cadence()
    said = []
    for step in range(100, 112):
        if cadence.is_look_due(step):
            cadence.adopt(CadencePlan(memory_every=3, storage_every=6), step)
        said.append(cadence.due(step))
    assert said == ["memory"] * 4 + ["storage", "", "", "memory", "", "", "storage", ""]


def test_a_look_without_measurements_is_made_again_soon() -> None:
    cadence = Cadence()
    assert not cadence.is_look_due(0)
    assert cadence.is_look_due(4)
    cadence.adopt(None, 4)
    assert not cadence.is_look_due(7)
    assert cadence.is_look_due(8)


def test_a_new_plan_counts_from_what_was_saved() -> None:
    cadence = Cadence(CadencePlan(memory_every=10, storage_every=100))
    assert cadence.due(0) == "storage"
    assert not cadence.is_look_due(50), "a plan of the caller's own is kept"
    assert cadence.due(5) == ""
    cadence.adopt(CadencePlan(memory_every=2, storage_every=100), 5)
    assert cadence.due(5) == "memory", "too long ago under the new plan"


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 5)), max_size=20))
def test_ranks_that_hear_the_same_plans_say_the_same(plans: list[tuple[int, int]]) -> None:
    one, two = Cadence(), Cadence()
    told = iter(plans)
    for step in range(0, 300, 3):
        looks = (one.is_look_due(step), two.is_look_due(step))
        assert looks[0] == looks[1]
        if looks[0]:
            every, times = next(told, (7, 3))
            plan = CadencePlan(memory_every=every, storage_every=every * times)
            one.adopt(plan, step)
            two.adopt(plan, step)
        assert one.due(step) == two.due(step)
