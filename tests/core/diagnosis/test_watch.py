"""The watch over a job: when it looks, what it finds, and when it acts."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core.diagnosis.picture import RankRecord
from dlrover.core.diagnosis.watch import AGAIN_SOON, EPISODE, MAX_VERDICTS, AskNode, Tell
from dlrover.protocol.messages.job import Incarnation, NodeId
from dlrover.protocol.messages.watch import (
    ActionKind,
    Collective,
    Culprit,
    FaultClass,
    FaultFound,
    HangFound,
    HangStrategy,
    Phase,
    ResourceReport,
    ThreadStack,
    Verdict,
    WatchTerms,
    WorkerDump,
)
from tests.core.diagnosis.watch_lab import (
    IN_ALL_REDUCE,
    IN_BACKWARD,
    IN_BARRIER,
    IN_LOADER,
    IN_LOCK,
    NODES,
    Lab,
    dump,
    inside,
    progress,
)


@pytest.fixture
def lab() -> Lab:
    lab = Lab()
    lab.train()
    return lab


def others(*odd: WorkerDump) -> tuple[WorkerDump, ...]:
    """The rest waits in backward."""
    ranks = {each.global_rank for each in odd}
    return (*odd, *(dump(rank) for rank in range(4) if rank not in ranks))


def acted(lab: Lab) -> HangFound:
    assert len(lab.acts()) == 1
    command = lab.acts()[0].command
    assert isinstance(command, HangFound)
    return command


class CountedRanks(dict[int, RankRecord]):
    num_walks = 0

    def values(self) -> Any:
        CountedRanks.num_walks += 1
        return super().values()


def test_a_report_costs_as_much_as_it_says_and_not_as_the_world_is_large(lab: Lab) -> None:
    """All diagnosticians look at all ranks, but once a second and not for each of ten thousand nodes."""
    lab.watch.picture.ranks = CountedRanks(lab.watch.picture.ranks)
    lab.train()
    CountedRanks.num_walks = 0
    lab.tell(*(progress(rank, phase_seconds=0.01, is_stalled=False) for rank in range(4)))
    looked = CountedRanks.num_walks
    for _ in range(10):
        lab.tell(*(progress(rank, phase_seconds=0.01, is_stalled=False) for rank in range(4)))
        lab.watch.next_deadline()
    assert CountedRanks.num_walks == looked > 0


def test_who_was_stalled_and_left_the_world_is_not_stalled_any_more(lab: Lab) -> None:
    picture = lab.watch.picture
    lab.tell(progress(0, is_stalled=True), progress(2, is_stalled=True), progress(3, is_stalled=False))
    assert [record.global_rank for record in picture.stalled] == [0, 2]
    lab.watch.follow(replace(picture.scene, places=picture.scene.places[:1]), lab.terms, lab.now)
    assert [record.global_rank for record in picture.stalled] == [0]
    lab.tell(progress(0, is_stalled=False))
    assert not picture.stalled
    lab.tell(progress(0, is_stalled=True))
    lab.enter(2)
    assert not picture.stalled


def test_nobody_is_asked_while_training_goes_on(lab: Lab) -> None:
    lab.train(20)
    assert lab.asked() == []
    assert lab.told() == []
    assert lab.watch.next_deadline() is None or lab.watch.next_deadline() >= lab.now  # type: ignore[operator]


def test_one_stalled_rank_makes_all_nodes_look_once(lab: Lab) -> None:
    effects = lab.tell(progress(1))
    assert [effect.node for effect in effects if isinstance(effect, AskNode)] == list(NODES)
    assert lab.tell(progress(2)) == []
    assert lab.asked()[0].order.order.again_after >= 3.4, "a pause of five seconds must be over at the second dump"


def test_a_stopped_rank_is_acted_upon_at_the_first_dump(lab: Lab) -> None:
    lab.tell(progress(3))
    lab.answer(0, *others(dump(3, (), Phase.FORWARD, state="T", phase_seconds=2.2)))
    command = acted(lab)
    assert command.verdict.fault is FaultClass.STOPPED
    assert command.verdict.action is ActionKind.RESTART_WORKERS
    assert lab.ranks() == [3]
    assert "Rank 3 is stopped" in command.verdict.evidence[0]
    assert "Rank 3 on host1" in lab.pages()[-1]


def test_a_deadlocked_rank_is_acted_upon_after_the_second_dump_and_its_stack_is_shown(lab: Lab) -> None:
    lab.look(*others(dump(2, IN_LOCK, Phase.FORWARD)))
    command = acted(lab)
    assert command.verdict.fault is FaultClass.DEADLOCK
    assert lab.ranks() == [2]
    page = lab.pages()[-1]
    assert "Rank 2 is here" in page
    assert "/job/train.py:31 forward" in page
    assert "Ranks 0-1, 3 are here" in page
    assert "_engine_run_backward" in page
    assert len(page.splitlines()) < 60


def test_several_ranks_at_fault_are_spoken_of_in_the_plural(lab: Lab) -> None:
    lab.look(*(dump(rank, IN_LOCK, Phase.FORWARD) for rank in (0, 2)), *(dump(rank) for rank in (1, 3)))
    evidence = acted(lab).verdict.evidence[0]
    assert evidence.startswith("Ranks 0, 2 wait for something of their own in phase forward"), evidence


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (dump(2, IN_LOCK, Phase.FORWARD, cpu_seconds=3.0), "it computes"),
        (dump(2, IN_LOCK, Phase.FORWARD, io_bytes=1_000_000), "it reads"),
        (dump(2, IN_LOCK, Phase.FORWARD, major_faults=5), "it is being swapped in"),
        (dump(2, IN_LOCK, Phase.FORWARD, switches=70), "it sleeps and wakes, so it does something"),
        (dump(2, IN_LOCK, Phase.FORWARD, children=("77 S - cpu=3.00 python",)), "a process of its own computes"),
        (dump(2, IN_LOCK, Phase.EVALUATION), "it evaluates"),
        (dump(2, IN_LOCK, Phase.START), "it starts"),
        (dump(2, IN_LOCK, progress=progress(2, Phase.FORWARD, step_seconds=0.0, phase_seconds=9.0)), "its first step"),
        (dump(2, IN_LOCK, progress=progress(2, Phase.FORWARD, is_stalled=False, phase_seconds=9.0)), "not overdue"),
        (dump(2, IN_LOADER, Phase.DATA), "data often come"),
        (dump(2, ("/usr/lib/python3.11/pdb.py:300 interaction", *IN_LOCK), Phase.FORWARD), "a person debugs it"),
        (dump(2, IN_LOCK, Phase.FORWARD, state="D"), "storage often comes back"),
        (dump(2, IN_LOCK, Phase.FORWARD, phase_seconds=4.9), "a short pause"),
    ],
)
def test_what_may_be_slow_work_is_told_and_left_alone(lab: Lab, odd: WorkerDump, why: str) -> None:
    lab.tell(*(each.progress for each in others(odd) if each.progress is not None))
    lab.answer(
        0,
        *others(
            replace(odd, cpu_seconds=0.0, io_bytes=0, major_faults=0, switches=0, children=("77 S - cpu=0.10 python",))
        ),
    )
    lab.after(3.6)
    lab.answer(1, *others(odd))
    assert lab.acts() == [], why
    assert lab.ranks() == [2]
    assert lab.told()[-1].action is ActionKind.NOTIFY


def test_a_rank_that_moves_between_the_dumps_is_no_proof(lab: Lab) -> None:
    first = others(dump(2, IN_LOCK, Phase.FORWARD, phase_seconds=2.0))
    lab.tell(*(each.progress for each in first if each.progress is not None))
    lab.answer(0, *first)
    lab.after(3.6)
    lab.answer(1, *others(dump(2, ("/job/train.py:33 forward", *IN_LOCK[2:]), Phase.FORWARD)))
    assert lab.acts() == []


def test_what_went_on_meanwhile_is_no_episode(lab: Lab) -> None:
    lab.tell(progress(1))
    lab.answer(0, *others())
    lab.after(3.6)
    lab.answer(
        1, *(replace(each, progress=progress(each.global_rank, is_stalled=False, step=130)) for each in others())
    )
    assert lab.told() == []


def test_without_proof_it_acts_after_the_hang_timeout_and_not_before(lab: Lab) -> None:
    everybody = tuple(dump(rank, IN_ALL_REDUCE, Phase.COLLECTIVE) for rank in range(4))
    lab.look(*everybody)
    assert lab.told()[-1].fault is FaultClass.NETWORK
    assert lab.told()[-1].culprits == ()
    began, seconds = lab.now, 6.0
    while not lab.acts():
        deadline = lab.watch.next_deadline()
        assert deadline is not None
        assert deadline < began + 330e6
        lab.now = max(lab.now, deadline)
        seconds = 6.0 + (lab.now - began) / 1e6
        waiting = tuple(dump(rank, IN_ALL_REDUCE, Phase.COLLECTIVE, phase_seconds=seconds) for rank in range(4))
        num_asked = len(lab.asked())
        lab.tell(*(each.progress for each in waiting if each.progress is not None))
        if len(lab.asked()) > num_asked:
            lab.answer(0, *waiting)
            lab.after(lab.asked()[-1].order.order.again_after)
            lab.answer(1, *waiting)
    assert 299 <= acted(lab).stalled_for <= 310
    assert len(lab.told()) <= 6, "one episode is not told again and again"
    assert len(lab.asked()) < 60


@pytest.mark.parametrize(
    ("mine", "theirs", "frames", "fault"),
    [
        (inside(9), inside(8), IN_ALL_REDUCE, FaultClass.SKIPPED_COLLECTIVE),
        (inside(8, "barrier", ""), inside(8), IN_BARRIER, FaultClass.MISMATCHED_COLLECTIVE),
        (inside(8, shape="float32[9]"), inside(8), IN_ALL_REDUCE, FaultClass.MISMATCHED_COLLECTIVE),
    ],
)
def test_ranks_in_different_collectives_are_told_apart(
    lab: Lab, mine: object, theirs: object, frames: tuple[str, ...], fault: FaultClass
) -> None:
    def at(rank: int) -> WorkerDump:
        told = progress(rank, Phase.COLLECTIVE, collective=mine if rank == 1 else theirs, phase_seconds=5.8)
        return dump(rank, frames if rank == 1 else IN_ALL_REDUCE, progress=told)

    lab.look(*(at(rank) for rank in range(4)))
    assert acted(lab).verdict.fault is fault
    assert lab.ranks() == [1]


IN_BROADCAST = (
    "/site/dlrover/trainer/torch/progress_hooks.py:238 wait",
    "/venv/torch/distributed/distributed_c10d.py:3151 broadcast",
    "/venv/torch/distributed/c10d_logger.py:83 wrapper",
    "/job/train.py:12 share",
    "/usr/lib/python3.11/threading.py:982 run",
)


def recorded(*entries: tuple[int, str, str]) -> tuple[Collective, ...]:
    """Torch's own record: number, operation and group of what is not done."""
    return tuple(
        Collective(sequence=sequence, operation=operation, group=group, is_inside=True, backend="gloo")
        for sequence, operation, group in entries
    )


