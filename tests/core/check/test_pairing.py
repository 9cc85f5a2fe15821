"""Who is tested with whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlrover.core.check.pairing import (
    across,
    across_rotated,
    alone,
    by_scheduling_group,
    confirmation,
    extremes,
    inside,
    neighbours,
    together,
)
from dlrover.protocol.messages.job import NodeRank


def ranks(*numbers: int) -> list[NodeRank]:
    return [NodeRank(number) for number in numbers]


RANKS = st.lists(st.integers(0, 400).map(NodeRank), unique=True, max_size=40)


def test_neighbours_are_pairs_and_an_odd_last_one_joins_the_last_pair() -> None:
    assert neighbours(ranks(0, 1, 2, 3)) == ((0, 1), (2, 3))
    assert neighbours(ranks(0, 1, 2, 3, 4)) == ((0, 1), (2, 3, 4))
    assert neighbours(ranks(0, 1, 2)) == ((0, 1, 2),)
    assert neighbours(ranks(0)) == ((0,),)
    assert neighbours([]) == ()


def test_the_fastest_meet_the_slowest_and_the_middle_joins_the_last_pair() -> None:
    assert extremes(ranks(0, 1, 2, 3)) == ((0, 3), (1, 2))
    assert extremes(ranks(0, 1, 2, 3, 4, 5)) == ((0, 5), (1, 4), (2, 3))
    assert extremes(ranks(2, 3, 4, 0, 1)) == ((2, 1), (3, 0, 4))
    assert extremes(ranks(0)) == ((0,),)
    assert extremes([]) == ()


def test_the_same_position_of_every_scheduling_group_comes_together() -> None:
    assert across([ranks(0, 1), ranks(4, 5)]) == ((0, 4), (1, 5))
    assert across([ranks(0, 1), ranks(2, 3), ranks(4, 5), ranks(6, 7)]) == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert across_rotated([ranks(0, 1), ranks(4, 5)]) == ((0, 5), (1, 4))


def test_a_position_with_one_node_is_merged_into_groups_that_exist() -> None:
    assert across([ranks(0, 1, 2), ranks(4, 5)]) == ((0, 4), (1, 5, 2))
    assert across([ranks(0, 1, 2, 3), ranks(4, 5)]) == ((0, 4, 3), (1, 5, 2))
    assert across([ranks(0, 1, 2)]) == ((0,), (1,), (2,))


def test_groups_of_one_node_are_mixed_anew_although_there_is_nothing_to_rotate() -> None:
    parts = [ranks(0), ranks(1), ranks(2), ranks(3)]
    assert across(parts) == ((0, 1, 2, 3),)
    assert across_rotated(parts) == ((0, 3), (1, 2))


def test_an_odd_node_gets_a_partner_of_its_own_scheduling_group_never_a_stranger() -> None:
    """An odd one that runs alone may pass with a broken link."""
    scheduling = {NodeRank(rank): ("a" if rank < 3 else "b" if rank < 8 else None) for rank in range(9)}
    groups = inside(by_scheduling_group(scheduling, scheduling), neighbours)
    assert groups == ((0, 1, 2), (3, 4), (5, 6, 7), (8,))


@given(RANKS)
def test_each_rank_is_in_exactly_one_group(some: list[NodeRank]) -> None:
    parts = by_scheduling_group(some, {rank: str(rank % 3) for rank in some})
    for groups in (
        neighbours(some),
        extremes(some),
        alone(some),
        together(some),
        inside(parts, extremes),
        across(parts),
        across_rotated(parts),
    ):
        assert sorted(rank for group in groups for rank in group) == sorted(some)
        assert all(groups)


@given(RANKS.filter(lambda some: len(some) > 1))
def test_pairs_are_pairs_and_only_one_may_have_three(some: list[NodeRank]) -> None:
    for groups in (neighbours(some), extremes(some)):
        sizes = sorted(len(group) for group in groups)
        assert sizes[:-1] == [2] * (len(sizes) - 1)
        assert sizes[-1] == 2 + len(some) % 2


def test_doubtful_nodes_meet_good_ones_they_have_not_met() -> None:
    met = {(7, 0), (0, 7)}
    plan = confirmation(
        ranks(7, 8),
        ranks(0, 1, 2),
        has_met=lambda rank, other: (rank, other) in met,
        prefers=lambda rank, other: True,
        may_pair_up=lambda rank: True,
    )
    assert plan.groups == ((1, 7), (0, 8), (2,))
    assert plan.num_served == 2


def test_the_preferred_partner_comes_before_a_better_one() -> None:
    plan = confirmation(
        ranks(7),
        ranks(0, 1, 2),
        has_met=lambda rank, other: False,
        prefers=lambda rank, other: other == 2,
        may_pair_up=lambda rank: True,
    )
    assert plan.groups[0] == (2, 7)


def test_doubtful_nodes_without_a_good_one_meet_each_other_once() -> None:
    met: set[frozenset[int]] = set()
    for expected in (((4, 5), (6, 7)), ((4, 6), (5, 7)), ((4, 7), (5, 6))):
        plan = confirmation(
            ranks(4, 5, 6, 7),
            [],
            has_met=lambda rank, other: frozenset((rank, other)) in met,
            prefers=lambda rank, other: True,
            may_pair_up=lambda rank: True,
        )
        assert plan.groups == expected
        met.update(frozenset(group) for group in plan.groups)
    plan = confirmation(
        ranks(4, 5, 6, 7),
        [],
        has_met=lambda rank, other: frozenset((rank, other)) in met,
        prefers=lambda rank, other: True,
        may_pair_up=lambda rank: True,
    )
    assert (plan.groups, plan.num_served) == (((4,), (5,), (6,), (7,)), 0)
