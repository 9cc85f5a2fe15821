"""Servers that are hot, idle, short of memory, or too few; the plan of spec 07 §11.3."""

from __future__ import annotations

import random
from typing import Any

from dlrover.core.scaling.servers.plans import back_of
from dlrover.protocol.messages.fleet import FleetSpec, NodePhase, NodeType, PsReady, ReplicaSpec, Resource, Strategy
from dlrover.protocol.messages.identity import Micros, NodeRank, PlatformId
from dlrover.protocol.messages.scaling import (
    AskScaling,
    Brake,
    Configuration,
    DefineScaling,
    GroupSize,
    JobFacts,
    MemoryPoint,
    NodeUse,
    PlannedGroup,
    PlannedNode,
    PlanOffered,
    RunMeasured,
    ScaleMode,
    ScaleOutcome,
    ScaleTerms,
    ScalingStatus,
    SizePlan,
    TypeUse,
)
from tests.core.fleet.fleet_scene import FleetScene
from tests.core.scene import micros, terms

SIZE = Resource(cpu=8.0, memory_mb=16_384)


class ServerScene(FleetScene):
    """Three servers, a chief and two workers of a job that scales itself."""

    number = 0

    @classmethod
    def begun(
        cls,
        *,
        num_ps: int = 3,
        num_workers: int = 3,
        limits: Resource | None = None,
        size: Resource = SIZE,
        **more: Any,
    ) -> ServerScene:
        scene = cls(terms(1, 3))
        scene.do(DefineScaling(terms=ScaleTerms(mode=ScaleMode.ON, **more)))
        replicas = {
            NodeType.WORKER: ReplicaSpec(count=num_workers, resource=size),
            NodeType.PS: ReplicaSpec(count=num_ps, resource=size),
        }
        scene.begin(FleetSpec(replicas=replicas, strategy=Strategy.PS, limits=limits or Resource()))
        scene.run()
        return scene

    def measure(
        self,
        *nodes: NodeUse,
        at: float,
        memory: tuple[MemoryPoint, ...] = (),
        step: int = 0,
        worker_cpu: float = 1.0,
        step_time: float = 1.0,
        **more: Any,
    ) -> None:
        self.tick(at)
        ServerScene.number += 1
        groups = []
        for kind in (NodeType.CHIEF, NodeType.WORKER, NodeType.PS):
            running = self.fleet.replicas[kind].running
            size = self.fleet.replicas[kind].spec.resource
            groups.append(GroupSize(kind, len(running), size.cpu, size.memory_mb))
        most = max((node.cpu for node in nodes), default=0.0)
        used = TypeUse(node_type=NodeType.PS, memory=memory, cpu_max=most)
        self.do(
            RunMeasured(
                number=ServerScene.number,
                configuration=Configuration(groups=tuple(groups), micro_batch=32),
                seconds=200.0,
                steps=200,
                step_time=step_time,
                nodes=nodes,
                types=(TypeUse(node_type=NodeType.WORKER, cpu=worker_cpu, cpu_max=worker_cpu, memory_mb=1000), used),
                last_step=step,
                **more,
            )
        )

    @property
    def scaling(self) -> ScalingStatus:
        answer = self.job.ask(AskScaling())
        assert isinstance(answer, ScalingStatus)
        return answer


def server(id_: int, cpu: float, memory: float = 4000.0, seconds: float = 180.0) -> NodeUse:
    return NodeUse(
        platform_node=PlatformId(id_),
        node_type=NodeType.PS,
        rank=NodeRank(id_),
        cpu=cpu,
        cpu_max=cpu,
        memory_mb=memory,
        seconds=seconds,
    )


def test_a_hot_server_is_exchanged_once_and_keeps_its_memory() -> None:
    scene = ServerScene.begun()
    scene.measure(server(0, 7.6), server(1, 1.6), server(2, 1.6), at=300)
    (new,) = scene.launched[6:]
    launch = scene.launches[new]
    assert (launch.node_type, launch.rank) == (NodeType.PS, 0)
    assert launch.resource == Resource(cpu=16, memory_mb=16_384)
    assert scene.scaling.decisions[-1].outcome is ScaleOutcome.PLANNED
    scene.measure(server(0, 7.6), server(1, 1.6), server(2, 1.6), at=360)
    assert scene.scaling.brake is Brake.UNDER_WAY
    assert len(scene.launched) == 7


