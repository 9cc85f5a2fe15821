"""The node check in the course of a job: who is checked, when, with whom, and what the verdict means for the job."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core.job import Job
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.check import CheckTerms, ExitClass
from dlrover.protocol.messages.fleet import FleetSpec, NodeExit
from dlrover.protocol.messages.job import (
    Check,
    End,
    ExitReason,
    FailureKind,
    Join,
    JoinCheck,
    Leave,
    LeaveReason,
    Run,
    ScaleJob,
    StopCause,
    Wait,
)
from tests.core.check.check_lab import Fault, Layout, random_layout
from tests.core.check.check_scene import CheckScene, check_terms
from tests.core.fleet.fleet_scene import FleetScene, workers
from tests.core.scene import failure

LETTERS = "abcdefgh"


def begin(num_nodes: int, *, min_nodes: int | None = None, layout: Layout | None = None, **check: object) -> CheckScene:
    """So many nodes have come; none has done anything yet."""
    terms = check_terms(num_nodes if min_nodes is None else min_nodes, num_nodes, **check)
    return CheckScene(terms=terms, layout=layout or Layout(num_nodes)).arrive(*LETTERS[:num_nodes])


# The usual way.


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 6])
def test_healthy_nodes_are_checked_once_and_then_train(num_nodes: int) -> None:
    scene = begin(num_nodes)
    assert isinstance(scene.wish("a"), JoinCheck)
    scene.settle()
    assert scene.running() == list(LETTERS[:num_nodes])
    assert scene.num_runs == num_nodes
    assert all(result.status == "healthy" and result.elapsed_ms > 0 for result in map(scene.result, scene.agents))
    assert scene.said("node status")
    assert scene.said("elapsed")


def test_a_group_runs_in_a_small_world_of_its_own() -> None:
    scene = begin(4).settle(until=Check)
    scene.frozen = set(LETTERS[1:4])
    for name in "bcd":
        wish = scene.wish(name)
        if isinstance(wish, JoinCheck):
            scene.join_check(name, wish.round)
    worlds = {name: scene.wish(name).world for name in "abcd"}  # type: ignore[union-attr]
    assert [worlds[name].coordinator for name in "abcd"] == ["host-a:1", "host-a:1", "host-c:1", "host-c:1"]
    assert [worlds[name].first_global_rank for name in "abcd"] == [0, 2, 0, 2]
    assert {world.world_size for world in worlds.values()} == {4}
    assert {world.group_world_size for world in worlds.values()} == {2}


def test_a_group_runs_as_soon_as_its_members_are_there() -> None:
    """Phase 2 of another group must not wait for a slow member of the first."""
    layout = Layout(4, faults={3: Fault.NETWORK})
    scene = begin(4, layout=layout)
    scene.settle(until=Check)
    for name in "abcd":
        scene.obey(name)
    assert isinstance(scene.wish("a"), JoinCheck), "the second phase"
    scene.join_check("a", 2)
    assert isinstance(scene.wish("a"), Wait)
    scene.join_check("d", 2)
    assert isinstance(scene.wish("a"), Check)
    assert isinstance(scene.wish("b"), JoinCheck)


def test_nobody_trains_before_the_check() -> None:
    scene = begin(2)
    with pytest.raises(Rejected, match="must pass the node check") as refusal:
        scene.join("a")
    assert refusal.value.code == "not-checked"


def test_the_status_tells_how_many_have_come_to_the_check_and_how_many_are_in_it() -> None:
    """They are not in the round yet: that nobody waits there says nothing about what the job waits for."""
    scene = CheckScene(terms=check_terms(3, 3), layout=Layout(3))
    assert scene.job.status().verdict == "No node has attached yet."
    scene.arrive("a", "b")
    assert scene.job.status().verdict == "Round 1: 0 of at least 3 nodes have come to the node check."
    scene.settle()
    assert scene.job.status().verdict == "Round 1: 2 of at least 3 nodes have come to the node check."
    scene.arrive("c").settle(until=Check)
    scene.obey("a")
    assert scene.job.status().verdict == (
        "Node check of round 1 begins with node ranks 0-2. Round 1: 2 of 3 nodes are still being checked."
    )
    scene.settle()
    assert scene.job.status().verdict == "Round 1 starts: 3 of 3 waiting nodes, 6 workers."


def test_without_a_check_there_is_none_to_join() -> None:
    scene = CheckScene(terms=replace(check_terms(1), check=None)).arrive("a")
    with pytest.raises(Rejected, match="no node check") as refusal:
        scene.join_check("a", 1)
    assert refusal.value.code == "no-node-check"


# Bad nodes.


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("fault", [Fault.COMPUTE, Fault.DEVICE])
def test_a_faulty_node_leaves_and_the_others_train(num_nodes: int, fault: Fault) -> None:
    bad = num_nodes - 1
    scene = begin(num_nodes, min_nodes=num_nodes - 1, layout=Layout(num_nodes, faults={bad: fault}))
    scene.settle()
    assert scene.running() == []  # the first call of the training round: one more may come
    scene.pass_time(31).settle()
    assert scene.running() == list(LETTERS[:bad])
    result = scene.result(LETTERS[bad])
    assert result is not None
    assert result.status == "faulty"
    assert "boom" in result.reason
    assert scene.agents[LETTERS[bad]].node not in scene.job.state.nodes.live


def test_a_faulty_node_is_told_why_and_leaves_with_a_code() -> None:
    scene = begin(4, min_nodes=3, layout=Layout(4, faults={2: Fault.COMPUTE}))
    scene.settle(until=Leave)
    wish = scene.wish("c")
    assert isinstance(wish, Leave)
    assert wish.exit_code == 20
    assert "its computation failed" in wish.reason


def test_the_last_node_of_six_is_found_replaced_and_the_replacement_passes() -> None:
    """Acceptance: phase 0 marks 4 and 5, phase 1 clears 4; 5 leaves, is replaced, and the next check passes."""
    scene = begin(6, layout=Layout(6, faults={5: Fault.NETWORK})).settle()
    assert scene.running() == []
    assert [scene.result(name).status for name in "abcdef"] == ["healthy"] * 5 + ["faulty"]  # type: ignore[union-attr]
    former = scene.agents.pop("f")
    scene.layout = Layout(6)
    scene.arrive("g").settle()
    assert scene.agents["g"].node_rank == former.node_rank
    assert scene.running() == list("abcdeg")
    assert all(scene.result(name).status == "healthy" for name in "abcdeg")  # type: ignore[union-attr]


def test_idle_nodes_test_the_links_of_the_one_they_wait_for() -> None:
    scene = begin(4, layout=Layout(4, faults={3: Fault.COMPUTE})).settle()
    scene.agents.pop("d")
    scene.layout = Layout(4, faults={3: Fault.NETWORK})  # passes alone
    scene.arrive("e").settle()
    assert scene.result("e").status == "faulty"  # type: ignore[union-attr]
    assert scene.running() == []


def test_all_faulty_ends_the_job() -> None:
    scene = begin(3, layout=Layout(3, faults=dict.fromkeys(range(3), Fault.COMPUTE))).settle()
    assert scene.end.reason is ExitReason.NODE_CHECK_FAILED
    assert scene.end.exit_code == 20
    assert "node ranks 0-2 faulty" in scene.end.message


def test_two_nodes_with_a_bad_link_fail_after_the_second_attempt() -> None:
    scene = begin(2, layout=Layout(2, broken_links={(0, 1)})).settle()
    assert scene.job.state.check.num_checks == 2
    assert scene.said("made once more")
    assert scene.end.reason is ExitReason.NODE_CHECK_FAILED
    assert "the link between node ranks 0 and 1 is suspect" in scene.end.message
    assert all(scene.result(name).status == "unproven" for name in "ab")  # type: ignore[union-attr]


def test_a_link_that_recovers_costs_one_attempt() -> None:
    scene = begin(2, layout=Layout(2, broken_links={(0, 1)}))
    while not scene.said("made once more"):
        assert any(scene.obey(name) for name in "ab")
    scene.layout = Layout(2)
    scene.settle()
    assert scene.running() == ["a", "b"]


def test_newcomers_that_cannot_be_proved_leave_a_world_alone() -> None:
    scene = begin(2, min_nodes=2)
    scene.terms = replace(scene.terms, limits=replace(scene.terms.limits, max_nodes=4))
    scene = CheckScene(terms=scene.terms, layout=Layout(4)).arrive("a", "b")
    scene.settle().pass_time(4).settle().pass_time(4).settle()
    world = scene.world("a")
    scene.layout = Layout(4, broken_links={(2, 3)})
    scene.frozen = {"a", "b"}
    scene.arrive("c", "d").settle()
    assert scene.world("a") == world
    assert all(scene.result(name).status == "unproven" for name in "cd")  # type: ignore[union-attr]
    assert set(scene.job.state.nodes.holders) == {0, 1}


# Slow nodes.


def test_a_straggler_is_told_so_by_its_next_wish_and_nobody_else_is() -> None:
    scene = begin(6, layout=Layout(6, slow={4})).settle(until=Join)
    notes = {name: scene.wish(name).note for name in "abcdef" if isinstance(scene.wish(name), Join)}
    assert "this node slow" in notes.pop("e")
    assert not any(notes.values())


def test_a_straggler_is_named_and_trains() -> None:
    scene = begin(6, layout=Layout(6, slow={4})).settle()
    assert scene.running() == list("abcdef")
    result = scene.result("e")
    assert result is not None
    assert result.status == "straggler"
    assert scene.said("node rank 4 slow")


def test_a_straggler_leaves_where_it_is_excluded() -> None:
    layout = Layout(6, slow={4})
    scene = begin(6, min_nodes=5, layout=layout, excludes_stragglers=True).settle(until=Leave)
    wish = scene.wish("e")
    assert isinstance(wish, Leave)
    assert wish.exit_code == 21
    scene.settle().pass_time(31).settle()
    assert scene.running() == list("abcdf")


# Nodes that come and go.


def test_a_node_that_dies_in_the_middle_is_named_at_once_and_its_partner_cleared() -> None:
    """Acceptance: peers get a verdict naming it, and need not wait for their own timeouts."""
    scene = begin(4, min_nodes=3, layout=Layout(4, faults={2: Fault.DEATH}))
    scene.frozen = {"d"}  # its task would hang until the library gives up
    scene.settle(until=Check)
    scene.join_check("d", 1)
    assert isinstance(scene.wish("d"), Check)
    scene.obey("c")
    assert isinstance(scene.wish("d"), Wait), "its run cannot pass any more"
    scene.frozen = set()
    scene.settle().pass_time(31).settle()
    assert scene.running() == ["a", "b", "d"]
    assert scene.result("c").status == "faulty"  # type: ignore[union-attr]
    assert scene.result("d").status == "healthy"  # type: ignore[union-attr]


def test_a_node_that_joins_in_the_middle_is_checked_in_the_next_phase() -> None:
    terms = check_terms(2, 3)
    scene = CheckScene(terms=terms, layout=Layout(3)).arrive("a", "b")
    scene.obey("a"), scene.obey("b")
    scene.pass_time(4)
    assert isinstance(scene.wish("a"), Check)
    scene.obey("a")
    scene.arrive("c").obey("c")
    assert isinstance(scene.wish("c"), Wait)
    scene.obey("b")
    assert scene.job.state.check.cycle is not None, "another phase, for the newcomer"
    scene.settle()
    assert scene.running() == ["a", "b", "c"]
    assert scene.result("c").status == "healthy"  # type: ignore[union-attr]


def test_a_node_that_leaves_in_order_is_not_blamed() -> None:
    scene = begin(4, min_nodes=3).settle(until=Check)
    scene.leave("d", LeaveReason.PREEMPTED)
    scene.agents.pop("d")
    scene.settle().pass_time(31).settle()
    assert scene.running() == ["a", "b", "c"]
    assert not scene.said("faulty")


def test_an_agent_that_restarts_in_the_middle_is_checked_anew_without_blame() -> None:
    scene = begin(4).settle(until=Check)
    scene.restart_agent("d", procs=2)
    assert isinstance(scene.wish("d"), JoinCheck)
    scene.settle()
    assert scene.running() == ["a", "b", "c", "d"]
    assert not scene.said("faulty")


def test_a_replacement_on_the_same_rank_is_checked_in_place_of_the_dead() -> None:
    scene = begin(4).settle(until=Check)
    scene.break_stream("d")
    scene.agents.pop("d")
    scene.arrive("e", rank=3)
    scene.settle()
    assert scene.running() == ["a", "b", "c", "e"]


def test_who_never_comes_to_the_next_phase_is_at_fault() -> None:
    scene = begin(4, min_nodes=3, layout=Layout(4, faults={3: Fault.NETWORK}))
    scene.settle(until=Check)
    for name in "abcd":
        scene.obey(name)
    scene.frozen = {"b"}
    scene.settle()
    assert scene.running() == []
    scene.pass_time(331).settle()
    assert isinstance(scene.wish("b"), Leave)
    assert "did not join" in scene.wish("b").reason  # type: ignore[union-attr]


def test_who_does_not_report_in_time_has_failed() -> None:
    scene = begin(4, min_nodes=3, timeout=100.0).settle(until=Check)
    scene.frozen = {"d"}
    scene.settle()
    assert isinstance(scene.wish("d"), Check)
    scene.pass_time(131)
    assert not isinstance(scene.wish("d"), Check)
    assert isinstance(scene.wish("a"), JoinCheck), "another phase is needed"
    scene.settle().pass_time(131).settle()
    scene.pass_time(131).settle().pass_time(131).settle()
    assert scene.running() == ["a", "b", "c"]


def test_a_partner_of_a_failed_one_is_not_waited_for_as_long() -> None:
    scene = begin(4).settle(until=Check)
    for name in "abcd":
        if isinstance(scene.wish(name), JoinCheck):
            scene.join_check(name, 1)
    scene.frozen = {"d"}
    scene.report("c", 1, exit_class=ExitClass.SETUP)
    scene.settle()
    assert isinstance(scene.wish("d"), Check)
    scene.pass_time(31)
    assert isinstance(scene.wish("d"), JoinCheck)
    scene.frozen = set()
    scene.settle()
    assert scene.running() == ["a", "b", "c", "d"]


def test_a_setup_failure_is_tried_again() -> None:
    """A port that somebody else took between the offer and its use is nobody's fault."""
    scene = begin(2).settle(until=Check)
    for name in "ab":
        if isinstance(scene.wish(name), JoinCheck):
            scene.join_check(name, 1)
    scene.report("a", 1, exit_class=ExitClass.SETUP)
    scene.report("b", 1, exit_class=ExitClass.SETUP)
    scene.settle()
    assert scene.running() == ["a", "b"]


