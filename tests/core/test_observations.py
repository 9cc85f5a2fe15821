"""Silence is judged on the master's clock, and the master's own absence is nobody's fault."""

from __future__ import annotations

import pytest

from dlrover.core.observations import Observations
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages import Heartbeat, Incarnation, NodeId, NodeSilent
from tests.core.scene import micros

NODE, LIFE = NodeId(1), Incarnation(1)


def beat(step: int | None = None, incarnation: int = 1) -> Heartbeat:
    return Heartbeat(node=NODE, incarnation=Incarnation(incarnation), step=step)


def tick(observations: Observations, at: float, due_at: float | None = None) -> list[NodeSilent]:
    return observations.tick(micros(at), micros(at if due_at is None else due_at))


@pytest.fixture
def observations() -> Observations:
    observations = Observations(micros(0))
    observations.attached(NODE, LIFE, micros(0))
    return observations


def test_forty_seconds_after_the_last_heartbeat(observations: Observations) -> None:
    observations.heard(beat(), micros(10))
    assert observations.next_deadline() == micros(50)
    assert not tick(observations, 49.9)
    assert tick(observations, 50) == [NodeSilent(node=NODE, incarnation=LIFE, last_seen_at=micros(10))]


def test_a_silence_is_found_once(observations: Observations) -> None:
    assert tick(observations, 40)
    assert not tick(observations, 80)
    assert observations.next_deadline() is None


def test_a_late_tick_extends_all_deadlines_by_its_lateness(observations: Observations) -> None:
    assert not tick(observations, 45, due_at=5), "the master was asleep for 40 s, not the node"
    assert observations.next_deadline() == micros(80)
    assert not tick(observations, 79.9)
    assert tick(observations, 80)


def test_lateness_before_a_heartbeat_does_not_count_again(observations: Observations) -> None:
    tick(observations, 45, due_at=5)
    observations.heard(beat(), micros(46))
    assert observations.next_deadline() == micros(86)


def test_nobody_is_suspected_before_a_full_window_after_the_master_started() -> None:
    observations = Observations(micros(100))
    observations.attached(NODE, LIFE, micros(90))
    assert observations.next_deadline() == micros(140)


def test_a_heartbeat_of_a_former_life_is_refused(observations: Observations) -> None:
    observations.attached(NODE, Incarnation(2), micros(5))
    with pytest.raises(Rejected) as refused:
        observations.heard(beat(incarnation=1), micros(6))
    assert refused.value.code == "stale-incarnation"
    assert observations.next_deadline() == micros(45)


def test_a_forgotten_node_is_not_found(observations: Observations) -> None:
    observations.forget(NODE)
    assert not tick(observations, 1000)
    with pytest.raises(Rejected):
        observations.heard(beat(), micros(1001))


def test_steps_never_go_back_within_a_life(observations: Observations) -> None:
    observations.heard(beat(step=7), micros(1))
    observations.heard(beat(step=5), micros(2))
    observations.heard(beat(), micros(3))
    observations.attached(NODE, LIFE, micros(4))
    assert observations.step(NODE) == 7
    assert observations.steps() == {NODE: 7}
    observations.attached(NODE, Incarnation(2), micros(5))
    assert observations.step(NODE) is None
