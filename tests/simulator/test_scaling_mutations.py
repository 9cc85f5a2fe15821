"""A core whose scaling is broken on purpose is caught: without a cool-down, without taking back, without a bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from dlrover.core.decision import Decision
from dlrover.core.scaling import acting, brakes, stragglers
from dlrover.core.scaling import facts as known_facts
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.probation import Judgement
from dlrover.core.scaling.state import Probation
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec
from dlrover.protocol.messages.scaling import ScaleFor, ScaleMode, ScaleTerms
from dlrover.simulator.campaign import Failure, run_plan
from dlrover.simulator.plan import Result, SeedPlan
from dlrover.simulator.shapes import Costs, Shape

Mutation = Callable[[pytest.MonkeyPatch], None]
NOISY, PRICEY = (0.9, 0.1, 0.3), (0.0, 1.0, 0.0)


def a_plan(seed: int, law: tuple[float, float, float], *, is_platform_slow: bool = False) -> SeedPlan:
    """An hour without faults, in which the room changes now and then. A slow platform needs longer for a node than a change must wait for the next."""
    fleet = FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=8)})
    terms = ScaleTerms(
        mode=ScaleMode.ON, scale_for=ScaleFor.BALANCED, nodes_start=1, stable_for=20.0, worker_pause=120.0
    )
    shape = Shape(min_nodes=1, max_nodes=8, fleet=fleet, scaling=terms, law=law, law_noise=0.1, num_steps=2400)
    if is_platform_slow:
        shape = replace(shape, costs=Costs(replacement=(200.0, 400.0)), scaling=replace(terms, worker_pause=1.0))
    return SeedPlan(seed=seed, shape=shape, faults=(), hours=1.0, is_thorough=False)


def there_is_no_cool_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(brakes, "_cool_down", lambda scaling, known, kind: None)


def nothing_is_taken_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(acting, "_take_back", lambda decision, watched, judgement: None)


def a_smaller_size_is_never_taken_back(patch: pytest.MonkeyPatch) -> None:
    original = acting._take_back

    def take_back(decision: Decision, watched: Probation, judgement: Judgement) -> None:
        if watched.nodes_after > watched.nodes_before:
            original(decision, watched, judgement)

    patch.setattr(acting, "_take_back", take_back)


def what_was_taken_back_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(brakes, "_taken_back", lambda scaling, known, promise: None)
    patch.setattr(acting.allreduce, "_measured", lambda scaling, configuration: {})


def the_room_is_no_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScaleFacts, "most", property(lambda known: known.limits.max_nodes))
    patch.setattr("dlrover.core.scaling.verdict._bound", lambda known, nodes: "")


def nothing_is_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(known_facts, "_under_way", lambda state: "")


def slow_nodes_are_exchanged_again_and_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stragglers, "allowed_at", lambda scaling, now: now)


def first_failure(law: tuple[float, float, float], *, is_platform_slow: bool = False) -> Failure | None:
    outcomes = (run_plan(a_plan(seed, law, is_platform_slow=is_platform_slow)) for seed in range(40))
    return next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)


@pytest.mark.parametrize("is_platform_slow", [False, True])
@pytest.mark.parametrize("law", [NOISY, PRICEY])
def test_the_shipped_core_breaks_nothing(law: tuple[float, float, float], is_platform_slow: bool) -> None:
    for seed in range(10):
        assert isinstance(run_plan(a_plan(seed, law, is_platform_slow=is_platform_slow)), Result)


@pytest.mark.parametrize(
    ("mutation", "law", "invariants"),
    [
        (there_is_no_cool_down, PRICEY, {"I10"}),
        (nothing_is_taken_back, NOISY, {"I10"}),
        (what_was_taken_back_is_forgotten, NOISY, {"I11"}),
        (the_room_is_no_bound, PRICEY, {"I10"}),
        (nothing_is_awaited, PRICEY, {"I10"}),
        (slow_nodes_are_exchanged_again_and_again, PRICEY, {"I10"}),
    ],
)
def test_a_broken_promise_of_scaling_is_noticed(
    mutation: Mutation, law: tuple[float, float, float], invariants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    failure = first_failure(law, is_platform_slow=mutation is nothing_is_awaited)
    assert failure is not None
    assert failure.invariant in invariants, failure.sentence


def test_a_smaller_size_that_is_never_taken_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that begins large and shall be cheap tries smaller sizes."""
    plan = a_plan(0, NOISY)
    terms = plan.shape.scaling
    assert terms is not None
    plan = replace(plan, shape=replace(plan.shape, scaling=replace(terms, nodes_start=8, scale_for=ScaleFor.COST)))
    assert isinstance(run_plan(plan), Result)
    a_smaller_size_is_never_taken_back(monkeypatch)
    failure = run_plan(plan)
    assert isinstance(failure, Failure)
    assert failure.invariant == "I10"
    assert "are taken back" in failure.sentence