def test_a_server_that_was_watched_too_briefly_or_is_like_the_others_stays() -> None:
    scene = ServerScene.begun()
    scene.measure(server(0, 7.6, seconds=100), server(1, 1.6), server(2, 1.6), at=300)
    scene.measure(server(0, 7.0), server(1, 6.0), server(2, 6.0), at=400)
    assert len(scene.launched) == 6


def test_more_servers_if_all_are_hot_and_none_beyond_the_limits() -> None:
    scene = ServerScene.begun()
    scene.measure(server(0, 7.6), server(1, 7.6), server(2, 7.6), at=300)
    assert scene.fleet.replicas[NodeType.PS].target == 4
    bounded = ServerScene.begun(limits=Resource(cpu=48))
    bounded.measure(server(0, 7.6), server(1, 7.6), server(2, 7.6), at=300)
    assert bounded.fleet.replicas[NodeType.PS].target == 3


def test_idle_servers_of_a_long_job_get_fewer_cores() -> None:
    scene = ServerScene.begun()
    scene.measure(server(0, 1.0), server(1, 5.0), server(2, 5.0), at=300)
    assert len(scene.launched) == 6, "no one knows how long the job is"
    scene.do(JobFacts(max_steps=100_000))
    scene.measure(server(0, 1.0), server(1, 5.0), server(2, 5.0), at=400, step=100)
    assert scene.launches[scene.launched[-1]].resource == Resource(cpu=5, memory_mb=16_384)


def test_a_person_holds_the_servers_for_a_while() -> None:
    scene = ServerScene.begun()
    from dlrover.protocol.messages.fleet import ScaleReplicas

    scene.tick(200)
    scene.do(ScaleReplicas(node_type=NodeType.WORKER, count=2))
    scene.measure(server(0, 7.6), server(1, 1.6), server(2, 1.6), at=300)
    assert scene.scaling.brake is Brake.MANUAL_HOLD
    assert len(scene.launched) == 6


def test_memory_that_grows_is_seen_before_the_limit_in_100_seeds() -> None:
    for seed in range(100):
        chance = random.Random(seed)
        share, rate = chance.uniform(0.2, 0.5), chance.uniform(0.005, 0.05)
        scene = ServerScene.begun()
        used, at, step = share * SIZE.memory_mb, 120.0, 0
        while len(scene.launched) == 6:
            used, at, step = used * (1 + rate), at + 60, step + 60
            assert used < SIZE.memory_mb, f"seed {seed}: it failed at {at:.0f} s with {rate:.1%} a minute"
            seen = used * chance.uniform(0.999, 1.0)
            point = MemoryPoint(Micros(micros(at)), step, seen)
            scene.measure(server(0, 3.0, seen), server(1, 3.0), server(2, 3.0), at=at, memory=(point,), step=step)
        launch = scene.launches[scene.launched[-1]]
        assert (launch.rank, launch.resource.cpu) == (0, 8)
        assert launch.resource.memory_mb > SIZE.memory_mb