def in_two_threads(rank: int, record: tuple[Collective, ...]) -> WorkerDump:
    told = progress(rank, Phase.COLLECTIVE, collective=inside(40), phase_seconds=5.8)
    side = ThreadStack(name="sharing", frames=IN_BROADCAST)
    both = dump(rank, IN_ALL_REDUCE, progress=told, recorded=record)
    return replace(both, threads=(*both.threads, side) if rank == 2 else both.threads)


def test_two_threads_of_a_rank_in_collectives_of_one_group_are_told_from_the_network(lab: Lab) -> None:
    swapped = recorded((40, "broadcast", "pg"), (41, "all_reduce", "pg"))
    usual = recorded((40, "all_reduce", "pg"))
    lab.look(*(in_two_threads(rank, swapped if rank == 2 else usual) for rank in range(4)))
    verdict = acted(lab).verdict
    assert (verdict.fault, verdict.confidence) == (FaultClass.CONCURRENT_COLLECTIVES, 0.95)
    assert lab.ranks() == [2]
    assert "thread main is in all_reduce at /job/train.py:44" in verdict.evidence[0]
    assert "thread sharing is in broadcast at /job/train.py:12 (share)" in verdict.evidence[0]
    assert "number 40 of group pg is all_reduce on rank 0 and broadcast on rank 2" in verdict.evidence[1]
    assert "thread sharing is in broadcast" in lab.pages()[-1]


