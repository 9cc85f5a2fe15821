"""A cluster inside its job: attaching agents, data that goes back with the model, servers that are let go."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core.outcome import NotYet
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.cluster import (
    AskCluster,
    ClusterPhase,
    CutTaken,
    ModelRestored,
    ModelSaved,
    ProcessParked,
    ServerBound,
    TakeCut,
    VersionView,
)
from dlrover.protocol.messages.data import (
    Consumption,
    DatasetSpec,
    ExchangeShards,
    RegisterDataset,
    ShardsGiven,
)
from dlrover.protocol.messages.fleet import MigrateNode, NodeType, PlatformId, Resource, ScaleReplicas, Strategy
from dlrover.protocol.messages.job import (
    ExitReason,
    FailureKind,
    Idle,
    JobEnd,
    JoinRendezvous,
    LookAgain,
    ReportFailure,
    ReportFinished,
    Run,
    Wait,
)
from tests.core.fleet.fleet_scene import FleetScene, ps_job
from tests.core.scene import failure, terms

P = ClusterPhase
SERVERS, CHIEF, WORKER = ("n0", "n1"), "n2", "n3"


def begin(num_ps: int = 2) -> FleetScene:
    """Servers, a chief and a worker, all attached."""
    scene = FleetScene(replace(terms(1), strategy=Strategy.PS))
    scene.begin(ps_job(num_workers=2, num_ps=num_ps)).run()
    for node in tuple(scene.cloud):
        scene.attach(f"n{node}")
    return scene


def tell(scene: FleetScene, name: str, command: Any) -> Any:
    agent = scene.agents[name]
    task = scene.world(name)
    named = replace(command, node=agent.node, incarnation=agent.incarnation, round=task.round)
    return scene.send(name, named).reply


def train(scene: FleetScene, step: int = -1, **details: Any) -> FleetScene:
    for name in scene.agents:
        if isinstance(scene.wish(name), Run):
            tell(scene, name, ServerBound(address=f"{name}:{scene.world(name).round}"))
    tell(scene, CHIEF, ModelRestored(step=step, **details))
    assert view(scene).phase is P.TRAINING
    return scene


def view(scene: FleetScene) -> VersionView:
    answer = scene.job.ask(AskCluster())
    assert isinstance(answer, VersionView)
    return answer


def register(scene: FleetScene, name: str, size: int = 100) -> None:
    spec = DatasetSpec(name="clicks", size=size, shard_size=10, batch_size=10)
    tell(scene, name, RegisterDataset(dataset="clicks", spec=spec))


def read(scene: FleetScene, name: str, count: int = 1) -> None:
    """Take so many shards and report them in full."""
    given = tell(scene, name, ExchangeShards(dataset="clicks", want=count))
    assert isinstance(given, ShardsGiven)
    done = tuple(Consumption(shard.id, shard.end - shard.start, step=5) for shard in given.shards)
    assert len(done) == count
    tell(scene, name, ExchangeShards(dataset="clicks", consumed=done))


def end_of(scene: FleetScene) -> JobEnd:
    assert scene.job.end is not None
    return scene.job.end


def num_consumed(scene: FleetScene) -> int:
    return sum(dataset.num_consumed for dataset in scene.job.state.data.datasets.values())


def fail(scene: FleetScene, name: str, kind: FailureKind = FailureKind.SIGNAL) -> None:
    agent = scene.agents[name]
    scene.send(
        name,
        ReportFailure(
            node=agent.node, incarnation=agent.incarnation, round=scene.world(name).round, failures=(failure(kind),)
        ),
    )


def test_agents_attach_from_nodes_of_every_type_and_run_one_process_each() -> None:
    scene = begin()
    kinds = [scene.world(name).task.node_type for name in scene.agents]  # type: ignore[union-attr]
    assert kinds == [NodeType.PS, NodeType.PS, NodeType.CHIEF, NodeType.WORKER]
    assert len({scene.world(name).round for name in scene.agents}) == 4
    train(scene)
    assert view(scene).servers == ("n0:1", "n1:2")
    assert not scene.fleet.servers.is_changed


def test_a_node_of_a_world_may_still_be_no_parameter_server() -> None:
    scene = FleetScene(terms(1)).begin(ps_job()).run()
    with pytest.raises(Rejected) as refused:
        scene.attach("n0")
    assert refused.value.code == ErrorCode.NODE_TYPE


def test_a_parameter_server_job_needs_a_platform() -> None:
    scene = FleetScene(replace(terms(1), strategy=Strategy.PS))
    with pytest.raises(Rejected, match="dlrover local --ps"):
        scene.attach("someone", platform_node=PlatformId(-1))


def test_such_a_job_has_no_rendezvous() -> None:
    scene = begin()
    agent = scene.agents[WORKER]
    join = JoinRendezvous(node=agent.node, incarnation=agent.incarnation, round=1, local_world_size=1, offer="h:1")  # type: ignore[arg-type]
    with pytest.raises(Rejected, match="no rendezvous"):
        scene.send(WORKER, join)


def test_after_the_loss_of_a_server_the_data_goes_back_to_the_cut_of_the_checkpoint() -> None:
    """Design 7: what was reported before the cut stays, everything later is read again, and nothing else."""
    scene = train(begin())
    register(scene, WORKER)
    read(scene, WORKER, 2)
    cut = tell(scene, CHIEF, TakeCut())
    assert isinstance(cut, CutTaken)
    read(scene, WORKER, 3)
    tell(scene, CHIEF, ModelSaved(step=20, cut=cut.cut))
    assert num_consumed(scene) == 50
    assert scene.job.state.data.datasets["clicks"].num_committed == 20
    fail(scene, "n0")
    assert view(scene).version == 2
    train(scene, 20, cut=cut.cut, data_state=cut.data_state)
    assert num_consumed(scene) == 20
    while not scene.job.state.data.datasets["clicks"].is_complete:
        read(scene, WORKER)
    assert num_consumed(scene) == 100


def test_a_model_without_any_checkpoint_has_seen_nothing() -> None:
    scene = train(begin())
    register(scene, WORKER)
    read(scene, WORKER, 2)
    fail(scene, "n1")
    train(scene)
    assert num_consumed(scene) == 0


def test_a_foreign_checkpoint_leaves_the_data_where_it_is() -> None:
    scene = train(begin())
    register(scene, WORKER)
    read(scene, WORKER, 2)
    fail(scene, "n1")
    train(scene, 7)
    assert num_consumed(scene) == 20
    said = [sentence for outcome in scene.outcomes for sentence in outcome.verdicts]
    assert any("Nothing is stored beside the checkpoint of step 7" in sentence for sentence in said)


def test_the_data_goes_on_if_the_user_says_so() -> None:
    scene = train(begin())
    register(scene, WORKER)
    cut = tell(scene, CHIEF, TakeCut())
    read(scene, WORKER, 2)
    fail(scene, "n1")
    train(scene, 7, cut=cut.cut, data_state=cut.data_state, is_data_kept=True)
    assert num_consumed(scene) == 20


def test_a_new_job_goes_on_where_the_checkpoint_of_the_former_one_had_read() -> None:
    former = train(begin())
    register(former, WORKER)
    read(former, WORKER, 4)
    cut = tell(former, CHIEF, TakeCut())
    scene = train(begin(), 30, cut=cut.cut, data_state=cut.data_state)
    register(scene, WORKER)
    assert num_consumed(scene) == 40
    assert tell(scene, CHIEF, TakeCut()).cut > cut.cut


def test_a_lost_worker_gives_its_shards_back_and_nothing_else_happens() -> None:
    scene = train(begin())
    register(scene, WORKER)
    tell(scene, WORKER, ExchangeShards(dataset="clicks", want=2))
    assert scene.job.state.data.datasets["clicks"].num_readers == 1
    before = scene.world(WORKER).round
    fail(scene, WORKER)
    assert scene.job.state.data.datasets["clicks"].num_readers == 0
    assert scene.world(WORKER).round > before
    assert (view(scene).version, view(scene).phase) == (1, P.TRAINING)


def test_a_report_of_an_ended_process_is_stale() -> None:
    scene = train(begin())
    register(scene, WORKER)
    agent = scene.agents[WORKER]
    old = ExchangeShards(
        node=agent.node, incarnation=agent.incarnation, round=scene.world(WORKER).round, dataset="clicks", want=1
    )
    fail(scene, "n0")
    for late in (old, TakeCut(node=agent.node, incarnation=agent.incarnation, round=old.round)):
        with pytest.raises(Rejected) as refused:
            scene.send(WORKER, late)
        assert refused.value.code == ErrorCode.STALE_ROUND


def park_and_save(scene: FleetScene, step: int) -> dict[str, Any]:
    assert view(scene).phase is P.PARKING
    for name in (CHIEF, WORKER):
        tell(scene, name, ProcessParked(step=step))
    assert view(scene).phase is P.SAVING
    cut = tell(scene, CHIEF, TakeCut())
    tell(scene, CHIEF, ModelSaved(step=step, cut=cut.cut))
    assert view(scene).phase is P.GATHERING
    return {"cut": cut.cut, "data_state": cut.data_state}


def test_other_numbers_of_servers_lose_no_record_and_old_ones_go_when_all_have_moved() -> None:
    scene = train(begin())
    register(scene, WORKER)
    read(scene, WORKER, 3)
    scene.do(ScaleReplicas(node_type=NodeType.PS, count=1))
    seen = park_and_save(scene, 40)
    assert isinstance(scene.wish("n1"), Wait)
    assert 1 not in scene.removed
    train(scene, 40, **seen)
    assert scene.removed == [1]
    assert num_consumed(scene) == 30
    assert view(scene).servers == (f"n0:{scene.world('n0').round}",)


def test_a_server_is_exchanged_for_another_node() -> None:
    scene = train(begin())
    scene.do(MigrateNode(node=PlatformId(0), resource=Resource(cpu=2)))
    new = max(scene.cloud)
    scene.run(new)
    assert view(scene).phase is P.TRAINING
    scene.attach(f"n{new}")
    seen = park_and_save(scene, 10)
    train(scene, 10, **seen)
    assert scene.removed == [0]
    assert view(scene).servers[0].startswith(f"n{new}:")


def test_a_server_whose_node_is_lost_is_replaced_by_the_platform() -> None:
    scene = train(begin())
    scene.vanish(1)
    assert (view(scene).version, view(scene).phase) == (2, P.GATHERING)
    new = max(scene.cloud)
    del scene.agents["n1"]
    scene.run(new)
    scene.attach(f"n{new}")
    train(scene)
    assert len(view(scene).servers) == 2


def test_the_job_completes_when_chief_and_workers_have_ended() -> None:
    scene = train(begin())
    for name in (CHIEF, WORKER):
        agent = scene.agents[name]
        round_ = scene.world(name).round
        scene.send(name, ReportFinished(node=agent.node, incarnation=agent.incarnation, round=round_))
        assert not isinstance(scene.wish(name), Run)
    assert end_of(scene).reason is ExitReason.COMPLETED


def test_who_has_finished_waits_for_the_others() -> None:
    scene = train(begin())
    agent = scene.agents[WORKER]
    scene.send(WORKER, ReportFinished(node=agent.node, incarnation=agent.incarnation, round=scene.world(WORKER).round))
    assert isinstance(scene.wish(WORKER), Idle)
    assert scene.job.end is None


def test_a_process_that_fails_again_and_again_ends_the_job() -> None:
    scene = train(begin())
    for _ in range(3):
        fail(scene, WORKER, FailureKind.EXCEPTION)
        assert scene.job.end is None
    fail(scene, WORKER, FailureKind.EXCEPTION)
    assert end_of(scene).reason is ExitReason.CODE_ERROR
    assert "worker-0 failed 4 times in a row" in end_of(scene).message
    assert end_of(scene).first_failure is not None


def test_a_coordinator_that_waits_for_its_workers_hears_of_each_at_once() -> None:
    """Without it the question would wait for a minute, and a chief that had waited so long counted as one that lived long."""
    scene = begin()
    train(scene)
    fail(scene, WORKER)
    agent, round_ = scene.agents[WORKER], scene.world(WORKER).round
    bound = ServerBound(address="h3:9", node=agent.node, incarnation=agent.incarnation, round=round_)
    outcome = scene.send(WORKER, bound)
    assert view(scene).workers == {0: "h3:9"}
    assert any(isinstance(effect, LookAgain) and "cluster" in effect.topics for effect in outcome.effects)


def test_the_loss_of_a_coordinator_is_the_loss_of_its_version() -> None:
    """At once: a chief that came back first, to find that it cannot go on, would cost a start of its process."""
    scene = train(begin())
    tell(scene, CHIEF, ServerBound(address="n2:1", is_coordinator=True))
    fail(scene, CHIEF)
    assert view(scene).version == 2
    assert "Version 2 of the cluster begins: chief-0 is lost." in scene.verdicts
    # While servers are gathered nothing has met it: it comes again within the version.
    tell(scene, CHIEF, ServerBound(address="n2:2", is_coordinator=True))
    fail(scene, CHIEF)
    assert view(scene).version == 2


def test_with_the_node_of_a_coordinator_its_version_is_lost() -> None:
    scene = train(begin())
    tell(scene, CHIEF, ServerBound(address="n2:1", is_coordinator=True))
    scene.vanish(2)
    assert view(scene).version == 2


def test_a_chief_beside_living_variables_starts_again_within_its_version() -> None:
    scene = train(begin())
    fail(scene, CHIEF)
    assert view(scene).version == 1
    with pytest.raises(Rejected, match="cannot coordinate"):
        tell(scene, WORKER, ServerBound(address="n3:1", is_coordinator=True))


@pytest.mark.parametrize(("step", "reason"), [(0, ExitReason.CODE_ERROR), (20, ExitReason.WORKER_ERROR)])
def test_the_save_of_a_fresh_model_does_not_show_that_its_program_runs(step: int, reason: ExitReason) -> None:
    """A coordinator saves before its first batch. A program that fails in that batch is wrong all the same."""
    scene = begin()
    train(scene)
    assert tell(scene, CHIEF, TakeCut()) == CutTaken(cut=0)
    tell(scene, CHIEF, ModelSaved(step=step, cut=0))
    while scene.job.end is None:
        fail(scene, CHIEF)
    assert end_of(scene).reason is reason


def test_a_script_that_cannot_run_is_not_tried_again() -> None:
    scene = begin()
    fail(scene, CHIEF, FailureKind.BAD_SCRIPT)
    assert end_of(scene).reason is ExitReason.CODE_ERROR


def test_a_question_waits_for_another_view() -> None:
    scene = train(begin())
    known = view(scene).number
    waiting = scene.job.ask(AskCluster(seen=known, wait=60.0))
    assert isinstance(waiting, NotYet)
    fail(scene, "n0")
    assert isinstance(scene.job.ask(AskCluster(seen=known)), VersionView)


@pytest.mark.parametrize("phase", [P.GATHERING, P.RESTORING, P.TRAINING, P.PARKING, P.SAVING])
def test_a_new_master_goes_on_in_every_phase(phase: ClusterPhase) -> None:
    """Design 15.8."""
    scene = begin()
    if phase is not P.GATHERING:
        for name in scene.agents:
            tell(scene, name, ServerBound(address=f"{name}:1"))
    if phase not in (P.GATHERING, P.RESTORING):
        tell(scene, CHIEF, ModelRestored(step=-1))
    if phase in (P.PARKING, P.SAVING):
        scene.do(ScaleReplicas(node_type=NodeType.PS, count=1))
    if phase is P.SAVING:
        for name in (CHIEF, WORKER):
            tell(scene, name, ProcessParked(step=3))
    assert view(scene).phase is phase
    scene.restart_master()
    scene.list()
    for name in scene.agents:
        scene.attach(name)
    assert view(scene).phase is phase
    if phase is P.PARKING:
        park_and_save(scene, 3)
    elif phase is P.SAVING:
        tell(scene, CHIEF, ModelSaved(step=3))
    if phase is P.RESTORING:
        tell(scene, CHIEF, ModelRestored(step=-1))
    elif phase is not P.TRAINING:
        train(scene, -1)
    assert view(scene).phase is P.TRAINING


def test_a_chief_that_does_not_save_in_time_is_given_up() -> None:
    scene = train(begin())
    scene.do(ScaleReplicas(node_type=NodeType.PS, count=1))
    scene.tick((scene.now + 31_000_000) / 1e6)
    assert (view(scene).version, view(scene).phase) == (2, P.GATHERING)


@pytest.mark.parametrize(
    "command",
    [
        ModelRestored(step=-2),
        ModelRestored(step=1, cut=-2),
        ModelSaved(step=3, cut=0),
        ModelSaved(step=2**60),
        ProcessParked(step=-5),
        ServerBound(address="x" * 300),
    ],
)
def test_numbers_that_make_no_sense_are_refused(command: Any) -> None:
    scene = train(begin())
    with pytest.raises(Rejected):
        tell(scene, CHIEF, command)