def test_too_few_nodes_for_a_check_give_up_with_a_reason() -> None:
    scene = CheckScene(terms=check_terms(3), layout=Layout(3)).arrive("a", "b").settle()
    assert isinstance(scene.wish("a"), Wait)
    scene.pass_time(601)
    assert scene.end.reason is ExitReason.RENDEZVOUS_TIMEOUT
    assert "2 of at least 3 nodes came to the node check" in scene.end.message


def test_a_long_check_does_not_run_into_the_join_timeout() -> None:
    scene = begin(2, timeout=5000.0).settle(until=Check)
    scene.pass_time(700)
    assert scene.job.end is None
    scene.settle()
    assert scene.running() == ["a", "b"]


# Later rounds.


def fail_and_come_back(scene: CheckScene, name: str = "a") -> None:
    scene.fail(name, failure(FailureKind.EXCEPTION, at=scene.now / 1e6))


def test_a_fresh_pass_spares_the_check_before_a_restart() -> None:
    scene = begin(2).settle()
    num_runs = scene.num_runs
    scene.pass_time(300)
    fail_and_come_back(scene)
    assert isinstance(scene.wish("b"), Join)
    scene.settle()
    assert scene.world("a").round == 2
    assert scene.num_runs == num_runs


@pytest.mark.parametrize(("fresh_for", "waited"), [(600.0, 601.0), (0.0, 1.0)])
def test_an_old_pass_does_not(fresh_for: float, waited: float) -> None:
    scene = begin(2, fresh_for=fresh_for).settle()
    num_runs = scene.num_runs
    scene.pass_time(waited)
    fail_and_come_back(scene)
    wish = scene.wish("b")
    assert isinstance(wish, JoinCheck)
    assert wish.cause is StopCause.FAILURE
    scene.settle()
    assert scene.world("a").round == 2
    assert scene.num_runs == num_runs + 2


