"""Nodes of a platform as their agents tell of them, through restarts of the master and exchanges."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from dlrover.agreed.worker_failure import DEVICE_FAULT_CODES
from dlrover.core.fleet.fleet import NUM_FORMER
from dlrover.core.fleet.replicas import Replicas
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    ErrorLevel,
    FleetSpec,
    LaunchRefused,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodeType,
    PlatformNode,
    ReplicaSpec,
    ReportNodeError,
    ScaleJob,
    ScaleReplicas,
)
from dlrover.protocol.messages.job import (
    ExitReason,
    FailureKind,
    Join,
    Leave,
    LeaveReason,
    PlatformId,
    RestartPolicy,
    Run,
)
from tests.core.fleet.fleet_scene import FleetScene, ps_job, workers
from tests.core.scene import failure, terms

INITIAL, PENDING, RUNNING = NodePhase.INITIAL, NodePhase.PENDING, NodePhase.RUNNING
SUCCEEDED, FAILED, DELETED = NodePhase.SUCCEEDED, NodePhase.FAILED, NodePhase.DELETED


class TestAgents:
    def test_a_node_whose_agent_attaches_runs_whatever_the_platform_showed(self) -> None:
        scene = FleetScene.of(2)
        scene.come(0)
        assert scene.phase(0) is RUNNING
        assert scene.node(0).agent == scene.agents["n0"].node

    def test_an_agent_gets_the_rank_of_its_node_without_asking_for_it(self) -> None:
        scene = FleetScene.of(3)
        attached = scene.attach("n2", platform_node=PlatformId(2))
        assert attached.node_rank == 2

    @pytest.mark.parametrize("node", [0, 1, 4])
    def test_only_workers_enter_the_world_and_nobody_takes_their_ranks(self, node: int) -> None:
        """Ids: a parameter server, the chief, two workers, the evaluator."""
        spec = ps_job(num_workers=3, num_ps=1)
        evaluator = {NodeType.EVALUATOR: ReplicaSpec(count=1)}
        scene = FleetScene(terms(2, 2)).begin(replace(spec, replicas=spec.replicas | evaluator))
        before = scene.job.digest()
        with pytest.raises(Rejected, match="nodes of type worker only") as refused:
            scene.attach(f"n{node}")
        assert refused.value.code == "node-type"
        assert scene.job.digest() == before
        assert [scene.attach(f"n{worker}").node_rank for worker in (2, 3)] == [0, 1]

    def test_a_type_that_only_the_agent_tells_counts_too(self) -> None:
        """The platform has not shown the node yet."""
        scene = FleetScene.of(2)
        with pytest.raises(Rejected, match="Evaluator on host-n7 cannot join"):
            scene.attach("n7", node_type=NodeType.EVALUATOR)

    def test_the_end_of_a_node_is_the_end_of_its_agent_at_once(self) -> None:
        scene = FleetScene.of(2, limits={"last_call": 30.0}).train(0, 1)
        assert isinstance(scene.wish("n0"), Run)
        scene.fail(1, exit_code=1)
        assert isinstance(scene.wish("n0"), Join), "nobody waits for a stream to break"
        scene.train(2)
        scene.rejoin_nodes(0)
        assert scene.world("n2").group_rank == 1
        assert scene.job.state.restarts.num_restarts == 0, "the platform's budget pays"

    def test_silence_is_a_failure_and_decided_once(self) -> None:
        scene = FleetScene.of(2, max_relaunches=1).train(0, 1)
        scene.at(100).silent("n1", last_seen=60)
        assert (scene.phase(1), scene.node(1).exit_reason) == (DELETED, NodeExit.NO_HEARTBEAT)
        assert (scene.spent(1), scene.launched, scene.removed) == (1, [0, 1, 2], [1])
        gone = PlatformNode(id=PlatformId(1), node_type=NodeType.WORKER, rank=1, phase=RUNNING)
        scene.do(NodeChanged(kind=NodeEventKind.DELETED, node=gone))
        assert scene.job.end is None
        assert (scene.spent(1), scene.launched) == (1, [0, 1, 2])

    def test_a_closed_connection_costs_nothing_unless_the_platform_tells_of_a_failure(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.at(10).break_stream("n1")
        scene.tick(15)
        assert (scene.launched, scene.spent(1)) == ([0, 1, 2], 0)
        seen = PlatformNode(id=PlatformId(1), node_type=NodeType.WORKER, rank=1, phase=FAILED, exit_code=1)
        scene.do(NodeChanged(kind=NodeEventKind.MODIFIED, node=seen))
        assert (scene.launched, scene.spent(1)) == ([0, 1, 2], 1)
        scene.do(NodeChanged(kind=NodeEventKind.MODIFIED, node=seen))
        assert scene.spent(1) == 1, "it is told once"

    @pytest.mark.parametrize(
        ("kind", "phase", "told", "is_counted"),
        [
            (NodeEventKind.DELETED, RUNNING, NodeExit.KILLED, False),
            (NodeEventKind.MODIFIED, FAILED, NodeExit.KILLED, False),
            (NodeEventKind.DELETED, RUNNING, NodeExit.NONE, True),
        ],
    )
    def test_closed_connections_count_in_the_rate_unless_the_platform_took_the_nodes_away(
        self, kind: NodeEventKind, phase: NodePhase, told: NodeExit, is_counted: bool
    ) -> None:
        """Without a reason it may have been our own removal, and the network what keeps failing."""
        scene = FleetScene.of(4, 1).train(0, 1, 2, 3)
        nodes = [0, 1, 2, 3]
        for number in range(8):
            rank = number % 4
            scene.at(number * 300).break_stream(f"n{nodes[rank]}")
            scene.tick(number * 300 + 6)
            if scene.job.end is not None:
                break
            seen = PlatformNode(
                id=PlatformId(nodes[rank]), node_type=NodeType.WORKER, rank=rank, phase=phase, exit_reason=told
            )
            scene.do(NodeChanged(kind=kind, node=seen))
            nodes[rank] = scene.launched[-1]
            scene.train(nodes[rank])
            scene.rejoin_nodes(*(node for node in nodes if node != nodes[rank]))
        if is_counted:
            assert "5 nodes failed within 3600 s" in scene.end.message
        else:
            assert scene.job.end is None
            assert scene.fleet.failures == []
            assert [scene.spent(rank) for rank in range(4)] == [0, 0, 0, 0]

    def test_whoever_tells_first_decides(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.at(10).break_stream("n1")
        scene.fail(1, exit_code=1)
        assert (scene.launched, scene.spent(1)) == ([0, 1, 2], 1)
        scene.tick(60)
        assert (scene.launched, scene.spent(1)) == ([0, 1, 2], 1)

    @pytest.mark.parametrize(
        ("reason", "cost"), [(LeaveReason.PREEMPTED, 0), (LeaveReason.STOPPED_BY_USER, 0), (LeaveReason.FAILED, 1)]
    )
    def test_a_node_that_leaves_is_replaced_and_preemption_is_free(self, reason: LeaveReason, cost: int) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.leave("n1", reason)
        assert (scene.launched, scene.spent(1)) == ([0, 1, 2], cost)
        assert scene.job.end is None

    def test_the_last_agent_that_leaves_does_not_end_a_job_that_gets_another_node(self) -> None:
        scene = FleetScene.of(1).train(0)
        scene.leave("n0", LeaveReason.STOPPED_BY_USER)
        assert scene.job.end is None
        scene.train(1)
        assert isinstance(scene.wish("n1"), Run)

    def test_an_agent_that_wakes_up_on_a_replaced_node_has_no_place_any_more(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.at(100).silent("n1")
        with pytest.raises(Rejected, match="replaced") as refused:
            scene.attach("n1")
        assert refused.value.code == "node-released"
        with pytest.raises(Rejected):
            scene.attach("late", platform_node=PlatformId(1), rank=1)

    def test_a_new_process_on_the_same_node_takes_its_rank_and_the_node_stays(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.at(10).break_stream("n1")
        scene.at(12).attach("again", platform_node=PlatformId(1), rank=1)
        assert scene.launched == [0, 1]
        assert scene.node(1).agent == scene.agents["again"].node
        scene.tick(100)
        assert scene.launched == [0, 1]

    def test_a_replacement_supersedes_a_node_whose_stream_is_broken(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.at(10).break_stream("n1")
        scene.vanish(1)
        scene.at(11).train(2)
        assert scene.agents["n2"].node_rank == 1

    def test_a_node_that_finished_is_not_replaced_whatever_becomes_of_it(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.finish("n1")
        scene.leave("n1", LeaveReason.PREEMPTED)
        scene.vanish(1)
        assert scene.launched == [0, 1]
        scene.fail(0, exit_reason=NodeExit.HARDWARE)
        assert scene.launched == [0, 1, 2], "one that finished does not switch off the help for the others"

    def test_those_that_are_done_are_counted_also_in_a_snapshot_that_does_not_say_how_many(self) -> None:
        scene = FleetScene.of(3, 1).train(0, 1, 2)
        for name in ("n0", "n1"):
            scene.finish(name)
        scene.leave("n1", LeaveReason.PREEMPTED)
        scene.vanish(1)
        assert (list(scene.fleet.workers.finished), scene.fleet.workers.num_done) == ([0, 1], 1)
        former = msgspec.to_builtins(scene.fleet.workers)
        del former["num_done"]
        assert msgspec.convert(former, Replicas, strict=False) == scene.fleet.workers

    @pytest.mark.parametrize("is_finished", [False, True])
    def test_silence_after_success_is_no_failure(self, is_finished: bool) -> None:
        scene = FleetScene.of(2).train(0, 1)
        if is_finished:
            scene.finish("n1")
        scene.at(100).silent("n1")
        assert scene.launched == ([0, 1] if is_finished else [0, 1, 2])

    def test_success_on_the_platform_counts_as_the_report_that_was_lost(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.finish("n0")
        scene.break_stream("n1")
        scene.show(1, SUCCEEDED, exit_code=0)
        assert scene.end.reason is ExitReason.COMPLETED
        assert scene.end.exit_code == 0

    def test_a_device_fault_replaces_the_node_instead_of_restarting_on_it(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        died = failure(FailureKind.EXIT_CODE, exit_code=DEVICE_FAULT_CODES[-1])
        scene.fail("n1", died)
        assert (scene.launched, scene.spent(1)) == ([0, 1, 2], 1)
        wish = scene.wish("n1")
        assert isinstance(wish, Leave)
        assert wish.exit_code == 0, "a platform would charge anything else as one more failure"
        scene.train(2)
        scene.rejoin_nodes(0)
        assert scene.world("n2").round == 2
        assert scene.job.state.restarts.spent == {}

    def test_exhausted_restarts_replace_the_node_while_the_platform_gives_some(self) -> None:
        scene = FleetScene(terms(2, 2, RestartPolicy(max_restarts=1)))
        scene.begin(FleetSpec(replicas=workers(2, max_relaunches=1), failure_window=0)).train(0, 1)
        node, seconds = 1, 0.0
        for _ in range(4):
            seconds += 10
            scene.at(seconds).fail(f"n{node}", failure(at=seconds))
            if scene.job.end is not None:
                break
            if node == 1 and scene.launched[-1] == 2:
                node = 2
                scene.train(2)
                scene.rejoin_nodes(0)
            else:
                scene.rejoin_nodes(0, node)
        assert scene.launched == [0, 1, 2]
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT
        assert seconds == 40, "one restart and one relaunch, then one restart more"

    def test_a_script_that_cannot_run_is_not_tried_on_another_node(self) -> None:
        scene = FleetScene.of(1).train(0)
        scene.fail("n0", failure(FailureKind.BAD_SCRIPT))
        assert scene.end.reason is ExitReason.CODE_ERROR
        assert scene.launched == [0]

    def test_an_agent_that_restarts_too_often_is_told_to_leave_and_its_node_replaced(self) -> None:
        scene = FleetScene(terms(1, 1, RestartPolicy(max_restarts=0)))
        scene.begin(FleetSpec(replicas=workers(1))).train(0)
        attached = scene.restart_agent("n0")
        assert isinstance(attached.desired.wish, Leave)
        assert scene.launched == [0, 1]
        scene.train(1)
        assert isinstance(scene.wish("n1"), Run)

    @pytest.mark.parametrize("level", list(ErrorLevel))
    def test_only_an_error_of_the_node_replaces_it(self, level: ErrorLevel) -> None:
        scene = FleetScene.of(2, 1).train(0, 1)
        agent = scene.agents["n1"]
        scene.do(ReportNodeError(node=agent.node, incarnation=agent.incarnation, level=level, message="m" * 5000))
        assert scene.launched == ([0, 1, 2] if level is ErrorLevel.NODE else [0, 1])
        assert scene.node(1).exit_reason is (NodeExit.UNKNOWN if level is ErrorLevel.NODE else NodeExit.NONE)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("Network is breakdown", NodeExit.CHECK_FAILED),
            ("Breakdown", NodeExit.CHECK_FAILED),
            ("Node Failure", NodeExit.CHECK_FAILED),
            ("CheckFailure", NodeExit.CHECK_FAILED),
            ("HardwareError", NodeExit.HARDWARE),
            ("Deleted", NodeExit.UNKNOWN),  # only the platform can say so
            ("Name or service not known", NodeExit.UNKNOWN),
        ],
    )
    def test_the_texts_of_former_versions_tell_the_reason(self, text: str, reason: NodeExit) -> None:
        """spec 01 §8.3, §8.14: scripts report a node's failure by these."""
        scene = FleetScene.of(2, 1).train(0, 1)
        agent = scene.agents["n1"]
        report = ReportNodeError(node=agent.node, incarnation=agent.incarnation, level=ErrorLevel.NODE, message=text)
        outcome = scene.do(report)
        assert scene.node(1).exit_reason is reason
        assert scene.launched == [0, 1, 2]
        assert any(text in verdict for verdict in outcome.verdicts)

    @pytest.mark.parametrize("claimed", [NodeExit.NONE, NodeExit.KILLED, NodeExit.HARDWARE])
    def test_errors_of_nodes_go_through_the_same_budget(self, claimed: NodeExit) -> None:
        scene = FleetScene.of(1, max_relaunches=2, failure_window=0)
        for node in (0, 1, 2):
            scene.at(node).train(node)
            agent = scene.agents[f"n{node}"]
            report = ReportNodeError(
                node=agent.node,
                incarnation=agent.incarnation,
                level=ErrorLevel.NODE,
                message="ECC error",
                exit_reason=claimed,
            )
            scene.do(report)
        assert scene.launched == [0, 1, 2]
        assert scene.end.reason is ExitReason.WORKER_ERROR
        assert "ECC error" in scene.end.message

    def test_an_error_of_a_node_started_by_hand_is_only_said(self) -> None:
        scene = FleetScene(terms(1)).gather("a")
        agent = scene.agents["a"]
        outcome = scene.do(
            ReportNodeError(node=agent.node, incarnation=agent.incarnation, level=ErrorLevel.NODE, message="smoke")
        )
        assert "smoke" in outcome.verdicts[-1]
        assert isinstance(scene.wish("a"), Run)


