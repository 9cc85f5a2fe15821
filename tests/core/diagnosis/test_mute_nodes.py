"""Nodes that run and are never heard of: exchanged, but not for ever."""

from __future__ import annotations

from dlrover.core.diagnosis.mute_nodes import MAX_EXCHANGES, MuteNodes
from dlrover.protocol.messages.fleet import Strategy
from tests.core.fleet.fleet_scene import FleetScene
from tests.core.scene import START, micros


def test_a_node_from_which_nobody_comes_is_exchanged_twice_and_then_told_of() -> None:
    scene = FleetScene.of(2).run(0, 1).come(0)
    mute = MuteNodes(START)
    assert mute.look(scene.job.state, micros(599)) == []
    newest = 1
    for number in range(MAX_EXCHANGES):
        scene.at(1000 * (number + 1))
        (found,) = mute.look(scene.job.state, scene.now)
        assert found.wish is not None
        assert found.wish.platform_node == newest
        assert "no agent has connected from it" in found.verdict.evidence[0]
        scene.do(found.wish)
        newest = scene.launched[-1]
        scene.run(newest)
        assert mute.look(scene.job.state, micros(1000 * (number + 1) + 500)) == []
    (found,) = mute.look(scene.job.state, micros(9000))
    assert found.wish is None
    assert "another one would not help" in found.verdict.reasoning
    assert mute.look(scene.job.state, micros(9100)) == [], "once"


def test_a_new_master_gives_everybody_time_and_jobs_without_agents_are_left_alone() -> None:
    scene = FleetScene.of(2).run(0, 1)
    late = MuteNodes(micros(5000))
    assert late.look(scene.job.state, micros(5500)) == []
    assert len(late.look(scene.job.state, micros(5600))) == 2
    custom = FleetScene.of(2, strategy=Strategy.LOCAL).run(0, 1)
    assert MuteNodes(START).look(custom.job.state, micros(5000)) == []
