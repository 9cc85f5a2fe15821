"""What people order of nodes of a platform: more or fewer, others, none for a while, all anew; and how it ends."""

from __future__ import annotations

import contextlib
import math

import pytest

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import (
    FleetSpec,
    MigrateNode,
    NodeExit,
    NodePhase,
    NodeType,
    ReplicaSpec,
    Resource,
    RestartJob,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    SizeReplicas,
    Strategy,
    SuspendJob,
)
from dlrover.protocol.messages.job import (
    ExitReason,
    FinishJob,
    Idle,
    Join,
    Leave,
    LeaveReason,
    PlatformId,
    Round,
    Run,
    Stage,
)
from tests.core.fleet.fleet_scene import FleetScene, ps_job
from tests.core.scene import failure, terms

INITIAL, PENDING, RUNNING = NodePhase.INITIAL, NodePhase.PENDING, NodePhase.RUNNING
SUCCEEDED, FAILED, DELETED = NodePhase.SUCCEEDED, NodePhase.FAILED, NodePhase.DELETED


DAY = 24 * 3600.0


def custom_job(num_workers: int) -> FleetSpec:
    """Nobody is critical. Ids: the server, the workers."""
    replicas = {
        NodeType.WORKER: ReplicaSpec(count=num_workers, critical="none"),
        NodeType.PS: ReplicaSpec(count=1),
    }
    return FleetSpec(replicas=replicas, strategy=Strategy.CUSTOM)


def allreduce_with_evaluator(max_relaunches: int = 3) -> FleetSpec:
    evaluator = ReplicaSpec(count=1, max_relaunches=max_relaunches)
    return FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=2), NodeType.EVALUATOR: evaluator})


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

    def test_workers_of_a_parameter_server_job_are_scaled_by_number_and_the_finished_count_for_growing(self) -> None:
        scene = FleetScene().begin(ps_job(num_workers=4))
        scene.run().show(5, SUCCEEDED, exit_code=0)
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=4))
        assert [scene.launches[id_].rank for id_ in scene.launched[6:]] == [3], "who finished is not started again"
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=2))
        assert scene.removed == [5, 6], "two work on, whoever finished before"
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=0))
        assert scene.removed == [5, 6, 4]
        assert 3 in scene.cloud, "the first worker is critical"

    def test_shrinking_to_as_many_as_still_work_takes_nobody_away(self) -> None:
        scene = FleetScene().begin(custom_job(num_workers=4)).run()
        scene.show(1, SUCCEEDED, exit_code=0)
        scene.show(2, SUCCEEDED, exit_code=0)
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=2))
        assert scene.removed == [1, 2], "they had ended"
        assert scene.job.end is None
        assert sorted(scene.fleet.workers.running) == [3, 4]
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=4))
        assert scene.launched == [0, 1, 2, 3, 4], "four shall be there, two of them have finished"

    def test_a_worker_that_is_being_exchanged_goes_with_the_node_that_should_take_its_place(self) -> None:
        scene = FleetScene().begin(custom_job(num_workers=3)).run()
        scene.do(MigrateNode(node=PlatformId(3), resource=Resource(cpu=9)))
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=2))
        assert sorted(scene.removed) == [3, 4]
        assert scene.fleet.workers.holders == {0: 1, 1: 2}
        assert scene.fleet.migrations == {}

    def test_a_rank_that_is_being_exchanged_is_one_that_runs(self) -> None:
        scene = FleetScene().begin(custom_job(num_workers=3)).run(0, 1, 3)
        scene.do(MigrateNode(node=PlatformId(3), resource=Resource(cpu=9)))
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=2))
        assert scene.removed == [2], "it does not run yet, and the old node of worker 2 does"

    def test_a_dismissed_worker_takes_along_whoever_was_to_take_its_place(self) -> None:
        scene = FleetScene.of(3, 1).train(0, 1, 2)
        scene.do(MigrateNode(node=PlatformId(2), resource=Resource(cpu=9)))
        scene.do(ScaleJob(min_nodes=1, max_nodes=2))
        assert scene.removed == [3]
        assert scene.fleet.workers.holders == {0: 0, 1: 1}
        scene.leave("n2", LeaveReason.DISMISSED)
        assert scene.removed == [3, 2]

    def test_the_exchange_of_a_worker_that_may_stay_goes_on(self) -> None:
        scene = FleetScene.of(3, 1).train(0, 2)
        scene.do(MigrateNode(node=PlatformId(2), resource=Resource(cpu=9)))
        scene.do(ScaleJob(min_nodes=1, max_nodes=2))
        assert scene.removed == [1], "it is not there yet"
        assert scene.fleet.migrations == {2: 3}

    def test_workers_that_were_added_are_critical_where_all_are_and_may_go_again(self) -> None:
        scene = FleetScene().begin(ps_job(num_workers=3, worker={"critical": "all", "max_relaunches": 0})).run()
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=4))
        assert [scene.node(id_).is_critical for id_ in (5, 6)] == [True, True]
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=3))
        assert scene.removed == [6], "the first ones are never scaled away, those that were added are"
        scene.run(5)
        scene.fail(5, exit_code=1)
        assert "cannot do without" in scene.end.message

    def test_what_stands_by_is_not_critical_until_the_job_grows(self) -> None:
        scene = FleetScene.of(2, 1, critical="all", standby=1).train(0, 1, 2)
        assert [scene.node(id_).is_critical for id_ in (0, 1, 2)] == [True, True, False]
        scene.do(ScaleJob(min_nodes=1, max_nodes=3))
        assert [scene.node(id_).is_critical for id_ in (0, 1, 2, 3)] == [True, True, True, False]

    def test_what_cannot_be_scaled_says_why(self) -> None:
        scene = FleetScene.of(2)
        for command in (
            ScaleReplicas(node_type=NodeType.WORKER, count=3),
            ScaleReplicas(node_type=NodeType.PS, count=3),
        ):
            with pytest.raises(Rejected) as refused:
                scene.do(command)
            assert refused.value.code == "bad-scale"


