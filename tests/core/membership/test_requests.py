"""What people ask of a running job: its workers again, a node exchanged."""

from __future__ import annotations

import pytest

from dlrover.core.job import Outcome
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import MigrateNode, Resource
from dlrover.protocol.messages.job import EndStream, Incarnation, Join, NodeId, PlatformId, StopCause
from dlrover.protocol.messages.requests import RelaunchNode, RestartWorkers
from tests.core.fleet.fleet_scene import FleetScene
from tests.core.scene import Scene, terms


def test_workers_start_again_in_the_next_round_at_nobody_s_cost() -> None:
    scene = Scene(terms(2)).gather("a", "b")
    scene.do(RestartWorkers(reason="new data."))
    wish = scene.wish("a")
    assert isinstance(wish, Join)
    assert wish.cause is StopCause.MEMBERSHIP
    assert "new data" in wish.reason
    scene.rejoin("a", "b")
    assert scene.world("a").round == 2
    assert scene.job.state.restarts.num_restarts == 0


def test_workers_that_do_not_run_or_could_not_come_back_are_not_restarted() -> None:
    scene = Scene(terms(2))
    with pytest.raises(Rejected, match="No workers run"):
        scene.do(RestartWorkers())
    scene.gather("a", "b")
    scene.block("a")
    with pytest.raises(Rejected, match="blocked"):
        scene.do(RestartWorkers())
    scene.unblock("a")
    scene.finish("b")
    with pytest.raises(Rejected, match="have finished"):
        scene.do(RestartWorkers())
    scene.stop()
    with pytest.raises(Rejected, match="has ended"):
        scene.do(RestartWorkers())


def test_a_node_is_exchanged_at_once_and_its_machine_avoided_if_wished() -> None:
    scene = FleetScene.of(2).train(0, 1)
    scene.do(RelaunchNode(node=agent_on(scene, 1), reason="slow disk"))
    assert scene.launched == [0, 1, 2]
    assert scene.removals[1].cordon_host == ""
    assert scene.launches[2].avoid_hosts == ()
    scene.train(2)
    scene.rejoin_nodes(0)
    assert scene.world("n0").round == 2
    assert scene.spent(1) == 0

    scene.do(RelaunchNode(node=agent_on(scene, 2), is_cordoned=True))
    assert scene.removals[2].cordon_host == "host-2"
    assert scene.launches[3].avoid_hosts == ("host-2",)


def test_the_agent_of_an_exchanged_node_hears_at_once_that_it_shall_end() -> None:
    """Else it trains on beside its successor until the platform removes it."""
    scene = FleetScene.of(2).train(0, 1)
    agent = scene.agents["n1"]
    outcome = scene.do(RelaunchNode(node=agent.node, reason="slow disk"))
    assert streams_ended_by(outcome) == [(agent.node, agent.incarnation)]
    with pytest.raises(Rejected, match=r"let go, because it was requested \(slow disk\). It shall end") as refused:
        scene.attach("n1")
    assert refused.value.code == "node-released"


def test_the_agent_of_a_node_that_was_waited_for_hears_it_when_the_new_node_comes() -> None:
    scene = FleetScene.of(2).train(0, 1)
    agent = scene.agents["n1"]
    outcome = scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=8)))
    assert streams_ended_by(outcome) == []
    scene.attach("n2", platform_node=PlatformId(2), rank=1)
    assert streams_ended_by(scene.outcomes[-1]) == [(agent.node, agent.incarnation)]
    with pytest.raises(Rejected, match="It shall end"):
        scene.attach("n1")


def test_an_agent_without_a_stream_hears_it_when_it_is_back() -> None:
    scene = FleetScene.of(2).train(0, 1)
    scene.at(10).break_stream("n1")
    outcome = scene.at(11).do(RelaunchNode(node=scene.agents["n1"].node))
    assert streams_ended_by(outcome) == []
    with pytest.raises(Rejected, match=r"it was requested\. It shall end"):
        scene.at(12).attach("n1")


def test_an_agent_whose_workers_have_finished_keeps_its_stream() -> None:
    scene = FleetScene.of(2).train(0, 1)
    scene.finish("n1")
    assert streams_ended_by(scene.vanish(1)) == []


def test_a_node_that_nobody_can_replace_is_left_alone() -> None:
    scene = Scene(terms(1)).gather("a")
    with pytest.raises(Rejected, match="started by hand"):
        scene.do(RelaunchNode(node=next(iter(scene.job.state.nodes.live))))
    with pytest.raises(Rejected, match="not part of the job"):
        scene.do(RelaunchNode(node=NodeId(99)))


def streams_ended_by(outcome: Outcome) -> list[tuple[NodeId, Incarnation]]:
    return [(effect.node, effect.incarnation) for effect in outcome.effects if isinstance(effect, EndStream)]


def agent_on(scene: FleetScene, node: int) -> NodeId:
    agent = scene.node(node).agent
    assert agent is not None
    return agent