def test_a_node_that_turned_bad_is_found_before_the_restart() -> None:
    scene = begin(4, min_nodes=3, fresh_for=0.0).settle()
    scene.pass_time(100)
    scene.layout = Layout(4, faults={1: Fault.COMPUTE})
    fail_and_come_back(scene)
    scene.settle().pass_time(31).settle()
    assert scene.running() == ["a", "c", "d"]


def test_a_newcomer_is_checked_beside_a_world_that_runs_on() -> None:
    scene = CheckScene(terms=check_terms(2, 4), layout=Layout(4)).arrive("a", "b").settle().pass_time(4).settle()
    scene.pass_time(4).settle()
    world = scene.world("a")
    scene.arrive("c", "d")
    while not isinstance(scene.wish("c"), Join):
        assert scene.world("a") == world, "nobody stops for a check"
        assert scene.obey("c") | scene.obey("d")
    scene.settle()
    assert scene.running() == ["a", "b", "c", "d"]


def test_a_faulty_newcomer_never_stops_the_world() -> None:
    scene = CheckScene(terms=check_terms(2, 3), layout=Layout(3)).arrive("a", "b").settle().pass_time(4).settle()
    scene.pass_time(4).settle()
    world = scene.world("a")
    scene.layout = Layout(3, faults={2: Fault.COMPUTE})
    scene.arrive("c").settle()
    assert scene.world("a") == world
    assert scene.result("c").status == "faulty"  # type: ignore[union-attr]