def test_two_threads_in_one_group_are_no_proof_while_the_order_is_unknown_or_equal(lab: Lab) -> None:
    lab.look(*(in_two_threads(rank, ()) for rank in range(4)))
    assert lab.acts() == []
    told = lab.told()[-1]
    assert (told.fault, told.confidence) == (FaultClass.CONCURRENT_COLLECTIVES, 0.8)


def test_threads_that_have_a_group_each_are_not_to_blame(lab: Lab) -> None:
    apart = recorded((3, "broadcast", "loader"), (40, "all_reduce", "pg"))
    lab.look(*(in_two_threads(rank, apart) for rank in range(4)))
    assert lab.told()[-1].fault is FaultClass.NETWORK


def test_a_dead_loader_process_needs_no_patience(lab: Lab) -> None:
    lab.look(*others(dump(0, IN_LOADER, Phase.DATA, children=("77 T do_signal_stop cpu=0.10 python",))))
    assert acted(lab).verdict.fault is FaultClass.DATA_STALL
    assert lab.ranks() == [0]


def test_after_acting_nothing_more_is_done_to_the_same_round(lab: Lab) -> None:
    lab.look(*others(dump(2, IN_LOCK, Phase.FORWARD)))
    lab.after(30)
    lab.tell(progress(1))
    lab.after(30)
    lab.tell(progress(1))
    assert len(lab.acts()) == 1
    assert len(lab.asked()) == len(NODES)


