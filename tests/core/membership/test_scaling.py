"""Changing how many nodes a job has while it runs, and the nodes that wait beside it."""

from __future__ import annotations

import pytest

from dlrover.core.membership.nodes import MISSED_GRACE
from dlrover.core.membership.standby import FIRST_DELAY, LONGEST_DELAY
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    Detection,
    End,
    ExitReason,
    FailureKind,
    Join,
    Leave,
    LeaveReason,
    NodeDisconnected,
    Run,
    StopCause,
    Wait,
)
from tests.core.scene import Scene, failure, micros, terms


def statuses(scene: Scene) -> dict[int, str]:
    return {node.node_rank: node.status for node in scene.job.status().nodes}


class TestScaling:
    def test_waiting_nodes_join_at_once_when_there_is_room(self) -> None:
        scene = Scene(terms(2)).gather(*"abcd")
        assert scene.members() == [0, 1]
        scene.at(100).scale(2, 4)
        assert isinstance(scene.wish("a"), Join)
        scene.obey("a", "b")
        assert scene.members() == [0, 1, 2, 3]
        assert scene.world("d").round == 2
        status = scene.job.status()
        assert (status.min_nodes, status.max_nodes, status.limits_version) == (2, 4, 1)

    def test_shrinking_leaves_out_the_highest_ranks_and_sends_them_away(self) -> None:
        scene = Scene(terms(2, 4)).gather(*"abcd")
        scene.at(100).scale(2, 3)
        wish = scene.wish("d")
        assert isinstance(wish, Leave)
        assert (wish.reason, wish.exit_code) == ("the job was scaled down", 0)
        assert statuses(scene)[3] == "leaving"
        joined = scene.wish("a")
        assert isinstance(joined, Join)
        assert joined.cause is StopCause.MEMBERSHIP
        scene.obey("c", "a", "b")  # whatever the order in which they come
        assert scene.members() == [0, 1, 2]
        scene.obey("d")
        assert scene.members() == [0, 1, 2]
        assert scene.job.state.restarts.num_restarts == 0, "nobody failed"

    def test_whoever_is_too_many_stays_as_a_standby_if_one_is_wished(self) -> None:
        scene = Scene(terms(1, 3, standby=1)).gather(*"abc")
        scene.at(100).scale(1, 2)
        scene.obey("c", "a")
        assert isinstance(scene.wish("c"), Wait), "its place is that of a lower rank on its way"
        scene.obey("b")
        assert scene.members() == [0, 1]
        assert statuses(scene)[2] == "standby"
        assert scene.job.status().num_standby == 1

    def test_a_world_below_a_raised_minimum_goes_on_until_enough_nodes_are_there(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.at(100).scale(3)
        assert isinstance(scene.wish("a"), Run)
        scene.gather("c")
        scene.obey("a", "b")
        assert scene.members() == [0, 1, 2]

    def test_a_spare_that_is_not_enough_for_a_raised_minimum_stops_nobody(self) -> None:
        scene = Scene(terms(1)).gather("a", "b")
        scene.at(100).scale(3)
        assert isinstance(scene.wish("a"), Run)
        scene.gather("c")
        assert isinstance(scene.wish("a"), Join)

    def test_below_the_minimum_the_job_waits_and_resumes_by_itself(self) -> None:
        scene = Scene(terms(2, 3)).gather(*"abc")
        scene.at(100).scale(3)
        scene.leave("c", LeaveReason.PREEMPTED)
        scene.rejoin("a", "b")
        assert scene.job.status().verdict == "Round 2: 2 of at least 3 nodes wait."
        scene.at(200).gather("d")
        assert scene.members() == [0, 1, 2]

    def test_no_round_is_skipped_or_stuck(self) -> None:
        scene = Scene(terms(2, 2)).gather("a", "b")
        rounds = [scene.world("a").round]
        for second, size in ((100, 4), (200, 3), (300, 4), (400, 2)):
            scene.at(second).scale(2, size)
            for name in "abcd"[: len(scene.agents)]:
                if scene.agents[name].node in scene.job.state.nodes.live:
                    scene.obey(name)
            for name in "abcd"[:size]:
                if name not in scene.agents or scene.agents[name].node not in scene.job.state.nodes.live:
                    scene.agents.pop(name, None)
                    scene.attach(name, launch=f"{name}-{second}")
                    scene.join(name)
                    scene.obey(*"abcd"[: "abcd".index(name)])
            assert scene.members() == list(range(size))
            rounds.append(scene.world("a").round)
        assert rounds == sorted(set(rounds))
        assert rounds[-1] == scene.job.state.rendezvous.round

    def test_scaling_during_a_round_counts_for_that_round(self) -> None:
        scene = Scene(terms(2, 4)).gather(*"abcd")
        scene.at(100).fail("a")
        scene.scale(2, 2)
        assert isinstance(scene.wish("d"), Leave)
        scene.rejoin("a", "b")
        assert scene.members() == [0, 1]

    def test_nodes_that_come_with_the_old_limits_are_welcome(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.at(100).scale(2, 3)
        scene.attach("c")
        scene.join("c")
        scene.obey("a", "b")
        assert scene.members() == [0, 1, 2]
        with pytest.raises(Rejected) as refused:
            scene.attach("d", terms=terms(2, node_unit=2))
        assert refused.value.code == "terms-differ"
        assert "node_unit" in str(refused.value)
        assert "max_nodes" not in str(refused.value), "what was changed by authority is nobody's fault"

    def test_bad_limits_change_nothing(self) -> None:
        scene = Scene(terms(2, node_unit=2)).gather("a", "b")
        for low, high in ((0, 2), (4, 2), (2, 3), (2, 10**9 * 2)):
            with pytest.raises(Rejected) as refused:
                scene.scale(low, high)
            assert refused.value.code == "bad-limits"
        assert scene.job.status().limits_version == 0

    def test_before_anybody_came_and_after_the_end_nothing_can_be_scaled(self) -> None:
        scene = Scene(terms(1))
        with pytest.raises(Rejected) as refused:
            scene.scale(2)
        assert refused.value.code == "not-begun"
        scene.gather("a").finish("a")
        with pytest.raises(Rejected) as refused:
            scene.scale(2)
        assert refused.value.code == "job-ended"

    def test_the_same_limits_again_change_nothing(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.scale(2)
        assert scene.job.status().limits_version == 0

    def test_nobody_is_restarted_in_the_last_minutes(self) -> None:
        scene = Scene(terms(1, 3)).gather(*"abc")
        scene.finish("a")
        scene.scale(1, 2)
        assert isinstance(scene.wish("c"), Run)

    def test_a_dismissed_node_cannot_join_and_ends_with_the_job_if_it_is_quicker(self) -> None:
        scene = Scene(terms(1, 2)).gather("a", "b")
        scene.at(100).scale(1)
        with pytest.raises(Rejected) as refused:
            scene.join("b")
        assert refused.value.code == "dismissed"
        scene.obey("a").finish("a")
        assert isinstance(scene.wish("b"), End)
        scene.leave("b")
        assert scene.end.reason is ExitReason.COMPLETED

    def test_a_dismissed_node_that_left_may_come_again(self) -> None:
        scene = Scene(terms(1, 2)).gather("a", "b")
        scene.at(100).scale(1)
        scene.obey("a", "b")
        scene.at(200).scale(2)
        scene.attach("b", incarnation=0)
        scene.join("b")
        scene.obey("a")
        assert scene.members() == [0, 1]


class TestStandby:
    def test_a_standby_takes_a_lost_place_after_a_second(self) -> None:
        scene = Scene(terms(2, standby=1)).gather(*"abc")
        assert statuses(scene) == {0: "alive", 1: "alive", 2: "standby"}
        scene.at(100).break_stream("b")
        scene.tick(100.9)
        assert isinstance(scene.wish("a"), Run)
        scene.tick(101)
        scene.obey("a")
        assert scene.members() == [0, 2]
        assert scene.job.state.restarts.num_restarts == 0

    def test_who_waits_beyond_the_standbys_is_pending(self) -> None:
        scene = Scene(terms(1, standby=1)).gather(*"abcd")
        assert statuses(scene) == {0: "alive", 1: "standby", 2: "pending", 3: "pending"}
        status = scene.job.status()
        assert (status.num_standby, status.num_pending) == (1, 2)

    def test_all_nodes_agree_on_the_number_of_standbys(self) -> None:
        scene = Scene(terms(1, standby=1)).gather("a")
        with pytest.raises(Rejected) as refused:
            scene.attach("b", terms=terms(1))
        assert "standby is 1 in the job and 0 there" in str(refused.value)


class TestPendTimeout:
    def test_a_node_that_no_world_has_room_for_leaves_with_its_own_code(self) -> None:
        scene = Scene(terms(1, pend_timeout=60.0, standby=1)).gather(*"ab")
        scene.at(10).gather("c")
        assert scene.job.next_deadline() == micros(70)
        scene.tick(69.9)
        assert isinstance(scene.wish("c"), Wait)
        scene.tick(70)
        wish = scene.wish("c")
        assert isinstance(wish, Leave)
        assert wish.exit_code == 22
        assert "pend_timeout" in wish.reason
        scene.obey("c")
        scene.tick(1000)
        assert isinstance(scene.wish("a"), Run), "the job goes on"
        assert isinstance(scene.wish("b"), Wait), "a standby is there to wait"

    def test_an_outage_of_the_master_leaves_them_the_time_that_all_have_for_coming_back(self) -> None:
        scene = Scene(terms(1, pend_timeout=60.0)).gather(*"ab")
        scene.at(10).fail("a")
        scene.rejoin("a")
        scene.at(500).restart_master()
        scene.tick()
        scene.attach("b")
        assert isinstance(scene.wish("b"), Wait), "a, which it may have to replace, is not back yet"
        scene.attach("a")
        scene.tick(540)
        assert isinstance(scene.wish("b"), Leave)

    def test_who_gets_a_place_in_time_stays(self) -> None:
        scene = Scene(terms(1, 2, pend_timeout=60.0)).gather("a", "b", "c")
        scene.at(30).leave("b", LeaveReason.PREEMPTED)
        scene.obey("a")
        assert scene.members() == [0, 2]
        scene.tick(100)
        assert isinstance(scene.wish("c"), Run)

    def test_an_open_round_may_still_take_it(self) -> None:
        scene = Scene(terms(2, pend_timeout=60.0)).gather(*"abc")
        scene.at(59).fail("a")
        scene.tick(61)
        assert isinstance(scene.wish("c"), Wait)
        scene.obey("a", "b").tick(62)
        assert isinstance(scene.wish("c"), Leave)

    def test_without_a_limit_it_waits_until_the_job_ends(self) -> None:
        scene = Scene(terms(1)).gather("a", "b")
        scene.tick(10**6)
        assert isinstance(scene.wish("b"), Wait)


class TestVisitors:
    """A node that comes and goes costs everybody a restart each time."""

    def visit(self, scene: Scene, second: float) -> None:
        """It enters the world, and is lost a moment later."""
        scene.at(second)
        scene.agents.pop("v", None)
        scene.attach("v", launch=f"v-{second}")
        scene.join("v")

    def lost(self, scene: Scene, second: float) -> None:
        scene.at(second).silent("v")
        scene.obey("a")

    def test_each_short_visit_makes_the_next_one_wait_longer(self) -> None:
        scene = Scene(terms(1, 2)).gather("a")
        now, delays = 100.0, []
        for _ in range(9):
            self.visit(scene, now)
            if isinstance(scene.wish("a"), Run):
                at = scene.job.next_deadline()
                assert at is not None
                delays.append(at / 1e6 - now)
                now = at / 1e6
                scene.tick(now)
            else:
                delays.append(0.0)
            scene.obey("a")
            assert scene.members() == [0, 1]
            self.lost(scene, now)
        assert delays[:5] == [0.0, 0.0, FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
        assert max(delays) == LONGEST_DELAY

    def test_a_visit_counts_however_its_end_was_noticed(self) -> None:
        """Its neighbours lose it first, and it is given up while the next round is open already."""
        scene = Scene(terms(1, 2)).gather("a")
        for second in (100, 110, 120):
            self.visit(scene, second)
            if second < 120:
                scene.obey("a")
                scene.at(second + 1).fail("a", failure(FailureKind.PEER_LOST))
                self.lost(scene, second + 2)
        assert isinstance(scene.wish("a"), Run)
        assert scene.job.next_deadline() == micros(112 + FIRST_DELAY)

    def test_a_round_that_opens_anyway_takes_it(self) -> None:
        scene = Scene(terms(1, 2)).gather("a")
        for second in (100, 110):
            self.visit(scene, second)
            scene.obey("a")
            self.lost(scene, second + 1)
        self.visit(scene, 115)
        assert isinstance(scene.wish("a"), Run)
        scene.fail("a")
        scene.obey("a")
        assert scene.members() == [0, 1]

    def test_a_long_visit_clears_its_name(self) -> None:
        scene = Scene(terms(1, 2)).gather("a")
        for second in (100, 110):
            self.visit(scene, second)
            scene.obey("a")
            self.lost(scene, second + 1)
        self.visit(scene, 200)
        scene.obey("a")
        self.lost(scene, 300)
        self.visit(scene, 301)
        assert isinstance(scene.wish("a"), Join)


class TestDetectionTerms:
    def test_the_grace_of_a_broken_stream_is_a_term_of_the_job(self) -> None:
        quick = terms(1, 2)
        quick = type(quick)(limits=quick.limits, detection=Detection(break_grace=2.5, break_grace_with_spare=0.5))
        scene = Scene(quick).gather(*"abc")
        scene.at(100).break_stream("c")
        assert scene.job.next_deadline() == micros(102.5)
        scene.tick(102.5)
        scene.gather("d")
        scene.at(200).break_stream("b")
        assert scene.job.next_deadline() == micros(200.5)

    def test_a_standby_takes_over_at_once_where_the_neighbours_miss_the_node_too(self) -> None:
        """One witness: a connection may be cut on its way. Two: its workers are gone as well."""
        scene = Scene(terms(2, 2)).gather(*"abc")
        scene.at(100).break_stream("b")
        assert scene.job.next_deadline() == micros(101)
        scene.at(100.1).fail("a", failure(FailureKind.PEER_LOST), has_whole_state=True)
        assert scene.job.next_deadline() == micros(100 + MISSED_GRACE)
        scene.obey("a")
        scene.tick(100 + MISSED_GRACE)
        assert scene.members() == [0, 2]

    def test_what_a_missed_node_alone_has_in_memory_is_worth_the_whole_grace(self) -> None:
        scene = Scene(terms(3, 3)).gather(*"abcd")
        scene.at(100).break_stream("b")
        scene.at(100.1).fail("a", failure(FailureKind.PEER_LOST), has_whole_state=True)
        scene.at(100.2).fail("c", failure(FailureKind.PEER_LOST), has_whole_state=False)
        assert scene.job.next_deadline() == micros(101)

    def test_a_failure_of_its_own_is_no_witness_that_a_node_is_gone(self) -> None:
        scene = Scene(terms(2, 2)).gather(*"abc")
        scene.at(100).break_stream("b")
        scene.at(100.1).fail("a", has_whole_state=True)
        assert scene.job.next_deadline() == micros(101)

    def test_without_a_standby_a_missed_node_has_its_usual_grace(self) -> None:
        scene = Scene(terms(2, 2)).gather(*"ab")
        scene.at(100).break_stream("b")
        scene.at(100.1).fail("a", failure(FailureKind.PEER_LOST), has_whole_state=True)
        assert scene.job.next_deadline() == micros(105)

    def test_a_stream_that_broke_by_our_own_fault_says_nothing_about_the_node(self) -> None:
        """The master stood still and agents closed their streams: a node may be busy just then, so it has a full window."""
        scene = Scene(terms(1, 2)).gather(*"abc")
        agent = scene.agents["b"]
        scene.at(100).do(NodeDisconnected(node=agent.node, incarnation=agent.incarnation, is_our_fault=True))
        assert scene.job.next_deadline() == micros(140), "not even a spare makes it shorter"
        scene.at(139).attach("b")
        assert isinstance(scene.wish("b"), Run)

    def test_terms_that_make_no_sense_are_refused(self) -> None:
        for values, word in (
            ({"silence": 9.0, "lease": 8.0, "suspicion": 9.0}, "two heartbeats"),
            ({"lease": 40.0}, "lease"),
            ({"suspicion": 9.0}, "suspicion"),
            ({"suspicion": 41.0}, "suspicion"),
            ({"heartbeat": 0.0}, "above 0"),
            ({"silence": float("inf")}, "finite"),
        ):
            with pytest.raises(ValueError, match=word):
                Detection(**values)

    def test_all_nodes_agree_on_them(self) -> None:
        scene = Scene(terms(1)).gather("a")
        with pytest.raises(Rejected) as refused:
            scene.attach("b", terms=type(scene.terms)(limits=scene.terms.limits, detection=Detection(silence=60.0)))
        assert "silence is 40.0 in the job and 60.0 there" in str(refused.value)
