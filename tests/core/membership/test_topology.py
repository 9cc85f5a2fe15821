"""Neighbours in the network are neighbours in rank."""

from __future__ import annotations

from dlrover.core.membership.topology import Placed, arrange
from dlrover.protocol.messages.job import AwaitOrder, NodeRank, Run
from tests.core.scene import Scene, terms


def placed(*places: str, groups: dict[int, int] | None = None) -> list[Placed]:
    """Ranks from 0, each with its switches as `outer/inner`."""
    return [
        Placed(NodeRank(rank), tuple(place.split("/")) if place else (), (groups or {}).get(rank, -1))
        for rank, place in enumerate(places)
    ]


def test_nodes_of_one_switch_stand_together_in_the_order_of_first_appearance() -> None:
    assert arrange(placed("a", "b", "a", "b")) == [0, 2, 1, 3]
    assert arrange(placed("b", "a", "c", "a", "b")) == [0, 4, 1, 3, 2]


def test_the_outer_switch_counts_before_the_inner_one() -> None:
    assert arrange(placed("x/a", "y/b", "x/c", "y/b", "x/a")) == [0, 4, 2, 1, 3]
    assert arrange(placed("x/a", "y/a", "x/a")) == [0, 2, 1], "two switches of one name below different ones are two"


def test_without_any_knowledge_ranks_give_the_order() -> None:
    assert arrange(list(reversed(placed("", "", "")))) == [0, 1, 2]


def test_groups_stay_whole_even_across_switches() -> None:
    assert arrange(placed("a", "b", "a", "b", groups={0: 7, 3: 7})) == [0, 3, 2, 1]
    assert arrange(placed("", "", "", "", groups={0: 1, 1: 2, 2: 1, 3: 2})) == [0, 2, 1, 3]


def test_the_lowest_rank_is_always_first() -> None:
    assert arrange(placed("z/q", "a/a", "a/a", "z/q", groups={1: 0, 3: 0}))[0] == 0


def test_a_sorter_has_the_last_word_for_those_it_names() -> None:
    assert arrange(placed("a", "b", "a", "b"), [NodeRank(3), NodeRank(0)]) == [3, 0, 2, 1]
    assert arrange(placed("a", "b", "a", "b"), [NodeRank(9), NodeRank(1), NodeRank(1)]) == [1, 0, 2, 3]


def test_the_world_follows_the_places_that_nodes_attach_with() -> None:
    scene = Scene(terms(4))
    for name, place in zip("abcd", [("s", "a"), ("s", "b"), ("s", "a"), ("s", "b")], strict=True):
        scene.attach(name, place=place, procs=2)
    scene.rejoin(*"abcd")
    assert scene.members() == [0, 2, 1, 3]
    assert [scene.world(name).first_global_rank for name in "abcd"] == [0, 4, 2, 6]
    assert scene.world("d").coordinator == "host-a:1"


def test_the_next_world_uses_the_order_of_the_sorter() -> None:
    scene = Scene(terms(3))
    for name in "abc":
        scene.attach(name)
    scene.order(2, 0, 1)
    scene.rejoin(*"abc")
    assert scene.members() == [2, 0, 1]
    scene.fail("a")
    scene.order()
    scene.rejoin(*"abc")
    assert scene.members() == [0, 1, 2]


def test_a_round_waits_for_the_sorter_but_not_for_ever() -> None:
    scene = Scene(terms(2))
    scene.attach("a")
    scene.attach("b")
    scene.do(AwaitOrder(limit=2.0))
    scene.rejoin("a", "b")
    assert "order of the nodes" in scene.job.status().verdict
    scene.tick(1.9)
    assert not isinstance(scene.wish("a"), Run)
    scene.tick(2.0)
    assert isinstance(scene.wish("a"), Run)
