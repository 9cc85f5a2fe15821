"""One node check from its first phase to its verdict: tables, corner cases, and hundreds of layouts of bad nodes."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.core.check.cycle import CheckCycle, CheckMode, CheckStatus, CheckVerdict, Next
from dlrover.core.check.evidence import CheckRules, ExitClass, PhaseName, median, say_ranks, stragglers
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import NodeRank, Round
from tests.core.check.check_lab import QUICK_MS, SLOW_MS, Fault, Layout, check_groups, drive, random_layout

FAILED = ExitClass.COMMUNICATION


def begin(num_nodes: int, **options: object) -> CheckCycle:
    return CheckCycle.begin(Layout(num_nodes).members(), first_round=Round(1), **options)  # type: ignore[arg-type]


def racks(*sizes: int, ungrouped: int = 0) -> dict[NodeRank, str | None]:
    names: list[str | None] = [f"rack-{number}" for number, size in enumerate(sizes) for _ in range(size)]
    names += [None] * ungrouped
    return {NodeRank(rank): name for rank, name in enumerate(names)}


def say(cycle: CheckCycle, *, failed: tuple[int, ...] = (), slow: tuple[int, ...] = ()) -> None:
    """All report what is said here, whatever their partners do."""
    for rank in list(cycle.waiting):
        exit_class = FAILED if rank in failed else ExitClass.OK
        cycle.report(rank, cycle.round, SLOW_MS if rank in slow else QUICK_MS, exit_class)


def next_phase(cycle: CheckCycle) -> Next:
    step = cycle.go_on()
    assert isinstance(step, Next), step
    return step


def end(cycle: CheckCycle) -> CheckVerdict:
    step = cycle.go_on()
    assert isinstance(step, CheckVerdict), step
    return step


@pytest.mark.parametrize(
    ("num_nodes", "first", "failed", "slow", "second"),
    [
        (4, ((0, 1), (2, 3)), (3,), (), ((0, 3), (1, 2))),
        (6, ((0, 1), (2, 3), (4, 5)), (), (4, 5), ((0, 5), (1, 4), (2, 3))),
        (5, ((0, 1), (2, 3, 4)), (), (0, 1), ((2, 1), (3, 0, 4))),
        (1, ((0,),), (0,), (), ((0,),)),
    ],
)
def test_the_groups_of_both_phases(
    num_nodes: int,
    first: tuple[tuple[int, ...], ...],
    failed: tuple[int, ...],
    slow: tuple[int, ...],
    second: tuple[tuple[int, ...], ...],
) -> None:
    """Every row of the pairing table."""
    cycle = begin(num_nodes)
    assert cycle.groups == first
    say(cycle, failed=failed, slow=slow)
    next_phase(cycle)
    assert cycle.groups == second
    assert cycle.round == 2


def test_a_healthy_job_needs_one_phase() -> None:
    verdict = Layout(8).run()
    assert verdict.has_passed
    assert verdict.num_phases == 1
    assert verdict.sentence == "Node check, 1 phase: all 8 nodes passed."
    assert verdict.node_status == "node status after phase 0 (round 1): node ranks 0-7 healthy."
    assert verdict.elapsed.startswith("elapsed times after phase 0 (round 1): median 5025 ms; 0: 5000 ms, 1: 5010 ms")


def test_six_nodes_with_one_broken() -> None:
    """Phase 0 accuses 4 and 5, phase 1 pairs them with good nodes, and only 5 is at fault; its replacement passes."""
    layout = Layout(6, {5: Fault.NETWORK})
    cycle = CheckCycle.begin(layout.members(), first_round=Round(1))
    layout.run_phase(cycle)
    step = next_phase(cycle)
    assert step.name is PhaseName.DIAGNOSTIC
    assert "node ranks 4-5 in doubt" in step.sentence
    assert (0, 5) in cycle.groups
    layout.run_phase(cycle)
    verdict = end(cycle)
    assert verdict.faulty == (5,)
    assert verdict.statuses[NodeRank(4)] is CheckStatus.HEALTHY
    assert verdict.reasons == {5: "it failed with node ranks 0, 4, which passed with others"}
    assert verdict.sentence == (
        "Node check, 2 phases: node rank 5 faulty: it failed with node ranks 0, 4, which passed with others."
    )
    assert not verdict.has_passed
    assert Layout(6).run().num_phases == 1


@pytest.mark.parametrize("seed", range(260))
def test_every_bad_node_is_found_and_no_good_one_is_blamed(seed: int) -> None:
    layout = random_layout(seed)
    verdict = layout.run()
    assert set(verdict.faulty) == set(layout.faults)
    assert verdict.unproven == ()
    assert set(verdict.stragglers) <= layout.slow
    if layout.num_nodes - len(layout.faults) > 3:
        assert set(verdict.stragglers) == layout.slow
    assert not set(verdict.times) & set(layout.faults), "a failed node's time must not count"
    if layout.num_nodes > 2:
        assert set(verdict.times) == set(range(layout.num_nodes)) - set(layout.faults)
    assert verdict.num_phases <= 6


@pytest.mark.parametrize(
    ("num_nodes", "kind"),
    [
        (num_nodes, kind)
        for num_nodes in [*range(2, 18), 31, 32, 33, 64, 127, 128, 129, 255, 256, 257]
        for kind in (Fault.DEVICE, Fault.COMPUTE, Fault.DEATH, Fault.NETWORK)
        # Two nodes cannot tell a bad network card from a bad link; see the test of two nodes.
        if (num_nodes, kind) != (2, Fault.NETWORK)
    ],
)
def test_one_bad_node_anywhere_is_found(num_nodes: int, kind: Fault) -> None:
    for place in {0, 1, num_nodes // 2, num_nodes - 2, num_nodes - 1}:
        verdict = Layout(num_nodes, {place: kind}).run()
        assert verdict.faulty == (place,)
        assert verdict.unproven == ()
        assert verdict.num_phases <= (3 if num_nodes in (4, 5) else 2 if num_nodes > 3 else 5)


@pytest.mark.parametrize("num_nodes", [8, 9, 64, 65])
def test_a_good_node_that_met_two_bad_ones_is_not_blamed(num_nodes: int) -> None:
    """All failed ones are paired with bad nodes again: phase 1 leaves doubts, a third phase with good ones settles them."""
    for bad in (range(1, num_nodes, 2), range(0, num_nodes - 2, 2), range(num_nodes // 2 - 1)):
        layout = Layout(num_nodes, dict.fromkeys(bad, Fault.NETWORK))
        verdict = layout.run()
        assert set(verdict.faulty) == set(bad)
        assert verdict.unproven == ()


def test_more_bad_nodes_than_good_ones() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        num_nodes = chance.randint(8, 60)
        bad = chance.sample(range(num_nodes), int(num_nodes * 0.7))
        layout = Layout(num_nodes, dict.fromkeys(bad, Fault.NETWORK))
        verdict = layout.run(CheckCycle.begin(layout.members(), first_round=Round(1), rules=CheckRules(max_phases=60)))
        assert set(verdict.faulty) == set(bad)


def test_nobody_is_blamed_where_nothing_can_be_known() -> None:
    """Every node fails with every other one and passes alone: the network itself, most likely."""
    layout = Layout(6, dict.fromkeys(range(6), Fault.NETWORK))
    verdict = layout.run()
    assert verdict.faulty == ()
    assert verdict.unproven == tuple(range(6))
    assert not verdict.has_passed
    assert "no node could be shown to be the cause" in verdict.sentence
    assert verdict.num_phases <= CheckRules().max_phases


def test_the_number_of_phases_has_a_bound() -> None:
    layout = Layout(257, dict.fromkeys(range(1, 257), Fault.NETWORK))
    assert layout.run().num_phases == CheckRules().max_phases


class TestSmallJobs:
    """Three nodes or fewer have no independent pair to compare with."""

    def test_two_nodes_run_alone_in_the_second_phase_and_the_one_that_fails_is_at_fault(self) -> None:
        layout = Layout(2, {1: Fault.DEVICE})
        cycle = CheckCycle.begin(layout.members(), first_round=Round(1))
        layout.run_phase(cycle)
        assert next_phase(cycle).name is PhaseName.ALONE
        assert cycle.groups == ((0,), (1,))
        layout.run_phase(cycle)
        verdict = end(cycle)
        assert verdict.faulty == (1,)
        assert verdict.reasons[NodeRank(1)] == "it failed alone, without any partner"
        assert verdict.statuses[NodeRank(0)] is CheckStatus.HEALTHY

    def test_two_nodes_that_pass_alone_have_a_suspect_link_and_nobody_is_blamed(self) -> None:
        verdict = Layout(2, {1: Fault.NETWORK}).run()
        assert verdict.faulty == ()
        assert verdict.suspect_links == ((0, 1),)
        assert verdict.unproven == (0, 1)
        assert not verdict.has_passed
        assert "the link between node ranks 0 and 1 is suspect" in verdict.sentence

    def test_three_nodes_with_one_bad_link(self) -> None:
        verdict = Layout(3, broken_links={(0, 2)}).run()
        assert verdict.faulty == ()
        assert verdict.suspect_links == ((0, 2),)
        assert verdict.has_passed

    def test_three_nodes_with_one_bad_network_card(self) -> None:
        assert Layout(3, {0: Fault.NETWORK}).run().faulty == (0,)

    def test_a_slow_node_harms_nobody(self) -> None:
        for num_nodes in (1, 2, 3):
            verdict = Layout(num_nodes, slow={0}).run()
            assert verdict.has_passed
            assert verdict.stragglers == ()
            assert verdict.num_phases == 1

    def test_a_single_node_gets_a_second_chance(self) -> None:
        cycle = begin(1)
        say(cycle, failed=(0,))
        next_phase(cycle)
        say(cycle)
        assert end(cycle).has_passed
        cycle = begin(1)
        say(cycle, failed=(0,))
        next_phase(cycle)
        say(cycle, failed=(0,))
        assert end(cycle).faulty == (0,)


class TestDeathsAndLatecomers:
    def test_a_node_that_dies_is_named_and_its_partner_is_not(self) -> None:
        cycle = begin(6)
        for rank in range(4):
            cycle.report(NodeRank(rank), Round(1), QUICK_MS)
        cycle.lose(NodeRank(5))
        assert not cycle.is_phase_complete()
        cycle.report(NodeRank(4), Round(1), 0, FAILED)
        step = next_phase(cycle)
        assert step.faulty == (5,)
        check_groups(cycle.groups, {NodeRank(rank) for rank in range(5)})
        say(cycle)
        verdict = end(cycle)
        assert verdict.faulty == (5,)
        assert verdict.reasons == {5: "it died during the check"}
        assert not verdict.has_passed

    def test_a_node_that_dies_after_its_report_is_not_healthy(self) -> None:
        cycle = begin(4)
        say(cycle)
        cycle.lose(NodeRank(2))
        assert end(cycle).faulty == (2,)

    def test_a_node_that_left_in_order_is_not_blamed(self) -> None:
        cycle = begin(4)
        cycle.lose(NodeRank(3), is_blamed=False)
        say(cycle, failed=(2,))
        next_phase(cycle)
        verdict = drive(cycle, lambda: say(cycle))
        assert verdict.has_passed
        assert 3 not in verdict.statuses

    def test_all_nodes_died(self) -> None:
        cycle = begin(2)
        cycle.lose(NodeRank(0))
        cycle.lose(NodeRank(1), why="no report within 300 s")
        verdict = end(cycle)
        assert verdict.faulty == (0, 1)
        assert "node rank 1 faulty: no report within 300 s" in verdict.sentence

    def test_a_latecomer_is_tested_in_the_next_phase(self) -> None:
        """One without a time used to be in no group, and waited for a pair that did not expect it."""
        cycle = begin(4)
        cycle.join(NodeRank(7))
        with pytest.raises(Rejected, match="takes no part"):
            cycle.report(NodeRank(7), Round(1), QUICK_MS)
        say(cycle, failed=(2, 3))
        step = next_phase(cycle)
        assert "node rank 7 came late" in step.sentence
        check_groups(cycle.groups, {NodeRank(rank) for rank in (0, 1, 2, 3, 7)})
        assert cycle.group_of(NodeRank(7)) is not None
        say(cycle)
        assert end(cycle).has_passed

    def test_a_latecomer_alone_is_reason_enough_for_another_phase(self) -> None:
        cycle = begin(4)
        say(cycle)
        cycle.join(NodeRank(4))
        next_phase(cycle)
        say(cycle, failed=(4,))
        verdict = drive(cycle, lambda: say(cycle, failed=(4,)))
        assert verdict.faulty == (4,)

    def test_a_latecomer_that_goes_again_is_forgotten(self) -> None:
        cycle = begin(4)
        cycle.join(NodeRank(4))
        cycle.lose(NodeRank(4))
        say(cycle)
        assert end(cycle).faulty == ()

    def test_a_replacement_does_not_inherit_the_blame(self) -> None:
        cycle = begin(4)
        cycle.lose(NodeRank(3))
        cycle.join(NodeRank(3))
        say(cycle, failed=(2,))
        next_phase(cycle)
        check_groups(cycle.groups, {NodeRank(rank) for rank in range(4)})
        say(cycle)
        verdict = end(cycle)
        assert verdict.has_passed
        assert verdict.statuses == dict.fromkeys(range(4), CheckStatus.HEALTHY)

    @given(st.integers(0, 2**32), st.integers(2, 40))
    @settings(max_examples=150, deadline=None)
    def test_nodes_die_and_join_all_the_time(self, seed: int, num_nodes: int) -> None:
        """The check ends, nobody is left out, no good node is blamed."""
        chance = random.Random(seed)
        layout = random_layout(seed, num_nodes=num_nodes)
        layout.broken_links = set()
        cycle = CheckCycle.begin(layout.members(), first_round=Round(1))
        dead: set[int] = set()

        def run_phase() -> None:
            for rank in list(cycle.members):
                if chance.random() < 0.03 and len(cycle.members) - len(cycle.gone) > 1 and rank not in cycle.gone:
                    cycle.lose(rank)
                    dead.add(rank)
                    if chance.random() < 0.5:
                        cycle.join(rank)
                        dead.discard(rank)
                        layout.faults.pop(rank, None)
            if chance.random() < 0.2 and cycle.phase < 4:
                cycle.join(NodeRank(1000 + cycle.phase))
            for group in cycle.groups:
                for rank in group:
                    if rank in cycle.waiting:
                        is_hit = any(member in cycle.gone for member in group)
                        own = layout.result(rank, group)
                        if layout.faults.get(rank) is Fault.DEATH:
                            cycle.lose(rank)
                            dead.add(rank)
                        else:
                            cycle.report(rank, cycle.round, QUICK_MS, FAILED if is_hit and own is ExitClass.OK else own)

        verdict = drive(cycle, run_phase)
        assert set(verdict.faulty) <= set(layout.faults) | dead
        assert dead <= set(verdict.faulty)


class TestWhatAFailureMeans:
    def test_a_failed_computation_is_the_nodes_own_fault_at_once(self) -> None:
        layout = Layout(4, {1: Fault.COMPUTE})
        cycle = CheckCycle.begin(layout.members(), first_round=Round(1))
        layout.run_phase(cycle)
        step = next_phase(cycle)
        assert step.faulty == (1,)
        assert (1,) in cycle.groups, "kept apart, so that it spoils nobody's run"
        layout.run_phase(cycle)
        verdict = end(cycle)
        assert verdict.faulty == (1,)
        assert verdict.reasons == {1: "its computation failed"}

    @pytest.mark.parametrize("exit_class", [ExitClass.COMMUNICATION, ExitClass.SETUP])
    def test_other_failures_accuse_the_whole_group(self, exit_class: ExitClass) -> None:
        cycle = begin(4)
        for rank in range(4):
            cycle.report(NodeRank(rank), Round(1), QUICK_MS, exit_class if rank < 2 else ExitClass.OK)
        assert next_phase(cycle).faulty == ()
        say(cycle)
        verdict = end(cycle)
        assert verdict.has_passed
        assert verdict.suspect_links == ((0, 1),)

    def test_a_broken_link_beside_a_bad_node_convicts_only_the_node(self) -> None:
        """Node 0 fails over the link in phase 0 and with the bad node in phase 1: twice, and still not its fault."""
        layout = Layout(8, {7: Fault.NETWORK}, broken_links={(0, 1)})
        verdict = layout.run()
        assert verdict.faulty == (7,)
        assert verdict.suspect_links == ((0, 1),)

    def test_one_member_may_fail_while_its_partner_passes(self) -> None:
        cycle = begin(4)
        verdict = drive(cycle, lambda: say(cycle, failed=(2,)))
        assert verdict.faulty == (2,)
        assert verdict.num_phases == 2


class TestStragglers:
    def test_the_plain_rule(self) -> None:
        def times(*seconds: float) -> dict[NodeRank, float]:
            return {NodeRank(rank): second * 1000 for rank, second in enumerate(seconds)}

        rules = CheckRules()
        assert stragglers(times(5, 5, 5, 5, 15, 15), rules) == [4, 5]
        assert stragglers(times(5, 5, 5, 5, 5, 15), rules) == [5]
        assert stragglers(times(5, 15), rules) == []
        assert stragglers(times(5, 5, 500), rules) == []
        assert stragglers({}, rules) == []
        assert stragglers(times(5, 5, 5, 10), rules) == [], "more than twice, not twice"
        assert stragglers(times(5, 5, 5, 10), CheckRules(straggler_ratio=1.5)) == [3]
        assert stragglers(times(5, 5, 5, 5.9), CheckRules(straggler_ratio=1.0)) == [], "the floor"

    def test_microseconds_of_noise_make_nobody_slow(self) -> None:
        times = {NodeRank(0): 0.01, NodeRank(1): 0.01, NodeRank(2): 0.01, NodeRank(3): 0.09}
        assert stragglers(times, CheckRules()) == []
        assert stragglers(times, CheckRules(straggler_floor_ms=0, straggler_share=0)) == [3]

    def test_a_slow_node_is_told_from_the_partner_it_holds_back(self) -> None:
        cycle = begin(6)
        say(cycle, slow=(4, 5))
        assert "node ranks 4-5 slow so far" in next_phase(cycle).sentence
        say(cycle, slow=(0, 5))
        verdict = end(cycle)
        assert verdict.stragglers == (5,)
        assert verdict.has_passed
        assert "node rank 5 slow: 15000 ms against a median of 5000 ms" in verdict.sentence
        assert "node rank 5 straggler" in verdict.node_status

    def test_one_slow_node_of_four_is_found(self) -> None:
        """Its pair lifts the median of the first phase so much that the plain rule sees nothing."""
        assert Layout(4, slow={3}).run().stragglers == (3,)

    def test_failed_nodes_do_not_count_into_the_median(self) -> None:
        layout = Layout(10, dict.fromkeys(range(4), Fault.DEVICE), slow={9})
        verdict = layout.run()
        assert verdict.faulty == (0, 1, 2, 3)
        assert verdict.stragglers == (9,)
        assert not set(verdict.times) & {0, 1, 2, 3}

    def test_a_good_node_between_a_bad_and_a_slow_one_is_neither(self) -> None:
        layout = Layout(8, {0: Fault.NETWORK, 2: Fault.NETWORK}, slow={7, 6})
        verdict = layout.run()
        assert verdict.faulty == (0, 2)
        assert verdict.stragglers == (6, 7)

    def test_bad_rules_are_refused(self) -> None:
        with pytest.raises(ValueError, match="straggler_ratio"):
            CheckRules(straggler_ratio=0.5)
        with pytest.raises(ValueError, match="max_phases"):
            CheckRules(max_phases=1)
        with pytest.raises(ValueError, match="at least 0"):
            CheckRules(straggler_floor_ms=float("nan"))


class TestSchedulingGroups:
    def test_the_phases_of_a_clean_job(self) -> None:
        cycle = CheckCycle.begin(racks(2, 2, 2, 2), first_round=Round(5))
        assert cycle.mode is CheckMode.SCHEDULING_GROUPS
        assert cycle.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
        say(cycle)
        step = next_phase(cycle)
        assert step.name is PhaseName.INTER_INITIAL
        assert "all passed inside their scheduling groups" in step.sentence
        assert cycle.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
        say(cycle)
        verdict = end(cycle)
        assert verdict.has_passed
        assert cycle.round == 6

    def test_a_failure_inside_a_group_is_settled_inside(self) -> None:
        members = racks(4, 4)
        layout = Layout(8, {3: Fault.NETWORK}, scheduling=lambda rank: members[NodeRank(rank)])
        cycle = CheckCycle.begin(members, first_round=Round(1))
        layout.run_phase(cycle)
        assert next_phase(cycle).name is PhaseName.INTRA_DIAGNOSTIC
        assert all(len({members[rank] for rank in group}) == 1 for group in cycle.groups)
        layout.run_phase(cycle)
        assert end(cycle).faulty == (3,)

    def test_a_failure_between_groups_is_rotated(self) -> None:
        cycle = CheckCycle.begin({NodeRank(r): ("a" if r < 2 else "b") for r in (0, 1, 4, 5)}, first_round=Round(1))
        say(cycle)
        next_phase(cycle)
        assert cycle.groups == ((0, 4), (1, 5))
        say(cycle, failed=(0, 4))
        step = next_phase(cycle)
        assert step.name is PhaseName.INTER_DIAGNOSTIC
        assert sorted(tuple(sorted(group)) for group in cycle.groups) == [(0, 5), (1, 4)]
        say(cycle, failed=(0, 5))
        assert drive(cycle, lambda: say(cycle, failed=(0,))).faulty == (0,)

    def test_a_node_that_shared_two_failed_groups_with_the_bad_one_is_not_blamed(self) -> None:
        """Four racks of two: rotation brings ranks 0 and 4 together again. Only the links between racks are bad."""
        members = racks(2, 2, 2, 2)
        layout = Layout(8, scheduling=lambda rank: members[NodeRank(rank)])
        layout.broken_links = {(0, other) for other in range(2, 8)}
        verdict = layout.run()
        assert verdict.faulty == (0,)
        assert verdict.unproven == ()

    def test_nodes_without_a_group_are_one_more(self) -> None:
        cycle = CheckCycle.begin(racks(3, 2, ungrouped=2), first_round=Round(1))
        assert cycle.groups == ((0, 1, 2), (3, 4), (5, 6))
        say(cycle)
        next_phase(cycle)
        assert cycle.groups == ((0, 3, 5), (1, 4, 6, 2))

    def test_the_only_node_of_a_group_is_not_held_up_by_having_no_partner(self) -> None:
        cycle = CheckCycle.begin(racks(4, 1), first_round=Round(1))
        assert cycle.groups == ((0, 1), (2, 3), (4,))
        say(cycle)
        assert next_phase(cycle).name is PhaseName.INTER_INITIAL
        assert cycle.groups == ((0, 4, 1, 2, 3),)

    def test_without_groups_or_with_one_only_the_plain_check_runs(self) -> None:
        assert CheckCycle.begin(racks(6), first_round=Round(1)).mode is CheckMode.PAIRS
        assert CheckCycle.begin(racks(ungrouped=6), first_round=Round(1)).mode is CheckMode.PAIRS
        assert CheckCycle.begin(racks(2, 1), first_round=Round(1)).mode is CheckMode.PAIRS
        assert CheckCycle.begin(racks(3, 3), first_round=Round(1), mode=CheckMode.PAIRS).mode is CheckMode.PAIRS

    @pytest.mark.parametrize(
        "sizes",
        [(3, 2), (3, 3), (4, 3), (3, 4), (3, 2, 2), (3, 3, 2), (3, 3, 3), (5, 2), (5, 4), (7, 2), (5, 5), (3, 1, 1)],
    )
    def test_a_bad_link_is_never_the_fault_of_a_bystander(self, sizes: tuple[int, ...]) -> None:
        """A rack of three meets as a whole: whoever shares it with both ends of a bad link fails as often as they do."""
        members = racks(*sizes)
        for link in itertools.combinations(members, 2):
            layout = Layout(len(members), broken_links={link}, scheduling=lambda rank: members[NodeRank(rank)])
            verdict = layout.run()
            assert set(verdict.faulty) <= set(link), f"link {link}: {verdict.sentence}"

    @pytest.mark.parametrize("seed", range(80))
    def test_every_bad_node_is_found(self, seed: int) -> None:
        layout = random_layout(seed + 5000, most_bad=0.3)
        size = random.Random(seed).choice([1, 2, 3, 4, 8])
        layout.scheduling = lambda rank: None if rank % 11 == 10 else f"rack-{rank // size}"
        verdict = layout.run()
        assert set(verdict.faulty) == set(layout.faults)
        assert verdict.unproven == ()
        assert set(verdict.stragglers) <= layout.slow


class TestPerformanceTest:
    def test_all_nodes_are_one_group_and_there_is_one_phase(self) -> None:
        cycle = begin(7, mode=CheckMode.ALL)
        assert cycle.groups == ((0, 1, 2, 3, 4, 5, 6),)
        say(cycle)
        assert end(cycle).has_passed

    def test_a_latecomer_has_no_part_in_it(self) -> None:
        cycle = begin(4, mode=CheckMode.ALL)
        cycle.join(NodeRank(9))
        say(cycle)
        verdict = end(cycle)
        assert verdict.has_passed
        assert 9 not in verdict.statuses

    def test_a_failure_accuses_nobody(self) -> None:
        cycle = begin(7, mode=CheckMode.ALL)
        say(cycle, failed=tuple(range(7)))
        verdict = end(cycle)
        assert verdict.faulty == ()
        assert not verdict.has_passed


class TestReports:
    def test_a_report_of_another_round_changes_nothing(self) -> None:
        cycle = begin(4)
        before = msgspec.msgpack.encode(cycle)
        for of_round in (0, 2):
            with pytest.raises(Rejected, match="round 1 runs") as caught:
                cycle.report(NodeRank(0), Round(of_round), QUICK_MS)
            assert caught.value.code == "stale-round"
        with pytest.raises(Rejected, match="takes no part"):
            cycle.report(NodeRank(9), Round(1), QUICK_MS)
        for elapsed_ms in (-1.0, float("nan"), float("inf"), 1e12):
            with pytest.raises(Rejected, match="milliseconds"):
                cycle.report(NodeRank(0), Round(1), elapsed_ms)
        assert msgspec.msgpack.encode(cycle) == before

    def test_the_first_report_counts(self) -> None:
        cycle = begin(4)
        cycle.report(NodeRank(0), Round(1), 7.12345)
        cycle.report(NodeRank(0), Round(1), 0, FAILED)
        assert cycle.trials[-1].reports[NodeRank(0)].elapsed_ms == 7.123

    def test_the_verdict_stays_for_whoever_asks_late(self) -> None:
        cycle = begin(4)
        say(cycle)
        verdict = end(cycle)
        assert cycle.final == verdict == cycle.verdict() == cycle.go_on()
        cycle.lose(NodeRank(2))
        assert cycle.verdict() == verdict
        with pytest.raises(Rejected, match="has its verdict"):
            cycle.report(NodeRank(0), Round(1), QUICK_MS)

    def test_an_empty_check_is_refused(self) -> None:
        with pytest.raises(Rejected, match="at least one node"):
            CheckCycle.begin({}, first_round=Round(1))


def test_a_large_job_lists_only_its_slowest() -> None:
    verdict = Layout(200, slow={77}).run()
    assert "slowest 77: 15000 ms" in verdict.elapsed
    assert len(verdict.elapsed) < 300
    assert verdict.node_status.endswith("node ranks 0-76, 78-199 healthy; node rank 77 straggler.")


def test_words() -> None:
    assert say_ranks([NodeRank(3)]) == "node rank 3"
    assert say_ranks([NodeRank(rank) for rank in (0, 1, 2, 5, 7, 8)]) == "node ranks 0-2, 5, 7-8"
    assert median([1.0, 2.0, 3.0, 10.0]) == 2.5
    assert median([1.0, 10.0, 2.0]) == 2.0
