"""A node that needs the others to stand still says why, and for how long at most."""

from __future__ import annotations

import pytest

from dlrover.core.membership.commands import LONGEST_BLOCK
from dlrover.core.membership.forming import hold_ends_at
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import AwaitOrder, Join, Leave, LeaveReason, Run, Wait
from tests.core.scene import Scene, micros, terms


def blocked() -> Scene:
    """A round that could start, but for node a."""
    scene = Scene(terms(2)).gather("a", "b")
    scene.at(100).fail("b")
    scene.block("a", "it converts a checkpoint")
    scene.rejoin("a", "b")
    return scene


def test_no_round_completes_while_somebody_blocks_it_and_the_verdict_says_who_and_why() -> None:
    scene = blocked()
    assert isinstance(scene.wish("a"), Wait)
    assert scene.job.status().verdict == (
        "Round 2: 2 nodes wait; blocked by node rank 0 (host-a): it converts a checkpoint."
    )
    scene.at(110).unblock("a")
    assert isinstance(scene.wish("b"), Run)


def test_the_lease_ends_it() -> None:
    scene = blocked()
    assert scene.job.next_deadline() == micros(700)
    assert not scene.job.due(micros(699.9)), "a call that is over must not come up again and again"
    scene.tick(700)
    assert isinstance(scene.wish("a"), Run)


def test_the_death_of_its_owner_ends_it() -> None:
    scene = Scene(terms(1, 3)).gather(*"abc")
    scene.at(100).fail("b")
    scene.block("a")
    scene.rejoin("b", "c")
    scene.silent("a")
    assert scene.members() == [1, 2]


def test_a_new_life_of_its_owner_ends_it() -> None:
    scene = blocked()
    scene.restart_agent("a")
    scene.join("a")
    assert isinstance(scene.wish("a"), Run)


def test_it_is_lifted_when_its_owner_leaves() -> None:
    scene = Scene(terms(1, 2)).gather("a", "b")
    scene.at(100).block("a")
    scene.leave("a", LeaveReason.PREEMPTED)
    scene.rejoin("b")
    assert isinstance(scene.wish("b"), Run)


def test_saying_it_again_prolongs_it_and_two_owners_count_each() -> None:
    scene = blocked()
    scene.at(600).block("a", "still at it")
    scene.at(650).block("b", "me too", lease=10.0)
    scene.tick(660)
    assert isinstance(scene.wish("a"), Wait)
    assert scene.job.next_deadline() == micros(1200)
    scene.unblock("a")
    assert isinstance(scene.wish("a"), Run)


def test_nobody_stops_for_a_round_that_cannot_complete() -> None:
    scene = Scene(terms(1, 2, first_call=0.0)).gather("a")
    scene.at(100).block("a")
    scene.gather("b")
    assert isinstance(scene.wish("a"), Run)
    scene.unblock("a")
    assert isinstance(scene.wish("a"), Join)


def test_an_outage_of_the_master_does_not_use_up_the_lease() -> None:
    scene = blocked()
    scene.at(500).restart_master()
    assert hold_ends_at(scene.job.state.rendezvous) == micros(1100)


def test_unblocking_what_is_not_blocked_is_harmless() -> None:
    scene = Scene(terms(1)).gather("a")
    scene.unblock("a")
    assert isinstance(scene.wish("a"), Run)


@pytest.mark.parametrize(
    ("reason", "lease"), [("", 1.0), ("  ", 1.0), ("x", 0.0), ("x", LONGEST_BLOCK + 1), ("x", float("nan"))]
)
def test_a_block_without_reason_or_end_is_refused(reason: str, lease: float) -> None:
    scene = Scene(terms(1)).gather("a")
    with pytest.raises(Rejected) as refused:
        scene.block("a", reason, lease)
    assert refused.value.code == "malformed"


def test_a_smaller_job_makes_room_only_when_a_round_can_complete_again() -> None:
    scene = Scene(terms(1, 3, first_call=0.0, standby=1)).gather(*"a")
    scene.gather("b", "c", "d")
    scene.obey("a").tick(30)
    scene.obey("a")
    assert scene.members() == [0, 1, 2]
    scene.at(100).block("a")
    scene.scale(1, 1)
    assert all(isinstance(scene.wish(name), Run) for name in "abc"), "nobody stops for a round that cannot complete"
    scene.unblock("a")
    assert isinstance(scene.wish("a"), Join)
    assert [isinstance(scene.wish(name), Leave) for name in "bcd"] == [False, True, True], "one of them is the standby"
    scene.obey("a", "b", "c", "d")
    assert scene.members() == [0]


def test_a_smaller_job_makes_room_when_the_lease_ends() -> None:
    scene = Scene(terms(1, 2)).gather("a", "b")
    scene.at(100).block("b", lease=50.0)
    scene.scale(1, 1)
    assert scene.job.next_deadline() == micros(150)
    scene.tick(150)
    assert isinstance(scene.wish("b"), Leave)
    scene.obey("a", "b")
    assert scene.members() == [0]


def test_a_master_that_dies_with_its_question_for_the_order_holds_nobody() -> None:
    scene = Scene(terms(1, 2)).gather("a", "b")
    scene.at(100).do(AwaitOrder(limit=60.0))
    scene.scale(1, 1)
    scene.at(101).restart_master()
    scene.tick()
    assert isinstance(scene.wish("b"), Leave)
