"""When waiting for nodes cannot help any more: five rules, their deadlines, and what is tried before."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.core.fleet.early_stop import shortage_ends_at
from dlrover.protocol.messages.fleet import (
    FleetSpec,
    MigrateNode,
    NodeExit,
    NodePhase,
    NodeType,
    PsReady,
    ReplicaSpec,
    Resource,
    ScaleJob,
    Strategy,
)
from dlrover.protocol.messages.job import ExitReason, LeaveReason, PlatformId, RestartPolicy, Stage
from tests.core.fleet.fleet_scene import FleetScene, ps_job, workers
from tests.core.scene import terms

PENDING, RUNNING, SUCCEEDED = NodePhase.PENDING, NodePhase.RUNNING, NodePhase.SUCCEEDED
MINUTE = 60.0
DAY = 24 * 3600.0


class TestNodeCheck:
    def test_a_job_whose_first_workers_all_failed_the_check_ends(self) -> None:
        scene = FleetScene.of(4, 1, failure_window=0).run()
        for node in range(3):
            scene.at(node).fail(node, exit_reason=NodeExit.CHECK_FAILED)
        assert scene.job.end is None
        scene.at(3).fail(4, exit_reason=NodeExit.CHECK_FAILED)
        assert scene.job.end is None, "a replacement says nothing about the first node of worker 3"
        scene.at(4).fail(3, exit_reason=NodeExit.CHECK_FAILED)
        assert scene.end.reason is ExitReason.NODE_CHECK_FAILED
        assert scene.end.exit_code == 1

    def test_failed_checks_of_months_do_not_add_up_in_a_job_that_trains(self) -> None:
        scene = FleetScene.of(4).train(0, 1, 2, 3)
        nodes = [0, 1, 2, 3]
        for rank in range(4):
            scene.at((rank + 1) * 20 * DAY).fail(rank, exit_reason=NodeExit.CHECK_FAILED)
            assert scene.job.end is None
            nodes[rank] = scene.launched[-1]
            scene.train(nodes[rank])
            scene.rejoin_nodes(*(node for node in nodes if node != nodes[rank]))
            assert scene.members() == [0, 1, 2, 3]
        assert scene.job.stage is Stage.RUNNING

    def test_a_world_of_the_others_does_not_acquit_those_who_failed(self) -> None:
        scene = FleetScene.of(4, 1, failure_window=0).run()
        for node in range(3):
            scene.fail(node, exit_reason=NodeExit.CHECK_FAILED)
        scene.come(3).join("n3")
        scene.tick(4000)
        assert scene.members() == [3]
        scene.fail(3, exit_reason=NodeExit.CHECK_FAILED)
        assert scene.end.reason is ExitReason.NODE_CHECK_FAILED

    def test_first_nodes_are_known_also_behind_those_of_other_types(self) -> None:
        replicas = {NodeType.CHIEF: ReplicaSpec(count=1), **workers(4)}
        scene = FleetScene(terms(1, 4)).begin(FleetSpec(replicas=replicas, standby=1, failure_window=0)).run()
        for node in (5, 1, 2, 3):
            scene.fail(node, exit_reason=NodeExit.CHECK_FAILED)
        assert scene.job.end is None, "5 is a standby's"
        scene.fail(4, exit_reason=NodeExit.CHECK_FAILED)
        assert scene.end.reason is ExitReason.NODE_CHECK_FAILED

    def test_three_workers_may_fail_it_by_chance(self) -> None:
        scene = FleetScene.of(3, 1).run()
        for node in range(3):
            scene.fail(node, exit_reason=NodeExit.CHECK_FAILED)
        assert scene.job.end is None


class TestPendingWorkers:
    def begin(
        self, num_running: int, num_workers: int, min_nodes: int, *, is_known: bool = True, **spec: float
    ) -> FleetScene:
        """Some run; whether the requirement is known depends on whether one of them has attached."""
        scene = FleetScene.of(num_workers, min_nodes, **spec)
        for node in range(num_running, num_workers):
            scene.show(node, PENDING)
        if num_running:
            scene.run(*range(num_running))
        if is_known:
            scene.come(0)
        return scene

    def test_below_the_minimum_for_too_long_ends_the_job(self) -> None:
        scene = self.begin(3, 4, 4)
        scene.tick(1 * MINUTE)
        assert scene.job.end is None
        scene.tick(20 * MINUTE)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT
        assert "worker 3" in scene.end.message.lower()
        assert scene.end.exit_code == 1

    def test_enough_without_the_one_that_waits_goes_on(self) -> None:
        scene = self.begin(4, 5, 4)
        scene.tick(DAY)
        assert scene.job.end is None or scene.end.reason is not ExitReason.PENDING_TIMEOUT

    def test_all_pending_ends_the_job_although_the_requirement_is_unknown(self) -> None:
        scene = self.begin(0, 2, 2, is_known=False)
        scene.tick(20 * MINUTE)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_one_of_two_pending_with_an_unknown_requirement_goes_on(self) -> None:
        scene = self.begin(1, 2, 2, is_known=False)
        scene.tick(DAY)
        assert scene.job.end is None

    @pytest.mark.parametrize("spec", [{"pending_strategy": 0}, {"pending_strategy": -1}, {"pending_timeout": 0.0}])
    def test_nobody_is_judged_where_the_user_says_so(self, spec: dict[str, float]) -> None:
        scene = self.begin(0, 2, 2, is_known=False, **spec)
        scene.tick(DAY)
        assert scene.job.end is None

    def test_a_timeout_below_ten_minutes_counts_as_ten(self) -> None:
        scene = self.begin(0, 2, 2, is_known=False, pending_timeout=10.0)
        scene.tick(599)
        assert scene.job.end is None
        scene.tick(600)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_the_join_timeout_does_not_run_while_the_platform_brings_nodes(self) -> None:
        scene = self.begin(1, 2, 2)
        scene.join("n0")
        scene.tick(700)
        assert scene.job.end is None
        scene.tick(901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_a_node_that_runs_and_never_joins_is_the_matter_of_the_join_timeout(self) -> None:
        scene = self.begin(2, 2, 2)
        scene.join("n0")
        scene.tick(601)
        assert scene.end.reason is ExitReason.RENDEZVOUS_TIMEOUT

    def test_the_job_resumes_by_itself_when_the_node_comes(self) -> None:
        scene = self.begin(1, 2, 2)
        scene.join("n0")
        scene.at(800).train(1)
        assert scene.job.stage is Stage.RUNNING
        scene.tick(DAY)
        assert scene.job.end is None

    def test_waiting_goes_on_through_a_master_restart_but_is_judged_only_by_what_is_there(self) -> None:
        scene = self.begin(0, 2, 2, is_known=False)
        scene.at(DAY).restart_master()
        assert scene.job.due(scene.now) == []
        scene.cloud[0] = replace(scene.cloud[0], phase=RUNNING)
        scene.list()
        assert scene.job.end is None

    def test_a_message_of_the_platform_is_part_of_the_reason(self) -> None:
        scene = self.begin(0, 1, 1, is_known=False)
        scene.show(0, PENDING, message="insufficient nvidia.com/gpu")
        scene.tick(901)
        assert "insufficient nvidia.com/gpu" in scene.end.message


class TestPendingServers:
    def test_a_server_that_waits_for_more_memory_for_too_long_ends_the_job(self) -> None:
        """Also where nobody else is judged."""
        spec = ps_job(resource=Resource(cpu=2, memory_mb=4096))
        scene = FleetScene().begin(FleetSpec(replicas=spec.replicas, strategy=Strategy.PS, pending_strategy=0)).run()
        scene.fail(0, exit_reason=NodeExit.OOM)
        assert scene.launches[4].resource.memory_mb == 8192
        scene.show(4, PENDING)
        scene.tick(DAY)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT
        assert scene.end.exit_code == 1

    @pytest.mark.parametrize("phase", [NodePhase.INITIAL, PENDING])
    def test_any_server_that_never_comes_ends_the_job(self, phase: NodePhase) -> None:
        scene = FleetScene().begin(ps_job()).run(0, 2, 3)
        if phase is PENDING:
            scene.show(1, PENDING)
        scene.tick(601)
        assert scene.job.end is None
        scene.tick(901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_the_first_worker_must_come_and_the_others_need_not(self) -> None:
        scene = FleetScene().begin(ps_job(num_workers=3)).run(0, 1, 2)
        scene.show(3, PENDING)
        scene.tick(DAY)
        assert scene.job.end is None, "the chief runs"
        scene = FleetScene().begin(ps_job(num_workers=3)).run(0, 1, 3)
        scene.show(2, PENDING)
        scene.tick(DAY)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_the_chief_must_come_also_where_all_workers_are_judged(self) -> None:
        spec = replace(ps_job(num_workers=3), pending_strategy=2)
        scene = FleetScene().begin(spec).run(0, 1, 3, 4)
        scene.show(2, PENDING)
        scene.tick(899)
        assert scene.job.end is None
        scene.tick(901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT
        assert "chief 0" in scene.end.message.lower()

    def test_a_chief_without_other_workers_is_waited_for_no_longer(self) -> None:
        scene = FleetScene().begin(ps_job(num_workers=1)).run(0, 1)
        scene.show(2, PENDING)
        scene.tick(901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_nobody_waits_for_a_node_that_another_one_stands_in_for(self) -> None:
        scene = FleetScene().begin(ps_job(resource=Resource(cpu=16, memory_mb=2048))).run()
        scene.do(MigrateNode(node=PlatformId(0), resource=Resource(cpu=32)))
        scene.show(4, PENDING)
        scene.tick(DAY)
        assert scene.job.end is None
        assert scene.launched == [0, 1, 2, 3, 4], "nor is it made smaller"


class TestPendingEvaluator:
    def begin(self, strategy: Strategy, **spec: float) -> FleetScene:
        """Everybody works but the evaluator, which waits for its resources. Ids of a parameter-server job: 0 to 3."""
        replicas = {NodeType.WORKER: ReplicaSpec(count=2), NodeType.EVALUATOR: ReplicaSpec(count=1)}
        if strategy is Strategy.PS:
            replicas[NodeType.PS] = ReplicaSpec(count=1)
        scene = FleetScene(terms(2)).begin(FleetSpec(replicas=replicas, strategy=strategy, **spec))
        if strategy is Strategy.PS:
            scene.run(0, 1, 2)
        else:
            scene.train(0, 1)
        scene.show(max(scene.cloud), PENDING)
        return scene

    @pytest.mark.parametrize("strategy", [1, 2])
    def test_nobody_waits_for_it_while_others_work_and_not_for_ever_afterwards(self, strategy: int) -> None:
        scene = self.begin(Strategy.PS, pending_strategy=strategy)
        scene.tick(DAY)
        assert scene.job.end is None
        scene.show(1, SUCCEEDED, exit_code=0)
        scene.show(2, SUCCEEDED, exit_code=0)
        assert scene.job.end is None, "the room that they leave may be what it waited for"
        scene.tick(DAY + 899)
        assert scene.job.end is None
        scene.tick(DAY + 901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT
        assert "evaluator 0" in scene.end.message.lower()
        assert 0 in scene.removed, "the server is not held for nothing"

    def test_in_an_all_reduce_job_it_is_the_same(self) -> None:
        scene = self.begin(Strategy.ALLREDUCE)
        scene.tick(DAY)
        scene.finish("n0")
        scene.finish("n1")
        scene.tick(DAY + 899)
        assert scene.job.end is None
        scene.tick(DAY + 901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_somebody_who_comes_back_to_work_gives_it_time_again(self) -> None:
        scene = self.begin(Strategy.PS)
        scene.show(1, SUCCEEDED, exit_code=0)
        scene.vanish(2)
        scene.tick(600)
        scene.run(scene.launched[-1])
        scene.tick(DAY)
        assert scene.job.end is None
        scene.show(scene.launched[-1], SUCCEEDED, exit_code=0)
        scene.tick(DAY + 899)
        assert scene.job.end is None
        scene.run(3).show(3, SUCCEEDED, exit_code=0)
        assert scene.end.reason is ExitReason.COMPLETED

    def test_it_is_waited_for_as_long_as_the_user_wants(self) -> None:
        scene = self.begin(Strategy.PS, pending_strategy=0)
        scene.show(1, SUCCEEDED, exit_code=0)
        scene.show(2, SUCCEEDED, exit_code=0)
        scene.tick(10 * DAY)
        assert scene.job.end is None


class TestSmallerNodes:
    def waiting(self, resource: Resource) -> FleetScene:
        """Nobody described what servers need. Servers 4 and 5 were given this since, evicted, and 6 and 7 wait."""
        scene = FleetScene().begin(ps_job()).run()
        for server in (0, 1):
            scene.do(MigrateNode(node=PlatformId(server), resource=resource))
        scene.run(4, 5)
        scene.do(PsReady())
        for server in (4, 5):
            scene.vanish(server)
        for server in (6, 7):
            scene.show(server, PENDING)
        return scene

    def test_servers_that_wait_for_a_day_ask_for_half(self) -> None:
        scene = self.waiting(Resource(cpu=16, memory_mb=2048))
        scene.tick(901)
        assert scene.job.end is None
        assert scene.removed == [0, 1, 6, 7]
        assert [scene.launches[id_].resource for id_ in (8, 9)] == [Resource(cpu=8, memory_mb=2048)] * 2
        assert [scene.launches[id_].service_address for id_ in (8, 9)] == ["a-job-ps-4", "a-job-ps-5"]

    def test_what_the_user_described_is_asked_for_to_the_end(self) -> None:
        scene = FleetScene().begin(ps_job(resource=Resource(cpu=16, memory_mb=16384))).run(1, 2, 3)
        scene.show(0, PENDING)
        scene.tick(899)
        assert scene.job.end is None
        scene.tick(901)
        assert scene.launched == [0, 1, 2, 3]
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_what_cannot_be_smaller_keeps_its_place_and_ends_the_job_in_time(self) -> None:
        scene = self.waiting(Resource(cpu=16, memory_mb=2048))
        scene.run(7)
        scene.tick(901)
        scene.show(8, PENDING)
        scene.tick(901 + 899)
        assert scene.launched[-1] == 8, "8 cores are not halved"
        assert scene.job.end is None
        scene.tick(901 + 901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_more_memory_after_a_lack_of_it_is_not_given_back(self) -> None:
        scene = FleetScene().begin(ps_job(resource=Resource(cpu=16, memory_mb=32768))).run()
        scene.fail(0, exit_reason=NodeExit.OOM)
        scene.show(4, PENDING)
        scene.tick(901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT


class TestShortage:
    def test_too_few_workers_for_too_long_end_the_job(self) -> None:
        """They were given up before anybody had said how many are needed."""
        scene = FleetScene.of(4, max_relaunches=0).run()
        scene.fail(3, exit_code=1)
        scene.at(10).come(0)
        assert scene.fleet.short_since is not None
        scene.join("n0")
        scene.tick(10 + 599)
        assert scene.job.end is None
        scene.tick(10 + 901)
        assert scene.job.end is not None

    def test_the_patience_follows_the_join_timeout_within_limits(self) -> None:
        for join_timeout, patience in ((10.0, 600.0), (1000.0, 1500.0), (1e6, 3600.0)):
            scene = FleetScene.of(4, max_relaunches=0, limits={"join_timeout": join_timeout}).run()
            scene.fail(3, exit_code=1)
            scene.come(0, 1, 2)
            assert shortage_ends_at(scene.job.state) == patience * 1e6

    def test_those_whose_work_is_done_are_not_missing(self) -> None:
        scene = FleetScene.of(4).train(0, 1, 2, 3)
        scene.finish("n0")
        scene.leave("n0", LeaveReason.PREEMPTED)
        scene.vanish(0)
        assert scene.fleet.short_since is None
        scene.tick(DAY)
        assert scene.job.end is None

    def test_the_clock_stops_when_enough_are_alive_again(self) -> None:
        scene = FleetScene.of(4, max_relaunches=0).run()
        scene.fail(3, exit_code=1)
        scene.come(0)
        assert scene.fleet.short_since is not None
        scene.do(ScaleJob(min_nodes=3, max_nodes=4))
        assert scene.fleet.short_since is None


class TestLastMinutes:
    """Some have finished, others were lost: who has finished is none of the next world."""

    def test_finished_workers_do_not_stand_in_for_those_that_never_come(self) -> None:
        scene = FleetScene.of(3, 2).train(0, 1, 2)
        scene.finish("n0")
        scene.vanish(1)
        scene.vanish(2)
        assert scene.job.end is None, "the two that are launched can be a world"
        assert "0 of at least 2 workers run" in scene.job.status().shortage
        scene.tick(899)
        assert scene.job.end is None
        scene.tick(901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_nor_do_those_whose_nodes_have_gone(self) -> None:
        scene = FleetScene.of(3, 1).train(0, 1, 2)
        for node in (0, 1):
            scene.finish(f"n{node}")
            scene.show(node, SUCCEEDED, exit_code=0)
        scene.vanish(2)
        assert "waits for 1 that the platform has to bring" in scene.job.status().shortage
        scene.tick(901)
        assert scene.end.reason is ExitReason.PENDING_TIMEOUT

    def test_nodes_that_the_platform_brings_have_longer_than_the_join_timeout(self) -> None:
        scene = FleetScene.of(4, 2, limits={"join_timeout": 60.0}).train(0, 1, 2, 3)
        scene.finish("n0")
        scene.finish("n1")
        scene.vanish(2)
        scene.vanish(3)
        scene.tick(500)
        assert scene.job.end is None
        scene.train(4, 5)
        assert scene.members() == [2, 3]

    def test_a_failure_is_judged_also_where_the_others_have_yet_to_be_brought(self) -> None:
        policy = RestartPolicy(max_restarts=0)
        scene = FleetScene(terms(2, 4, policy)).begin(FleetSpec(replicas=workers(4, max_relaunches=0)))
        scene.train(0, 1, 2).tick(100)
        assert scene.members() == [0, 1, 2]
        scene.finish("n0")
        scene.finish("n1")
        scene.fail("n2")
        assert scene.end.reason is ExitReason.WORKER_ERROR
        assert "No restarts are allowed" in scene.end.message

    def test_nobody_is_missed_while_the_others_train_on(self) -> None:
        scene = FleetScene.of(4, 3).train(0, 1, 2)
        scene.tick(100)
        assert scene.members() == [0, 1, 2]
        scene.finish("n0")
        scene.tick(DAY)
        assert scene.job.end is None
        assert scene.job.status().shortage == ""


class TestGroups:
    def begin(self) -> FleetScene:
        """Two racks of two; a node of the second is lost, and its replacement waits."""
        scene = FleetScene(terms(2, 4))
        scene.begin(FleetSpec(replicas=workers(4), group_affinity={0: 2, 1: 2})).train(0, 1, 2, 3)
        scene.vanish(3)
        scene.show(4, PENDING)
        return scene

    def test_a_group_without_room_moves_as_a_whole_once(self) -> None:
        scene = self.begin()
        scene.tick(299)
        assert scene.launched == [0, 1, 2, 3, 4]
        scene.tick(300)
        assert scene.launched == [0, 1, 2, 3, 4, 5, 6]
        assert [(scene.launches[id_].rank, scene.launches[id_].group) for id_ in (5, 6)] == [(2, 1001), (3, 1001)]
        assert scene.removed == [2, 4]
        assert sum(scene.fleet.workers.spent.values()) == 0
        assert scene.node(0).is_live, "the other group is left alone"
        scene.show(5, PENDING)
        scene.show(6, PENDING)
        scene.tick(700)
        assert scene.launches[scene.launched[-1]].group in (1001, 1002)

    def test_each_group_has_its_own_waiting_nodes(self) -> None:
        scene = self.begin()
        scene.vanish(0)
        scene.show(5, PENDING)
        scene.tick(299)
        scene.run(4)
        scene.tick(300)
        assert {scene.launches[id_].rank for id_ in scene.launched[6:]} == {0, 1}, (
            "only the group of the one that waits"
        )

    def test_first_launches_and_jobs_without_groups_never_move(self) -> None:
        scene = FleetScene(terms(2, 4))
        scene.begin(FleetSpec(replicas=workers(4), group_affinity={0: 2, 1: 2})).train(0, 1, 2)
        scene.show(3, PENDING)
        scene.tick(DAY)
        assert scene.launched == [0, 1, 2, 3]
        scene = FleetScene.of(2, 1).train(0, 1)
        scene.vanish(1)
        scene.show(2, PENDING)
        scene.tick(DAY)
        assert scene.launched == [0, 1, 2]

    def test_the_number_of_moves_is_limited(self) -> None:
        scene = FleetScene(terms(1, 2))
        scene.begin(FleetSpec(replicas=workers(2), group_affinity={0: 1, 1: 1}, max_group_relaunches=1)).train(0, 1)
        scene.vanish(1)
        scene.show(2, PENDING)
        scene.tick(301)
        assert scene.launched == [0, 1, 2, 3]
        scene.show(3, PENDING)
        scene.tick(900)
        assert scene.launched == [0, 1, 2, 3]
