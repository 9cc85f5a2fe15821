"""What all nodes of a job together may ask for: both numbers are in each refusal."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.core.fleet.commands import check_spec
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import (
    FleetSpec,
    MigrateNode,
    NodeExit,
    NodeType,
    ReplicaSpec,
    Resource,
    ScaleReplicas,
)
from dlrover.protocol.messages.job import PlatformId, ScaleJob
from tests.core.fleet.fleet_scene import FleetScene, ps_job, terms

SIZE = Resource(cpu=4, memory_mb=8192, gpus=1)


def spec(limits: Resource, *, count: int = 2, standby: int = 0) -> FleetSpec:
    return FleetSpec(
        replicas={NodeType.WORKER: ReplicaSpec(count=count, resource=SIZE)}, standby=standby, limits=limits
    )


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        (Resource(cpu=7), ("8 cores", "limit is 7")),
        (Resource(memory_mb=16383), ("16384 MiB", "limit is 16383")),
        (Resource(gpus=1), ("2 accelerators", "limit is 1")),
    ],
)
def test_a_fleet_beyond_its_limits_is_refused(limits: Resource, numbers: tuple[str, str]) -> None:
    with pytest.raises(Rejected) as refused:
        check_spec(spec(limits))
    assert all(number in str(refused.value) for number in numbers)


def test_a_fleet_within_its_limits_is_not_and_absent_ones_are_none() -> None:
    check_spec(spec(Resource(cpu=8, memory_mb=16384, gpus=2)))
    check_spec(spec(Resource()))
    check_spec(spec(Resource(), count=1000))


def test_standbys_count() -> None:
    with pytest.raises(Rejected, match="12 cores"):
        check_spec(spec(Resource(cpu=8), standby=1))


def test_a_world_grows_up_to_its_limits() -> None:
    scene = FleetScene(terms(2, 3)).begin(spec(Resource(cpu=12), count=3)).train(0, 1, 2)
    with pytest.raises(Rejected, match="16 cores, and the job's limit is 12"):
        scene.do(ScaleJob(min_nodes=2, max_nodes=4))
    scene.do(ScaleJob(min_nodes=1, max_nodes=2))
    scene.do(ScaleJob(min_nodes=1, max_nodes=3))


def limited_ps_job(limits: Resource) -> FleetSpec:
    """Three workers of which one is the chief, and two servers."""
    return replace(ps_job(resource=SIZE), limits=limits)


def test_other_types_grow_up_to_the_limits_too() -> None:
    job = ps_job(resource=SIZE)
    total = sum(replica.count for replica in job.replicas.values() if replica.resource == SIZE) * 4
    scene = FleetScene().begin(limited_ps_job(Resource(cpu=total))).run()
    num_servers = job.replicas[NodeType.PS].count
    with pytest.raises(Rejected, match=f"limit is {total}"):
        scene.do(ScaleReplicas(node_type=NodeType.PS, count=num_servers + 1))
    with pytest.raises(Rejected, match=f"limit is {total}"):
        scene.do(MigrateNode(node=PlatformId(0), resource=replace(SIZE, cpu=5)))
    scene.do(MigrateNode(node=PlatformId(0), resource=replace(SIZE, cpu=3)))


def test_memory_after_a_lack_of_it_grows_up_to_the_limits() -> None:
    job = ps_job(resource=SIZE)
    num_sized = sum(replica.count for replica in job.replicas.values() if replica.resource == SIZE)
    scene = FleetScene().begin(limited_ps_job(Resource(memory_mb=num_sized * 8192 + 1000))).run()
    newest = max(scene.launches)
    scene.fail(0, exit_reason=NodeExit.OOM)
    assert scene.launches[newest + 1].resource.memory_mb == 8192 + 1000
    scene.show(newest + 1, "Running")
    scene.fail(newest + 1, exit_reason=NodeExit.OOM)
    assert scene.launches[newest + 2].resource.memory_mb == 8192 + 1000, "no more is left"
