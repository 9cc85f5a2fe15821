"""Nodes of a platform: wanted, shown, lost, replaced; told of by the platform, by their agents, by people."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core.fleet import NUM_FORMER
from dlrover.core.restarts import DEVICE_FAULT_CODES
from dlrover.protocol.errors import Rejected
from dlrover.protocol.fleet_messages import (
    DefineFleet,
    ErrorLevel,
    FleetSpec,
    LaunchRefused,
    MigrateNode,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    ReplicaSpec,
    ReportNodeError,
    Resource,
    RestartJob,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    Strategy,
    SuspendJob,
)
from dlrover.protocol.messages import (
    ExitReason,
    FailureKind,
    FinishJob,
    Join,
    Leave,
    LeaveReason,
    PlatformId,
    RestartPolicy,
    Run,
    Stage,
)
from tests.core.fleet_scene import FleetScene, ps_job, workers
from tests.core.scene import failure, terms

INITIAL, PENDING, RUNNING = NodePhase.INITIAL, NodePhase.PENDING, NodePhase.RUNNING
SUCCEEDED, FAILED, DELETED = NodePhase.SUCCEEDED, NodePhase.FAILED, NodePhase.DELETED


def in_phase(phase: NodePhase, **spec: Any) -> FleetScene:
    """Two workers of which the job can lose one; node 0 is in the phase."""
    scene = FleetScene.of(2, 1, **spec)
    scene.run(1)
    if phase is not INITIAL:
        scene.show(0, PENDING)
    if phase in (RUNNING, SUCCEEDED, FAILED):
        scene.show(0, RUNNING, host="host-0")
    if phase in (SUCCEEDED, FAILED):
        scene.show(0, phase, exit_code=0 if phase is SUCCEEDED else 1)
    elif phase is DELETED:
        scene.vanish(0)
    return scene


class TestDefinition:
    def test_every_node_is_asked_for_once_the_platform_has_said_what_it_has(self) -> None:
        scene = FleetScene(terms(2))
        scene.do(DefineFleet(spec=FleetSpec(replicas=workers(2))))
        assert scene.launched == []
        scene.list()
        assert scene.launched == [0, 1]
        assert [scene.launches[id_].name for id_ in (0, 1)] == ["a-job-worker-0", "a-job-worker-1"]
        assert [scene.launches[id_].rank for id_ in (0, 1)] == [0, 1]

    def test_the_same_definition_again_changes_nothing_and_another_is_refused(self) -> None:
        scene = FleetScene.of(2)
        scene.do(DefineFleet(spec=scene.fleet.spec))
        assert scene.launched == [0, 1]
        with pytest.raises(Rejected) as refused:
            scene.do(DefineFleet(spec=FleetSpec(replicas=workers(3))))
        assert refused.value.code == "fleet-differs"

    def test_a_parameter_server_job_gets_a_chief_from_its_workers(self) -> None:
        scene = FleetScene().begin(ps_job(num_workers=3, num_ps=3))
        kinds = [(launch.node_type, launch.rank) for launch in scene.launches.values()]
        assert kinds == [
            (NodeType.PS, 0), (NodeType.PS, 1), (NodeType.PS, 2),
            (NodeType.CHIEF, 0), (NodeType.WORKER, 0), (NodeType.WORKER, 1),
        ]  # fmt: skip
        assert [scene.launches[id_].service_address for id_ in range(3)] == ["a-job-ps-0", "a-job-ps-1", "a-job-ps-2"]
        assert scene.node(3).is_critical
        assert scene.node(4).is_critical, "worker 0 of a parameter-server job is"
        assert not scene.node(5).is_critical

    def test_groups_take_consecutive_ranks_in_ascending_order(self) -> None:
        scene = FleetScene.of(5, group_affinity={7: 2, 3: 3})
        assert [scene.launches[id_].group for id_ in range(5)] == [3, 3, 3, 7, 7]

    def test_standbys_are_workers_beyond_the_world(self) -> None:
        scene = FleetScene.of(2, standby=1)
        assert [scene.launches[id_].rank for id_ in scene.launched] == [0, 1, 2]

    def test_priorities_are_asked_for(self) -> None:
        scene = FleetScene.of(5, priority="0.5")
        assert [scene.launches[id_].priority for id_ in range(5)] == ["high", "high", "high", "low", "low"]

    def test_a_malformed_list_of_critical_nodes_makes_nobody_critical_and_says_so(self) -> None:
        scene = FleetScene()
        outcome = scene.do(DefineFleet(spec=FleetSpec(replicas=workers(2, critical="0"))))
        assert not any(node.is_critical for node in scene.fleet.nodes.values())
        assert any("'0'" in verdict for verdict in outcome.verdicts)

    def test_no_rank_gets_more_than_five_relaunches(self) -> None:
        assert FleetScene.of(1, max_relaunches=100).fleet.workers.budget(0) == 5

    @pytest.mark.parametrize(
        ("spec", "word"),
        [
            (FleetSpec(replicas={}), "no worker"),
            (FleetSpec(replicas=workers(0)), "no worker"),
            (FleetSpec(replicas=workers(-1)), "count"),
            (FleetSpec(replicas=workers(2, max_relaunches=-1)), "relaunches"),
            (FleetSpec(replicas=workers(2, priority="urgent")), "urgent"),
            (FleetSpec(replicas=workers(2, resource=Resource(cpu=-1))), "less than nothing"),
            (FleetSpec(replicas=workers(2), strategy=Strategy.PS), "ps"),
            (FleetSpec(replicas=workers(2), strategy=Strategy.CUSTOM), "ps"),
            (FleetSpec(replicas=workers(2), group_affinity={0: 3}), "places 3 workers"),
            (FleetSpec(replicas=workers(2), group_affinity={-1: 2}), "group_affinity"),
            (FleetSpec(replicas=workers(2), standby=-1), "standby"),
        ],
    )
    def test_what_cannot_be_is_refused_in_words(self, spec: FleetSpec, word: str) -> None:
        with pytest.raises(Rejected, match=word) as refused:
            FleetScene().do(DefineFleet(spec=spec))
        assert refused.value.code == "bad-fleet"

    def test_without_a_platform_its_commands_are_refused(self) -> None:
        for command in (
            NodesListed(nodes=()),
            SuspendJob(),
            RestartJob(),
            ScaleReplicas(node_type=NodeType.PS, count=1),
        ):
            with pytest.raises(Rejected) as refused:
                FleetScene().do(command)
            assert refused.value.code == "no-platform"


class TestPhases:
    @pytest.mark.parametrize("phase", [INITIAL, PENDING, RUNNING])
    @pytest.mark.parametrize("is_deleted", [False, True])
    def test_a_live_node_that_ends_is_replaced(self, phase: NodePhase, is_deleted: bool) -> None:
        scene = in_phase(phase)
        if is_deleted:
            scene.vanish(0)  # the platform last saw it as it was
        else:
            scene.fail(0, exit_code=1)
        assert scene.launched == [0, 1, 2]
        assert scene.launches[2].rank == 0
        assert not scene.node(0).is_live

    @pytest.mark.parametrize("phase", [INITIAL, PENDING, RUNNING])
    def test_a_node_that_succeeded_is_not_replaced_also_if_nobody_ever_saw_it_run(self, phase: NodePhase) -> None:
        scene = in_phase(phase)
        scene.show(0, SUCCEEDED, exit_code=0)
        assert scene.phase(0) is SUCCEEDED
        scene.vanish(0) if 0 in scene.cloud else None
        assert scene.launched == [0, 1]

    @pytest.mark.parametrize("phase", [SUCCEEDED, FAILED])
    def test_the_deletion_of_an_ended_node_changes_nothing(self, phase: NodePhase) -> None:
        scene = in_phase(phase, remove_exited=False)
        launched = list(scene.launched)
        scene.vanish(0)
        assert scene.launched == launched
        assert scene.job.end is None

    @pytest.mark.parametrize("phase", list(NodePhase))
    @pytest.mark.parametrize("shown", list(NodePhase))
    @pytest.mark.parametrize("kind", list(NodeEventKind))
    def test_nothing_that_a_platform_says_can_fail(
        self, phase: NodePhase, shown: NodePhase, kind: NodeEventKind
    ) -> None:
        scene = in_phase(phase)
        seen = PlatformNode(id=PlatformId(0), node_type=NodeType.WORKER, rank=0, phase=shown)
        scene.do(NodeChanged(kind=kind, node=seen))
        scene.do(NodeChanged(kind=kind, node=seen))

    def test_events_about_strangers_harm_nobody(self) -> None:
        scene = FleetScene.of(2)
        for node_type in (NodeType.PS, NodeType.EVALUATOR):
            seen = PlatformNode(id=PlatformId(99), node_type=node_type, rank=0, phase=RUNNING, name="odd")
            scene.do(NodeChanged(kind=NodeEventKind.ADDED, node=seen))
        assert scene.removed == [99, 99], "nobody asked for such a node"
        scene.do(LaunchRefused(node=PlatformId(99), reason="no room"))
        assert sorted(scene.fleet.nodes) == [0, 1]

    def test_an_exit_code_tells_the_reason_if_the_platform_does_not(self) -> None:
        scene = in_phase(RUNNING)
        scene.fail(0, exit_code=201)
        assert scene.node(0).exit_reason is NodeExit.HARDWARE
        scene.run(2)
        scene.fail(2)
        assert scene.node(2).exit_reason is NodeExit.UNKNOWN

    def test_what_the_platform_says_is_kept_apart_from_the_reason_and_short(self) -> None:
        scene = in_phase(RUNNING)
        scene.fail(0, exit_code=1, message="x" * 10_000_000)
        assert scene.node(0).exit_reason is NodeExit.FATAL
        assert len(scene.node(0).message) == 2048

    def test_a_node_that_nobody_wants_any_more_stays_so_whatever_is_told_of_it(self) -> None:
        scene = in_phase(RUNNING)
        scene.vanish(0)
        for phase in NodePhase:
            seen = PlatformNode(id=PlatformId(0), node_type=NodeType.WORKER, rank=0, phase=phase)
            scene.do(NodeChanged(kind=NodeEventKind.MODIFIED, node=seen))
            assert scene.node(0).is_released
        assert scene.fleet.workers.holders == {0: 2, 1: 1}

    def test_a_refused_launch_is_explained_and_stays_wanted(self) -> None:
        scene = FleetScene.of(2)
        outcome = scene.do(LaunchRefused(node=PlatformId(1), reason="quota of 1 node"))
        assert any("quota of 1 node" in verdict for verdict in outcome.verdicts)
        assert scene.phase(1) is INITIAL
        assert scene.do(LaunchRefused(node=PlatformId(1), reason="quota of 1 node")).verdicts == ()


class TestBudgets:
    def test_failures_are_paid_by_the_rank_until_its_budget_is_used_up(self) -> None:
        scene = FleetScene.of(2, 1, max_relaunches=2, failure_window=0)
        for second, node in enumerate((0, 2, 3)):
            scene.at(second).run(node)
            scene.fail(node, exit_code=1)
        assert scene.launched == [0, 1, 2, 3]
        assert (scene.spent(0), scene.spent(1)) == (2, 0)
        assert "used up" in " ".join(scene.verdicts)
        assert scene.job.end is None, "one worker is enough for this job"

    def test_evictions_cost_nothing_however_many(self) -> None:
        scene = FleetScene.of(2, max_relaunches=1)
        node = 0
        for _ in range(20):
            scene.run(node)
            scene.vanish(node, exit_reason=NodeExit.KILLED)
            node = scene.launched[-1]
        assert scene.spent(0) == 0
        assert scene.fleet.workers.evictions[0] == 20
        scene.run(node)
        scene.fail(node, exit_code=1)
        assert scene.spent(0) == 1, "the budget is still there for a failure"
        assert scene.job.end is None

    def test_an_evicted_critical_node_never_ends_the_job(self) -> None:
        scene = FleetScene.of(2, critical="all", max_relaunches=0)
        scene.run().vanish(0)
        assert scene.job.end is None
        scene.run(2)
        scene.fail(2, exit_code=1)
        assert scene.end.reason is ExitReason.CODE_ERROR
        assert scene.end.exit_code == 1

    def test_the_platform_is_told_how_often_a_rank_was_relaunched(self) -> None:
        scene = FleetScene.of(1)
        scene.fail(0, exit_code=1)
        assert scene.launches[1].relaunch_count == 1

    def test_a_host_whose_check_failed_is_avoided(self) -> None:
        scene = in_phase(RUNNING, cordon_faulty=True)
        scene.fail(0, exit_reason=NodeExit.CHECK_FAILED)
        assert scene.launches[2].avoid_hosts == ("host-0",)
        assert scene.removals[0].cordon_host == "host-0"
        scene.run(2)
        scene.fail(2, exit_reason=NodeExit.FATAL)
        assert scene.launches[3].avoid_hosts == ("host-0",), "user code says nothing about a host"
        assert scene.removals[2].cordon_host == ""

    def test_user_errors_are_not_relaunched_where_the_job_says_so(self) -> None:
        scene = FleetScene.of(2, relaunch_always=False)
        scene.run().fail(0, exit_code=1)
        assert scene.launched == [0, 1]
        assert scene.job.end is None, "how many are needed is not known before somebody attached"
        scene = FleetScene.of(2, relaunch_always=False)
        scene.train(0, 1).fail(0, exit_code=1)
        assert scene.end.reason is ExitReason.WORKER_ERROR
        assert "1 workers left" in scene.end.message

    def test_lack_of_memory_is_no_reason_for_another_node_where_all_need_the_same(self) -> None:
        scene = FleetScene.of(2, resource=Resource(memory_mb=655))
        scene.train(0, 1).fail(0, exit_reason=NodeExit.OOM)
        assert scene.end.reason is ExitReason.WORKER_OOM

    def test_many_failures_in_a_short_time_end_the_job_and_the_same_number_over_months_does_not(self) -> None:
        def lives(pause: float) -> FleetScene:
            scene = FleetScene.of(4, 1, max_relaunches=3).run()
            nodes = [0, 1, 2, 3]
            for number in range(8):
                scene.at(number * pause).fail(nodes[number % 4], exit_reason=NodeExit.HARDWARE)
                if scene.job.end is not None:
                    break
                nodes[number % 4] = scene.launched[-1]
                scene.run(scene.launched[-1])
            return scene

        stormy = lives(pause=60.0)
        assert "5 nodes failed within 3600 s" in stormy.end.message
        assert lives(pause=5 * 24 * 3600.0).job.end is None

    def test_a_worker_below_the_minimum_that_cannot_be_replaced_ends_the_job(self) -> None:
        scene = FleetScene.of(4, max_relaunches=0)
        scene.train(0, 1, 2, 3)
        scene.fail(2, exit_code=1)
        assert scene.end.reason is ExitReason.WORKER_ERROR
        assert "3 workers left" in scene.end.message

    def test_the_minimum_is_that_of_the_newest_scaling(self) -> None:
        scene = FleetScene.of(4, max_relaunches=0)
        scene.train(0, 1, 2, 3)
        scene.do(ScaleJob(min_nodes=3, max_nodes=4))
        scene.fail(2, exit_code=1)
        assert scene.job.end is None
        scene.vanish(2) if 2 in scene.cloud else None
        assert scene.job.end is None, "the same node is not missed twice"
        scene.fail(1, exit_code=1)
        assert "2 workers left" in scene.end.message

    def test_the_trailing_deletion_of_a_replaced_node_does_not_count_a_second_time(self) -> None:
        scene = FleetScene.of(4, max_relaunches=1, remove_exited=False)
        scene.train(0, 1, 2, 3)
        scene.fail(2, exit_code=1)
        assert scene.phase(4) is INITIAL
        scene.vanish(2)
        assert scene.job.end is None
        assert scene.spent(2) == 1
        assert scene.launched == [0, 1, 2, 3, 4]


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
        assert isinstance(scene.wish("n1"), Leave)
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


class TestScaling:
    def test_growing_brings_new_nodes_and_shrinking_lets_the_dismissed_go(self) -> None:
        scene = FleetScene.of(2, 1).train(0, 1)
        scene.do(ScaleJob(min_nodes=1, max_nodes=3))
        assert scene.launched == [0, 1, 2]
        scene.train(2)
        scene.rejoin_nodes(0, 1)
        assert scene.world("n2").group_world_size == 3
        scene.do(ScaleJob(min_nodes=1, max_nodes=2))
        assert isinstance(scene.wish("n2"), Leave)
        scene.leave("n2", LeaveReason.DISMISSED)
        assert scene.removed == [2]
        assert scene.launched == [0, 1, 2]
        assert sum(scene.fleet.workers.spent.values()) == 0, "scaling uses no budget up"

    def test_shrinking_takes_those_first_that_are_not_there_yet(self) -> None:
        scene = FleetScene.of(4, 1).train(0, 1)
        scene.do(ScaleJob(min_nodes=1, max_nodes=2))
        assert scene.removed == [3, 2]
        assert isinstance(scene.wish("n1"), Run | Join)
        assert sorted(scene.fleet.workers.holders) == [0, 1]

    def test_a_rank_that_grows_back_keeps_what_it_has_spent(self) -> None:
        scene = FleetScene.of(2, 1).train(0, 1)
        scene.fail(1, exit_code=1)
        scene.do(ScaleJob(min_nodes=1, max_nodes=1))
        scene.do(ScaleJob(min_nodes=1, max_nodes=2))
        assert scene.launches[scene.launched[-1]].relaunch_count == 1

    def test_workers_of_a_parameter_server_job_are_scaled_by_number_and_the_finished_count(self) -> None:
        scene = FleetScene().begin(ps_job(num_workers=4))
        scene.run().show(5, SUCCEEDED, exit_code=0)
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=4))
        assert [scene.launches[id_].rank for id_ in scene.launched[6:]] == [3], "who finished is not started again"
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=1))
        assert scene.removed == [5, 6, 4]
        assert 3 in scene.cloud, "the chief is critical"

    def test_what_cannot_be_scaled_says_why(self) -> None:
        scene = FleetScene.of(2)
        for command in (
            ScaleReplicas(node_type=NodeType.WORKER, count=3),
            ScaleReplicas(node_type=NodeType.PS, count=3),
        ):
            with pytest.raises(Rejected) as refused:
                scene.do(command)
            assert refused.value.code == "bad-scale"


class TestMigration:
    def test_the_old_worker_stays_until_the_new_one_runs(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=8)))
        assert scene.launches[2].resource.cpu == 8
        assert isinstance(scene.wish("n1"), Run)
        scene.run(2)
        assert scene.removed == [1]
        scene.come(2).rejoin_nodes(0, 2)
        assert scene.world("n2").group_rank == 1

    def test_the_state_is_asked_for_before_a_node_is_exchanged(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=8)))
        request = scene.job.state.checkpoints.request
        assert request is not None
        assert "to be exchanged" in request.reason

    def test_the_new_worker_may_come_before_the_platform_shows_it(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=8)))
        scene.come(2)
        assert scene.removed == [1]
        assert scene.agents["n2"].node_rank == 1

    def test_an_exchange_whose_target_fails_is_called_off(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=8)))
        scene.fail(2, exit_code=1)
        assert isinstance(scene.wish("n1"), Run)
        assert scene.launched == [0, 1, 2]
        assert scene.spent(1) == 0
        scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=4)))
        assert scene.launched == [0, 1, 2, 3]

    def test_an_old_node_that_dies_during_the_exchange_is_not_replaced_twice(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=8)))
        scene.vanish(1)
        assert scene.launched == [0, 1, 2]
        assert scene.fleet.migrations == {}
        scene.train(2)

    def test_less_than_nothing_cannot_be_given(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        with pytest.raises(Rejected, match="less than nothing"):
            scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=-1)))

    @pytest.mark.parametrize("node", [0, 1, 99])
    def test_what_cannot_be_exchanged_is_refused(self, node: int) -> None:
        """Critical, exchanged already, unknown."""
        scene = FleetScene.of(2, critical="0:1").train(0, 1)
        scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=8)))
        with pytest.raises(Rejected) as refused:
            scene.do(MigrateNode(node=PlatformId(node), resource=Resource(cpu=8)))
        assert refused.value.code == "bad-migration"


class TestSuspension:
    def test_nothing_is_launched_until_the_job_is_resumed(self) -> None:
        scene = FleetScene.of(2, 1).train(0, 1)
        scene.do(SuspendJob(reason="night"))
        assert scene.job.stage is Stage.SUSPENDED
        scene.vanish(1)
        assert scene.launched == [0, 1]
        assert not any("gives up" in verdict for verdict in scene.verdicts)
        scene.rejoin_nodes(0)
        assert isinstance(scene.wish("n0"), Run), "what runs, runs on"
        assert scene.job.stage is Stage.SUSPENDED
        scene.do(ResumeJob())
        assert scene.job.stage is Stage.RUNNING
        assert scene.launched == [0, 1, 2]

    def test_it_returns_to_the_stage_it_came_from_also_over_a_master_restart(self) -> None:
        scene = FleetScene.of(2)
        scene.do(SuspendJob())
        scene.restart_master().list()
        assert scene.job.stage is Stage.SUSPENDED
        scene.do(ResumeJob())
        assert scene.job.stage is Stage.INIT

    def test_time_in_suspension_is_no_waiting_time(self) -> None:
        scene = FleetScene.of(2)
        scene.at(100).do(SuspendJob())
        scene.tick(100_000)
        assert scene.job.end is None
        scene.do(ResumeJob())
        scene.tick(100_500)
        assert scene.job.end is None

    def test_the_wrong_stage_is_refused(self) -> None:
        scene = FleetScene.of(1)
        with pytest.raises(Rejected, match="not suspended"):
            scene.do(ResumeJob())
        scene.do(SuspendJob())
        for command in (SuspendJob(), RestartJob()):
            with pytest.raises(Rejected) as refused:
                scene.do(command)
            assert refused.value.code == "bad-stage"
        scene.stop()
        with pytest.raises(Rejected) as refused:
            scene.do(ResumeJob())
        assert refused.value.code == "job-ended"


class TestRestart:
    def test_all_workers_are_replaced_once_and_the_job_goes_on(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.finish("n1")
        scene.do(RestartJob(reason="loss is NaN"))
        assert scene.job.stage is Stage.RUNNING
        assert (scene.launched, scene.removed) == ([0, 1, 2, 3], [0, 1])
        assert [scene.launches[id_].rank for id_ in (2, 3)] == [0, 1]
        assert scene.job.state.rendezvous.world is None
        scene.tick(60)
        assert scene.launched == [0, 1, 2, 3], "it restarts once"
        scene.train(2, 3)
        assert scene.world("n3").round == 2
        assert sum(scene.fleet.workers.spent.values()) == 0

    def test_somebody_who_comes_back_after_it_opens_the_next_round(self) -> None:
        scene = FleetScene.of(2, 1, limits={"join_timeout": 600.0}).train(0, 1)
        scene.gather("by-hand")
        scene.leave("by-hand", LeaveReason.PREEMPTED)
        scene.do(RestartJob())
        scene.restart_agent("by-hand")
        scene.join("by-hand")
        assert scene.job.state.rendezvous.opening is not None, "nobody else need come for a round of one"
        assert scene.job.next_deadline() is not None

    def test_the_fourth_restart_is_one_too_many(self) -> None:
        scene = FleetScene.of(1)
        for _ in range(3):
            scene.do(RestartJob())
        assert scene.job.end is None
        scene.do(RestartJob(reason="again"))
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT
        assert scene.end.exit_code == 1

    def test_parameter_server_jobs_cannot_restart_as_a_whole(self) -> None:
        scene = FleetScene().begin(ps_job())
        with pytest.raises(Rejected) as refused:
            scene.do(RestartJob())
        assert refused.value.code == "bad-restart"


class TestTheEnd:
    def test_all_nodes_are_removed_before_the_master_may_go(self) -> None:
        scene = FleetScene.of(3, 2).train(0, 1)
        scene.stop()
        assert scene.removed == [2], "nobody works there"
        scene.leave("n0")
        outcome = scene.leave("n1")
        assert sorted(scene.removed) == [0, 1, 2]
        assert isinstance(outcome.effects[-1], FinishJob), "the removals come before it"

    def test_they_are_removed_by_the_next_master_if_this_one_dies(self) -> None:
        scene = FleetScene.of(1).train(0)
        scene.stop()
        scene.leave("n0")
        scene.removed.clear()
        scene.restart_master()
        assert scene.removed == [0]
        assert isinstance(scene.outcomes[-1].effects[-1], FinishJob)

    def test_exited_nodes_stay_where_the_user_wants_to_look_at_them(self) -> None:
        scene = FleetScene.of(2, 1, remove_exited=False).run()
        scene.fail(0, exit_code=1)
        assert scene.removed == []
        scene.stop()
        assert sorted(scene.removed) == [0, 1, 2], "at the end nothing remains"

    def test_a_parameter_server_job_ends_well_when_its_critical_nodes_have_done_their_work(self) -> None:
        scene = FleetScene().begin(ps_job(num_workers=3))
        scene.run(0, 1, 2, 3)
        scene.show(2, SUCCEEDED, exit_code=0)
        assert scene.job.end is None
        scene.show(3, SUCCEEDED, exit_code=0)
        assert scene.end.reason is ExitReason.COMPLETED
        assert scene.end.exit_code == 0
        assert set(scene.removed) == {0, 1, 2, 3, 4}, "the other worker never began"
        assert scene.job.stage is Stage.STOPPED

    def test_it_ends_when_all_workers_have_exited_and_one_of_them_well(self) -> None:
        spec = ps_job(num_workers=2, worker={"critical": "none", "max_relaunches": 0})
        scene = FleetScene().begin(spec).run()
        scene.fail(3, exit_code=1)
        scene.show(2, SUCCEEDED, exit_code=0)
        assert scene.end.reason is ExitReason.COMPLETED

    def test_an_evicted_node_that_was_replaced_keeps_nobody_waiting(self) -> None:
        scene = FleetScene().begin(ps_job(worker={"critical": "none"})).run()
        scene.vanish(3)
        scene.run(4)
        scene.show(2, SUCCEEDED, exit_code=0)
        assert scene.end.reason is ExitReason.COMPLETED, "the chief is critical, and done"
        scene = FleetScene.of(1, max_relaunches=0).run()
        scene.vanish(0)
        scene.run(1)
        scene.show(1, SUCCEEDED, exit_code=0)
        assert scene.end.reason is ExitReason.COMPLETED

    def test_workers_that_all_failed_fail_the_job(self) -> None:
        scene = FleetScene.of(2, max_relaunches=0, failure_window=0).run()
        scene.at(1).fail(0, exit_code=1)
        scene.at(2).fail(1, exit_code=1)
        assert scene.end.reason is ExitReason.UNKNOWN_ERROR
        assert scene.end.exit_code == 1

    def test_low_priority_nodes_without_resources_keep_no_job_alive(self) -> None:
        spec = FleetSpec(
            replicas={
                NodeType.WORKER: ReplicaSpec(count=2, priority="0.5", critical="none"),
                NodeType.PS: ReplicaSpec(count=1),
                NodeType.CHIEF: ReplicaSpec(count=1),
                NodeType.EVALUATOR: ReplicaSpec(count=1),
            },
            strategy=Strategy.PS,
        )
        scene = FleetScene().begin(spec)
        scene.run(0, 1, 2)
        scene.show(1, SUCCEEDED, exit_code=0)
        scene.show(2, SUCCEEDED, exit_code=0)
        assert scene.job.end is None, "the evaluator is critical and has not ended"
        scene.show(4, RUNNING)
        scene.show(4, SUCCEEDED, exit_code=0)
        assert scene.end.reason is ExitReason.COMPLETED

    @pytest.mark.parametrize("kind", [NodeType.CHIEF, NodeType.EVALUATOR, NodeType.PS])
    def test_the_final_failure_of_a_critical_node_ends_the_job_with_its_reason(self, kind: NodeType) -> None:
        replicas = {
            NodeType.WORKER: ReplicaSpec(count=1),
            NodeType.CHIEF: ReplicaSpec(count=1, max_relaunches=0),
            NodeType.PS: ReplicaSpec(count=1, max_relaunches=0, critical="all"),
            NodeType.EVALUATOR: ReplicaSpec(count=1, max_relaunches=0),
        }
        scene = FleetScene().begin(FleetSpec(replicas=replicas, strategy=Strategy.PS)).run()
        node = next(id_ for id_, launch in scene.launches.items() if launch.node_type is kind)
        scene.at(100).fail(node, exit_reason=NodeExit.UNKNOWN)
        assert (
            scene.end.reason
            is {
                NodeType.CHIEF: ExitReason.WORKER_ERROR,
                NodeType.EVALUATOR: ExitReason.EVALUATOR_ERROR,
                NodeType.PS: ExitReason.PS_ERROR,
            }[kind]
        )

    def test_a_failure_before_any_training_is_taken_for_an_error_of_the_code(self) -> None:
        scene = FleetScene().begin(ps_job(worker={"max_relaunches": 0})).run()
        scene.at(5).fail(2, exit_code=1)
        assert scene.end.reason is ExitReason.CODE_ERROR


class TestStatus:
    def test_the_status_shows_each_node_with_its_relaunches(self) -> None:
        scene = FleetScene.of(1).train(0)
        scene.fail(0, exit_code=1, message="bad day")
        former, new = scene.job.status().fleet
        assert (former.phase, former.exit_reason, former.message) == (FAILED, NodeExit.FATAL, "bad day")
        assert (new.phase, new.num_relaunches, new.max_relaunches) == (INITIAL, 1, 3)

    def test_below_the_minimum_the_job_says_what_it_waits_for_and_when_it_resumes(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.vanish(1)
        scene.show(2, PENDING, message="no node with 8 GPUs")
        status = scene.job.status()
        assert "1 of at least 2 workers run" in status.shortage
        assert "no node with 8 GPUs" in status.shortage
        assert "gives up after 900 s" in status.shortage
        scene.run(2)
        assert scene.job.status().shortage == ""
        assert "Enough workers run now." in scene.verdicts
        scene.come(2).rejoin_nodes(0, 2)
        assert scene.world("n0").round == 2
