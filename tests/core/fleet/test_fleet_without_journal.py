"""A master whose journal was lost, and a platform that remembers more than it does."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core.job import Job
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import (
    AskPsNodes,
    DefineFleet,
    FleetSpec,
    LaunchNode,
    MigrateNode,
    NodeChanged,
    NodeEventKind,
    NodePhase,
    NodesListed,
    NodeType,
    PlatformNode,
    PsNodes,
    PsReady,
    RemoveNode,
    ReplicaSpec,
    Resource,
    ResumeJob,
    ScaleReplicas,
    SuspendJob,
)
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    Incarnation,
    JobTerms,
    Leave,
    LeaveReason,
    Limits,
    MasterStarted,
    Micros,
    NodeRank,
    PlatformId,
)
from tests.core.fleet.fleet_scene import FleetScene, ps_job, workers
from tests.core.scene import terms


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


def test_a_replacement_is_not_called_like_a_node_that_comes_later_in_the_list() -> None:
    """The node would be taken for the replacement, and pay with another rank's budget when it fails."""
    job = job_that_knows_nothing()
    listed = NodesListed(nodes=(shown(0, 0, NodePhase.FAILED), shown(2, 1)), next_id=PlatformId(3))
    job.apply(listed, Micros(2))
    fleet = job.state.fleet
    assert fleet is not None
    ranks = {node.id: node.rank for node in fleet.nodes.values() if node.is_live}
    assert ranks.pop(PlatformId(2)) == 1
    assert list(ranks.values()) == [0]
    assert min(ranks) >= 3


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


@pytest.mark.parametrize("when", ["before the list, by rank", "before the list", "after the list"])
def test_a_node_whose_agent_tells_that_it_has_finished_is_not_replaced(when: str) -> None:
    """Its report went to the master whose journal was lost; the agent tells it again as it attaches."""
    scene = FleetScene(terms(2, 3))
    scene.do(DefineFleet(spec=FleetSpec(replicas=workers(3))))
    for rank in range(3):
        scene.cloud[10 + rank] = shown(10 + rank, rank)
    if when == "after the list":
        scene.list()
    scene.attach("n10", rank=0 if "rank" in when else None, incarnation=1, running_round=3, is_finished=True)
    scene.list()
    assert scene.fleet.workers.finished == {0: None}
    scene.vanish(10)
    assert scene.launched == []


class TestNodesThatWereSentAwayBeforeTheFirstList:
    """A node that leaves exits with 0. Taken over as one of the job's own, it would count as one that has done its work."""

    def scene(self) -> FleetScene:
        scene = FleetScene(terms(1, 2))
        scene.do(DefineFleet(spec=FleetSpec(replicas=workers(2, critical="all"))))
        for rank in range(2):
            scene.cloud[10 + rank] = shown(10 + rank, rank)
            scene.attach(f"n{10 + rank}", incarnation=1, running_round=3)
        return scene

    @pytest.mark.parametrize("is_left", [True, False])
    @pytest.mark.parametrize("is_resumed", [False, True])
    def test_they_are_not_taken_for_nodes_that_have_done_their_work(self, is_left: bool, is_resumed: bool) -> None:
        scene = self.scene()
        scene.do(SuspendJob(is_releasing=True))
        if is_left:
            self.leave(scene)
        if is_resumed:
            scene.do(ResumeJob())
        listed = dict(scene.cloud)
        scene.list()
        assert scene.removed == ([10, 11] if is_left else []), "a node is removed when its agent has left"
        if not is_left:
            self.leave(scene)
            assert scene.removed == [10, 11]
        for node in listed.values():
            ended = replace(node, phase=NodePhase.SUCCEEDED)
            scene.do(NodeChanged(kind=NodeEventKind.MODIFIED, node=ended))
        assert scene.job.end is None
        assert scene.fleet.workers.finished == {}
        if not is_resumed:
            assert scene.launched == []
            scene.do(ResumeJob())
        assert [scene.launches[id_].rank for id_ in scene.launched] == [0, 1]
        assert min(scene.launched) >= 12
        assert scene.fleet.workers.spent == {}
        assert scene.fleet.agents == {}

    def test_an_agent_that_comes_while_the_job_is_suspended_is_asked_to_leave(self) -> None:
        scene = FleetScene(terms(1, 2))
        scene.do(DefineFleet(spec=FleetSpec(replicas=workers(2))))
        scene.cloud[10] = shown(10, 0)
        scene.do(SuspendJob(is_releasing=True))
        scene.attach("n10", incarnation=1, running_round=3)
        scene.list()
        wish = scene.wish("n10")
        assert isinstance(wish, Leave)
        assert wish.is_pause
        assert scene.removed == []
        scene.leave("n10", LeaveReason.DISMISSED)
        assert scene.removed == [10]

    def test_a_node_whose_agent_never_came_is_removed_at_once(self) -> None:
        scene = FleetScene(terms(1, 4))
        scene.do(DefineFleet(spec=FleetSpec(replicas=workers(2))))
        scene.cloud[13] = shown(13, 3)
        scene.do(SuspendJob(is_releasing=True))
        scene.list()
        assert scene.removed == [13]
        assert scene.fleet.workers.target == 4, "the job had been scaled, and is resumed as it was"

    def test_a_node_that_has_finished_has_done_its_work(self) -> None:
        scene = FleetScene(terms(1, 2))
        scene.do(DefineFleet(spec=FleetSpec(replicas=workers(2))))
        scene.cloud[10] = shown(10, 0)
        scene.do(SuspendJob(is_releasing=True))
        scene.attach("n10", incarnation=1, running_round=3, is_finished=True)
        scene.list()
        assert scene.fleet.workers.finished == {0: None}

    def test_finished_work_counts_although_its_agent_has_left(self) -> None:
        scene = self.scene()
        scene.do(SuspendJob(is_releasing=True))
        scene.attach("n10", incarnation=2, running_round=3, is_finished=True)
        self.leave(scene)
        scene.do(ResumeJob())
        scene.list()
        assert [scene.launches[id_].rank for id_ in scene.launched] == [1]

    def leave(self, scene: FleetScene) -> None:
        for name in ("n10", "n11"):
            scene.leave(name, LeaveReason.DISMISSED)