def test_who_waited_for_long_is_checked_again_when_a_round_opens() -> None:
    terms = replace(check_terms(2, 2), standby=1)
    scene = CheckScene(terms=terms, layout=Layout(3)).arrive("a", "b", "c").settle()
    assert scene.running() == ["a", "b"]
    scene.pass_time(700)
    scene.layout = Layout(3, faults={2: Fault.COMPUTE})
    fail_and_come_back(scene)
    assert isinstance(scene.wish("c"), JoinCheck)
    scene.settle()
    assert scene.running() == ["a", "b"]


def with_fresh_newcomers(**check: object) -> CheckScene:
    """`c` and `d` came later than `a` and `b`; when workers fail only the pass of those is old, and they are checked again."""
    scene = CheckScene(terms=check_terms(2, 4, **check), layout=Layout(4)).arrive("a", "b").settle()
    scene.pass_time(4).settle().pass_time(4).settle()
    scene.pass_time(500).arrive("c", "d").settle()
    assert scene.running() == ["a", "b", "c", "d"]
    scene.pass_time(200)
    fail_and_come_back(scene)
    return scene


def until_checked(scene: CheckScene, *names: str) -> None:
    """Everybody does what it shall, but the tasks of the check take a while."""
    while not all(isinstance(scene.wish(name), Check) for name in names):
        for name in scene.agents:
            if not isinstance(scene.wish(name), Check):
                scene.obey(name)


