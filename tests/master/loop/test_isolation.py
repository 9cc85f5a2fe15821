"""A master that hears nobody at all is cut off; one that misses somebody is not."""

from __future__ import annotations

import pytest

from dlrover.master.loop.isolation import Isolation
from dlrover.protocol.messages.job import Detection, NodeId

DETECTION = Detection()
SECOND = 1_000_000


@pytest.fixture
def isolation() -> Isolation:
    made = Isolation()
    for node in (1, 2, 3):
        made.came(NodeId(node))
    assert made.heard(0, DETECTION) == 0
    return made


def is_cut_off(isolation: Isolation, at: float) -> bool:
    return isolation.is_cut_off(int(at * SECOND), DETECTION)


def test_nobody_is_heard_of_for_half_of_the_silence(isolation: Isolation) -> None:
    assert not is_cut_off(isolation, 19.9)
    assert is_cut_off(isolation, 20)
    assert is_cut_off(isolation, 599)
    assert not is_cut_off(isolation, 600), "there is nobody any more"


def test_one_that_is_heard_of_is_enough_to_miss_the_others(isolation: Isolation) -> None:
    for at in range(5, 45, 5):
        assert isolation.heard(at * SECOND, DETECTION) == 0
        assert not is_cut_off(isolation, at + 5)


def test_the_first_to_come_back_tells_how_long_it_was(isolation: Isolation) -> None:
    assert isolation.heard(50 * SECOND, DETECTION) == 50 * SECOND
    assert isolation.heard(51 * SECOND, DETECTION) == 0


def test_streams_that_end_meanwhile_say_nothing(isolation: Isolation) -> None:
    for node in (1, 2, 3):
        isolation.left(NodeId(node), 40 * SECOND, DETECTION)
    assert is_cut_off(isolation, 45)


def test_streams_that_ended_before_are_of_nodes_that_are_gone(isolation: Isolation) -> None:
    for node in (1, 2, 3):
        isolation.left(NodeId(node), 1 * SECOND, DETECTION)
    assert not is_cut_off(isolation, 30)


def test_the_silence_of_the_only_node_is_its_own(isolation: Isolation) -> None:
    for node in (1, 2):
        isolation.left(NodeId(node), 1 * SECOND, DETECTION)
    assert not is_cut_off(isolation, 30)


def test_a_master_that_stood_still_has_heard_nobody_in_that_time(isolation: Isolation) -> None:
    isolation.stood_still(30 * SECOND)
    assert not is_cut_off(isolation, 35)
    assert is_cut_off(isolation, 50)
