"""A job that begins as former jobs propose."""

from __future__ import annotations

import pytest

from dlrover.core.job import Job
from dlrover.protocol.messages.fleet import (
    DefineFleet,
    FleetSpec,
    LaunchNode,
    NodesListed,
    NodeType,
    ReplicaSpec,
    Resource,
    Strategy,
)
from dlrover.protocol.messages.job import MasterStarted, Micros
from dlrover.protocol.messages.scaling import (
    DefineScaling,
    PlannedGroup,
    PlanOffered,
    ScaleMode,
    ScaleTerms,
    SizePlan,
)
from tests.core.scaling.driver import Driver, family

NOW = Micros(0)
LINEAR = family((1.0, 0.0, 0.0, 0.0))


def launched(spec: FleetSpec, *groups: PlannedGroup, terms: ScaleTerms | None = None) -> list[LaunchNode]:
    job = Job()
    job.apply(MasterStarted(1, "a-job"), NOW)
    job.apply(DefineScaling(terms=terms or ScaleTerms(mode=ScaleMode.ON, nodes_start=1)), NOW)
    if groups:
        job.apply(PlanOffered(plan=SizePlan(groups=groups), sentence="five jobs alike"), NOW)
    job.apply(DefineFleet(spec=spec), NOW)
    effects = job.apply(NodesListed(nodes=()), NOW).effects
    return [effect for effect in effects if isinstance(effect, LaunchNode)]


def world(count: int = 8, memory_mb: int = 0, limits: Resource | None = None) -> FleetSpec:
    replicas = {NodeType.WORKER: ReplicaSpec(count=count, resource=Resource(memory_mb=memory_mb))}
    return FleetSpec(replicas=replicas, limits=limits or Resource())


def workers(count: int, memory_mb: int | None = None) -> PlannedGroup:
    return PlannedGroup(node_type=NodeType.WORKER, count=count, memory_mb=memory_mb)


def test_a_start_plan_says_with_how_many_nodes_a_world_begins() -> None:
    assert len(launched(world())) == 1
    assert len(launched(world(), workers(5))) == 5
    assert len(launched(world(count=4), workers(5))) == 4


def test_a_world_that_began_as_planned_stays_so_when_its_agents_come() -> None:
    driver = Driver(LINEAR, max_nodes=8, min_nodes=2, start_plan=SizePlan(groups=(workers(6),)))
    driver.wait(1)
    assert (driver.nodes, driver.target) == (6, 6)


def test_a_start_plan_below_the_minimum_begins_with_the_minimum() -> None:
    driver = Driver(LINEAR, max_nodes=8, min_nodes=3, start_plan=SizePlan(groups=(workers(1),)))
    fleet = driver.job.state.fleet
    assert fleet is not None
    assert (fleet.workers.target, driver.target) == (3, 3)


def test_a_limit_of_memory_is_exchanged_for_the_planned_one() -> None:
    nodes = launched(world(memory_mb=512), workers(2, 900))
    assert [node.resource.memory_mb for node in nodes] == [900, 900]


def test_no_limit_is_put_on_nodes_that_have_none() -> None:
    assert [node.resource.memory_mb for node in launched(world(), workers(2, 900))] == [0, 0]


def test_a_start_plan_is_cut_to_what_one_node_may_have() -> None:
    nodes = launched(world(memory_mb=8_000), workers(1, 10**6))
    assert nodes[0].resource.memory_mb == ScaleTerms().largest.memory_mb


def test_a_start_plan_beyond_the_limits_of_the_job_changes_no_size() -> None:
    limits = Resource(memory_mb=8 * 4_000)
    nodes = launched(world(memory_mb=4_000, limits=limits), workers(2, 8_000))
    assert [node.resource.memory_mb for node in nodes] == [4_000, 4_000]


@pytest.mark.parametrize("mode", [ScaleMode.OFF, ScaleMode.DRY_RUN])
def test_a_job_that_does_not_scale_itself_begins_as_its_user_says(mode: ScaleMode) -> None:
    nodes = launched(world(memory_mb=512), workers(2, 900), terms=ScaleTerms(mode=mode))
    assert [node.resource.memory_mb for node in nodes] == [512] * 8


def test_servers_begin_as_planned_and_workers_at_most_as_many_as_the_user_said() -> None:
    replicas = {
        NodeType.PS: ReplicaSpec(count=1, resource=Resource(cpu=1, memory_mb=512)),
        NodeType.WORKER: ReplicaSpec(count=3, resource=Resource(cpu=2, memory_mb=4_000)),
    }
    servers = PlannedGroup(node_type=NodeType.PS, count=2, cpu=6, memory_mb=10_000)
    more = PlannedGroup(node_type=NodeType.WORKER, count=9, cpu=8, memory_mb=9_000)
    nodes = launched(FleetSpec(replicas=replicas, strategy=Strategy.PS), servers, more)
    assert {node.resource for node in nodes if node.node_type is NodeType.PS} == {Resource(cpu=6, memory_mb=10_000)}
    trained = [node for node in nodes if node.node_type is not NodeType.PS]
    assert len(nodes) - len(trained) == 2
    assert [(node.resource.cpu, node.resource.memory_mb) for node in trained] == [(8, 9_000)] * 3


def test_a_size_that_the_user_gave_servers_wins() -> None:
    replicas = {
        NodeType.PS: ReplicaSpec(count=1, resource=Resource(cpu=3, memory_mb=2_048)),
        NodeType.WORKER: ReplicaSpec(count=1, resource=Resource(cpu=4, memory_mb=8_000)),
    }
    plan = PlannedGroup(node_type=NodeType.PS, count=1, cpu=6, memory_mb=10_000)
    nodes = launched(FleetSpec(replicas=replicas, strategy=Strategy.PS), plan)
    assert [node.resource for node in nodes if node.node_type is NodeType.PS] == [Resource(cpu=3, memory_mb=2_048)]


def test_types_that_may_not_change_begin_as_the_user_says() -> None:
    terms = ScaleTerms(mode=ScaleMode.ON, nodes_start=1, types=(NodeType.PS,))
    assert len(launched(world(count=4), workers(2), terms=terms)) == 4


def test_the_start_plan_is_in_the_state_after_a_replay() -> None:
    job = Job()
    job.apply(MasterStarted(1, "a-job"), NOW)
    job.apply(DefineScaling(terms=ScaleTerms(mode=ScaleMode.ON)), NOW)
    verdicts = job.apply(PlanOffered(plan=SizePlan(groups=(workers(5),)), sentence="five jobs alike"), NOW).verdicts
    assert any("as brain proposes: five jobs alike" in verdict for verdict in verdicts)
    again = Job.decode(job.encode())
    assert again.state.scaling.start == SizePlan(groups=(workers(5),))
    again.apply(DefineFleet(spec=world()), NOW)
    assert len(again.apply(NodesListed(nodes=()), NOW).effects) >= 5
