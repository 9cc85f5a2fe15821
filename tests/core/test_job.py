"""The job through its one door: who may attach, what a message of a former life does, how a job ends."""

from __future__ import annotations

import typing

import pytest
from msgspec.structs import replace

from dlrover.core.job import HANDLERS, Job, Origin
from dlrover.core.replay_guard import NUM_STORED_REPLIES
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    Attach,
    Command,
    DeadlineKind,
    DeadlinePassed,
    Done,
    End,
    ExitReason,
    FailureKind,
    FinishJob,
    Idle,
    Incarnation,
    Join,
    JoinRendezvous,
    LeaveReason,
    MasterStarted,
    NodeDisconnected,
    NodeId,
    Round,
    Run,
    Stage,
    StopCause,
    StopJob,
    TellNode,
    Wait,
)
from tests.core.scene import Scene, failure, micros, terms


def test_every_command_has_a_handler() -> None:
    assert set(HANDLERS) == set(typing.get_args(Command))


def test_the_clock_never_goes_back() -> None:
    scene = Scene().at(10)
    scene.do(StopJob())
    with pytest.raises(AssertionError, match="clock went back"):
        scene.job.apply(StopJob(), micros(9))


class TestAttach:
    def test_the_first_node_sets_the_terms_and_a_differing_one_is_told_both_values(self) -> None:
        scene = Scene(terms(2, 4))
        scene.attach("a")
        with pytest.raises(Rejected, match="max_nodes is 4 in the job and 2 there") as refused:
            scene.attach("b", terms=terms(2, 2))
        assert refused.value.code == "terms-differ"

    def test_ranks_are_given_from_the_lowest_free_one(self) -> None:
        scene = Scene(terms(1, 8))
        assert scene.attach("a", rank=1).node_rank == 1
        assert [scene.attach(name).node_rank for name in "bcd"] == [0, 2, 3]
        scene.leave("c")
        assert scene.attach("e").node_rank == 2
        assert scene.attach("f").node_rank == 4

    def test_a_broken_stream_and_back_restarts_nothing(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        before = scene.job.desired(scene.agents["b"].node)
        scene.at(10).break_stream("b")
        attached = scene.at(14).attach("b", running_round=1)
        assert attached.incarnation == 1
        assert attached.desired == before
        scene.tick(100)
        assert isinstance(scene.wish("a"), Run)

    def test_a_restarted_agent_keeps_node_and_rank_in_a_new_incarnation(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        attached = scene.restart_agent("b")
        assert (attached.node, attached.node_rank, attached.incarnation) == (2, 1, 2)
        assert isinstance(attached.desired.wish, Join)
        assert attached.desired.wish.cause is StopCause.FAILURE
        assert isinstance(scene.wish("a"), Join)

    def test_an_agent_that_restarts_before_any_world_costs_nothing(self) -> None:
        scene = Scene(terms(2))
        scene.attach("a")
        scene.join("a")
        scene.restart_agent("a")
        assert scene.job.state.restarts.incident is None
        assert isinstance(scene.wish("a"), Join), "what it joined with before is void"

    @pytest.mark.parametrize("life", ["life-2", ""])
    def test_an_older_life_of_the_same_launch_is_refused(self, life: str) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        assert scene.agents["b"].life == "life-2"
        scene.restart_agent("b")
        with pytest.raises(Rejected) as refused:
            scene.attach("b", incarnation=1, life=life)
        assert refused.value.code == "stale-incarnation"

    def test_an_attach_whose_answer_was_lost_is_answered_again(self) -> None:
        """The node was given up; its agent cannot know that it has a new incarnation since."""
        scene = Scene(terms(2)).gather("a", "b")
        scene.at(10).break_stream("b")
        scene.tick(15)
        unheard = scene.at(16).attach("b", running_round=1, is_answer_lost=True)
        assert unheard.incarnation == 2
        scene.do(NodeDisconnected(node=unheard.node, incarnation=unheard.incarnation))
        attached = scene.at(17).attach("b", running_round=1)
        assert (attached.node, attached.incarnation) == (2, 2)
        assert isinstance(attached.desired.wish, Join)
        scene.rejoin("a", "b")
        assert scene.world("b").round == 2

    def test_it_is_answered_again_even_if_the_node_was_given_up_once_more(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for second in (10, 30):
            agent = scene.job.state.nodes.live[scene.agents["b"].node]
            scene.at(second).do(NodeDisconnected(node=agent.id, incarnation=agent.incarnation))
            scene.tick(second + 5)
            scene.attach("b", is_answer_lost=True)
        assert scene.attach("b").incarnation == 3
        scene.rejoin("a", "b")
        assert scene.world("b").round == 2

    def test_the_first_attach_to_a_master_without_its_journal_may_be_repeated(self) -> None:
        scene = Scene(terms(2))
        command = Attach(
            launch="l", host="h", terms=scene.terms, local_world_size=1, incarnation=Incarnation(7), life="one"
        )
        first, second = scene.do(command).reply, scene.do(command).reply
        assert first == second

    def test_a_delayed_attach_of_the_same_process_disturbs_nobody(self) -> None:
        """It left on a stream that broke, and arrives after the one that was answered."""
        scene = Scene(terms(2)).gather("a", "b")
        scene.at(10).break_stream("b")
        scene.tick(15)
        scene.attach("b")
        scene.rejoin("a", "b")
        world = scene.world("b")
        scene.attach("b", incarnation=1, running_round=1, is_answer_lost=True)
        assert scene.world("b") == world
        scene.finish("b")
        assert isinstance(scene.wish("b"), Idle), "it is still the life that may speak"

    def test_another_shutdown_timeout_is_no_reason_to_refuse(self) -> None:
        scene = Scene(terms(2)).gather("a")
        scene.attach("b", terms=replace(scene.terms, shutdown_timeout=120.0))
        assert scene.job.state.terms == scene.terms, "the first node's counts"

    def test_incarnations_grow_over_the_replacement_of_a_node(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.restart_agent("b")
        scene.break_stream("b")
        attached = scene.attach("c", rank=1)
        assert (attached.node, attached.incarnation) == (3, 3)

    def test_a_node_that_was_given_up_and_comes_back_begins_a_new_life(self) -> None:
        scene = Scene(terms(1, 2)).gather("a", "b")
        scene.at(10).break_stream("b")
        scene.tick(15)
        attached = scene.at(20).attach("b", running_round=1)
        assert (attached.node, attached.node_rank, attached.incarnation) == (2, 1, 2)
        assert isinstance(attached.desired.wish, Join), "its workers belong to a world that is over"

    def test_an_agent_from_a_lost_journal_is_taken_in_above_its_own_numbers(self) -> None:
        """What it ran belongs to a past that nobody knows any more."""
        scene = Scene(terms(1))
        attached = scene.attach("a", incarnation=7, running_round=5)
        assert attached.incarnation == 8
        assert attached.desired.wish == Join(Round(6), StopCause.MEMBERSHIP, "round 6 is the next to form")
        scene.join("a")
        assert scene.world("a").round == 6

    def test_after_a_lost_journal_too_the_first_round_calls_for_those_nobody_has_heard_of(self) -> None:
        scene = Scene(terms(1, 3, first_call=3.0))
        scene.attach("a", incarnation=7, running_round=5)
        scene.at(1).join("a")
        assert isinstance(scene.wish("a"), Wait)
        scene.at(2).attach("b", incarnation=7, running_round=5)
        scene.join("b")
        scene.tick(5)
        assert scene.world("a").group_world_size == 2

    def test_a_master_that_agents_know_from_later_lives_counts_on_from_there(self) -> None:
        """Its journal was lost. Below the epoch they have seen they could not obey it."""
        scene = Scene(terms(1, 3)).gather("a")
        attached = scene.attach("b", master_epoch=7)
        assert (attached.master_epoch, attached.desired.master_epoch) == (8, 8)
        assert TellNode(scene.agents["a"].node) in scene.outcomes[-1].effects, "whoever is there hears of it"
        assert scene.attach("c", master_epoch=7).master_epoch == 8, "once is enough"
        assert scene.restart_master().job.master_epoch == 9

    def test_an_older_epoch_that_an_agent_knows_means_nothing(self) -> None:
        scene = Scene(terms(1)).restart_master()
        assert scene.attach("a", master_epoch=1).master_epoch == 2

    @pytest.mark.parametrize(
        "nonsense",
        [
            {"launch": ""},
            {"procs": 0},
            {"procs": 65_537},
            {"rank": -1},
            {"incarnation": -1},
            {"running_round": 2**63},
            {"master_epoch": 2**63},
        ],
        ids=str,
    )
    def test_nonsense_is_refused(self, nonsense: dict[str, typing.Any]) -> None:
        with pytest.raises(Rejected) as refused:
            Scene().attach("a", **nonsense)
        assert refused.value.code == "malformed"

    def test_after_the_end_an_attach_is_told_the_end(self) -> None:
        scene = Scene(terms(1)).gather("a")
        scene.stop()
        assert isinstance(scene.attach("b").desired.wish, End)
        assert isinstance(scene.restart_agent("a").desired.wish, End)


class TestFormerLives:
    """I6: a message from an older incarnation or an older master changes nothing (`Scene.do` compares the state)."""

    def test_a_command_of_an_older_incarnation_is_refused(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        old = scene.agents["b"]
        scene.restart_agent("b")
        late = NodeDisconnected(node=old.node, incarnation=old.incarnation)
        for command, origin in (
            (late, None),
            (StopJob(), Origin(old.node, old.incarnation, 99)),
        ):
            with pytest.raises(Rejected) as refused:
                scene.do(command, origin)
            assert refused.value.code == "stale-incarnation"

    def test_a_superseded_node_is_refused(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.break_stream("b")
        scene.attach("c", rank=1)
        with pytest.raises(Rejected) as refused:
            scene.do(NodeDisconnected(node=scene.agents["b"].node, incarnation=Incarnation(1)))
        assert refused.value.code == "stale-incarnation"
        with pytest.raises(Rejected, match="any more"):
            scene.job.desired(scene.agents["b"].node)

    def test_a_node_cannot_speak_for_another(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        a, b = scene.agents["a"], scene.agents["b"]
        forged = JoinRendezvous(
            node=b.node, incarnation=b.incarnation, round=Round(2), local_world_size=1, offer="host-b:7"
        )
        with pytest.raises(Rejected) as refused:
            scene.do(forged, Origin(a.node, a.incarnation, a.sequence + 1))
        assert refused.value.code == "wrong-sender"

    def test_an_older_master_epoch_is_refused(self) -> None:
        scene = Scene()
        with pytest.raises(Rejected) as refused:
            scene.do(MasterStarted(1))
        assert refused.value.code == "old-epoch"

    def test_the_journal_of_another_job_is_refused(self) -> None:
        with pytest.raises(Rejected, match=r"'a-job'.*'another'"):
            Scene().do(MasterStarted(2, "another"))


class TestRepeatedCommands:
    def test_a_command_sent_twice_is_applied_once(self) -> None:
        scene = Scene(terms(2))
        scene.attach("a")
        scene.join("a", offer="host-a:1")
        agent, before = scene.agents["a"], scene.job.digest()
        again = JoinRendezvous(
            node=agent.node, incarnation=agent.incarnation, round=Round(1), local_world_size=1, offer="host-a:1"
        )
        outcome = scene.at(5).do(again, Origin(agent.node, agent.incarnation, 1))
        assert outcome.reply == Done()
        assert not outcome.effects
        assert scene.job.digest() == before

    def test_it_is_answered_even_if_it_would_be_refused_now(self) -> None:
        scene = Scene(terms(1))
        scene.attach("a")
        scene.join("a", offer="host-a:1")
        agent = scene.agents["a"]
        again = JoinRendezvous(
            node=agent.node, incarnation=agent.incarnation, round=Round(1), local_world_size=1, offer="host-a:1"
        )
        assert scene.do(again, Origin(agent.node, agent.incarnation, 1)).reply == Done()

    def test_a_goodbye_is_answered_twice(self) -> None:
        scene = Scene(terms(2))
        scene.attach("a")
        scene.leave("a", LeaveReason.STOPPED_BY_USER)
        agent = scene.agents["a"]
        assert scene.job.answered(Origin(agent.node, agent.incarnation, agent.sequence)) == Done()

    def test_the_last_replies_are_kept_and_what_is_older_is_refused(self) -> None:
        scene = Scene(terms(2))
        scene.attach("a")
        agent = scene.agents["a"]
        for sequence in range(1, NUM_STORED_REPLIES + 2):
            scene.join("a", offer=f"host-a:{sequence}")
        assert scene.job.answered(Origin(agent.node, agent.incarnation, 2)) == Done()
        with pytest.raises(Rejected) as refused:
            scene.do(StopJob(), Origin(agent.node, agent.incarnation, 1))
        assert refused.value.code == "too-old"
        assert scene.job.answered(Origin(agent.node, agent.incarnation, NUM_STORED_REPLIES + 2)) is None

    def test_a_refused_command_leaves_its_number_unused(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        with pytest.raises(Rejected):
            scene.join("a", round_=7)
        agent = scene.agents["a"]
        assert scene.job.answered(Origin(agent.node, agent.incarnation, agent.sequence)) is None


class TestDesired:
    def test_the_number_grows_exactly_when_the_wish_changes(self) -> None:
        scene = Scene(terms(2))
        assert scene.attach("a").desired.number == 1
        node = scene.agents["a"].node
        assert list(scene.outcomes[-1].effects) == [TellNode(node)]
        scene.attach("a")
        assert not scene.outcomes[-1].effects
        scene.attach("b")
        assert scene.outcomes[-1].effects == (TellNode(scene.agents["b"].node),), "a does not care"
        scene.join("a")
        assert scene.job.desired(node).number == 2
        assert isinstance(scene.wish("a"), Wait)

    def test_a_new_master_states_it_anew(self) -> None:
        scene = Scene(terms(1)).gather("a")
        before = scene.job.desired(scene.agents["a"].node)
        scene.at(50).restart_master()
        after = scene.job.desired(scene.agents["a"].node)
        assert after.wish == before.wish
        assert (after.master_epoch, after.number) == (2, before.number + 1)


class TestJoin:
    def test_a_join_for_another_round_is_refused(self) -> None:
        scene = Scene(terms(2))
        scene.attach("a")
        for wrong in (0, 2):
            with pytest.raises(Rejected) as refused:
                scene.join("a", round_=wrong)
            assert refused.value.code == "stale-round"

    def test_a_member_cannot_leave_its_world_by_joining_the_next(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        with pytest.raises(Rejected, match="not open") as refused:
            scene.join("a")
        assert refused.value.code == "stale-round"

    def test_more_workers_than_can_be_are_refused(self) -> None:
        """Their sum would not fit into the encoding of the state."""
        scene = Scene(terms(1))
        scene.attach("a")
        with pytest.raises(Rejected) as refused:
            scene.join("a", procs=2**63)
        assert refused.value.code == "malformed"

    def test_a_slow_member_is_told_to_join_again(self) -> None:
        """Somebody fails before a slow member has started; it need not wait for a timeout."""
        scene = Scene(terms(2)).gather("a", "b")
        scene.fail("b")
        assert isinstance(scene.wish("a"), Join)
        assert scene.wish("a").round == 2  # type: ignore[union-attr]

    def test_a_port_is_never_used_for_two_rounds(self) -> None:
        """An offer that served once is refused."""
        scene = Scene(terms(2)).gather("a", "b")
        assert scene.world("b").coordinator == "host-a:1"
        scene.fail("b")
        for name, offer in (("a", "host-a:1"), ("b", "host-b:1"), ("b", "host-a:1")):
            with pytest.raises(Rejected) as refused:
                scene.join(name, offer=offer)
            assert refused.value.code == "offer-used"

    def test_a_new_offer_of_a_waiting_node_replaces_the_old_one(self) -> None:
        scene = Scene(terms(2))
        scene.attach("a")
        scene.attach("b")
        scene.join("a", offer="host-a:1")
        scene.join("a", offer="host-a:2")
        scene.join("b")
        assert scene.world("b").coordinator == "host-a:2"

    def test_global_ranks_follow_the_node_ranks_and_worker_counts(self) -> None:
        """2 nodes x 8, node position 1, local rank 1 is global rank 9 of 16."""
        scene = Scene(terms(2))
        scene.attach("a", rank=1, procs=8)
        scene.attach("b", rank=0, procs=8)
        scene.rejoin("a", "b")
        assert scene.world("a").first_global_rank + 1 == 9
        assert scene.world("a").world_size == 16
        assert scene.world("a").coordinator == "host-b:1"

    def test_no_world_starts_with_a_node_whose_stream_is_broken(self) -> None:
        scene = Scene(terms(2))
        scene.attach("a")
        scene.attach("b")
        scene.join("a")
        scene.break_stream("a")
        scene.join("b")
        assert isinstance(scene.wish("b"), Wait)
        scene.attach("a")
        assert isinstance(scene.wish("b"), Run), "it is back with what it had joined with"

    def test_a_join_that_was_on_its_way_when_the_stream_broke_counts_when_it_is_back(self) -> None:
        scene = Scene(terms(2))
        scene.attach("a")
        scene.attach("b")
        scene.join("b")
        scene.break_stream("a")
        scene.join("a")
        assert isinstance(scene.wish("b"), Wait)
        scene.attach("a")
        assert isinstance(scene.wish("a"), Run)

    def test_a_spare_that_joined_long_ago_does_not_start_alone(self) -> None:
        scene = Scene(terms(1, 2, last_call=30.0)).gather("a", "b", "c")
        scene.at(3600).fail("b")
        assert isinstance(scene.wish("c"), Wait), "the last call counts from the opening of the round"
        scene.rejoin("a", "b")
        assert isinstance(scene.wish("a"), Run)
        assert isinstance(scene.wish("c"), Wait)


class TestLosingNodes:
    def test_five_seconds_for_a_broken_stream(self) -> None:
        scene = Scene(terms(1, 2)).gather("a", "b")
        scene.at(10).break_stream("b")
        assert scene.job.next_deadline() == micros(15)
        assert not scene.tick(14.9)
        scene.tick(15)
        assert isinstance(scene.wish("a"), Join)
        assert scene.wish("a").cause is StopCause.MEMBERSHIP  # type: ignore[union-attr]
        scene.join("a")
        assert scene.world("a").group_world_size == 1
        assert scene.job.state.restarts.num_restarts == 0, "a lost node costs no budget"

    def test_a_silent_node_is_gone_at_once(self) -> None:
        scene = Scene(terms(1, 2)).gather("a", "b")
        scene.at(50).silent("b", last_seen=9.6)
        assert scene.verdicts == ("Node rank 1 (host-b) was silent for 40 s.",)
        assert isinstance(scene.wish("a"), Join)

    def test_workers_that_lost_a_lost_node_pay_nothing(self) -> None:
        scene = Scene(terms(1, 2, last_call=30.0)).gather("a", "b")
        scene.at(10).break_stream("b")
        scene.fail("a", failure(FailureKind.PEER_LOST, at=10))
        scene.join("a")
        scene.tick(15)
        assert scene.world("a").round == 2
        assert scene.job.state.restarts.spent == {}
        assert scene.job.state.restarts.num_without_progress == 0

    def test_nobody_left_and_nobody_back_ends_the_job(self) -> None:
        scene = Scene(terms(1, join_timeout=600.0)).gather("a")
        scene.at(10).break_stream("a")
        scene.tick(15)
        assert scene.job.stage is Stage.RUNNING
        assert scene.job.next_deadline() == micros(615)
        scene.tick(615)
        assert scene.end.reason is ExitReason.NOT_ENOUGH_NODES
        assert scene.end.exit_code == 22
        assert scene.outcomes[-1].effects == (FinishJob(scene.end),)

    def test_a_stale_deadline_is_harmless(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for kind in DeadlineKind:
            scene.do(DeadlinePassed(kind=kind, id=2))
        assert isinstance(scene.wish("a"), Run)

    def test_an_outage_of_the_master_shifts_all_deadlines(self) -> None:
        scene = Scene(terms(2, 4, last_call=30.0, join_timeout=600.0))
        for name in "abc":
            scene.at(0).attach(name)
        scene.at(1).join("a")
        scene.at(2).join("b")
        scene.at(500).restart_master()
        for name in "abc":
            scene.at(510).attach(name)
        assert isinstance(scene.wish("a"), Wait), "the last call was interrupted for 498 s"
        assert scene.job.next_deadline() == micros(530)
        scene.tick(530)
        assert isinstance(scene.wish("a"), Run)

    def test_master_restarts_do_not_postpone_the_join_timeout_for_ever(self) -> None:
        """How long the master lived after its last command is unknown: only the time for coming back is granted."""
        scene = Scene(terms(2, join_timeout=600.0))
        scene.at(0).attach("a")
        scene.join("a")
        scene.at(500).restart_master().attach("a")
        assert scene.job.next_deadline() == micros(600)
        scene.at(590).restart_master().attach("a")
        assert scene.job.next_deadline() == micros(630), "nobody could join before it was back"
        scene.at(610).attach("a")
        scene.at(615).restart_master().attach("a")
        assert scene.job.next_deadline() == micros(635), "no more than was left when the last command came"
        scene.tick(635)
        assert scene.end.reason is ExitReason.RENDEZVOUS_TIMEOUT

    def test_after_a_long_outage_the_join_timeout_leaves_time_for_coming_back(self) -> None:
        scene = Scene(terms(2, join_timeout=600.0))
        scene.attach("a")
        scene.at(36_000).restart_master().attach("a")
        assert scene.job.next_deadline() == micros(36_040)

    def test_after_a_master_start_each_node_has_a_full_window(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.at(10).break_stream("b")
        scene.at(12).restart_master()
        assert scene.job.next_deadline() == micros(52)
        assert scene.job.status().nodes[0].status == "disconnected"


class TestEnd:
    def test_all_finished_is_success(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.finish("a")
        assert isinstance(scene.wish("a"), Idle)
        scene.finish("b")
        assert (scene.end.reason, scene.end.exit_code) == (ExitReason.COMPLETED, 0)
        assert scene.job.stage is Stage.STOPPING
        assert scene.wish("a") == End(scene.end)

    def test_a_finish_that_was_lost_with_the_stream_is_told_by_the_attach(self) -> None:
        scene = Scene(terms(1)).gather("a")
        scene.break_stream("a")
        scene.attach("a", running_round=1, is_finished=True)
        assert scene.end.reason is ExitReason.COMPLETED

    def test_the_master_may_go_when_the_last_node_has_left_and_is_told_once(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.finish("a")
        scene.finish("b")
        assert not scene.leave("a").effects
        assert scene.leave("b").effects == (FinishJob(scene.end),)
        assert scene.job.stage is Stage.STOPPED
        assert scene.job.next_deadline() is None

    def test_nodes_that_do_not_leave_are_given_up(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.at(10).stop()
        assert scene.job.next_deadline() == micros(45)
        scene.at(11).leave("a")
        (outcome,) = scene.tick(45)
        assert outcome.effects == (FinishJob(scene.end),)

    @pytest.mark.parametrize(("timeout", "drains_at"), [(0.0, 15.0), (120.0, 135.0), (float("inf"), 1e9 + 10)])
    def test_nodes_have_the_shutdown_timeout_that_the_user_gave(self, timeout: float, drains_at: float) -> None:
        scene = Scene(replace(terms(1), shutdown_timeout=timeout)).gather("a")
        scene.at(10).stop()
        assert scene.job.next_deadline() == micros(drains_at)

    def test_a_stop_before_anybody_came_ends_at_once(self) -> None:
        assert Scene().stop().effects != ()

    def test_a_restart_of_the_master_leaves_what_was_left_for_leaving(self) -> None:
        scene = Scene(terms(1)).gather("a")
        scene.at(10).stop()
        scene.at(100).restart_master()
        assert scene.job.next_deadline() == micros(135)

    def test_a_master_that_died_before_it_could_exit_is_told_again(self) -> None:
        scene = Scene(terms(1)).gather("a")
        scene.finish("a")
        scene.leave("a")
        scene.restart_master()
        assert FinishJob(scene.end) in scene.outcomes[-1].effects

    def test_stop_on_request(self) -> None:
        scene = Scene(terms(1)).gather("a")
        scene.do(StopJob(message="enough"))
        assert scene.end.reason is ExitReason.STOPPED_BY_USER
        assert scene.end.exit_code == 1
        assert "enough" in scene.end.message
        assert scene.stop().reply == Done(), "asking twice is fine"

    def test_the_last_node_stopped_by_its_user_ends_the_job(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.leave("a", LeaveReason.STOPPED_BY_USER)
        assert isinstance(scene.wish("b"), Join), "another may still come"
        scene.leave("b", LeaveReason.STOPPED_BY_USER)
        assert scene.end.reason is ExitReason.STOPPED_BY_USER
        assert scene.outcomes[-1].effects == (FinishJob(scene.end),)

    def test_the_last_node_preempted_may_be_replaced(self) -> None:
        scene = Scene(terms(1)).gather("a")
        scene.leave("a", LeaveReason.PREEMPTED)
        assert scene.job.end is None
        scene.attach("b")
        scene.join("b")
        assert scene.world("b").round == 2

    def test_a_join_after_the_end_is_refused_and_a_late_failure_is_not(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.stop()
        with pytest.raises(Rejected) as refused:
            scene.join("a", round_=2)
        assert refused.value.code == "job-ended"
        scene.fail("a")
        assert scene.end.first_failure is None

    def test_once_a_member_has_finished_nobody_is_added(self) -> None:
        scene = Scene(terms(1, 3)).gather("a", "b")
        scene.tick(3)
        scene.finish("a")
        scene.attach("c")
        scene.join("c")
        assert isinstance(scene.wish("b"), Run)
        scene.finish("b")
        assert scene.end.reason is ExitReason.COMPLETED

    def test_a_lost_node_after_others_finished_ends_the_job_if_too_few_are_left(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.finish("a")
        scene.at(10).silent("b")
        assert scene.end.reason is ExitReason.NOT_ENOUGH_NODES
        assert "had finished already" in scene.end.message

    def test_a_blip_of_the_last_node_at_work_is_waited_for_as_long_as_silence(self) -> None:
        """With 5 s as usual the job would fail, because no world can form without the node."""
        scene = Scene(terms(2)).gather("a", "b")
        scene.finish("a")
        scene.at(10).break_stream("b")
        assert scene.job.next_deadline() == micros(50)
        scene.tick(49)
        before = scene.world("b")
        assert scene.attach("b", running_round=1).incarnation == 1
        assert scene.world("b") == before, "nothing restarts"
        scene.at(60).break_stream("b")
        scene.tick(100)
        assert scene.end.reason is ExitReason.NOT_ENOUGH_NODES
        assert "had finished already" in scene.end.message

    def test_a_node_that_can_be_done_without_is_not_waited_for_longer(self) -> None:
        scene = Scene(terms(1, 3)).gather("a", "b", "c")
        scene.finish("a")
        scene.at(10).break_stream("b")
        assert scene.job.next_deadline() == micros(15)
        scene.at(11).break_stream("c")
        scene.tick(15)
        assert scene.job.next_deadline() == micros(51), "c is the last hope now"
        scene.tick(51)
        assert scene.job.end is not None

    def test_a_finished_node_without_a_stream_is_not_waited_for_longer(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.finish("a")
        scene.at(10).break_stream("a")
        assert scene.job.next_deadline() == micros(15)

    def test_a_node_that_finished_while_given_up_has_finished(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.at(10).break_stream("b")
        scene.tick(15)
        assert isinstance(scene.wish("a"), Join)
        scene.at(16).finish("a")  # it was done when it was asked back
        assert scene.job.next_deadline() == micros(50), "b may have been done, too"
        scene.at(17).attach("b", running_round=1, is_finished=True)
        assert scene.end.reason is ExitReason.COMPLETED

    def test_a_node_that_was_given_up_is_not_waited_for_beyond_a_window(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.at(10).break_stream("b")
        scene.tick(15)
        scene.at(16).finish("a")
        scene.tick(50)
        assert scene.end.reason is ExitReason.NOT_ENOUGH_NODES

    @pytest.mark.parametrize("is_given_up", [True, False])
    def test_a_node_that_finished_is_not_started_again_though_the_others_went_on(self, is_given_up: bool) -> None:
        scene = Scene(terms(1, 2, last_call=1.0)).gather("a", "b")
        scene.at(10).break_stream("b")
        if is_given_up:
            scene.tick(15)
        else:
            scene.fail("a")
        scene.join("a")
        scene.tick(16 if is_given_up else 11)
        assert scene.world("a").round == 2
        scene.attach("b", running_round=1, is_finished=True)
        assert isinstance(scene.wish("b"), Idle)
        scene.finish("a")
        assert scene.end.reason is ExitReason.COMPLETED

    def test_a_finish_that_is_reported_after_the_others_went_on_counts(self) -> None:
        scene = Scene(terms(1, 2, last_call=1.0)).gather("a", "b")
        scene.at(10).break_stream("b")
        scene.fail("a")
        scene.join("a")
        scene.tick(11)
        scene.attach("b", running_round=1)
        assert isinstance(scene.wish("b"), Join)
        scene.finish("b", round_=1)
        assert isinstance(scene.wish("b"), Idle)

    def test_a_member_of_a_newer_world_has_not_finished(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.fail("a")
        scene.rejoin("a", "b")
        scene.finish("b", round_=1)
        assert isinstance(scene.wish("b"), Run)


class TestFinishedUnderALostJournal:
    """Nobody remembers the world: whoever comes says whether it has finished in it."""

    def test_it_is_not_started_again(self) -> None:
        scene = Scene(terms(1, 2, first_call=3.0))
        assert isinstance(scene.attach("a", incarnation=1, running_round=4, is_finished=True).desired.wish, Idle)
        scene.attach("b", incarnation=1, running_round=4)
        scene.join("b")
        scene.tick(3)
        assert (scene.world("b").round, scene.world("b").group_world_size) == (5, 1)
        scene.finish("b")
        assert scene.end.reason is ExitReason.COMPLETED

    def test_all_finished_is_success_when_nobody_else_came(self) -> None:
        scene = Scene(terms(2))
        for name in "ab":
            scene.attach(name, incarnation=1, running_round=4, is_finished=True)
        assert not scene.tick(39.9)
        scene.tick(40)
        assert (scene.end.reason, scene.end.exit_code) == (ExitReason.COMPLETED, 0)

    def test_too_few_who_still_work_are_told_so_after_a_window(self) -> None:
        scene = Scene(terms(2))
        scene.attach("a", incarnation=1, running_round=4, is_finished=True)
        scene.at(1).attach("b", incarnation=1, running_round=4)
        scene.join("b")
        scene.tick(41)
        assert scene.end.reason is ExitReason.NOT_ENOUGH_NODES
        assert "1 node had finished already, and the 1 left" in scene.end.message


class TestFinishedAndDead:
    def test_a_finished_node_that_dies_at_the_barrier_has_still_finished(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.finish("a")
        scene.at(10).break_stream("a")
        scene.tick(15)
        assert isinstance(scene.wish("b"), Run)
        scene.finish("b")
        assert scene.end.reason is ExitReason.COMPLETED


def test_status_tells_everything_at_a_glance() -> None:
    scene = Scene(terms(2)).gather("a", "b", procs=2)
    status = scene.job.status()
    assert (status.job_name, status.stage, status.round, status.world_size) == ("a-job", Stage.RUNNING, 1, 4)
    assert [(node.node_rank, node.host, node.status, node.wish) for node in status.nodes] == [
        (0, "host-a", "alive", "run"),
        (1, "host-b", "alive", "run"),
    ]
    assert status.verdict == "Round 1 starts: 2 of 2 waiting nodes, 4 workers."
    assert status.digest == scene.job.digest().hex()


def test_below_the_minimum_the_status_says_who_was_lost_and_what_is_waited_for() -> None:
    scene = Scene(terms(2, 3)).gather("a", "b", "c")
    scene.at(50).silent("b", last_seen=10)
    scene.join("a")
    scene.at(51).silent("c", last_seen=11)
    said = scene.job.status().verdict
    assert said == "Node rank 2 (host-c) was silent for 40 s. Round 2: 1 of at least 2 nodes wait."


def test_a_thousand_nodes_meet_in_a_moment() -> None:
    """A join costs the same with ten nodes and with a thousand."""
    count = 1000
    job, the_terms = Job(), terms(count)
    job.apply(MasterStarted(1, "big"), micros(0))
    attach = [
        Attach(launch=f"launch-{index}", host=f"host-{index}", terms=the_terms, local_world_size=8)
        for index in range(count)
    ]
    for command in attach:
        job.apply(command, micros(1))
    for index in range(count):
        node = NodeId(index + 1)
        join = JoinRendezvous(
            node=node, incarnation=Incarnation(1), round=Round(1), local_world_size=8, offer=f"host-{index}:1"
        )
        outcome = job.apply(join, micros(2), Origin(node, Incarnation(1), 1))
    assert len(outcome.effects) == count
    world = job.desired(NodeId(count)).wish
    assert isinstance(world, Run)
    assert world.world.world_size == 8 * count