def lose_a_device(lab: Lab) -> None:
    report = ResourceReport(node=NODES[0], incarnation=Incarnation(1), troubles=("NVML: GPU is lost",))
    lab.watch.hear(report, lab.now)
    lab.after(2)
    lab.tick()


def test_a_hang_is_acted_upon_although_nothing_came_of_another_finding(lab: Lab) -> None:
    lose_a_device(lab)
    (act,) = lab.acts()
    assert isinstance(act.command, FaultFound)
    lab.watch.hear_answer(act.command, lab.now, is_heard=True)  # nobody can replace the node
    assert [past.has_acted for past in lab.watch.diagnosis(9).verdicts] == [False]
    for _ in range(50):
        lose_a_device(lab)
    assert len(lab.acts()) == 1, "the same finding would lead to nothing again"
    lab.look(*others(dump(2, IN_LOCK, Phase.FORWARD)))
    assert [type(each.command) for each in lab.acts()] == [FaultFound, HangFound]


def test_a_finding_of_which_nothing_came_is_tried_again_after_long(lab: Lab) -> None:
    lose_a_device(lab)
    lab.watch.hear_answer(lab.acts()[0].command, lab.now, is_heard=True)
    lab.after(EPISODE)
    lose_a_device(lab)
    assert len(lab.acts()) == 2


def test_a_hang_that_the_job_has_not_heard_of_is_found_again(lab: Lab) -> None:
    hanging = others(dump(2, IN_LOCK, Phase.FORWARD))
    lab.look(*hanging)
    lab.watch.hear_answer(acted(lab), lab.now, is_heard=False)  # the journal cannot be written
    assert lab.watch.next_deadline() is not None
    lab.after(AGAIN_SOON)
    lab.look(*hanging)
    assert [type(each.command) for each in lab.acts()] == [HangFound, HangFound]


def test_an_answer_that_comes_when_the_next_round_is_open_changes_nothing(lab: Lab) -> None:
    lab.look(*others(dump(2, IN_LOCK, Phase.FORWARD)))
    lab.enter(1, is_active=False)
    lab.watch.hear_answer(acted(lab), lab.now, is_heard=True)
    assert [past.has_acted for past in lab.watch.diagnosis(9).verdicts] == [True]