def test_a_round_waits_for_members_that_are_being_checked() -> None:
    """Enough others wait, and the last call for the members is over long before their check: no world begins without them."""
    scene = with_fresh_newcomers()
    number = scene.job.state.rendezvous.next_round
    until_checked(scene, "a", "b")
    assert isinstance(scene.wish("c"), Wait)
    scene.pass_time(31)
    assert not scene.running()
    assert "members of the last world are being checked" in scene.job.status().verdict
    scene.pass_time(60).settle()
    assert scene.running() == ["a", "b", "c", "d"]
    assert scene.world("a").round == number, "one restart, not two"


def test_a_round_waits_for_the_second_attempt_too() -> None:
    scene = with_fresh_newcomers()
    number = scene.job.state.rendezvous.next_round
    scene.layout = Layout(4, broken_links={(0, 1)})
    until_checked(scene, "a", "b")
    scene.pass_time(40).settle(until=JoinCheck)
    scene.layout = Layout(4)
    scene.settle()
    assert scene.world("d").round == number
    assert scene.running() == ["a", "b", "c", "d"]


def test_a_round_waits_for_members_that_measure_the_network() -> None:
    scene = with_fresh_newcomers(is_perf_test=True)
    number = scene.job.state.rendezvous.next_round
    for _ in range(2):  # the check, then the performance test
        until_checked(scene, "a", "b")
        scene.pass_time(40)
        assert not scene.running()
        scene.obey("a")
        scene.obey("b")
    scene.settle()
    assert scene.world("d").round == number
    assert scene.running() == ["a", "b", "c", "d"]


