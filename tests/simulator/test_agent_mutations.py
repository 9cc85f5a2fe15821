"""
An agent that is broken on purpose is caught, because the simulator runs the shipped decisions of agents.

Each mutation takes one rule away from `dlrover/agent/decisions`. The simulator has to notice within so many planned faults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dlrover.agent.decisions.acts import Act, OfferPort, StopWorkers
from dlrover.agent.decisions.decisions import AgentDecisions
from dlrover.agent.decisions.joining import Joining
from dlrover.protocol.messages.job import Desired, Round, Wish
from tests.simulator.test_mutations import first_failure

Mutation = Callable[[pytest.MonkeyPatch], None]


def without_stops(decide: Callable[..., list[Act]]) -> Callable[..., list[Act]]:
    return lambda *args: [act for act in decide(*args) if not isinstance(act, StopWorkers)]


def workers_of_a_former_life_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentDecisions, "_forget_former_life", without_stops(AgentDecisions._forget_former_life))


def workers_run_while_their_node_joins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Joining, "enter", without_stops(Joining.enter))


def workers_start_twice(patch: pytest.MonkeyPatch) -> None:
    """A wish that is repeated starts them again."""
    original = AgentDecisions._obey

    def obey(decisions: AgentDecisions, wish: Wish) -> list[Act]:
        decisions.started_round = Round(0)
        return original(decisions, wish)

    patch.setattr(AgentDecisions, "_obey", obey)


def a_used_port_is_not_replaced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Joining, "offer_another", lambda joining, refused: [])


def refusals_are_taken_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentDecisions, "mend", lambda decisions, command, code: [])


def failures_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentDecisions, "failed", lambda decisions, report: [])


def the_end_of_the_work_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentDecisions, "finished", lambda decisions, round_, step, now: [])


def the_first_wish_counts(patch: pytest.MonkeyPatch) -> None:
    original = AgentDecisions.take

    def take(decisions: AgentDecisions, desired: Desired) -> bool:
        return decisions.membership.desired is None and original(decisions, desired)

    patch.setattr(AgentDecisions, "take", take)


def workers_outlive_a_long_sleep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentDecisions, "woke", lambda decisions, away: [])


def cold_nodes_join(patch: pytest.MonkeyPatch) -> None:
    original = Joining.enter

    def enter(joining: Joining, join: Any) -> list[Act]:
        joining._is_warm = True
        return original(joining, join)

    patch.setattr(Joining, "enter", enter)


def victims_are_blamed(patch: pytest.MonkeyPatch) -> None:
    """A node joins while its report waits for an extension."""
    original = Joining.offer

    def offer(joining: Joining, join: Any) -> list[Act]:
        joining.num_untold = 0
        return original(joining, join)

    patch.setattr(Joining, "offer", offer)


def later_rounds_are_not_entered(patch: pytest.MonkeyPatch) -> None:
    original = Joining.enter

    def enter(joining: Joining, join: Any) -> list[Act]:
        acts = original(joining, join)
        return acts if join.round < 3 else [act for act in acts if not isinstance(act, OfferPort)]

    patch.setattr(Joining, "enter", enter)


LIKELY = {
    "workers_start_twice": 16,
    "a_used_port_is_not_replaced": 90,
    "refusals_are_taken_as_they_are": 90,
    "victims_are_blamed": 51,
}
"""Seeds that noticed the mutations which few seeds notice; only the time of the search hangs on them."""


@pytest.mark.parametrize(
    ("mutation", "invariants"),
    [
        (workers_of_a_former_life_go_on, {"I6"}),
        (workers_run_while_their_node_joins, {"I1"}),
        (workers_start_twice, {"I1", "I7", "I8"}),
        (a_used_port_is_not_replaced, {"I8"}),
        (refusals_are_taken_as_they_are, {"I8"}),
        (workers_outlive_a_long_sleep, {"I1"}),
        (failures_are_not_told, {"I1", "I8"}),
        (the_end_of_the_work_is_not_told, {"I8"}),
        (the_first_wish_counts, {"I1", "I8"}),
        (cold_nodes_join, {"warm-up"}),
        (victims_are_blamed, {"I7"}),
        (later_rounds_are_not_entered, {"I8"}),
    ],
)
def test_a_broken_rule_of_agents_is_noticed(
    mutation: Mutation, invariants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    room = {"I7": "has_failover", "warm-up": "has_warm_up"}.get(min(invariants), "")
    failure = first_failure(invariants, room, likely=LIKELY.get(mutation.__name__, 1))
    assert failure.invariant in invariants, failure.sentence