def test_the_cost_of_a_restart_is_measured_and_named_the_next_time(lab: Lab) -> None:
    lab.look(*others(dump(2, IN_LOCK, Phase.FORWARD)))
    lab.enter(1, is_active=False)
    lab.enter(2)
    lab.after(1.5)
    lab.tell(*(progress(rank, is_stalled=False, phase_seconds=0.01) for rank in range(4)), round_=2)
    assert lab.watch.restart_cost == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("strategy", "action"), [(HangStrategy.LOG, ActionKind.NONE), (HangStrategy.NOTIFY, ActionKind.NOTIFY)]
)
def test_the_strategy_may_forbid_to_act(strategy: HangStrategy, action: ActionKind) -> None:
    lab = Lab(WatchTerms(strategy=strategy))
    lab.train()
    lab.look(*others(dump(2, IN_LOCK, Phase.FORWARD)))
    assert lab.acts() == []
    assert lab.told()[-1].fault is FaultClass.DEADLOCK
    assert lab.told()[-1].action is action


def test_a_job_that_never_told_of_a_step_is_never_restarted_for_being_slow() -> None:
    lab = Lab()
    silent = tuple(
        dump(rank, IN_LOCK, progress=progress(rank, Phase.START, step=None, step_seconds=0.0, phase_seconds=90_000.0))
        for rank in range(4)
    )
    lab.look(*silent)
    assert lab.told()
    assert lab.acts() == []


def test_a_node_that_does_not_answer_ends_the_look_and_spoils_the_proof(lab: Lab) -> None:
    lab.tell(progress(0), progress(1))
    lab.answer(0, dump(0, IN_LOCK, Phase.FORWARD), dump(1))
    lab.after(3.6)
    assert lab.answer(1, dump(0, IN_LOCK, Phase.FORWARD), dump(1)) == []
    lab.after(10)
    lab.tick()
    assert lab.acts() == []
    assert any("ranks 2-3" in sentence for sentence in lab.told()[-1].evidence)


def test_a_verdict_is_remembered_once_and_counted(lab: Lab) -> None:
    for _ in range(5):
        lab.look(*others(dump(2, IN_LOADER, Phase.DATA)))
        lab.after(61)
    past = lab.watch.diagnosis(10).verdicts
    assert [(each.verdict.fault, each.count) for each in past] == [(FaultClass.DATA_STALL, 5)]
    assert len([effect for effect in lab.effects if isinstance(effect, Tell)]) == 3, "at 1, 2 and 4"


def of_many_nodes(lab: Lab, num_nodes: int) -> int:
    """How many are told when each of them has the same trouble."""
    for node in range(num_nodes):
        culprits = (Culprit(node=NodeId(node), global_rank=-1),)
        lab.watch.hear_verdict(Verdict(fault=FaultClass.DISK_FULL, diagnostician="x", culprits=culprits), lab.now)
    lab.after(2)
    return sum(isinstance(effect, Tell) for effect in lab.tick())


def test_a_verdict_of_each_of_many_nodes_is_not_told_again_and_again(lab: Lab) -> None:
    assert [of_many_nodes(lab, 250) for _ in range(5)] == [250, 250, 0, 250, 0], "found 1, 2 and 4 times"
    shown = lab.watch.diagnosis(1000).verdicts
    assert len(shown) == MAX_VERDICTS
    assert len({past.verdict.culprits for past in shown}) == MAX_VERDICTS
    assert lab.watch.newest == shown[-1]


def test_a_verdict_that_goes_on_is_the_same_one_although_a_later_one_is_long_over(lab: Lab) -> None:
    of_many_nodes(lab, 1)
    of_many_nodes(lab, 2)
    for _ in range(3):
        lab.after(EPISODE - 10)
        of_many_nodes(lab, 1)
    assert [past.count for past in lab.watch.diagnosis(10).verdicts] == [5, 1]