class TestMasterRestarts:
    def test_open_intents_are_asked_for_again_after_the_list_and_not_before(self) -> None:
        scene = FleetScene.of(3).run(0)
        scene.cloud.pop(2)  # the launch was lost with the master
        scene.launches.pop(2)
        scene.launched.clear()
        scene.restart_master()
        assert scene.outcomes[-1].effects == ()
        outcome = scene.list()
        assert [effect.id for effect in outcome.effects if hasattr(effect, "rank")] == [2]
        assert scene.launched == [2]

    def test_ranks_that_died_during_the_outage_are_replaced(self) -> None:
        scene = FleetScene.of(3).run()
        scene.cloud.pop(1)
        scene.restart_master().list()
        assert scene.launched == [0, 1, 2, 3]
        assert (scene.launches[3].rank, scene.spent(1)) == (1, 0)

    def test_what_still_lives_is_left_alone(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.restart_master().list()
        scene.attach("n0", running_round=1)
        scene.attach("n1", running_round=1)
        scene.tick(100)
        assert scene.launched == [0, 1]
        assert isinstance(scene.wish("n0"), Run)

    def test_an_empty_list_means_that_everything_was_taken_away(self) -> None:
        scene = FleetScene.of(3).run()
        scene.cloud.clear()
        scene.list()
        assert scene.launched == [0, 1, 2, 3, 4, 5]
        assert [scene.spent(rank) for rank in range(3)] == [0, 0, 0]
        assert scene.job.end is None

    def test_a_node_that_came_and_went_unseen_is_replaced_and_one_that_is_refused_is_not(self) -> None:
        """A platform does not launch an id twice, so asking again for the first would never help."""
        scene = FleetScene.of(2)
        scene.cloud.clear()
        scene.do(LaunchRefused(node=PlatformId(1), reason="quota"))
        scene.at(59).list()
        assert scene.launched == [0, 1]
        scene.at(60).list()
        assert scene.launched == [0, 1, 2]
        assert (scene.launches[2].rank, scene.spent(0)) == (0, 0)
        assert scene.removed == [0], "should its launch only have been late"

    def test_a_refusal_explains_an_absence_only_as_long_as_it_is_repeated(self) -> None:
        """After it the node may have been launched, and gone before anybody looked."""
        scene = FleetScene.of(2, 1).train(0)
        del scene.cloud[1]
        for at in (10, 300, 600):
            scene.at(at).do(LaunchRefused(node=PlatformId(1), reason="quota"))
        scene.at(1199).list()
        assert scene.launched == [0, 1]
        scene.at(1200).list()
        assert (scene.launched, scene.spent(1)) == ([0, 1, 2], 0)

    def test_a_removal_is_asked_for_again_until_the_platform_does_not_show_the_node(self) -> None:
        scene = FleetScene.of(2, 1).train(0, 1)
        alive = scene.cloud[1]
        scene.at(100).silent("n1")
        assert scene.removed == [1]
        scene.cloud[1] = alive
        scene.list()
        assert scene.removed == [1, 1]
        scene.list()
        assert scene.removed == [1, 1]

    def test_a_master_without_its_journal_adopts_what_it_finds(self) -> None:
        """Records 0 and 1 were never launched by this master; 2 and 3 took their ranks in the life before."""
        scene = FleetScene(terms(2))
        for id_, rank in ((2, 0), (3, 1)):
            scene.cloud[id_] = PlatformNode(
                id=PlatformId(id_),
                node_type=NodeType.WORKER,
                rank=rank,
                phase=RUNNING,
                name=f"w{id_}",
                relaunch_count=1,
            )
        scene.begin(FleetSpec(replicas=workers(2)))
        assert (scene.launched, scene.removed) == ([], [])
        assert [scene.spent(rank) for rank in (0, 1)] == [1, 1]
        assert scene.fleet.workers.holders == {0: 2, 1: 3}
        assert (scene.node(0).phase, scene.node(0).exit_reason) == (DELETED, NodeExit.RELAUNCHED)
        scene.fail(3, exit_code=1)
        assert scene.launched == [4]

    def test_ranks_that_nobody_has_get_ids_that_nobody_ever_had(self) -> None:
        scene = FleetScene(terms(3))
        scene.cloud[5] = PlatformNode(id=PlatformId(5), node_type=NodeType.WORKER, rank=1, phase=RUNNING, name="w5")
        scene.begin(FleetSpec(replicas=workers(3)))
        assert scene.launched == [6, 7]
        assert [scene.launches[id_].rank for id_ in (6, 7)] == [0, 2]

    def test_of_two_nodes_of_a_rank_the_newer_stays(self) -> None:
        scene = FleetScene(terms(1))
        for id_ in (4, 7):
            scene.cloud[id_] = PlatformNode(
                id=PlatformId(id_), node_type=NodeType.WORKER, rank=0, phase=RUNNING, name=f"w{id_}"
            )
        scene.begin(FleetSpec(replicas=workers(1)))
        assert scene.fleet.workers.holders == {0: 7}
        assert (scene.launched, scene.removed) == ([], [4])

    def test_an_agent_may_come_before_the_list_that_shows_its_node(self) -> None:
        scene = FleetScene(terms(2))
        scene.do(DefineFleet(spec=FleetSpec(replicas=workers(2))))
        scene.attach("n7", rank=1, platform_node=PlatformId(7), incarnation=3)
        assert scene.fleet.workers.holders == {0: 0, 1: 7}
        scene.cloud[7] = PlatformNode(id=PlatformId(7), node_type=NodeType.WORKER, rank=1, phase=RUNNING, name="w7")
        scene.list()
        assert scene.launches[scene.launched[0]].rank == 0
        assert len(scene.launched) == 1
        assert scene.node(7).agent == scene.agents["n7"].node

    def test_a_node_that_was_given_up_long_ago_and_shows_up_again_is_removed(self) -> None:
        scene = FleetScene.of(1, max_relaunches=0)
        node = 0
        for _ in range(4 * NUM_FORMER):
            scene.run(node)
            scene.vanish(node)
            node = scene.launched[-1]
        assert len(scene.fleet.nodes) <= 2 * NUM_FORMER + 1, "the table does not grow for ever"
        scene.cloud[0] = PlatformNode(id=PlatformId(0), node_type=NodeType.WORKER, rank=0, phase=RUNNING, name="w0")
        scene.list()
        assert scene.removed == [0]
        assert scene.fleet.workers.holders == {0: node}

    @pytest.mark.parametrize("is_listed", [True, False])
    def test_a_node_that_was_let_go_and_comes_late_is_removed_once_more(self, is_listed: bool) -> None:
        """Its launch took longer than its removal."""
        scene = FleetScene().begin(ps_job()).run(0, 2, 3)
        late = scene.cloud.pop(1)
        scene.do(ScaleReplicas(node_type=NodeType.PS, count=1))
        scene.list()
        assert (scene.removed, scene.node(1).is_gone) == ([1], True)
        scene.cloud[1] = late
        if is_listed:
            scene.list()
        else:
            scene.show(1, NodePhase.RUNNING)
        assert scene.removed == [1, 1]
        scene.cloud[1] = late
        scene.list()
        assert scene.removed == [1, 1, 1], "until it is not there any more"
        scene.list()
        scene.stop()
        assert scene.cloud == {}
        assert scene.removed.count(1) == 3

    def test_a_node_that_comes_after_the_end_is_removed_too(self) -> None:
        scene = FleetScene.of(2).train(0)
        late = scene.cloud.pop(1)
        scene.stop()
        scene.list()
        scene.cloud[1] = late
        scene.show(1, NodePhase.PENDING)
        assert 1 not in scene.cloud

    def test_an_agent_that_was_dismissed_leaves_before_its_node_is_removed(self) -> None:
        scene = FleetScene.of(2, 1).train(0, 1)
        scene.do(ScaleJob(min_nodes=1, max_nodes=1))
        scene.show(1, NodePhase.RUNNING)
        seen = scene.cloud.pop(1)
        scene.list()
        scene.cloud[1] = seen
        scene.list()
        assert scene.removed == []
        scene.leave("n1", LeaveReason.DISMISSED)
        assert scene.removed == [1]

    def test_old_news_of_an_ended_node_that_people_want_to_look_at_removes_nothing(self) -> None:
        scene = FleetScene.of(2, 1, remove_exited=False).run()
        scene.fail(0, exit_code=1)
        scene.do(NodeChanged(kind=NodeEventKind.MODIFIED, node=replace(scene.cloud[0], phase=NodePhase.RUNNING)))
        assert scene.removed == []


class TestReplacementInTheWorld:
    def test_a_standby_takes_over_and_the_replacement_becomes_the_standby(self) -> None:
        scene = FleetScene(terms(2, 2))
        scene.terms = terms(2, 2)
        scene.begin(FleetSpec(replicas=workers(2), standby=1)).run()
        scene.come(0, 1, 2).rejoin_nodes(0, 1)
        scene.join("n2")
        assert isinstance(scene.wish("n1"), Run)
        scene.vanish(1)
        scene.rejoin_nodes(0)
        assert isinstance(scene.wish("n2"), Run)
        assert scene.launches[3].rank == 1
        scene.train(3)
        assert not isinstance(scene.wish("n3"), Run), "it waits warm"

    def test_nobody_waits_for_a_node_that_is_still_being_launched(self) -> None:
        """Going on with fewer and growing later costs a short restart; waiting costs the whole launch."""
        scene = FleetScene.of(3, 2, limits={"last_call": 30.0}).train(0, 1, 2)
        scene.at(100).vanish(2)
        assert scene.launched == [0, 1, 2, 3]
        scene.rejoin_nodes(0, 1)
        assert scene.world("n0").group_world_size == 2, "at once, while the replacement is on its way"
        scene.at(160).train(3)
        scene.rejoin_nodes(0, 1)
        assert scene.world("n3").group_world_size == 3

    def test_some_finished_and_one_lost_waits_for_the_replacement(self) -> None:
        scene = FleetScene.of(2, 1).train(0, 1)
        scene.finish("n0")
        scene.vanish(1)
        scene.tick(300)
        assert scene.job.end is None
        scene.train(2)
        scene.finish("n2")
        assert scene.end.reason is ExitReason.COMPLETED
