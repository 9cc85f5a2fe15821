"""Silence is judged on the master's clock, and the master's own absence is nobody's fault."""

from __future__ import annotations

import contextlib
import random

import pytest

from dlrover.core.membership.liveness import Liveness
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import Detection, FailureKind, Heartbeat, Incarnation, NodeId, NodeSilent, Run
from tests.core.scene import Scene, failure, micros, terms

NODE, LIFE = NodeId(1), Incarnation(1)


def beat(step: int | None = None, incarnation: int = 1) -> Heartbeat:
    return Heartbeat(node=NODE, incarnation=Incarnation(incarnation), step=step)


def tick(observations: Liveness, at: float, due_at: float | None = None) -> list[NodeSilent]:
    return observations.tick(micros(at), micros(at if due_at is None else due_at))


@pytest.fixture
def observations() -> Liveness:
    observations = Liveness(micros(0))
    observations.attached(NODE, LIFE, micros(0))
    return observations


def test_forty_seconds_after_the_last_heartbeat(observations: Liveness) -> None:
    observations.heard(beat(), micros(10))
    assert observations.next_deadline() == micros(50)
    assert not tick(observations, 49.9)
    assert tick(observations, 50) == [NodeSilent(node=NODE, incarnation=LIFE, last_seen_at=micros(10))]


def test_a_silence_is_found_once(observations: Liveness) -> None:
    assert tick(observations, 40)
    assert not tick(observations, 80)
    assert observations.next_deadline() is None


def test_a_late_tick_extends_all_deadlines_by_its_lateness(observations: Liveness) -> None:
    assert not tick(observations, 45, due_at=5), "the master was asleep for 40 s, not the node"
    assert observations.next_deadline() == micros(80)
    assert not tick(observations, 79.9)
    assert tick(observations, 80)


def test_lateness_before_a_heartbeat_does_not_count_again(observations: Liveness) -> None:
    tick(observations, 45, due_at=5)
    observations.heard(beat(), micros(46))
    assert observations.next_deadline() == micros(86)


def test_nobody_is_suspected_before_a_full_window_after_the_master_started() -> None:
    observations = Liveness(micros(100))
    observations.attached(NODE, LIFE, micros(90))
    assert observations.next_deadline() == micros(140)


def test_a_heartbeat_of_a_former_life_is_refused(observations: Liveness) -> None:
    observations.attached(NODE, Incarnation(2), micros(5))
    with pytest.raises(Rejected) as refused:
        observations.heard(beat(incarnation=1), micros(6))
    assert refused.value.code == "stale-incarnation"
    assert observations.next_deadline() == micros(45)


@pytest.mark.parametrize("seed", range(50))
def test_what_is_not_looked_at_changes_no_finding(seed: int) -> None:
    """Two of the same, but one forgets before each tick until when nobody need be looked at."""
    chance = random.Random(seed)
    quick, thorough = Liveness(micros(0)), Liveness(micros(0))
    now = 0.0
    for _ in range(200):
        now += chance.choice([0.1, 1, 5, 15])
        node, suspects = NodeId(chance.randrange(5)), [NodeId(chance.randrange(5))] * chance.randrange(2)
        what, at = chance.randrange(5), micros(now - chance.choice([0, 0, 3]))
        late = chance.choice([0, 0, 0, 4])
        found = []
        for observations in (quick, thorough):
            with contextlib.suppress(Rejected):
                match what:
                    case 0:
                        observations.attached(node, LIFE, at)
                    case 1:
                        observations.heard(Heartbeat(node=node, incarnation=LIFE), at)
                    case 2:
                        observations.forget(node)
                    case 3:
                        observations.follow(Detection(), suspects)
            if observations is thorough:
                observations._quiet_until = None
            found.append(tick(observations, now, now - late))
        assert found[0] == found[1]
        deadline = quick.next_deadline()
        assert deadline is None or quick.quiet_until() <= deadline


def test_a_forgotten_node_is_not_found(observations: Liveness) -> None:
    observations.forget(NODE)
    assert not tick(observations, 1000)
    with pytest.raises(Rejected):
        observations.heard(beat(), micros(1001))


