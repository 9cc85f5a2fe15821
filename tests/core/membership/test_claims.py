"""A master whose journal was lost, among agents that train on in a world that it knows nothing of."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core.membership.claims import TakeUp, WorldClaim
from dlrover.core.membership.forming import why_held
from dlrover.core.outcome import NotYet
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    Attached,
    ExitReason,
    FailureKind,
    Idle,
    Join,
    LeaveReason,
    NodeId,
    NodeRank,
    Round,
    Run,
    Stage,
    Wait,
    WorldSpec,
)
from dlrover.protocol.messages.sync import JoinSync, SyncFinished, SyncState
from tests.core.scene import Scene, failure, micros, terms


def forgotten(*names: str, procs: int = 2, standby: int = 0, **limits: Any) -> tuple[Scene, dict[str, WorldSpec]]:
    """A job of these nodes runs in round 3; a new master knows nothing of it. What the agents remember is theirs."""
    before = Scene(terms(len(names), standby=standby, **limits)).gather(*names, procs=procs)
    for _ in range(2):
        before.fail(names[0])
        before.rejoin(*names)
    worlds = {name: before.world(name) for name in names}
    scene = Scene(before.terms)
    scene.agents = before.agents
    scene.num_offers = before.num_offers
    return scene, worlds


def come_back(scene: Scene, worlds: dict[str, WorldSpec], name: str, **details: Any) -> Attached:
    fields = {"world": worlds[name], "running_round": worlds[name].round, "master_epoch": 1, "procs": 2}
    return scene.attach(name, former_rank=scene.agents[name].node_rank, **(fields | details))


def test_when_all_members_are_back_the_world_goes_on_and_nobody_restarts() -> None:
    scene, worlds = forgotten(*"abc")
    worlds = {name: replace(world, turns=((Round(2), 7),)) for name, world in worlds.items()}
    lives = {name: agent.incarnation for name, agent in scene.agents.items()}
    for name in "cab":  # in whatever order
        wish = come_back(scene, worlds, name).desired.wish
        assert isinstance(wish, Run)
        assert wish.world == worlds[name], "keep running until we know better"
    state = scene.job.state
    assert state.rendezvous.is_active
    assert state.stage is Stage.RUNNING
    assert scene.members() == [0, 1, 2]
    assert {name: scene.world(name) for name in "abc"} == worlds
    assert {name: agent.incarnation for name, agent in scene.agents.items()} == lives, "a new life would kill workers"
    assert state.master_epoch == 2, "wishes must be newer than all that agents have heard"
    assert scene.job.next_deadline() is None
    assert "no worker restarts" in scene.job.status().verdict
    assert state.restarts.num_restarts == 0


def test_nobody_passes_a_sync_point_before_the_world_is_known() -> None:
    scene, worlds = forgotten("a", "b", procs=1)

    def join(name: str) -> None:
        agent = scene.agents[name]
        scene.send(name, JoinSync(name="x", round=Round(3), node=agent.node, incarnation=agent.incarnation))

    come_back(scene, worlds, "a", procs=1)
    with pytest.raises(Rejected) as refused:
        join("a")
    assert refused.value.code == "world-unknown", "it may try again, which a worker of an old round may not"
    come_back(scene, worlds, "b", procs=1)
    join("a")
    assert isinstance(scene.job.ask(SyncFinished(name="x", round=Round(3))), NotYet)
    join("b")
    assert scene.job.ask(SyncFinished(name="x", round=Round(3))) == SyncState(True)


def test_the_world_is_one_like_any_other_afterwards() -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds, "a")
    come_back(scene, worlds, "b")
    scene.fail("b")
    scene.rejoin("a", "b")
    assert scene.world("a").round == 4
    assert scene.world("a").coordinator != worlds["a"].coordinator
    scene.finish("a")
    scene.finish("b")
    assert scene.end.reason is ExitReason.COMPLETED


def test_nobody_is_suspected_before_the_window_is_over() -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds, "a")
    assert scene.job.next_deadline() == micros(40)
    scene.tick(39.9)
    assert isinstance(scene.wish("a"), Run)
    assert "1 of 2 are" in why_held(scene.job.state.rendezvous)
    scene.tick(40)
    assert isinstance(scene.wish("a"), Join), "somebody is missing: a new round forms"
    assert "only 1 of its 2 nodes" in scene.job.status().verdict
    come_back(scene, worlds, "b")
    scene.rejoin("a", "b")
    assert scene.world("a").round == 4, "the number of a round whose store may still answer is not given again"


def test_newcomers_wait_until_it_is_known() -> None:
    scene, worlds = forgotten("a", "b", standby=1)
    come_back(scene, worlds, "a")
    scene.gather("new")
    assert isinstance(scene.wish("new"), Wait)
    come_back(scene, worlds, "b")
    assert isinstance(scene.wish("new"), Wait)
    assert [node.status for node in scene.job.status().nodes] == ["alive", "standby", "alive"]


@pytest.mark.parametrize(
    "lie", [{"coordinator": "elsewhere:1"}, {"group_rank": 0, "first_global_rank": 0}, {"world_size": 5}]
)
def test_claims_that_contradict_each_other_lead_to_a_new_round(lie: dict[str, Any]) -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds, "a")
    come_back(scene, worlds | {"b": replace(worlds["b"], **lie)}, "b")
    assert not scene.job.state.rendezvous.take_up.claims or scene.job.next_deadline() == micros(40)
    scene.tick(40)
    assert isinstance(scene.wish("a"), Join)
    scene.rejoin("a", "b")
    assert isinstance(scene.wish("a"), Run)


@pytest.mark.parametrize(
    "rubbish",
    [
        {"group_rank": 9},
        {"group_world_size": 10**9},
        {"local_world_size": 0},
        {"first_global_rank": -1},
        {"world_size": 2**62},
        {"coordinator": ""},
        {"round": 2},
    ],
)
def test_a_claim_that_makes_no_sense_is_no_claim(rubbish: dict[str, Any]) -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds | {"a": replace(worlds["a"], **rubbish)}, "a", running_round=worlds["a"].round)
    assert isinstance(scene.wish("a"), Join)


def test_a_member_of_an_older_round_does_not_disturb_the_others() -> None:
    scene, worlds = forgotten("a", "b")
    old = replace(worlds["b"], round=worlds["b"].round - 1)
    come_back(scene, worlds, "a")
    scene.attach("late", world=old, running_round=old.round, incarnation=3)
    assert isinstance(scene.wish("late"), Join)
    come_back(scene, worlds, "b")
    assert scene.world("a") == worlds["a"]


def test_a_member_of_a_newer_round_shows_that_the_world_was_over() -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds, "a")
    new = replace(worlds["b"], round=worlds["b"].round + 1)
    come_back(scene, worlds | {"b": new}, "b")
    assert isinstance(scene.wish("a"), Join)
    assert scene.job.state.rendezvous.next_round == 5


def test_workers_that_die_meanwhile_end_it() -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds, "a")
    scene.fail("a", failure(FailureKind.SIGNAL, signal=9))
    assert isinstance(scene.wish("a"), Join)


def test_an_agent_that_dies_meanwhile_ends_it() -> None:
    scene, worlds = forgotten(*"abc")
    come_back(scene, worlds, "a")
    come_back(scene, worlds, "b")
    scene.restart_agent("a")
    assert isinstance(scene.wish("b"), Join)


def test_a_member_that_leaves_meanwhile_ends_it() -> None:
    scene, worlds = forgotten(*"abc")
    come_back(scene, worlds, "a")
    come_back(scene, worlds, "b")
    scene.leave("a", LeaveReason.PREEMPTED)
    assert isinstance(scene.wish("b"), Join)


def test_a_stream_that_breaks_for_a_moment_does_not() -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds, "a")
    scene.break_stream("a")
    scene.at(3)
    come_back(scene, worlds, "a")
    come_back(scene, worlds, "b")
    assert scene.world("a") == worlds["a"]


def test_the_master_may_die_again_meanwhile() -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds, "a")
    scene.at(30).restart_master()
    come_back(scene, worlds, "a", master_epoch=3)
    assert scene.job.next_deadline() == micros(70), "the window begins anew"
    come_back(scene, worlds, "b", master_epoch=3)
    assert scene.world("a") == worlds["a"]


def test_who_has_finished_meanwhile_is_not_started_again() -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds, "a", is_finished=True)
    assert isinstance(scene.wish("a"), Idle)
    come_back(scene, worlds, "b")
    assert isinstance(scene.wish("b"), Run)
    scene.finish("b")
    assert scene.end.reason is ExitReason.COMPLETED


def test_who_finishes_before_all_are_back_is_not_started_again() -> None:
    scene, worlds = forgotten("a", "b")
    come_back(scene, worlds, "a")
    scene.finish("a")
    come_back(scene, worlds, "b", is_finished=True)
    assert scene.end.reason is ExitReason.COMPLETED


def test_a_job_that_had_been_scaled_keeps_its_world() -> None:
    scene, worlds = forgotten(*"abc")
    scene.terms = terms(2)
    for name in "abc":
        come_back(scene, worlds, name)
    assert scene.members() == [0, 1, 2]
    status = scene.job.status()
    assert (status.min_nodes, status.max_nodes, status.limits_version) == (2, 3, 1)


def test_ranks_are_kept_unless_somebody_has_them_by_now() -> None:
    scene, worlds = forgotten(*"abc")
    scene.attach("new")
    assert scene.agents["new"].node_rank == 0
    assert [come_back(scene, worlds, name).node_rank for name in "cba"] == [2, 1, 3]
    assert scene.members() == [3, 1, 2], "the places in the world stay all the same"


def test_the_loss_of_the_only_one_that_came_back_names_the_round() -> None:
    scene, worlds = forgotten(*"ab")
    come_back(scene, worlds, "a")
    scene.leave("a", LeaveReason.PREEMPTED)
    said = [verdict for outcome in scene.outcomes for verdict in outcome.verdicts]
    assert any("round 3 cannot be taken up again" in verdict for verdict in said), said


def test_a_smaller_job_that_somebody_wants_meanwhile_is_what_comes_of_it() -> None:
    scene, worlds = forgotten(*"abc")
    come_back(scene, worlds, "a")
    come_back(scene, worlds, "b")
    scene.scale(1, 2)
    come_back(scene, worlds, "c")
    assert isinstance(scene.wish("a"), Join), "a world of three is not wanted any more"
    scene.rejoin("a", "b")
    assert scene.members() == [0, 1]
    status = scene.job.status()
    assert (status.min_nodes, status.max_nodes) == (1, 2)


def test_a_larger_minimum_that_somebody_wants_meanwhile_stays_wanted() -> None:
    scene, worlds = forgotten(*"ab")
    come_back(scene, worlds, "a")
    scene.scale(3, 4)
    come_back(scene, worlds, "b")
    assert scene.world("a") == worlds["a"], "a world below a raised minimum trains on"
    status = scene.job.status()
    assert (status.min_nodes, status.max_nodes) == (3, 4)


def test_a_claim_costs_the_same_among_few_and_among_many() -> None:
    size = 2000
    common = {"round": 3, "group_world_size": size, "local_world_size": 1, "world_size": size, "restart_count": 2}
    worlds = [
        WorldSpec(group_rank=place, first_global_rank=place, coordinator="h0:1", **common) for place in range(size)
    ]
    take_up = TakeUp()
    for place, world in enumerate(worlds):
        take_up.add(NodeId(place), WorldClaim(NodeRank(place), world))
    num_looks = 0

    class Watched(dict[Any, Any]):
        def values(self) -> Any:
            nonlocal num_looks
            for value in super().values():
                num_looks += 1
                yield value

    take_up.claims = Watched(take_up.claims)
    assert not take_up.contradicts(replace(worlds[0], group_rank=size))
    assert take_up.contradicts(worlds[5])
    assert num_looks < 10
