"""What people ask of a running job: its workers again, a node exchanged."""

from __future__ import annotations

import pytest

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages import Join, NodeId, StopCause
from dlrover.protocol.steering_messages import RelaunchNode, RestartWorkers
from tests.core.fleet_scene import FleetScene
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


def test_a_node_that_nobody_can_replace_is_left_alone() -> None:
    scene = Scene(terms(1)).gather("a")
    with pytest.raises(Rejected, match="started by hand"):
        scene.do(RelaunchNode(node=next(iter(scene.job.state.nodes.live))))
    with pytest.raises(Rejected, match="not part of the job"):
        scene.do(RelaunchNode(node=NodeId(99)))


def agent_on(scene: FleetScene, node: int) -> NodeId:
    agent = scene.node(node).agent
    assert agent is not None
    return agent