def test_steps_never_go_back_within_a_life(observations: Liveness) -> None:
    observations.heard(beat(step=7), micros(1))
    observations.heard(beat(step=5), micros(2))
    observations.heard(beat(), micros(3))
    observations.attached(NODE, LIFE, micros(4))
    assert observations.step(NODE) == 7
    assert observations.steps() == {NODE: 7}
    observations.attached(NODE, Incarnation(2), micros(5))
    assert observations.step(NODE) is None


class TestSuspicion:
    """Two witnesses need less time than one: the silence of a node, and neighbours that lost it."""

    def test_a_suspect_is_found_sooner(self, observations: Liveness) -> None:
        observations.heard(beat(), micros(10))
        observations.follow(Detection(), [NODE])
        assert observations.next_deadline() == micros(22)
        assert not tick(observations, 21.9)
        assert tick(observations, 22)

    def test_who_is_suspected_no_more_has_its_full_time_again(self, observations: Liveness) -> None:
        observations.follow(Detection(), [NODE])
        observations.follow(Detection(), [])
        assert observations.next_deadline() == micros(40)

    def test_the_times_are_terms_of_the_job(self, observations: Liveness) -> None:
        observations.follow(Detection(heartbeat=1.0, silence=10.0, suspicion=3.0, lease=5.0))
        assert observations.next_deadline() == micros(10)

    def test_the_job_suspects_members_that_others_lost_and_that_do_not_come_back(self) -> None:
        scene = Scene(terms(3)).gather(*"abc")
        assert scene.job.suspects() == []
        scene.at(100).fail("a", failure(FailureKind.PEER_LOST))
        assert scene.job.suspects() == [scene.agents[name].node for name in "abc"]
        scene.rejoin("a", "b")
        assert scene.job.suspects() == [scene.agents["c"].node]
        scene.fail("b", failure(FailureKind.SIGNAL, signal=9, global_rank=1), round_=1)
        assert scene.job.suspects() == [], "now somebody else is to blame"

    def test_a_lost_node_is_replaced_long_before_its_silence_is_over(self) -> None:
        """Power is cut at 100: the others' collectives fail, and the job goes on with a spare at 112."""
        scene, observations = Scene(terms(2)).gather(*"abc"), Liveness(micros(0))
        for name in "abc":
            observations.attached(scene.agents[name].node, scene.agents[name].incarnation, micros(100))
        scene.at(101).fail("a", failure(FailureKind.PEER_LOST))
        scene.join("a")
        for second in range(101, 113):
            for name in "ac":
                agent = scene.agents[name]
                observations.heard(Heartbeat(node=agent.node, incarnation=agent.incarnation), micros(second))
            observations.follow(scene.job.state.detection, scene.job.suspects())
            findings = tick(observations, second)
            assert bool(findings) == (second == 112)
        (finding,) = findings
        scene.at(112).do(finding)
        assert isinstance(scene.wish("a"), Run)
        assert scene.members() == [0, 2]

    @pytest.mark.parametrize("stall", [10, 20, 30])
    def test_a_busy_node_is_no_false_alarm(self, stall: int) -> None:
        """It stalls for up to half a minute; the collectives of the others only wait."""
        scene, observations = Scene(terms(2)).gather("a", "b"), Liveness(micros(0))
        for second in range(0, 200, 5):
            observations.follow(scene.job.state.detection, scene.job.suspects())
            for name in "ab":
                agent = scene.agents[name]
                if not second:
                    observations.attached(agent.node, agent.incarnation, micros(0))
                if name == "a" or not 50 < second < 50 + stall:
                    observations.heard(Heartbeat(node=agent.node, incarnation=agent.incarnation), micros(second))
            assert not tick(observations, second)


def test_what_a_node_has_in_memory_is_what_it_told_last() -> None:
    observations = Liveness(micros(0))
    observations.attached(NodeId(1), Incarnation(1), micros(0))
    for step in (7, 5):  # a training that went back
        beat = Heartbeat(node=NodeId(1), incarnation=Incarnation(1), step=9, snapshot_step=step, copied_step=step)
        observations.heard(beat, micros(1))
        assert observations.snapshot_steps() == {NodeId(1): step}
        assert observations.copied_steps() == {NodeId(1): step}