def test_11_3_one_plan_grows_workers_and_exchanges_servers() -> None:
    """3 servers, 3 workers, worker 0 critical; 6 workers, (8, 8192) for worker 0, worker 1 and server 1."""
    scene = FleetScene(terms(1, 3))
    scene.do(DefineScaling(terms=ScaleTerms(mode=ScaleMode.ON)))
    replicas = {
        NodeType.WORKER: ReplicaSpec(count=3, resource=SIZE, critical="0:3"),
        NodeType.PS: ReplicaSpec(count=3, resource=SIZE),
        NodeType.CHIEF: ReplicaSpec(count=1, resource=SIZE),
    }
    scene.begin(FleetSpec(replicas=replicas, strategy=Strategy.PS))
    scene.run()
    ids = {(node.node_type, node.rank): node.id for node in scene.fleet.nodes.values()}
    nodes = tuple(
        PlannedNode(platform_node=ids[kind, rank], cpu=8, memory_mb=8192)
        for kind, rank in ((NodeType.WORKER, 0), (NodeType.WORKER, 1), (NodeType.PS, 1))
    )
    plan = SizePlan(groups=(PlannedGroup(node_type=NodeType.WORKER, count=6),), nodes=nodes)
    scene.tick(300)
    groups = (GroupSize(NodeType.CHIEF, 1), GroupSize(NodeType.WORKER, 3), GroupSize(NodeType.PS, 3))
    scene.do(
        RunMeasured(
            number=1,
            configuration=Configuration(groups=groups),
            seconds=100,
            steps=100,
            step_time=1,
            records_per_second=32,
        )
    )
    scene.do(PlanOffered(plan=plan, expected_speed=64, sentence="more workers"))
    launched = [scene.launches[id_] for id_ in scene.launched[7:]]
    wanted = sorted((each.node_type.value, each.rank) for each in launched)
    assert wanted == [("ps", 1), ("worker", 1), ("worker", 3), ("worker", 4), ("worker", 5)], (
        "worker 0 is critical and stays"
    )
    for launch in launched:
        scene.show(launch.id, NodePhase.RUNNING)
    assert scene.removed == [ids[NodeType.WORKER, 1]], "the old server stays until the workers have switched"


def test_workers_that_do_not_come_in_time_move_no_target_of_a_world() -> None:
    """Found by the simulator, seed 552 of the jobs with servers."""
    scene = ServerScene.begun(longest_probation=60.0, server_pause=0.0)
    scene.measure(server(0, 3.0), server(1, 3.0), server(2, 3.0), at=900)
    group = PlannedGroup(node_type=NodeType.WORKER, count=4)
    scene.do(PlanOffered(plan=SizePlan(groups=(group,)), expected_speed=1000.0))
    assert len(scene.launched) == 8
    scene.tick(1000)
    assert scene.scaling.num_outcomes.get(ScaleOutcome.UNJUDGED) == 1
    assert scene.job.state.scaling.target is None


def test_fewer_cores_of_idle_servers_are_taken_back_if_the_job_became_slower() -> None:
    """Their use is a mean: they may need their cores in bursts."""
    scene = ServerScene.begun()
    scene.do(JobFacts(max_steps=100_000))
    scene.measure(*(server(id_, 1.0) for id_ in range(3)), at=400, step=100)
    fewer = scene.launched[-3:]
    assert [scene.launches[id_].resource.cpu for id_ in fewer] == [5.0, 5.0, 5.0]
    scene.run()
    scene.do(PsReady())
    scene.measure(*(server(id_, 1.0) for id_ in fewer), at=600, step=200, step_time=1.5)
    decided = scene.scaling.decisions[-1]
    assert decided.outcome is ScaleOutcome.TAKEN_BACK
    assert [scene.launches[id_].resource for id_ in scene.launched[-3:]] == [SIZE] * 3
    assert scene.launched[-1] not in fewer


def test_fewer_cores_of_idle_servers_stay_if_the_speed_stays() -> None:
    scene = ServerScene.begun()
    scene.do(JobFacts(max_steps=100_000))
    scene.measure(*(server(id_, 1.0) for id_ in range(3)), at=400, step=100)
    fewer = scene.launched[-3:]
    scene.run()
    scene.do(PsReady())
    scene.measure(*(server(id_, 1.0) for id_ in fewer), at=600, step=200)
    assert scene.launched[-3:] == fewer
    assert scene.scaling.decisions[-1].outcome is not ScaleOutcome.TAKEN_BACK


