"""
An agent that is broken on purpose is caught, because the simulator runs the shipped decisions of agents.

Each mutation takes one rule away from `dlrover/agent/decisions`. The simulator has to notice within so many planned faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.agent.decisions import last_breath
from dlrover.agent.decisions.acts import Act, OfferPort, StopWorkers
from dlrover.agent.decisions.decisions import AgentDecisions
from dlrover.agent.decisions.joining import Joining
from dlrover.agent.decisions.last_breath import BreathTalk
from dlrover.agreed.last_breath import Offer, Plan, plan_breath
from dlrover.host.shared_page.breath_words import BreathAnswer
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


def patch_plan(patch: pytest.MonkeyPatch, change: Callable[[Sequence[Offer], int], Plan]) -> None:
    patch.setattr(last_breath, "plan_breath", change)


def survivors_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda offers, silent: plan_breath([replace(each, digest=0) for each in offers], silent))


def silence_is_consent(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda offers, silent: plan_breath(offers, 0))


def the_oldest_step_is_saved(patch: pytest.MonkeyPatch) -> None:
    def choose(offers: Sequence[Offer], silent: int) -> Plan:
        plan = plan_breath(offers, silent)
        oldest = min((offer.step for offer in offers), default=-1)
        holders = tuple(offer.local_rank for offer in offers if offer.step == oldest)
        return replace(plan, step=oldest, holders=holders) if plan.holders else plan

    patch_plan(patch, choose)


def any_survivor_saves(patch: pytest.MonkeyPatch) -> None:
    def choose(offers: Sequence[Offer], silent: int) -> Plan:
        plan = plan_breath(offers, silent)
        return replace(plan, holders=tuple(offer.local_rank for offer in offers)) if plan.holders else plan

    patch_plan(patch, choose)


def all_are_told_to_finish(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda offers, silent: plan_breath([replace(each, can_finish=True) for each in offers], silent))


def steps_are_never_finished(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda offers, silent: plan_breath([replace(each, can_finish=False) for each in offers], silent))


def nothing_is_ever_saved(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda offers, silent: Plan(-1, (), "never"))


def a_second_writer_follows_one_that_may_still_write(patch: pytest.MonkeyPatch) -> None:
    def end(talk: BreathTalk, answers: Any) -> None:
        talk.is_saved = all(answer is BreathAnswer.SAVED for answer in answers.values())
        talk.orders = {}
        if not talk.is_saved and not talk.plan.is_cut:
            talk._ask_next_writer()

    patch.setattr(BreathTalk, "_end_save", end)


def a_dead_writer_is_believed(patch: pytest.MonkeyPatch) -> None:
    def end(talk: BreathTalk, answers: Any) -> None:
        talk.is_saved, talk.orders = True, {}

    patch.setattr(BreathTalk, "_end_save", end)


def a_dead_writer_has_no_successor(patch: pytest.MonkeyPatch) -> None:
    patch_plan(patch, lambda offers, silent: _first_only(plan_breath(offers, silent)))


def _first_only(plan: Plan) -> Plan:
    return replace(plan, holders=plan.holders[:1])


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
        (survivors_are_not_compared, {"breath"}),
        (silence_is_consent, {"breath"}),
        (the_oldest_step_is_saved, {"breath"}),
        (any_survivor_saves, {"breath"}),
        (all_are_told_to_finish, {"breath"}),
        (steps_are_never_finished, {"breath"}),
        (nothing_is_ever_saved, {"breath"}),
        (a_second_writer_follows_one_that_may_still_write, {"breath"}),
        (a_dead_writer_is_believed, {"breath"}),
        (a_dead_writer_has_no_successor, {"breath"}),
    ],
)
def test_a_broken_rule_of_agents_is_noticed(
    mutation: Mutation, invariants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    room = {"I7": "has_failover", "warm-up": "has_warm_up", "breath": "has_guard"}.get(min(invariants), "")
    failure = first_failure(invariants, room, likely=LIKELY.get(mutation.__name__, 1))
    assert failure.invariant in invariants, failure.sentence