class TestSizes:
    def test_nodes_that_are_added_have_the_new_size_and_those_that_are_there_keep_theirs(self) -> None:
        small = Resource(cpu=2, memory_mb=4096)
        scene = FleetScene().begin(ps_job(worker={"resource": small}, resource=small)).run()
        newest = max(scene.launches)
        scene.do(SizeReplicas(node_type=NodeType.WORKER, resource=Resource(cpu=6)))
        assert max(scene.launches) == newest, "it launches and removes nothing"
        scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=2))
        added = scene.launches[newest + 1]
        assert added.resource == Resource(cpu=6, memory_mb=4096), "a part that is not given stays"
        scene.vanish(newest, exit_reason=NodeExit.KILLED)
        assert scene.launches[newest + 2].rank == scene.launches[newest].rank
        assert scene.launches[newest + 2].resource == small, "who takes the place of a node has its size"
        scene.do(ScaleReplicas(node_type=NodeType.PS, count=3))
        assert scene.launches[newest + 3].resource == small, "other types keep theirs"

    @pytest.mark.parametrize(
        ("node_type", "resource", "said"),
        [
            (NodeType.EVALUATOR, Resource(cpu=1), "no nodes of type evaluator"),
            (NodeType.WORKER, Resource(cpu=-1), "resources must be at least 0"),
            (NodeType.WORKER, Resource(cpu=math.nan), "give a finite number"),
            (NodeType.WORKER, Resource(cpu=5), "10 cores, and the job's limit is 8"),
        ],
    )
    def test_a_size_that_no_node_can_have_is_refused(self, node_type: NodeType, resource: Resource, said: str) -> None:
        spec = FleetSpec(
            replicas={NodeType.WORKER: ReplicaSpec(count=2, resource=Resource(cpu=2))}, limits=Resource(cpu=8)
        )
        scene = FleetScene(terms(2, 2)).begin(spec).train(0, 1)
        with pytest.raises(Rejected, match=said) as refused:
            scene.do(SizeReplicas(node_type=node_type, resource=resource))
        assert refused.value.code == "bad-scale"
        assert scene.fleet.replicas[NodeType.WORKER].spec.resource == Resource(cpu=2)


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

    def test_an_exchange_is_no_failure_also_if_the_new_agent_is_quicker_than_the_platform(self) -> None:
        scene = FleetScene.of(2, max_relaunches=1).train(0, 1)
        for old, new in ((1, 2), (2, 3), (3, 4)):
            scene.do(MigrateNode(node=PlatformId(old), resource=Resource(cpu=8)))
            scene.come(new)
            assert (scene.job.end, scene.fleet.failures) == (None, [])
            assert old in scene.removed
            scene.rejoin_nodes(0, new)
            assert scene.members() == [0, 1]
        assert (scene.spent(1), scene.fleet.workers.evictions) == (0, {})

    def test_a_worker_that_succeeds_needs_nobody_in_its_place(self) -> None:
        scene = FleetScene().begin(custom_job(num_workers=2)).run()
        scene.do(MigrateNode(node=PlatformId(2), resource=Resource(cpu=8)))
        scene.show(1, SUCCEEDED, exit_code=0)
        assert scene.job.end is None
        scene.show(2, SUCCEEDED, exit_code=0)
        assert 3 in scene.removed
        assert scene.end.reason is ExitReason.COMPLETED

    def test_nor_does_one_whose_agent_says_that_it_has_finished(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=8)))
        scene.finish("n1")
        assert scene.removed == [2]
        assert scene.fleet.workers.holders == {0: 0, 1: 1}
        scene.finish("n0")
        assert scene.end.reason is ExitReason.COMPLETED

    def test_less_than_nothing_cannot_be_given(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        with pytest.raises(Rejected, match="resources must be at least 0"):
            scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=-1)))

    @pytest.mark.parametrize("resource", [Resource(cpu=math.inf), Resource(cpu=math.nan), Resource(memory_mb=2**60)])
    def test_numbers_that_are_none_cannot_be_given(self, resource: Resource) -> None:
        scene = FleetScene().begin(ps_job()).run()
        with pytest.raises(Rejected, match="give a") as refused:
            scene.do(MigrateNode(node=PlatformId(0), resource=resource))
        assert refused.value.code == "bad-migration"

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

    def test_nor_is_it_for_a_round_whose_nodes_run_and_do_not_join(self) -> None:
        scene = FleetScene.of(2, limits={"join_timeout": 120.0}).run(0, 1)
        scene.come(0)
        scene.at(100).do(SuspendJob())
        scene.tick(100_000)
        assert scene.job.end is None
        scene.do(ResumeJob())
        scene.tick(100_119)
        assert scene.job.end is None
        scene.tick(100_121)
        assert scene.end.reason is ExitReason.RENDEZVOUS_TIMEOUT

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