def test_many_do_not_wait_for_the_long_check_of_a_few() -> None:
    """Its agent was restarted, so it is checked anew, and something hangs: the others have waited for the last call."""
    scene = begin(4, min_nodes=2).settle()
    scene.pass_time(10).restart_agent("d", procs=2)
    until_checked(scene, "d")
    for name in "abc":
        scene.obey(name)
    scene.pass_time(31)
    assert scene.running() == ["a", "b", "c"]


def test_a_member_that_does_not_come_to_its_check_is_not_waited_for_any_longer() -> None:
    scene = with_fresh_newcomers()
    scene.frozen = {"b"}
    scene.settle().pass_time(31).settle()
    assert isinstance(scene.wish("c"), Wait), "a was checked, and everybody has the last call from then on"
    scene.pass_time(31).settle()
    assert scene.running() == ["a", "c", "d"]


def test_the_status_of_a_round_is_not_about_the_check_of_a_newcomer() -> None:
    scene = begin(2).settle()
    scene.arrive("c")
    fail_and_come_back(scene)
    assert scene.job.status().verdict.endswith("Round 2: 0 of at least 2 nodes wait.")


def test_a_scaled_down_node_leaves_its_check() -> None:
    scene = begin(4, min_nodes=2).settle(until=Check)
    scene.do(ScaleJob(min_nodes=2, max_nodes=3))
    scene.settle()
    assert scene.running() == ["a", "b", "c"]
    assert not scene.said("faulty")


def test_the_end_of_the_job_ends_the_check() -> None:
    scene = begin(4).settle(until=Check)
    scene.stop()
    assert all(isinstance(scene.wish(name), End) for name in "abcd")
    with pytest.raises(Rejected):
        scene.report("a", 1)


# The performance test.


def test_the_performance_test_is_one_group_of_all() -> None:
    scene = begin(4, is_perf_test=True)
    scene.settle(until=Check)
    sizes = set()
    while not isinstance(scene.wish("a"), Run):
        for name in "abcd":
            wish = scene.wish(name)
            if isinstance(wish, Check):
                sizes.add((wish.phase, wish.world.group_world_size))
            scene.obey(name)
    assert sizes == {("initial", 2), ("performance", 4)}
    assert scene.result("a").bandwidth_gbps == 1.5  # type: ignore[union-attr]
    assert scene.said("bus bandwidth 1.50 to 1.50 GB/s")
    assert scene.running() == list("abcd")


def test_those_who_have_not_come_to_it_are_the_first_that_are_looked_for() -> None:
    scene = begin(4, is_perf_test=True)
    while scene.job.state.check.num_checks == 0:
        for name in "abcd":
            scene.obey(name)
    for name in "ab":
        scene.obey(name)
    nodes = [scene.agents[name].node for name in "cdab"]
    assert list(scene.job.state.check.perf) == nodes, "else each join would pass all that came before it"


def test_a_failed_performance_test_is_told_and_training_starts() -> None:
    scene = begin(3, is_perf_test=True)
    while scene.job.state.check.num_checks == 0:
        for name in "abc":
            scene.obey(name)
    scene.layout = Layout(3, faults={1: Fault.NETWORK})
    scene.settle()
    assert scene.said("Communication test over 3 nodes failed")
    assert scene.running() == list("abc")


def test_a_node_that_dies_in_the_performance_test_holds_nobody_up() -> None:
    scene = begin(3, min_nodes=2, is_perf_test=True)
    while scene.job.state.check.num_checks == 0:
        for name in "abc":
            scene.obey(name)
    scene.layout = Layout(3, faults={1: Fault.DEATH})
    scene.settle().pass_time(31).settle()
    assert scene.running() == ["a", "c"]


# A master that restarts.


