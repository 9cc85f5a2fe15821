"""The cluster of parameter servers: changed in two phases, with versions, and without losing an address."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import (
    AskClusterVersion,
    AskPsNodes,
    ClusterVersion,
    FleetSpec,
    MigrateNode,
    NodeExit,
    NodePhase,
    NodeType,
    PsNodes,
    PsReady,
    ReplicaSpec,
    Resource,
    ResumeJob,
    ScaleReplicas,
    Strategy,
    SuspendJob,
    UpdateClusterVersion,
    VersionType,
)
from dlrover.protocol.messages.job import ExitReason, NodeId, PlatformId
from dlrover.protocol.messages.requests import RelaunchNode
from tests.core.fleet.fleet_scene import FleetScene, ps_job

PENDING, FAILED = NodePhase.PENDING, NodePhase.FAILED


def two_servers(**ps: Any) -> FleetScene:
    """Ids 0 and 1 are the servers; all run, and the workers use them."""
    scene = FleetScene().begin(ps_job(**ps)).run()
    scene.do(PsReady())
    return scene


def ask(scene: FleetScene) -> PsNodes:
    answer = scene.job.ask(AskPsNodes())
    assert isinstance(answer, PsNodes)
    return answer


def ids(scene: FleetScene) -> list[int]:
    return [node.id for node in ask(scene).nodes]


def scale(scene: FleetScene, count: int) -> None:
    scene.do(ScaleReplicas(node_type=NodeType.PS, count=count))


def version(scene: FleetScene, kind: VersionType, **who: Any) -> int:
    answer = scene.job.ask(AskClusterVersion(version_type=kind, **who))
    assert isinstance(answer, ClusterVersion)
    return answer.version


def test_workers_are_ready_when_they_have_said_so_once() -> None:
    scene = FleetScene().begin(ps_job()).run()
    assert not ask(scene).is_ready
    assert [node.service_address for node in ask(scene).nodes] == ["a-job-ps-0", "a-job-ps-1"]
    scene.do(PsReady())
    assert ask(scene).is_ready
    assert ids(scene) == [0, 1]


def test_a_replacement_keeps_address_rank_and_place() -> None:
    scene = two_servers()
    scene.fail(0, exit_reason=NodeExit.HARDWARE)
    assert scene.launches[4].service_address == "a-job-ps-0"
    assert scene.launches[4].rank == 0
    assert ids(scene) == [4, 1], "it has taken the place already"
    assert not ask(scene).is_ready
    assert version(scene, VersionType.GLOBAL) == 1
    scene.run(4)
    scene.do(PsReady())
    assert (ids(scene), ask(scene).is_ready) == ([4, 1], True)


def test_a_server_without_memory_comes_back_with_twice_as_much() -> None:
    scene = two_servers(resource=Resource(cpu=4, memory_mb=4096))
    scene.fail(1, exit_reason=NodeExit.OOM)
    assert scene.launches[4].resource == Resource(cpu=4, memory_mb=8192)
    assert scene.node(4).is_oom_replacement
    assert scene.spent(1, NodeType.PS) == 1


def test_more_servers_are_used_when_all_of_them_run() -> None:
    scene = two_servers()
    scale(scene, 4)
    assert [scene.launches[id_].rank for id_ in (4, 5)] == [2, 3]
    assert (ids(scene), ask(scene).is_ready) == ([0, 1], False)
    scene.run(5)
    assert ids(scene) == [0, 1]
    scene.run(4)
    assert ids(scene) == [0, 1, 4, 5]
    assert not ask(scene).is_ready
    scene.do(PsReady())
    assert ask(scene).is_ready


def test_dropped_servers_stay_until_the_workers_have_switched() -> None:
    scene = two_servers()
    scale(scene, 1)
    assert (ids(scene), scene.removed) == ([0], [])
    scene.do(PsReady())
    assert scene.removed == [1]
    assert not scene.node(1).is_critical
    assert version(scene, VersionType.GLOBAL) == 0, "nobody was lost"


def test_dropping_twice_before_a_switch_drops_both() -> None:
    scene = FleetScene().begin(ps_job(num_ps=3)).run()
    scene.do(PsReady())
    scale(scene, 2)
    scale(scene, 1)
    assert ids(scene) == [0]
    scene.do(PsReady())
    assert sorted(scene.removed) == [1, 2]


def test_growing_again_takes_back_what_was_only_about_to_go() -> None:
    scene = two_servers()
    scale(scene, 1)
    scale(scene, 3)
    assert scene.launched == [0, 1, 2, 3, 4]
    scene.run(4)
    assert ids(scene) == [0, 1, 4]
    scene.do(PsReady())
    assert scene.removed == []


def test_servers_that_never_ran_are_dropped_at_once() -> None:
    scene = two_servers()
    scale(scene, 3)
    scale(scene, 2)
    assert scene.removed == [4]
    assert ids(scene) == [0, 1]


def test_nobody_is_told_of_a_server_that_will_never_come() -> None:
    """A replacement that was scaled away before it ran, while something else changes."""
    scene = two_servers()
    scene.fail(1, exit_code=201)
    scale(scene, 1)
    assert ids(scene) == [0]
    scene.do(MigrateNode(node=PlatformId(0), resource=Resource(cpu=2.0)))
    assert ids(scene) == [0], "the current one, until the other runs"


def test_a_dropped_server_that_dies_is_not_replaced() -> None:
    scene = two_servers()
    scale(scene, 1)
    scene.vanish(1)
    assert scene.launched == [0, 1, 2, 3]
    assert scene.fleet.servers.dropped == {}


def test_an_exchange_switches_once_the_new_server_runs() -> None:
    scene = two_servers(resource=Resource(cpu=4, memory_mb=4096))
    scene.do(MigrateNode(node=PlatformId(0), resource=Resource(cpu=16, memory_mb=16384)))
    assert (scene.launches[4].rank, scene.launches[4].resource.cpu) == (0, 16)
    assert scene.launches[4].service_address == "a-job-ps-4"
    assert ids(scene) == [0, 1]
    scene.run(4)
    assert ids(scene) == [4, 1]
    assert scene.removed == [], "the old one serves until the switch"
    scene.do(PsReady())
    assert scene.removed == [0]
    assert scene.fleet.migrations == {}
    assert (ids(scene), ask(scene).is_ready) == ([4, 1], True)


def test_an_exchange_whose_target_fails_leaves_the_old_server() -> None:
    scene = two_servers()
    scene.do(MigrateNode(node=PlatformId(0), resource=Resource(cpu=16)))
    scene.run(4)
    scene.fail(4, exit_code=1)
    assert ids(scene) == [0, 1]
    assert scene.launched == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_server_that_is_being_exchanged_can_be_dropped(is_running: bool) -> None:
    scene = two_servers()
    scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=16)))
    if is_running:
        scene.run(4)
    scale(scene, 1)
    assert ids(scene) == [0]
    scene.do(PsReady())
    assert sorted(scene.removed) == [1, 4]
    assert ids(scene) == [0]


def test_nobody_is_waited_for_while_the_job_is_suspended() -> None:
    scene = FleetScene().begin(ps_job()).run(0, 2, 3)
    scene.at(300).do(SuspendJob())
    scene.tick(5000)
    assert not ask(scene).has_failure
    scene.do(ResumeJob())
    scene.tick(5599)
    assert not ask(scene).has_failure, "its wait begins anew"
    scene.tick(5600)
    assert ask(scene).has_failure


def test_servers_that_do_not_come_are_done_without() -> None:
    scene = FleetScene().begin(ps_job()).run(0, 2, 3)
    scene.tick(599)
    assert not ask(scene).has_failure
    scene.tick(600)
    assert ask(scene).has_failure
    assert ids(scene) == [0]
    scene.do(PsReady())
    scene.run(1)
    assert not ask(scene).has_failure
    assert (ids(scene), ask(scene).is_ready) == ([0, 1], False), "it is used when the workers have switched to it"


def test_a_cluster_that_changed_again_meanwhile_has_to_be_switched_to_once_more() -> None:
    scene = two_servers()
    scale(scene, 3)
    scene.run(4)
    seen = tuple(node.service_address for node in ask(scene).nodes)
    scale(scene, 1)
    scene.do(PsReady(addresses=seen))
    assert not ask(scene).is_ready
    assert scene.removed == []
    scene.do(PsReady(addresses=("a-job-ps-0",)))
    assert ask(scene).is_ready
    assert sorted(scene.removed) == [1, 4]


@pytest.mark.parametrize("is_named", [False, True])
def test_nobody_switches_to_a_cluster_that_is_not_there_yet(is_named: bool) -> None:
    """A server that shall go is needed until the replacement of another one runs."""
    scene = FleetScene().begin(ps_job(num_ps=3)).run()
    scene.do(PsReady())
    scale(scene, 2)
    scene.vanish(0)
    new = scene.launched[-1]
    seen = tuple(node.service_address for node in ask(scene).nodes)
    scene.do(PsReady(addresses=seen if is_named else ()))
    assert (ids(scene), ask(scene).is_ready, scene.removed) == ([new, 1, 2], False, [])
    assert "not there yet" in scene.verdicts[-1]
    scene.run(new)
    assert ids(scene) == [new, 1]
    scene.do(PsReady())
    assert (ids(scene), ask(scene).is_ready, scene.removed) == ([new, 1], True, [2])


def test_a_running_server_that_is_relaunched_takes_its_variables_with_it() -> None:
    scene = two_servers()
    scene.do(RelaunchNode(node=NodeId(-1), platform_node=PlatformId(1)))
    assert version(scene, VersionType.GLOBAL) == 1
    assert (ids(scene), ask(scene).is_ready) == ([0, 4], False)
    assert ask(scene).nodes[1].service_address == "a-job-ps-1"
    scene.do(RelaunchNode(node=NodeId(-1), platform_node=PlatformId(4)))
    assert version(scene, VersionType.GLOBAL) == 1, "there was nothing on it yet"


def test_a_server_that_nobody_uses_yet_is_relaunched_without_a_loss() -> None:
    scene = two_servers()
    scale(scene, 3)
    scene.run(4)
    scene.do(RelaunchNode(node=NodeId(-1), platform_node=PlatformId(4)))
    assert version(scene, VersionType.GLOBAL) == 0


def test_a_server_that_is_about_to_go_is_not_relaunched() -> None:
    scene = two_servers()
    scale(scene, 1)
    with pytest.raises(Rejected, match="about to go"):
        scene.do(RelaunchNode(node=NodeId(-1), platform_node=PlatformId(1)))


def test_versions_are_kept_by_kind_and_node() -> None:
    scene = two_servers()
    assert version(scene, VersionType.LOCAL) == 0
    assert version(scene, VersionType.RESTORED) == -1
    scene.do(UpdateClusterVersion(version_type=VersionType.LOCAL, version=3, rank=1))
    scene.do(UpdateClusterVersion(version_type=VersionType.RESTORED, version=2, rank=1))
    scene.do(UpdateClusterVersion(version_type=VersionType.LOCAL, version=5, node_type=NodeType.PS, rank=1))
    scene.do(UpdateClusterVersion(version_type=VersionType.GLOBAL, version=7))
    assert version(scene, VersionType.LOCAL, rank=1) == 3
    assert version(scene, VersionType.LOCAL, rank=0) == 0
    assert version(scene, VersionType.RESTORED, rank=1) == 2
    assert version(scene, VersionType.LOCAL, node_type=NodeType.PS, rank=1) == 5
    assert version(scene, VersionType.GLOBAL) == 7
    scene.vanish(1)
    assert version(scene, VersionType.GLOBAL) == 8
    with pytest.raises(Rejected):
        scene.do(UpdateClusterVersion(version_type=VersionType.GLOBAL, version=-1))


def test_the_cluster_and_its_versions_survive_the_master() -> None:
    scene = two_servers()
    scale(scene, 1)
    scene.vanish(0)
    before = ask(scene), version(scene, VersionType.GLOBAL)
    scene.restart_master().list()
    assert (ask(scene), version(scene, VersionType.GLOBAL)) == before
    scene.run(4)
    scene.do(PsReady())
    assert scene.removed == [1]


def test_a_job_without_servers_has_nothing_to_wait_for() -> None:
    scene = FleetScene.of(1)
    assert ask(scene) == PsNodes(is_ready=True)
    assert version(scene, VersionType.GLOBAL) == 0
    with pytest.raises(Rejected) as refused:
        scene.do(PsReady())
    assert refused.value.code == "no-servers"
    assert version(FleetScene(), VersionType.LOCAL) == 0


def test_the_last_server_cannot_be_scaled_away() -> None:
    with pytest.raises(Rejected) as refused:
        scale(two_servers(), 0)
    assert refused.value.code == "bad-scale"


def test_a_critical_server_that_cannot_be_replaced_ends_the_job() -> None:
    scene = two_servers(critical="all", max_relaunches=0)
    scene.fail(1, exit_reason=NodeExit.OOM)
    assert scene.end.reason is ExitReason.PS_OOM
    assert version(scene, VersionType.GLOBAL) == 1


def test_a_job_without_any_server_left_ends() -> None:
    scene = two_servers(max_relaunches=0)
    scene.fail(0, exit_code=201)
    assert scene.job.end is None, "the workers can go on with the other one"
    scene.fail(1, exit_reason=NodeExit.OOM)
    assert scene.end.reason is ExitReason.PS_OOM
    assert "no parameter server left" in scene.end.message


def test_a_job_whose_other_servers_are_about_to_go_has_none_left() -> None:
    scene = two_servers(max_relaunches=0)
    scale(scene, 1)
    scene.fail(0, exit_reason=NodeExit.OOM)
    assert scene.end.reason is ExitReason.PS_OOM


def test_servers_that_were_added_are_as_critical_as_the_first_ones() -> None:
    scene = two_servers(critical=" all ", max_relaunches=0)
    scale(scene, 3)
    scene.run(4)
    scene.do(PsReady())
    assert scene.node(4).is_critical
    scene.fail(4, exit_code=1)
    assert scene.end.reason is ExitReason.CODE_ERROR
    assert "cannot do without" in scene.end.message


def test_critical_servers_do_not_keep_a_job_that_has_done_its_work() -> None:
    """They serve for ever, so what they do is never done."""
    scene = FleetScene().begin(ps_job(num_workers=3, worker={"critical": "none"}, critical="all")).run(0, 1, 2)
    scene.show(2, NodePhase.SUCCEEDED, exit_code=0)
    assert scene.end.reason is ExitReason.COMPLETED


class TestServerThatExitsWithZero:
    """It has no work of its own that could be done while others train."""

    def test_in_mid_training_it_is_replaced_like_one_that_failed(self) -> None:
        scene = two_servers()
        outcome = scene.show(0, NodePhase.SUCCEEDED, exit_code=0)
        assert outcome.verdicts == (
            "Ps 0 (a-job-ps-0) ended (Succeeded) although others still train with it; relaunch 1 of at most 3 of its rank.",
        )
        assert scene.launches[4].service_address == "a-job-ps-0"
        assert (ids(scene), ask(scene).is_ready) == ([4, 1], False)
        assert version(scene, VersionType.GLOBAL) == 1, "its variables are lost"
        assert scene.spent(0, NodeType.PS) == 1
        scene.run(4)
        scene.do(PsReady())
        assert (ids(scene), ask(scene).is_ready) == ([4, 1], True)

    def test_a_chief_that_has_finished_does_not_matter_while_a_worker_trains(self) -> None:
        scene = two_servers(num_workers=3, worker={"critical": "1:3"})
        scene.show(2, NodePhase.SUCCEEDED, exit_code=0)
        scene.show(1, NodePhase.SUCCEEDED, exit_code=0)
        assert scene.launches[5].rank == 1

    @pytest.mark.parametrize("critical", ["", "all"])
    def test_a_job_that_cannot_replace_it_ends(self, critical: str) -> None:
        replicas = {NodeType.WORKER: ReplicaSpec(count=2)}
        replicas[NodeType.PS] = ReplicaSpec(count=1, critical=critical, max_relaunches=0)
        scene = FleetScene().begin(FleetSpec(replicas=replicas, strategy=Strategy.CUSTOM)).run()
        scene.tick(100)
        scene.show(0, NodePhase.SUCCEEDED, exit_code=0)
        assert scene.end.reason is ExitReason.PS_ERROR
        assert "cannot be replaced" in scene.end.message

    def test_one_that_was_about_to_go_is_not_replaced(self) -> None:
        scene = two_servers()
        scale(scene, 1)
        scene.show(1, NodePhase.SUCCEEDED, exit_code=0)
        assert scene.launched == [0, 1, 2, 3]
        assert scene.job.end is None

    def test_at_the_end_of_the_training_it_is_fine(self) -> None:
        """Also where a new master hears of all ends in one list, in which servers come first."""
        for budget in (0, 3):
            scene = two_servers(max_relaunches=budget)
            for node in (0, 1, 2, 3):
                scene.cloud[node] = replace(scene.cloud[node], phase=NodePhase.SUCCEEDED, exit_code=0)
            scene.list()
            assert scene.end.reason is ExitReason.COMPLETED
            assert scene.launched == [0, 1, 2, 3]


class TestEvaluatorLeftAlone:
    """The servers serve those who train; an evaluator reads what was saved."""

    def scene(self, priority: str = "") -> FleetScene:
        """Ids 0 and 1 are the servers, 2 is the chief, 3 and 4 are workers, 5 evaluates; all but 4 run."""
        replicas = {
            NodeType.WORKER: ReplicaSpec(count=3, critical="none", priority=priority),
            NodeType.PS: ReplicaSpec(count=2, critical="all"),
            NodeType.EVALUATOR: ReplicaSpec(count=1),
        }
        scene = FleetScene().begin(FleetSpec(replicas=replicas, strategy=Strategy.PS)).run(0, 1, 2, 3, 5)
        scene.do(PsReady())
        return scene

    def finish(self, scene: FleetScene, *nodes: int) -> None:
        for node in nodes:
            scene.show(node, NodePhase.SUCCEEDED, exit_code=0)

    def test_the_servers_go_when_the_chief_has_finished_and_nobody_trains_any_more(self) -> None:
        scene = self.scene().run(4)
        self.finish(scene, 2, 3)
        assert not {0, 1} & set(scene.removed), "a worker uses them"
        self.finish(scene, 4)
        assert {0, 1} <= set(scene.removed)
        assert (scene.job.end, ids(scene)) == (None, [])
        assert version(scene, VersionType.GLOBAL) == 0, "they were not lost"
        assert [scene.phase(id_) for id_ in (0, 1)] == [NodePhase.DELETED] * 2
        scene.restart_master().list()
        assert scene.launched == [0, 1, 2, 3, 4, 5], "nobody takes their place"
        self.finish(scene, 5)
        assert scene.end.reason is ExitReason.COMPLETED

    def test_they_stay_for_the_chief(self) -> None:
        scene = self.scene().run(4)
        self.finish(scene, 3, 4)
        assert not {0, 1} & set(scene.removed)

    def test_they_stay_for_a_worker_that_is_still_to_come(self) -> None:
        scene = self.scene()
        self.finish(scene, 2, 3)
        assert not {0, 1} & set(scene.removed)

    def test_a_worker_of_low_priority_that_never_got_resources_goes_with_them(self) -> None:
        scene = self.scene(priority="0.5")
        assert scene.launches[4].priority == "low"
        self.finish(scene, 2, 3)
        assert {0, 1, 4} <= set(scene.removed)
        assert scene.job.end is None

    def test_so_does_a_server_that_was_to_take_the_place_of_another(self) -> None:
        scene = self.scene().run(4)
        scene.do(MigrateNode(node=PlatformId(0), resource=Resource(cpu=16)))
        scale(scene, 3)
        self.finish(scene, 2, 3, 4)
        assert {0, 1, 6, 7} <= set(scene.removed)
        assert scene.fleet.migrations == {}

    @pytest.mark.parametrize("node_type", [NodeType.PS, NodeType.WORKER, NodeType.CHIEF])
    def test_then_nobody_can_be_added_who_would_train(self, node_type: NodeType) -> None:
        scene = self.scene().run(4)
        self.finish(scene, 2, 3, 4)
        with pytest.raises(Rejected, match="training is over"):
            scene.do(ScaleReplicas(node_type=node_type, count=5))
        scene.do(ScaleReplicas(node_type=NodeType.EVALUATOR, count=2))
        assert scene.launched[-1] == 6