def test_answers_of_an_older_look_and_strange_ranks_are_ignored(lab: Lab) -> None:
    lab.tell(progress(1))
    lab.answer(0, *others(dump(2, (), state="T")), look=99)
    assert lab.acts() == []
    stranger = replace(dump(2, (), state="T"), global_rank=40)
    lab.answer(0, replace(stranger, global_rank=0), dump(2))
    assert lab.told() == [] or lab.ranks() != [40]


def test_innermost_frames_decide_who_waits() -> None:
    """A Python function of the user's, called by backward, is the rank's own business."""
    lab = Lab()
    lab.train()
    lab.look(*others(dump(1, ("/job/train.py:12 backward_hook", *IN_BACKWARD), Phase.BACKWARD)))
    assert lab.ranks() == [1]
    assert acted(lab).verdict.fault is FaultClass.DEADLOCK


def test_ranks_that_rest_in_backward_wait_although_their_communication_turns_over_on_a_busy_machine(lab: Lab) -> None:
    blocked = dump(2, IN_LOCK, Phase.FORWARD, state="D", wait_channel="request_wait_answer")
    waiting = others(blocked)
    lab.look(*waiting, second=tuple(replace(each, cpu_seconds=0.12) for each in waiting))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.STORAGE_STALL, [2])
    lab.after(20)
    lab.look(*waiting, second=tuple(replace(each, cpu_seconds=0.2 if each is blocked else 2.0) for each in waiting))
    assert lab.told()[-1].fault is FaultClass.BUSY, "these compute"


def test_a_rank_that_is_just_ending_is_told_of_only_when_it_does_not_end(lab: Lab) -> None:
    ending = dump(2, IN_LOCK, progress=progress(2, Phase.END, is_stalled=False, phase_seconds=6.0))
    lab.look(*others(ending), second=others(replace(ending, cpu_seconds=1.0)))
    assert lab.told() == [], "how it ends will say more"
    lab.after(4)
    lab.look(*others(ending))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.SKIPPED_COLLECTIVE, [2])


def test_only_a_debugger_that_stays_has_stopped_a_rank(lab: Lab) -> None:
    """Native stacks are sampled between the dumps, by something that stops the process for a moment."""
    passing = tuple(dump(rank, IN_ALL_REDUCE, Phase.COLLECTIVE) for rank in range(4))
    lab.look(*passing, second=(replace(passing[0], state="t"), *passing[1:]))
    assert lab.told()[-1].fault is FaultClass.NETWORK
    lab.after(10)
    lab.look(replace(passing[0], state="t"), *passing[1:])
    assert lab.told()[-1].fault is FaultClass.STOPPED
    assert lab.ranks() == [0]
    assert lab.acts() == [], "somebody may be looking for the fault"


def test_ranks_that_have_ended_are_no_proof(lab: Lab) -> None:
    """They may have ended well: what ends badly is reported at once."""
    gone = replace(dump(1, ()), state="X", pid=0)
    lab.look(*others(gone))
    assert (lab.told()[-1].fault, lab.ranks()) == (FaultClass.DEAD, [1])
    lab.after(10)
    lab.look(gone, dump(2, IN_LOCK, Phase.FORWARD), dump(0), dump(3))
    assert lab.ranks() == [2]
    assert lab.acts() == []
    lab.after(20)
    lab.tell(progress(0))
    lab.answer(0, gone, replace(dump(2, ()), state="T"), dump(0), dump(3))
    assert acted(lab).verdict.fault is FaultClass.STOPPED


def test_a_rank_in_backward_of_the_next_step_has_skipped_the_collective_that_the_others_are_in(lab: Lab) -> None:
    def at(rank: int) -> WorkerDump:
        if rank == 3:
            done = replace(inside(7), is_inside=False)
            return dump(3, progress=progress(3, Phase.BACKWARD, step=101, collective=done, phase_seconds=5.8))
        told = progress(rank, Phase.COLLECTIVE, collective=inside(8), phase_seconds=5.8)
        return dump(rank, IN_ALL_REDUCE, progress=told)

    lab.look(*(at(rank) for rank in range(4)))
    assert acted(lab).verdict.fault is FaultClass.SKIPPED_COLLECTIVE
    assert lab.ranks() == [3]