class TestRelease:
    """A suspension that lets the running nodes save and go."""

    def test_all_nodes_save_and_leave_and_a_resumed_job_gets_new_ones(self) -> None:
        scene = FleetScene.of(3, 2).train(0, 1, 2)
        scene.do(SuspendJob(reason="quota", is_releasing=True))
        assert scene.job.stage is Stage.SUSPENDED
        for name in ("n0", "n1", "n2"):
            wish = scene.wish(name)
            assert isinstance(wish, Leave), f"{name} shall {wish}"
            assert wish.is_pause, "its workers have their time to end, and what they hold is saved"
            assert wish.exit_code == 0
        assert scene.removed == [], "a node is removed when its agent has left"
        for name in ("n0", "n1", "n2"):
            scene.leave(name, LeaveReason.DISMISSED)
        assert (scene.removed, scene.launched) == ([0, 1, 2], [0, 1, 2])
        assert scene.job.end is None
        scene.tick(100_000)
        assert scene.job.end is None, "time in suspension is no waiting time"
        scene.do(ResumeJob())
        assert scene.launched == [0, 1, 2, 3, 4, 5]
        assert [scene.launches[id_].rank for id_ in (3, 4, 5)] == [0, 1, 2]
        scene.train(3, 4, 5)
        assert scene.world("n4").group_world_size == 3
        assert scene.job.stage is Stage.RUNNING
        workers = scene.fleet.workers
        assert not workers.spent, "a suspension uses no budget up"
        assert not workers.evictions

    def test_nodes_without_an_agent_are_removed_by_the_platform(self) -> None:
        scene = FleetScene.of(2, 1).train(0)
        scene.do(SuspendJob(is_releasing=True))
        assert scene.removed == [1]
        scene.leave("n0", LeaveReason.DISMISSED)
        assert scene.removed == [1, 0]
        scene.do(ResumeJob())
        assert scene.launched == [0, 1, 2, 3]

    def test_a_node_that_crashes_on_its_way_out_is_not_replaced(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.do(SuspendJob(is_releasing=True))
        scene.show(0, FAILED, exit_code=1)
        scene.vanish(1)
        assert scene.launched == [0, 1]
        assert scene.job.end is None

    def test_a_plain_suspension_can_release_later_and_a_new_master_keeps_it(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.do(SuspendJob())
        scene.do(SuspendJob(is_releasing=True))
        with pytest.raises(Rejected, match="suspended already"):
            scene.do(SuspendJob(is_releasing=True))
        for name in ("n0", "n1"):
            scene.leave(name, LeaveReason.DISMISSED)
        scene.restart_master().list()
        assert scene.launched == [0, 1]
        assert scene.fleet.is_released
        scene.do(ResumeJob())
        assert scene.launched == [0, 1, 2, 3]

    def test_a_released_job_can_be_scaled_and_stopped(self) -> None:
        scene = FleetScene.of(2, 1).train(0, 1)
        scene.do(SuspendJob(is_releasing=True))
        for name in ("n0", "n1"):
            scene.leave(name, LeaveReason.DISMISSED)
        scene.do(ScaleJob(min_nodes=1, max_nodes=3))
        assert scene.launched == [0, 1]
        scene.do(ResumeJob())
        assert scene.launched == [0, 1, 2, 3, 4]
        scene.do(SuspendJob(is_releasing=True))
        scene.stop()
        assert scene.end.reason is ExitReason.STOPPED_BY_USER
        assert sorted(scene.removed) == [0, 1, 2, 3, 4]

    def test_a_node_that_is_being_exchanged_goes_with_its_successor(self) -> None:
        scene = FleetScene.of(2, 1).train(0, 1)
        scene.do(MigrateNode(node=PlatformId(1), resource=Resource(cpu=2.0)))
        scene.do(SuspendJob(is_releasing=True))
        assert scene.removed == [2]
        assert scene.fleet.migrations == {}

    def test_what_cannot_go_on_later_with_other_nodes_is_refused(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.finish("n0")
        with pytest.raises(Rejected, match="have finished"):
            scene.do(SuspendJob(is_releasing=True))
        assert scene.job.stage is Stage.RUNNING
        servers = FleetScene(terms(1, 2)).begin(ps_job())
        with pytest.raises(Rejected, match="form one world"):
            servers.do(SuspendJob(is_releasing=True))


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

    def test_all_agents_of_one_incident_ask_for_one_restart(self) -> None:
        scene = FleetScene.of(4).train(0, 1, 2, 3)
        for node in range(4):
            with contextlib.suppress(Rejected):  # by then it was let go
                scene.fail(f"n{node}", failure(at=node / 1000), round_=1)
            scene.send(f"n{node}", RestartJob(reason="all anew", round=Round(1)))
        assert scene.fleet.num_restarts == 1
        assert scene.job.end is None
        assert scene.launched == list(range(8))
        scene.train(4, 5, 6, 7)
        scene.send("n4", RestartJob(round=Round(1)))
        assert scene.fleet.num_restarts == 1, "it is about a world that is over"
        scene.send("n4", RestartJob(round=Round(2)))
        assert scene.fleet.num_restarts == 2

    def test_one_restart_answers_all_agents_also_if_all_reports_come_first(self) -> None:
        scene = FleetScene.of(4).train(0, 1, 2, 3)
        for node in range(4):
            scene.fail(f"n{node}", failure(at=node / 1000), round_=1)
        for node in range(4):
            scene.send(f"n{node}", RestartJob(round=Round(1)))
        assert scene.fleet.num_restarts == 1
        assert scene.job.end is None

    def test_of_a_long_reason_only_the_beginning_is_kept(self) -> None:
        scene = FleetScene.of(1)
        size = len(scene.job.encode())
        scene.do(SuspendJob(reason="x" * 1_000_000))
        scene.do(ResumeJob())
        for _ in range(4):
            scene.do(RestartJob(reason="x" * 1_000_000))
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT
        assert len(scene.job.encode()) < size + 20_000

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

    def test_an_all_reduce_job_ends_when_its_evaluator_has_done_its_work_too(self) -> None:
        scene = FleetScene(terms(2)).begin(allreduce_with_evaluator()).train(0, 1).run(2)
        scene.finish("n0")
        scene.finish("n1")
        assert scene.job.end is None
        assert isinstance(scene.wish("n0"), Idle)
        scene.show(0, SUCCEEDED, exit_code=0)
        scene.show(1, SUCCEEDED, exit_code=0)
        assert scene.removed == [0, 1]
        scene.tick(10 * DAY)
        assert scene.job.end is None
        scene.show(2, SUCCEEDED, exit_code=0)
        assert scene.end.reason is ExitReason.COMPLETED
        assert scene.removed == [0, 1, 2]

    def test_nor_does_it_end_with_its_evaluator_while_the_world_still_trains(self) -> None:
        scene = FleetScene(terms(2)).begin(allreduce_with_evaluator()).train(0, 1).run(2)
        scene.show(2, SUCCEEDED, exit_code=0)
        assert scene.job.end is None
        assert isinstance(scene.wish("n0"), Run)
        scene.finish("n0")
        scene.finish("n1")
        assert scene.end.reason is ExitReason.COMPLETED

    def test_an_evaluator_that_cannot_be_replaced_fails_the_job_that_waits_for_it(self) -> None:
        scene = FleetScene(terms(2)).begin(allreduce_with_evaluator(max_relaunches=0)).train(0, 1).run(2)
        scene.finish("n0")
        scene.finish("n1")
        scene.fail(2, exit_code=1)
        assert scene.end.reason is ExitReason.EVALUATOR_ERROR

    def test_an_all_reduce_job_does_not_wait_for_a_worker_that_has_nothing_to_do_any_more(self) -> None:
        """However critical: the world that did the work has ended well without it."""
        scene = FleetScene.of(2, 1, critical="all", limits={"last_call": 0.0, "first_call": 0.0}).train(0)
        scene.finish("n0")
        assert scene.end.reason is ExitReason.COMPLETED

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