@pytest.mark.parametrize("num_turns", range(9))
def test_a_master_restart_at_any_instant_loses_nothing(num_turns: int) -> None:
    """The state replays; agents come back on new streams and go on with the same wish."""
    scene = begin(4, min_nodes=3, layout=Layout(4, faults={3: Fault.NETWORK}))
    for _ in range(num_turns):
        for name in "abcd":
            scene.obey(name)
    before = {name: scene.wish(name) for name in scene.agents if scene.agents[name].node in scene.job.state.nodes.live}
    scene.restart_master()
    for name in before:
        scene.attach(name, procs=2, running_round=scene.job.state.rendezvous.round)
        assert scene.wish(name) == before[name]
    scene.settle().pass_time(31).settle()
    assert scene.running() == ["a", "b", "c"]
    assert Job.decode(scene.job.encode()).digest() == scene.job.digest()


def test_an_outage_of_the_master_leaves_time_for_the_report() -> None:
    scene = begin(2, timeout=100.0).settle(until=Check)
    scene.at(500)
    scene.restart_master()
    scene.tick()
    for name in "ab":
        scene.attach(name, procs=2)
    assert isinstance(scene.wish("a"), Check)
    scene.settle()
    assert scene.running() == ["a", "b"]


# Bad input.


@pytest.mark.parametrize(
    ("details", "code"),
    [
        ({"elapsed": float("nan")}, "malformed"),
        ({"elapsed": -1.0}, "malformed"),
        ({"bandwidth_gbps": float("inf")}, "malformed"),
        ({"bandwidth_gbps": -1.0}, "malformed"),
    ],
)
def test_absurd_reports_change_nothing(details: dict[str, float], code: str) -> None:
    scene = begin(2).settle(until=Check)
    name = "a" if isinstance(scene.wish("a"), Check) else "b"
    with pytest.raises(Rejected) as refusal:
        scene.report(name, 1, **details)  # type: ignore[arg-type]
    assert refusal.value.code == code


def test_reports_and_joins_of_other_rounds_are_refused() -> None:
    scene = begin(4).settle(until=Check)
    with pytest.raises(Rejected) as refusal:
        scene.report("a", 7)
    assert refusal.value.code == "stale-round"
    with pytest.raises(Rejected) as refusal:
        scene.join_check("a", 9)
    assert refusal.value.code == "stale-round"


def test_a_repeated_report_counts_once() -> None:
    scene = begin(4).settle(until=Check)
    scene.report("a", 1, elapsed=5.0)
    scene.report("a", 1, elapsed=9.0, exit_class=ExitClass.COMPUTE)
    scene.settle()
    assert scene.running() == list("abcd")


def test_nodes_that_are_checked_otherwise_are_refused() -> None:
    scene = begin(2)
    scene.terms = replace(scene.terms, check=CheckTerms(module="another.check"))
    with pytest.raises(Rejected, match=r"module is 'some\.check' in the job and 'another\.check' there"):
        scene.arrive("c")


@pytest.mark.parametrize(
    "wrong",
    [{"module": ""}, {"straggler_ratio": 0.5}, {"timeout": 0}, {"fresh_for": -1}, {"memory_limit": 0}],
)
def test_terms_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"give|needs"):
        CheckTerms(**({"module": "some.check"} | wrong))  # type: ignore[arg-type]


# With a platform.


@dataclass
class CheckedFleet(CheckScene, FleetScene):
    """The agent on node 3 of the platform is called "n3"."""


def checked_fleet(num_nodes: int, layout: Layout, **spec: Any) -> CheckedFleet:
    scene = CheckedFleet(terms=check_terms(num_nodes), layout=layout)
    scene.begin(FleetSpec(replicas=workers(num_nodes, **spec)))
    scene.run(*range(num_nodes)).come(*range(num_nodes))
    return scene


def test_the_platform_replaces_a_faulty_node_on_another_host() -> None:
    scene = checked_fleet(4, Layout(4, faults={1: Fault.COMPUTE}))
    scene.settle()
    assert scene.node(1).exit_reason is NodeExit.CHECK_FAILED
    launch = scene.launches[4]
    assert (launch.rank, launch.avoid_hosts) == (1, ("host-1",))
    scene.layout = Layout(4)
    scene.run(4).come(4)
    scene.settle()
    assert scene.running() == ["n0", "n2", "n3", "n4"]
    assert not scene.said("The job ends")


