"""Numbers and sizes of servers and workers: the rules in the running core, the search, first sizes, and what a slow start forbids."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover.core.scaling import facts
from dlrover.core.scaling.brakes import SERVERS
from dlrover.core.scaling.fit.model import Fit
from dlrover.core.scaling.servers import search
from dlrover.core.scaling.servers.search import ServerOption
from dlrover.protocol.messages.fleet import (
    FleetSpec,
    NodeExit,
    NodePhase,
    NodeType,
    PsReady,
    ReplicaSpec,
    Resource,
    ScaleReplicas,
    Strategy,
)
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.messages.scaling import (
    Brake,
    DefineScaling,
    JobFacts,
    MemoryPoint,
    Optimizer,
    PlannedGroup,
    PlanOffered,
    ScaleMode,
    ScaleTerms,
    SizePlan,
)
from tests.core.fleet.fleet_scene import FleetScene
from tests.core.scaling.test_servers import SIZE, ServerScene, server
from tests.core.scene import micros, terms


def target(scene: FleetScene, kind: NodeType) -> int:
    return scene.fleet.replicas[kind].target


def test_8_2_the_servers_of_the_most_workers_that_the_limits_allow() -> None:
    scene = ServerScene.begun(num_ps=1, num_workers=2, limits=Resource(cpu=96), optimizer=Optimizer.RULES)
    scene.measure(server(0, 4.0), at=300)
    assert target(scene, NodeType.PS) > 1
    assert "the most workers that the limits allow" in scene.scaling.decisions[-1].sentence


def test_more_servers_by_the_rules_are_taken_back_if_they_bring_less_than_their_share() -> None:
    outcomes = {}
    for step_time in (0.3, 0.98):
        scene = ServerScene.begun(num_ps=1, num_workers=2, limits=Resource(cpu=96))
        scene.measure(server(0, 4.0), at=300)
        more = target(scene, NodeType.PS)
        assert more > 1
        scene.run()
        scene.do(PsReady())
        ids = [node.id for node in scene.fleet.live_nodes(NodeType.PS)]
        scene.measure(*(server(id_, 4.0) for id_ in ids), at=500, step_time=step_time)
        outcomes[step_time] = target(scene, NodeType.PS) == more
    assert outcomes == {0.3: True, 0.98: False}


def test_after_three_changes_of_servers_each_further_one_waits_twice_as_long() -> None:
    waits = []
    for changes in (0, 3, 4, 6, 40):
        scene = ServerScene.begun(num_ps=1, num_workers=2, limits=Resource(cpu=96))
        scaling = scene.job.state.scaling
        scaling.num_changes, scaling.changed_kinds = {SERVERS: changes}, {SERVERS: micros(200)}
        scene.measure(server(0, 4.0), at=210)
        decided = scene.scaling.decisions[-1]
        assert decided.brake is Brake.COOL_DOWN
        assert scaling.look_at is not None
        waits.append((scaling.look_at - micros(200)) / 300e6)
    assert waits == [1, 1, 2, 8, 256]


def test_8_2_a_small_change_of_the_servers_is_not_worth_a_switch() -> None:
    scene = ServerScene.begun(num_ps=6, num_workers=2, limits=Resource(cpu=75), optimizer=Optimizer.RULES)
    scene.measure(*(server(rank, 4.0) for rank in range(6)), at=300)
    assert target(scene, NodeType.PS) == 6, "7 servers would be 17 % more cores"


def test_8_4_a_hot_server_gets_the_cores_of_the_most_workers() -> None:
    scene = ServerScene.begun(limits=Resource(cpu=200), optimizer=Optimizer.RULES)
    scene.measure(server(0, 7.6), server(1, 0.6), server(2, 0.6), at=300)
    launch = scene.launches[scene.launched[-1]]
    assert (launch.rank, launch.resource) == (0, Resource(cpu=32, memory_mb=SIZE.memory_mb))


def test_8_6_servers_of_a_job_that_begins_slowly_stay_but_for_one_whose_memory_ends() -> None:
    scene = ServerScene.begun()
    scene.do(JobFacts(custom={"init_training_time": "1900"}))
    scene.measure(server(0, 7.6), server(1, 7.6), server(2, 7.6), at=300)
    assert target(scene, NodeType.PS) == 3
    points = tuple(MemoryPoint(Micros(micros(60.0 * each)), 60 * each, 8000.0 + 600 * each) for each in range(1, 11))
    scene.measure(server(0, 3.0, 14_000.0), server(1, 3.0), server(2, 3.0), at=700, memory=points, step=600)
    assert scene.launches[scene.launched[-1]].resource.memory_mb > SIZE.memory_mb


@pytest.mark.parametrize("said", ["nan", "soon", "-1", "1e300"])
def test_a_time_that_is_no_number_of_seconds_says_nothing(said: str) -> None:
    scene = ServerScene.begun()
    scene.do(JobFacts(custom={"init_training_time": said}))
    assert not facts.gather(scene.job.state, scene.now).slow_start


def test_9_1_a_job_that_names_no_sizes_begins_with_those_of_the_first_plan() -> None:
    scene = FleetScene(terms(1, 3))
    scene.do(DefineScaling(terms=ScaleTerms(mode=ScaleMode.ON, gives_sizes=True)))
    replicas = {kind: ReplicaSpec(count=1) for kind in (NodeType.PS, NodeType.EVALUATOR)}
    replicas[NodeType.WORKER] = ReplicaSpec(count=3)
    scene.begin(FleetSpec(replicas=replicas, strategy=Strategy.PS))
    sizes = {(launch.node_type, launch.resource) for launch in scene.launches.values()}
    assert {size for _, size in sizes} == {Resource(cpu=4, memory_mb=8000)}
    assert {kind for kind, _ in sizes} == {NodeType.PS, NodeType.CHIEF, NodeType.WORKER, NodeType.EVALUATOR}


def test_9_1_a_fifth_of_the_limits_within_the_limits() -> None:
    for limit, each in ((100, 16.0), (10, 0.0)):
        scene = FleetScene(terms(1, 3))
        scene.do(DefineScaling(terms=ScaleTerms(mode=ScaleMode.ON, gives_sizes=True)))
        replicas = {NodeType.WORKER: ReplicaSpec(count=3), NodeType.PS: ReplicaSpec(count=2)}
        limits = Resource(cpu=limit, memory_mb=102_400)
        scene.begin(FleetSpec(replicas=replicas, strategy=Strategy.PS, limits=limits))
        assert {launch.resource.cpu for launch in scene.launches.values()} == {each}


def test_9_2_sizes_of_users_stay_and_so_do_types_that_may_not_be_changed() -> None:
    scene = FleetScene(terms(1, 3))
    scene.do(DefineScaling(terms=ScaleTerms(mode=ScaleMode.ON, gives_sizes=True, types=(NodeType.PS,))))
    replicas = {NodeType.WORKER: ReplicaSpec(count=2), NodeType.PS: ReplicaSpec(count=1, resource=SIZE)}
    scene.begin(FleetSpec(replicas=replicas, strategy=Strategy.PS))
    found = {launch.node_type: launch.resource for launch in scene.launches.values()}
    assert found[NodeType.PS] == SIZE
    assert found[NodeType.WORKER] == Resource()


def test_9_4_servers_that_are_added_after_an_oom_get_as_much_as_the_one_that_failed() -> None:
    scene = ServerScene.begun()
    scene.show(0, NodePhase.FAILED, exit_reason=NodeExit.OOM)
    assert scene.launches[scene.launched[-1]].resource.memory_mb == SIZE.memory_mb + 8192
    scene.run(scene.launched[-1])
    scene.do(ScaleReplicas(node_type=NodeType.PS, count=4))
    assert scene.launches[scene.launched[-1]].resource.memory_mb == SIZE.memory_mb + 8192


def test_9_4_the_ceiling_of_memory_is_a_setting() -> None:
    scene = ServerScene.begun(largest=Resource(cpu=32, memory_mb=20_000))
    scene.show(0, NodePhase.FAILED, exit_reason=NodeExit.OOM)
    assert scene.launches[scene.launched[-1]].resource.memory_mb == 20_000


def test_an_offer_that_expects_no_speed_is_tried() -> None:
    scene = ServerScene.begun()
    scene.measure(server(0, 3.0), server(1, 3.0), server(2, 3.0), at=900)
    plan = SizePlan(groups=(PlannedGroup(node_type=NodeType.PS, count=5),))
    scene.do(PlanOffered(plan=plan, sentence="like the last five jobs"))
    assert target(scene, NodeType.PS) == 5, scene.scaling.sentence


def test_a_question_changes_nothing() -> None:
    scene = ServerScene.begun(largest=Resource(cpu=32, memory_mb=16_384))
    points = tuple(MemoryPoint(Micros(micros(60.0 * each)), 60 * each, 8000.0 + 600 * each) for each in range(1, 11))
    scene.measure(server(0, 3.0, 14_000.0), server(1, 3.0), server(2, 3.0), at=700, memory=points, step=600)
    before = scene.job.encode()
    assert any("it cannot get more" in warning for warning in scene.scaling.warnings)
    assert scene.job.encode() == before


# The search.

THETAS = (0.01, 0.001, 1.0, 0.0, 0.0)
"""Time goes into the work of the servers, by their cores."""


def found_by(
    scene: ServerScene, *nodes: Any, worker_cpu: float = 1.0
) -> tuple[ServerOption, dict[ServerOption, float]]:
    scene.measure(*nodes, at=300, worker_cpu=worker_cpu)
    run = scene.job.state.scaling.runs[-1]
    configuration = run.configuration
    groups = {group.node_type: group for group in configuration.groups}
    ps, worker = groups[NodeType.PS], groups[NodeType.WORKER]
    now = ServerOption(configuration.num_workers, ps.count, worker.cpu, ps.cpu)
    fit = Fit(features=("",) * 5, thetas=THETAS, error=0.0, num_runs=3, num_counts=3)
    known = facts.gather(scene.job.state, scene.job.state.now)
    return now, search.search(scene.job.state, known, fit, run, now)


def test_busy_servers_would_be_faster_with_more_cores_and_idle_ones_would_not() -> None:
    for used, is_faster in ((4.0, True), (1.0, False)):
        scene = ServerScene.begun(size=Resource(), gives_sizes=True)
        now, found = found_by(scene, *(server(rank, used, seconds=100) for rank in range(3)))
        more = [ratio for option, ratio in found.items() if option == now._replace(server_cpu=option.server_cpu)]
        assert (max(more) > 1) == is_faster
        assert 1 < len(found) <= search.MOST_EVALUATIONS


def test_cores_of_servers_that_a_user_named_stay() -> None:
    now, found = found_by(ServerScene.begun(num_workers=4), *(server(rank, 8.0, seconds=100) for rank in range(3)))
    assert {option.server_cpu for option in found} == {now.server_cpu}
    assert {option.worker_cpu for option in found} > {now.worker_cpu}, "those of workers are the plan's"


def test_cores_of_workers_are_not_looked_at_where_most_of_them_are_critical() -> None:
    now, found = found_by(ServerScene.begun(num_workers=2), *(server(rank, 8.0, seconds=100) for rank in range(3)))
    assert {option.worker_cpu for option in found} == {now.worker_cpu}


def test_no_option_is_within_the_dead_band_of_the_servers() -> None:
    now, found = found_by(
        ServerScene.begun(size=Resource(), gives_sizes=True), *(server(rank, 4.0, seconds=100) for rank in range(3))
    )
    total = now.servers * now.server_cpu
    for option in found:
        share = option.servers * option.server_cpu / total
        is_same = (option.servers, option.server_cpu) == (now.servers, now.server_cpu)
        assert is_same or not 0.5 < share < 1.2


def test_the_users_number_of_workers_is_a_cap() -> None:
    now, found = found_by(ServerScene.begun(), *(server(rank, 2.0, seconds=100) for rank in range(3)))
    assert max(option.workers for option in found) == now.workers