def test_what_is_taken_back_touches_no_server_that_the_change_left_alone() -> None:
    scene = ServerScene.begun(num_ps=4)
    old = [node.id for node in scene.fleet.live_nodes(NodeType.PS)]
    scene.measure(server(old[0], 7.6), *(server(id_, 1.6) for id_ in old[1:]), at=300)
    (large,) = scene.launched[-1:]
    scene.run()
    scene.do(PsReady())
    scene.do(JobFacts(max_steps=100_000))
    scene.measure(server(large, 10.0), *(server(id_, 1.0) for id_ in old[1:]), at=700, step=100)
    fewer = scene.launched[-3:]
    assert [(scene.launches[id_].rank, scene.launches[id_].resource.cpu) for id_ in fewer] == [(1, 5), (2, 5), (3, 5)]
    scene.run()
    scene.do(PsReady())
    scene.measure(server(large, 10.0), *(server(id_, 1.0) for id_ in fewer), at=900, step=200, step_time=1.5)
    assert scene.scaling.decisions[-1].outcome is ScaleOutcome.TAKEN_BACK
    back = [scene.launches[id_] for id_ in scene.launched if id_ > fewer[-1]]
    assert [(launch.rank, launch.resource.cpu) for launch in back] == [(1, 8), (2, 8), (3, 8)]
    scene.run()
    scene.do(PsReady())
    sizes = sorted((node.rank, node.resource.cpu) for node in scene.fleet.live_nodes(NodeType.PS))
    assert sizes == [(0, 16), (1, 8), (2, 8), (3, 8)]


def test_servers_of_different_sizes_get_back_each_what_it_had() -> None:
    """All are changed, in number too: who comes again for a rank that was given up gets the usual size."""
    scene = ServerScene.begun(server_pause=0.0)
    old = [node.id for node in scene.fleet.live_nodes(NodeType.PS)]
    scene.measure(server(old[0], 7.6), server(old[1], 1.6), server(old[2], 1.6), at=300)
    (large,) = scene.launched[-1:]
    scene.run()
    scene.do(PsReady())
    scene.measure(server(large, 8.0), server(old[1], 4.0), server(old[2], 4.0), at=700)
    nodes = tuple(PlannedNode(platform_node=PlatformId(id_), cpu=6.0) for id_ in (large, old[1], old[2]))
    group = PlannedGroup(node_type=NodeType.PS, count=2, cpu=6.0)
    scene.do(PlanOffered(plan=SizePlan(groups=(group,), nodes=nodes)))
    fewer = scene.launched[-2:]
    assert [(scene.launches[id_].rank, scene.launches[id_].resource.cpu) for id_ in fewer] == [(0, 6), (1, 6)]
    scene.run()
    scene.do(PsReady())
    scene.measure(*(server(id_, 4.0) for id_ in fewer), at=900, step_time=1.5)
    assert scene.scaling.decisions[-1].outcome is ScaleOutcome.TAKEN_BACK
    scene.run()
    scene.do(PsReady())
    sizes = sorted((node.rank, node.resource.cpu) for node in scene.fleet.live_nodes(NodeType.PS))
    assert sizes == [(0, 16), (1, 8), (2, 8)]


def test_later_servers_get_back_what_the_change_took_from_them() -> None:
    """The median of those that it exchanges; if it exchanges none, what later ones would have got. Other changes leave them alone."""
    scene = ServerScene.begun()
    old = [node.id for node in scene.fleet.live_nodes(NodeType.PS)]
    scene.measure(server(old[0], 7.6), server(old[1], 1.6), server(old[2], 1.6), at=300)
    large = PlannedNode(platform_node=PlatformId(scene.launched[-1]), cpu=4.0)
    scene.run()
    scene.do(PsReady())
    group = PlannedGroup(node_type=NodeType.PS, cpu=4.0)

    def back(*groups: PlannedGroup, nodes: tuple[PlannedNode, ...] = ()) -> SizePlan:
        return back_of(scene.job.state, SizePlan(groups=groups, nodes=nodes))

    assert back(nodes=(large,)) == SizePlan()
    assert back(group, nodes=(large,)).groups == (PlannedGroup(node_type=NodeType.PS, cpu=16.0),)
    assert back(group).groups == (PlannedGroup(node_type=NodeType.PS, cpu=8.0),)
    assert back(PlannedGroup(node_type=NodeType.PS, count=5)).groups == (PlannedGroup(node_type=NodeType.PS, count=3),)
