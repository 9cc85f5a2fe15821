"""Nodes of a platform: wanted, shown, and paid for when they are lost."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    FleetSpec,
    LaunchRefused,
    NodeChanged,
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    Resource,
    RestartJob,
    ScaleJob,
    ScaleReplicas,
    Strategy,
    SuspendJob,
)
from dlrover.protocol.messages.job import (
    ExitReason,
    PlatformId,
)
from tests.core.fleet.fleet_scene import FleetScene, ps_job, workers
from tests.core.scene import terms

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
        scene = FleetScene.of(5, priority="0.6")
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
            (FleetSpec(replicas=workers(2, resource=Resource(cpu=-1))), "resources must be at least 0"),
            (FleetSpec(replicas=workers(2), strategy=Strategy.PS), "ps"),
            (FleetSpec(replicas=workers(2), strategy=Strategy.CUSTOM), "ps"),
            (FleetSpec(replicas=workers(2), group_affinity={0: 3}), "places 3 workers"),
            (FleetSpec(replicas=workers(2), group_affinity={-1: 2}), "group_affinity"),
            (FleetSpec(replicas=workers(2), standby=-1), "standby"),
            (FleetSpec(replicas=workers(2, resource=Resource(cpu=math.inf))), "worker.resource.cpu inf"),
            (FleetSpec(replicas=workers(2, resource=Resource(cpu=math.nan))), "worker.resource.cpu nan"),
            (FleetSpec(replicas=workers(2, resource=Resource(memory_mb=2**60))), "worker.resource.memory_mb"),
            (FleetSpec(replicas=workers(2, max_relaunches=2**60)), "max_relaunches"),
            (FleetSpec(replicas=workers(2, critical=f"{10**22}:1")), "ranks and relaunches from 0"),
            (FleetSpec(replicas=workers(2, critical=f"0:1,{'9' * 5000}:1")), "ranks and relaunches from 0"),
            (FleetSpec(replicas=workers(2), failure_window=math.nan), "failure_window nan"),
            (FleetSpec(replicas=workers(2), failure_window=-1e308), "failure_window -1e[+]308"),
            (FleetSpec(replicas=workers(2), pending_timeout=math.inf), "pending_timeout inf"),
            (FleetSpec(replicas=workers(2), group_pending_timeout=math.nan), "group_pending_timeout nan"),
            (FleetSpec(replicas=workers(2), max_job_restarts=2**60), "max_job_restarts"),
            (FleetSpec(replicas=workers(2), group_affinity={2**60: 2}), "group_affinity"),
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

    def test_each_launch_tells_how_many_nodes_its_rank_had(self) -> None:
        scene = FleetScene.of(2).train(0, 1)
        scene.vanish(0)
        assert (scene.launches[2].num_former, scene.launches[2].relaunch_count) == (1, 0)
        scene.run().fail(2, exit_reason=NodeExit.HARDWARE)
        assert (scene.launches[3].num_former, scene.launches[3].relaunch_count) == (2, 1)

    def test_a_worker_that_lacked_memory_is_tried_again_as_it_was_until_its_budget_is_used_up(self) -> None:
        scene = FleetScene.of(2, resource=Resource(memory_mb=655), max_relaunches=1)
        scene.train(0, 1).fail(0, exit_reason=NodeExit.OOM)
        assert scene.launches[2].resource.memory_mb == 655
        assert (scene.launches[2].rank, scene.launches[2].relaunch_count) == (0, 1)
        scene.run().fail(2, exit_reason=NodeExit.OOM)
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
