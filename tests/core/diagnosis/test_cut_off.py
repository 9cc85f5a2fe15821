"""Who is cut off, by what is sent again without an answer."""

from __future__ import annotations

import pytest

from dlrover.core.diagnosis.cut_off import find_cut_off, lasting
from dlrover.protocol.messages.watch import FaultClass, Phase, UnansweredLink, WorkerDump
from tests.core.diagnosis.watch_lab import IN_ALL_REDUCE, Lab, dump, inside, progress


def at(rank: int, *links: tuple[int, int], **details: object) -> WorkerDump:
    """A rank with an address of its own; `links`: to whom something is sent again, and how often."""
    unanswered = tuple(
        UnansweredLink(local=f"10.0.0.{rank}", remote=f"10.0.0.{to}", times=times) for to, times in links
    )
    return dump(rank, IN_ALL_REDUCE, Phase.COLLECTIVE, addresses=(f"10.0.0.{rank}",), unanswered=unanswered, **details)


def test_the_end_that_all_have_in_common_is_cut_off() -> None:
    found = find_cut_off([at(0), at(1, (2, 4)), at(2, (3, 5)), at(3)])
    assert found is not None
    assert found.ranks == (2,)
    assert found.sentence == (
        "Rank 2 (10.0.0.2) is cut off: what passes between there and ranks 1, 3 is not acknowledged, and was sent again up to 5 times."
    )


@pytest.mark.parametrize(
    "dumps",
    [
        (at(0), at(1, (2, 4)), at(2), at(3)),  # a pair: either of them
        (at(0, (1, 4)), at(1), at(2, (3, 4)), at(3)),  # two pairs without a common end
        (at(0), at(1, (9, 4)), at(2, (9, 4)), at(3)),  # somebody who is no rank
    ],
)
def test_packets_that_are_lost_without_a_common_rank_blame_nobody(dumps: tuple[WorkerDump, ...]) -> None:
    found = find_cut_off(dumps)
    assert found is not None
    assert found.ranks == ()
    assert "Packets are lost" in found.sentence


def test_once_is_nothing_unless_it_lasts() -> None:
    once, never = at(0, (1, 1)), at(0, (1, 0), (2, 0))
    assert lasting(None, once) == lasting(at(0, (3, 1)), once) == ()
    assert lasting(never, once) == once.unanswered
    assert lasting(once, never) == never.unanswered[:1]
    assert find_cut_off([at(0), at(1)]) is None


def test_a_rank_whose_packets_do_not_even_leave_it_is_cut_off() -> None:
    """Its own system drops them and does not count: they wait at both dumps."""
    lab = Lab()
    lab.train()
    lab.look(at(0), at(1, (2, 4)), at(2, (3, 0)), at(3))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.NETWORK, [2])


def test_ranks_that_share_an_address_are_cut_off_together() -> None:
    here = [dump(rank, addresses=("10.0.0.7",)) for rank in (0, 1)]
    found = find_cut_off([*here, at(2, (7, 3)), at(3, (7, 3))])
    assert found is not None
    assert found.ranks == (0, 1)


def test_a_rank_that_is_cut_off_is_named_although_some_came_further_than_others() -> None:
    lab = Lab()
    lab.train()
    ahead = progress(0, Phase.COLLECTIVE, phase_seconds=5.7, collective=inside(8))
    behind = [progress(rank, Phase.COLLECTIVE, phase_seconds=5.7, collective=inside(7)) for rank in range(4)]
    lab.look(
        at(0, progress=ahead),
        at(1, (2, 4), progress=behind[1]),
        at(2, (3, 4), progress=behind[2]),
        at(3, progress=behind[3]),
    )
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.NETWORK, [2])
    assert lab.acts() == [], "networks come back"


def test_the_network_is_not_blamed_while_somebody_has_only_just_come() -> None:
    lab = Lab()
    lab.train()
    late = at(1, progress=progress(1, Phase.COLLECTIVE, phase_seconds=0.2, is_stalled=False))
    before = dump(1, ("/job/train.py:20 prepare",), Phase.FORWARD)
    lab.tell(*(progress(rank, Phase.COLLECTIVE) for rank in (0, 2, 3)))
    lab.answer(0, before, *(at(rank) for rank in (0, 2, 3)))
    lab.after(4)
    lab.answer(1, late, *(at(rank) for rank in (0, 2, 3)))
    assert lab.told() == []
    lab.after(4)
    lab.look(*(at(rank) for rank in range(4)))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.NETWORK, [])
