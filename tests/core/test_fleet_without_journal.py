"""A master whose journal was lost, and a platform that remembers more than it does."""

from __future__ import annotations

import pytest

from dlrover.core.job import Job
from dlrover.protocol.errors import Rejected
from dlrover.protocol.fleet_messages import (
    DefineFleet,
    FleetSpec,
    LaunchNode,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    RemoveNode,
    ReplicaSpec,
)
from dlrover.protocol.messages import MasterStarted, Micros, PlatformId


def job_that_knows_nothing(count: int = 2) -> Job:
    job = Job()
    job.apply(MasterStarted(1, "job"), Micros(0))
    spec = FleetSpec(replicas={NodeType.WORKER: ReplicaSpec(count=count)})
    job.apply(DefineFleet(spec=spec), Micros(1))
    return job


def shown(id_: int, rank: int, phase: NodePhase = NodePhase.RUNNING) -> PlatformNode:
    return PlatformNode(id=PlatformId(id_), node_type=NodeType.WORKER, rank=rank, phase=phase)


def test_it_counts_on_from_the_newest_epoch_that_the_platform_obeyed() -> None:
    job = job_that_knows_nothing()
    outcome = job.apply(NodesListed(nodes=(), master_epoch=7), Micros(2))
    assert [one.master_epoch for one in outcome.effects if isinstance(one, LaunchNode)] == [7, 7]
    assert job.master_epoch == 7


def test_it_asks_for_no_id_that_was_used_before() -> None:
    outcome = job_that_knows_nothing().apply(NodesListed(nodes=(), next_id=PlatformId(40)), Micros(2))
    assert [one.id for one in outcome.effects if isinstance(one, LaunchNode)] == [40, 41]


def test_nodes_that_ended_in_that_life_are_removed() -> None:
    listed = NodesListed(nodes=(shown(5, 0), shown(6, 1), shown(9, 1, NodePhase.FAILED)))
    outcome = job_that_knows_nothing().apply(listed, Micros(2))
    assert [one.id for one in outcome.effects if isinstance(one, RemoveNode)] == [9]


def test_what_it_never_asked_for_can_be_removed() -> None:
    job = job_that_knows_nothing()
    job.apply(NodesListed(nodes=(shown(0, 0), shown(1, 1))), Micros(2))
    fleet = job.state.fleet
    assert fleet is not None
    assert all(node.asked_at is not None for node in fleet.nodes.values())


@pytest.mark.parametrize(
    "listed", [NodesListed(nodes=(), master_epoch=2**60), NodesListed(nodes=(), next_id=PlatformId(2**60))]
)
def test_absurd_numbers_are_refused(listed: NodesListed) -> None:
    with pytest.raises(Rejected):
        job_that_knows_nothing().apply(listed, Micros(2))
