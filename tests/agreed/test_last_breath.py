"""Who saves the last step: never with a doubt, and only who has the newest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlrover.agreed.last_breath import Offer, plan_breath

OFFERS = st.lists(
    st.builds(
        Offer, st.integers(0, 7), st.integers(40, 42), st.integers(0, 1), st.sampled_from([None, 0, 1]), st.booleans()
    ),
    max_size=8,
    unique_by=lambda offer: offer.local_rank,
)


def test_all_have_the_same_step_and_the_first_rank_saves() -> None:
    plan = plan_breath([Offer(2, 57, 9), Offer(1, 57, 9)], 0)
    assert (plan.step, plan.holders, plan.doubt) == (57, (1, 2), "")


def test_one_is_ahead_by_one_step_and_saves_for_all() -> None:
    plan = plan_breath([Offer(0, 56, 8), Offer(1, 57, 9), Offer(2, 56, 8)], 0)
    assert (plan.step, plan.holders) == (57, (1,))


def test_a_survivor_that_is_silent_is_a_doubt() -> None:
    plan = plan_breath([Offer(0, 57, 9)], 1)
    assert plan.holders == ()
    assert plan.doubt == "1 of the survivors did not answer"


def test_nobody_is_left() -> None:
    assert plan_breath([], 0).doubt == "no survivor has a whole step"


def test_two_steps_apart_is_a_doubt() -> None:
    assert plan_breath([Offer(0, 55, 8), Offer(1, 57, 9)], 0).doubt == "survivors are at steps 55 to 57"


def test_different_states_of_one_step_are_a_doubt_also_if_a_newer_one_exists() -> None:
    assert plan_breath([Offer(0, 57, 8), Offer(1, 57, 9)], 0).doubt == "survivors have different states of step 57"
    behind = [Offer(0, 56, 8), Offer(1, 57, 9), Offer(2, 56, 7)]
    assert plan_breath(behind, 0).doubt == "survivors have different states of step 56"


def test_of_a_state_in_pieces_each_saves_its_own_and_replicas_are_compared() -> None:
    plan = plan_breath([Offer(0, 57, 9, 5), Offer(2, 57, 9, 5), Offer(3, 57, 8, 6)], 0)
    assert (plan.holders, plan.is_cut) == ((0, 2, 3), True)
    unequal = plan_breath([Offer(0, 57, 9, 5), Offer(2, 57, 7, 5), Offer(3, 57, 8, 6)], 0)
    assert unequal.doubt == "survivors have different states of step 57"


def test_a_piece_that_only_a_survivor_behind_has_is_missing() -> None:
    plan = plan_breath([Offer(0, 57, 9, 5), Offer(3, 56, 8, 6)], 0)
    assert plan.doubt == "a piece of step 57 is missing"
    assert plan_breath([Offer(0, 57, 9, 5), Offer(2, 56, 7, 5), Offer(3, 57, 8, 6)], 0).holders == (0, 3)


def test_the_step_before_is_saved_if_only_that_one_has_all_its_pieces() -> None:
    plan = plan_breath([Offer(0, 57, 9, 5), Offer(2, 56, 7, 5), Offer(3, 56, 8, 6)], 0)
    assert (plan.step, plan.holders, plan.doubt) == (56, (2, 3), "")


def test_a_survivor_with_all_gradients_finishes_the_step_of_the_others() -> None:
    plan = plan_breath([Offer(0, 57, 9, 5), Offer(3, 56, 8, 6, can_finish=True)], 0)
    assert (plan.step, plan.holders, plan.doubt, plan.finishers) == (57, (), "", (3,))


def test_all_survivors_with_all_gradients_finish_because_the_lost_worker_may_have_finished() -> None:
    plan = plan_breath([Offer(0, 56, 9, 5, can_finish=True), Offer(3, 56, 8, 6, can_finish=True)], 0)
    assert (plan.step, plan.finishers) == (57, (0, 3))


def test_no_step_is_finished_of_which_a_piece_has_no_gradients() -> None:
    plan = plan_breath([Offer(0, 56, 9, 5, can_finish=True), Offer(3, 56, 8, 6)], 0)
    assert (plan.step, plan.holders, plan.finishers) == (56, (0, 3), ())


def test_no_step_is_finished_that_is_whole_elsewhere() -> None:
    plan = plan_breath([Offer(0, 57, 9, 5), Offer(2, 56, 7, 5, can_finish=True)], 0)
    assert (plan.step, plan.holders, plan.finishers) == (57, (0,), ())


@given(OFFERS, st.integers(0, 2))
def test_whoever_saves_has_the_newest_step_and_no_survivor_says_otherwise(offers: list[Offer], num_silent: int) -> None:
    plan = plan_breath(offers, num_silent)
    assert [bool(plan.holders), bool(plan.doubt), bool(plan.finishers)].count(True) == 1
    if plan.finishers:
        steps = {offer.local_rank: (offer.step, offer.piece) for offer in offers}
        assert {steps[rank][0] + 1 for rank in plan.finishers} == {plan.step}
        then = {piece for step, piece in steps.values() if step == plan.step} | {
            steps[rank][1] for rank in plan.finishers
        }
        assert then == {offer.piece for offer in offers}, "the step will be whole"
    holders = [offer for offer in offers if offer.local_rank in plan.holders]
    if plan.holders:
        assert num_silent == 0
        assert {offer.step for offer in holders} == {plan.step}
        newest = max(offer.step for offer in offers)
        is_newest_whole = {offer.piece for offer in offers if offer.step == newest} == {offer.piece for offer in offers}
        assert plan.step == newest or not is_newest_whole
        contents = {(offer.step, offer.piece, offer.digest) for offer in offers}
        assert len(contents) == len({(step, piece) for step, piece, _digest in contents}), "one content of each"
        assert {offer.piece for offer in holders} == {offer.piece for offer in offers}, "no piece is missing"
        assert max(offer.step for offer in offers) - min(offer.step for offer in offers) <= 1


@given(OFFERS, st.randoms())
def test_the_order_of_the_offers_does_not_matter(offers: list[Offer], chance: object) -> None:
    shuffled = list(offers)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert plan_breath(offers, 0) == plan_breath(shuffled, 0)