def test_a_faulty_node_that_may_not_be_replaced_ends_the_job_in_words() -> None:
    scene = checked_fleet(2, Layout(2, faults={1: Fault.COMPUTE}), max_relaunches=0)
    scene.settle()
    assert scene.end.reason is ExitReason.NODE_CHECK_FAILED
    assert "cannot be replaced" in scene.end.message


def test_a_platform_replaces_nodes_that_could_not_be_proved() -> None:
    scene = checked_fleet(2, Layout(2, broken_links={(0, 1)}))
    scene.settle()
    assert scene.job.end is None
    assert sorted(scene.launches) == [0, 1, 2, 3]


# Many nodes.


@pytest.mark.parametrize("seed", [3, 11, 29])
def test_large_jobs_find_every_bad_node_and_blame_no_other(seed: int) -> None:
    layout = random_layout(seed, num_nodes=257, most_bad=0.1)
    names = [f"n{number}" for number in range(257)]
    scene = CheckScene(terms=check_terms(100, 257), layout=layout)
    scene.is_quick = True
    scene.arrive(*names).settle()
    bad = {name for name, agent in scene.agents.items() if agent.node_rank in layout.faults}
    assert {name for name in names if scene.result(name).status == "faulty"} == bad  # type: ignore[union-attr]
    scene.pass_time(31).settle()
    assert set(scene.running()) == set(names) - bad


# Whatever happens.


@pytest.mark.parametrize("seed", range(40))
def test_any_story_ends_in_training_or_with_a_reason(seed: int) -> None:
    """Nodes come, die, restart and go, and the master restarts, at any instant of any phase: nobody waits for ever."""
    chance = random.Random(seed)
    options = {"fresh_for": chance.choice([0.0, 20.0, 600.0]), "is_perf_test": chance.random() < 0.3}
    options["excludes_stragglers"] = chance.random() < 0.3
    scene = CheckScene(terms=check_terms(2, 5, **options), layout=random_layout(seed, num_nodes=6))
    scene.arrive("a", "b", "c")
    tell_story(scene, chance, num_turns=120)
    scene.layout = Layout(99)
    if scene.job.end is not None:
        return
    for _ in range(4):
        bring_back(scene)
        scene.settle().pass_time(31).settle()
        if len(scene.running()) >= 2 or scene.job.end is not None:
            break
        scene.arrive(*(f"late{len(scene.agents)}-{number}" for number in range(2)))
    assert len(scene.running()) >= 2 or scene.job.end is not None, scene.job.state.check


def tell_story(scene: CheckScene, chance: random.Random, num_turns: int) -> None:
    for turn in range(num_turns):
        if scene.job.end is not None:
            return
        alive = [name for name, agent in scene.agents.items() if agent.node in scene.job.state.nodes.live]
        connected = [name for name in alive if scene.job.state.nodes.is_connected(scene.agents[name].node)]
        name = chance.choice(alive) if alive else ""
        rare = ["come", "restart", "break", "silent", "leave", "fail", "time", "master"]
        match chance.choice(["obey"] * 16 + ["back"] * 5 + rare):
            case "obey":
                for other in connected:
                    if other in scene.agents and chance.random() < 0.8:
                        scene.obey(other)
            case "come" if len(alive) < 6:
                scene.arrive(f"node{turn}")
            case "restart" if name:
                scene.restart_agent(name, procs=2)
            case "break" if name:
                scene.break_stream(name)
            case "back":
                bring_back(scene)
            case "silent" if name:
                scene.silent(name)
            case "leave" if connected:
                scene.leave(chance.choice(connected), LeaveReason.PREEMPTED)
            case "fail" if scene.running():
                scene.fail(chance.choice(scene.running()), failure(FailureKind.PEER_LOST, at=scene.now / 1e6))
            case "time":
                scene.pass_time(chance.choice([1.0, 4.0, 31.0]))
            case "master":
                scene.restart_master()


def bring_back(scene: CheckScene) -> None:
    for name, agent in scene.agents.items():
        if agent.node in scene.job.state.nodes.broken:
            running = scene.job.desired(agent.node).wish
            scene.attach(name, procs=2, running_round=running.world.round if isinstance(running, Run) else 0)