def test_an_exchanged_server_keeps_the_address_under_which_it_is_reached() -> None:
    """An exchange gives a rank another address; without a word of the platform it would be that of the first server."""
    scene = two_servers()
    scene.do(MigrateNode(node=PlatformId(0), resource=Resource(cpu=9)))
    scene.run(4)
    scene.do(PsReady())
    scene.vanish(4)
    scene.run(5)
    anew = FleetScene(cloud=dict(scene.cloud)).begin(ps_job())
    assert addresses(anew) == addresses(scene) == {5: "a-job-ps-4", 1: "a-job-ps-1"}
    anew.vanish(5)
    assert anew.launches[6].service_address == "a-job-ps-4"


def test_a_platform_that_tells_no_address_is_taken_to_have_kept_the_first_one() -> None:
    scene = two_servers()
    scene.vanish(0)
    scene.run(4)
    anew = FleetScene(cloud={id_: replace(node, service_address="") for id_, node in scene.cloud.items()})
    assert addresses(anew.begin(ps_job())) == {4: "a-job-ps-0", 1: "a-job-ps-1"}


def test_a_server_that_had_been_added_is_as_critical_as_the_others() -> None:
    scene = two_servers(critical="all")
    scene.do(ScaleReplicas(node_type=NodeType.PS, count=3))
    scene.run(4)
    anew = FleetScene(cloud=dict(scene.cloud)).begin(ps_job(critical="all"))
    assert anew.node(4).is_critical


def two_servers(**ps: Any) -> FleetScene:
    scene = FleetScene().begin(ps_job(**ps)).run()
    scene.do(PsReady())
    return scene


def addresses(scene: FleetScene) -> dict[int, str]:
    answer = scene.job.ask(AskPsNodes())
    assert isinstance(answer, PsNodes)
    return {node.id: node.service_address for node in answer.nodes}


def attach(job: Job, number: int, now: int, *, node: int, rank: int | None = None) -> NodeRank:
    told = Attach(
        launch=f"launch-{number}",
        host=f"host-{number}",
        terms=JobTerms(limits=Limits(min_nodes=2, max_nodes=2)),
        local_world_size=1,
        node_rank=None if rank is None else NodeRank(rank),
        incarnation=Incarnation(0),
        life=f"life-{number}",
        platform_node=PlatformId(node),
    )
    reply = job.apply(told, Micros(now)).reply
    assert isinstance(reply, Attached)
    return reply.node_rank


def test_a_node_that_cannot_say_its_rank_takes_nobody_elses() -> None:
    job = job_that_knows_nothing()
    assert attach(job, 1, 2, node=7) == 0, "some rank, to meet the others under"
    job.apply(NodesListed(nodes=(shown(5, 0), shown(7, 1))), Micros(3))
    fleet = job.state.fleet
    assert fleet is not None
    assert {node.id: node.rank for node in fleet.nodes.values() if node.is_live} == {5: 0, 7: 1}
    assert fleet.nodes[PlatformId(7)].agent is not None, "the platform says which it is, and its agent is known"
    assert attach(job, 2, 4, node=5) == 1, "its own is taken, by a node that needs it no less"
    assert not [node for node in fleet.nodes.values() if node.removal is not None]


def test_a_node_that_was_told_its_rank_is_taken_over_at_once() -> None:
    job = job_that_knows_nothing()
    assert attach(job, 1, 2, node=7, rank=1) == 1
    fleet = job.state.fleet
    assert fleet is not None
    assert fleet.nodes[PlatformId(7)].rank == 1
    assert fleet.nodes[PlatformId(7)].agent is not None


def test_a_node_that_is_shown_with_a_type_the_job_does_not_have_breaks_nothing() -> None:
    """The id is one that the job has given to a worker, so it is that worker, whatever the platform calls it."""
    job = job_that_knows_nothing()
    told = replace(shown(0, 0), node_type=NodeType.EVALUATOR, relaunch_count=2)
    job.apply(NodesListed(nodes=(told, shown(1, 1))), Micros(2))
    fleet = job.state.fleet
    assert fleet is not None
    assert fleet.nodes[PlatformId(0)].node_type is NodeType.WORKER
    assert fleet.replicas[NodeType.WORKER].spent == {0: 2}
