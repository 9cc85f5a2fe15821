"""What each diagnostician finds in a picture, and what it does not."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, SupportsIndex

import pytest

from dlrover.core.diagnosis.checks.failures import fault_of
from dlrover.core.diagnosis.checks.nodes import Devices
from dlrover.core.diagnosis.checks.progress import Straggler
from dlrover.core.diagnosis.picture import FailedWorkers, NodePlace, Picture, RankRecord, Window
from dlrover.core.diagnosis.samples import Sample, Samples
from dlrover.protocol.messages.job import FailureKind, Incarnation, Micros, NodeId, NodeRank, Round
from dlrover.protocol.messages.watch import (
    ActionKind,
    DeviceSample,
    FaultClass,
    NodeEvent,
    Phase,
    ProcessSample,
    ResourceReport,
    SampleTaken,
    Verdict,
)
from dlrover.protocol.units import in_bytes
from tests.core.diagnosis.watch_lab import NODES, Lab, progress
from tests.core.scene import failure


def found(lab: Lab, fault: FaultClass) -> list[Verdict]:
    return [verdict for verdict in lab.told() if verdict.fault is fault]


def ranks(verdict: Verdict) -> list[int]:
    return [culprit.global_rank for culprit in verdict.culprits]


def resources(node: NodeId = NODES[0], **details: Any) -> ResourceReport:
    return ResourceReport(node=node, incarnation=Incarnation(1), **details)


def hear(lab: Lab, report: ResourceReport) -> None:
    lab.watch.hear(report, lab.now)
    lab.after(2)
    lab.tick()


def train(lab: Lab, num_reports: int, own: dict[int, float], *, step: float = 0.1) -> None:
    """Reports of a hundred steps each; `own`: seconds of own work in a step, by rank; the rest is waiting."""
    for number in range(1, num_reports + 1):
        lab.tell(
            *(
                progress(
                    rank,
                    step=100 * number,
                    is_stalled=False,
                    phase_seconds=0.01,
                    seconds={
                        Phase.FORWARD: 100 * number * own.get(rank, 0.02),
                        Phase.BACKWARD: 100 * number * (step - own.get(rank, 0.02)),
                    },
                )
                for rank in range(4)
            )
        )
        lab.after(5)
        lab.tick()


def test_a_rank_whose_own_work_takes_longer_is_a_straggler() -> None:
    lab = Lab()
    train(lab, 4, {2: 0.08})
    (verdict,) = found(lab, FaultClass.STRAGGLER)[:1]
    assert ranks(verdict) == [2]
    assert verdict.action is ActionKind.NOTIFY


@pytest.mark.parametrize("own", [{}, {2: 0.025}, {0: 0.08, 1: 0.08, 2: 0.08}])
def test_small_differences_and_majorities_are_no_stragglers(own: dict[int, float]) -> None:
    lab = Lab()
    train(lab, 4, own)
    assert found(lab, FaultClass.STRAGGLER) == []


@pytest.mark.parametrize("beside", [Phase.CHECKPOINT, Phase.EVALUATION, Phase.DATA])
def test_a_rank_that_saves_evaluates_or_loads_for_all_is_no_straggler(beside: Phase) -> None:
    """Rank 0 saves in each third step. Files are opened and closed around it, which looks like computing."""
    lab = Lab()
    for number in range(1, 5):
        steps = 100 * number
        lab.tell(
            *(
                progress(
                    rank,
                    step=steps,
                    is_stalled=False,
                    phase_seconds=0.01,
                    num_plain_steps=0 if beside is Phase.DATA else 66 * number if rank == 0 else steps,
                    plain_seconds=0.02 * (66 * number if rank == 0 else steps),
                    seconds={
                        Phase.FORWARD: steps * 0.02
                        + (100 / 3 * number * 0.1 if rank == 0 and beside is not Phase.DATA else 0.0),
                        Phase.BACKWARD: steps * (0.01 if rank == 0 else 0.11),
                        beside: steps * 0.06 if rank == 0 else 0.0,
                    },
                )
                for rank in range(4)
            )
        )
        lab.after(5)
        lab.tick()
    assert found(lab, FaultClass.STRAGGLER) == []


class CountedWindows(deque[Window]):
    num_reads = 0

    def __getitem__(self, index: SupportsIndex) -> Window:
        CountedWindows.num_reads += 1
        return super().__getitem__(index)


def test_stragglers_are_found_in_time_that_grows_with_the_ranks_and_not_with_their_square() -> None:
    picture, num_ranks = Picture(), 400
    place = NodePlace(node=NODES[0], node_rank=NodeRank(0), host="", first_rank=0, num_ranks=num_ranks)
    for rank in range(num_ranks):
        record = picture.ranks[rank] = RankRecord(place, rank)
        record.heard_at = Micros(1)
        record.windows = CountedWindows([Window(steps=10, own=8.0 if rank == 7 else 1.0, waiting=1.0)] * 2)
    CountedWindows.num_reads = 0
    (verdict,) = Straggler().diagnose(picture, Micros(2))
    assert ranks(verdict) == [7]
    assert CountedWindows.num_reads < 20 * num_ranks


class CountedSamples(Samples):
    num_asked = 0

    def newest(self) -> list[Sample]:
        self.num_asked += 1
        return super().newest()


def test_what_collectors_told_is_gone_through_once_and_not_for_each_node() -> None:
    picture, samples = Picture(), CountedSamples()
    picture.samples = samples
    for node in map(NodeId, range(50)):
        picture.resources[node] = resources(node)
        trouble = "GPU is lost" if node == 9 else ""
        samples.add(SampleTaken(node=node, incarnation=Incarnation(1), kind="mine", trouble=trouble), Micros(1))
    (verdict,) = Devices().diagnose(picture, Micros(2))
    assert [culprit.node for culprit in verdict.culprits] == [9]
    assert samples.num_asked == 1


def test_the_rank_that_first_reported_no_number_is_named() -> None:
    lab = Lab()
    told = [progress(rank, is_stalled=False, metrics={"loss": 0.5}) for rank in (0, 2, 3)]
    lab.tell(progress(1, is_stalled=False, metrics={"loss": math.nan}), *told)
    assert [ranks(each) for each in found(lab, FaultClass.NUMERICS)] == [[1]]


def test_a_loss_that_jumps_is_told_and_one_that_falls_is_not() -> None:
    lab = Lab()
    for step in range(40):
        loss = 3.0 - step * 0.05
        lab.tell(*(progress(rank, step=step, is_stalled=False, metrics={"loss": loss}) for rank in range(4)))
        lab.after(5)
    assert found(lab, FaultClass.LOSS_SPIKE) == []
    lab.tell(progress(3, step=41, is_stalled=False, metrics={"loss": 90.0}))
    assert [ranks(each) for each in found(lab, FaultClass.LOSS_SPIKE)] == [[3]]


def test_the_minority_of_replicas_is_named_and_without_a_majority_all_are() -> None:
    lab = Lab()
    digests = ["aa", "aa", "bb", "aa"]
    lab.tell(*(progress(rank, is_stalled=False, digest=digests[rank], digest_step=60) for rank in range(4)))
    (verdict,) = found(lab, FaultClass.CORRUPTION)
    assert ranks(verdict) == [2]
    lab = Lab()
    lab.tell(*(progress(rank, is_stalled=False, digest="ab"[rank % 2], digest_step=60) for rank in range(4)))
    (verdict,) = found(lab, FaultClass.CORRUPTION)
    assert len(ranks(verdict)) == 4
    assert verdict.confidence <= 0.5


def test_digests_of_different_steps_are_not_compared() -> None:
    lab = Lab()
    lab.tell(*(progress(rank, is_stalled=False, digest=str(rank), digest_step=60 + rank) for rank in range(4)))
    assert found(lab, FaultClass.CORRUPTION) == []


@pytest.mark.parametrize(
    ("growing", "growth", "expected"),
    [
        ((1,), lambda number: 60 * number, [[1]]),
        ((0, 1, 2, 3), lambda number: 60 * number, []),
        ((1,), lambda number: 600 * (number >= 8), []),  # once
        ((1,), lambda number: 200 * max(0, number - 9), []),  # not for long yet
    ],
)
def test_a_worker_that_grows_alone_leaks_and_all_together_or_at_once_do_not(
    growing: tuple[int, ...], growth: Callable[[int], int], expected: list[list[int]]
) -> None:
    lab = Lab()
    for number in range(12):
        for node in NODES:
            first = 2 * NODES.index(node)
            samples = tuple(
                ProcessSample(global_rank=rank, memory_bytes=in_bytes(500 + (growth(number) if rank in growing else 0)))
                for rank in (first, first + 1)
            )
            hear(lab, resources(node, workers=samples, memory_bytes=in_bytes(5000), memory_limit_bytes=in_bytes(16000)))
        lab.after(3)
    leaks = found(lab, FaultClass.MEMORY_LEAK)
    assert [ranks(each) for each in leaks[:1]] == expected


@pytest.mark.parametrize(
    ("details", "fault", "action"),
    [
        ({"memory_bytes": 97, "memory_limit_bytes": 100}, FaultClass.OUT_OF_MEMORY, ActionKind.NOTIFY),
        ({"shm_bytes": 97, "shm_limit_bytes": 100}, FaultClass.OUT_OF_MEMORY, ActionKind.NOTIFY),
        ({"disk_free_bytes": 3_000_000}, FaultClass.DISK_FULL, ActionKind.NOTIFY),
        ({"clock_jump": -40.0}, FaultClass.CLOCK_JUMP, ActionKind.NOTIFY),
        ({"troubles": ("GPU is lost: 3",)}, FaultClass.DEVICE, ActionKind.RELAUNCH_NODE),
        ({"devices": (DeviceSample(index=1, health="Xid 79"),)}, FaultClass.DEVICE, ActionKind.NOTIFY),
        ({"troubles": ("the driver does not answer",)}, FaultClass.UNKNOWN, ActionKind.NOTIFY),
    ],
)
def test_what_a_node_tells_of_itself(details: dict[str, Any], fault: FaultClass, action: ActionKind) -> None:
    lab = Lab()
    hear(lab, resources(**details))
    (verdict,) = lab.told()
    assert (verdict.fault, verdict.action, verdict.culprits[0].node) == (fault, action, NODES[0])
    assert len(lab.acts()) == (action is ActionKind.RELAUNCH_NODE)


def test_a_healthy_node_is_not_worth_a_word() -> None:
    lab = Lab()
    hear(lab, resources(memory_bytes=50, memory_limit_bytes=100, disk_free_bytes=10**11, clock_jump=0.2))
    assert lab.told() == []


def test_a_known_line_in_a_log_has_the_node_replaced() -> None:
    lab = Lab()
    event = NodeEvent(
        node=NODES[1], incarnation=Incarnation(1), level="error", name="log-pattern", text="error code 507035"
    )
    lab.watch.hear(event, lab.now)
    lab.tick()
    (verdict,) = lab.told()
    assert (verdict.diagnostician, verdict.action) == ("node_failure", ActionKind.RELAUNCH_NODE)


def test_a_rank_that_the_platform_runs_twice_is_told() -> None:
    lab = Lab()
    lab.watch.hear_duplicates({"worker 3": 2})
    lab.tick()
    assert [verdict.diagnostician for verdict in lab.told()] == ["node_inconsistency"]


@pytest.mark.parametrize(
    ("kind", "text", "fault"),
    [
        (FailureKind.SIGNAL, "killed", FaultClass.DEAD),
        (FailureKind.OUT_OF_MEMORY, "", FaultClass.OUT_OF_MEMORY),
        (FailureKind.MEMORY_ERROR, "", FaultClass.OUT_OF_MEMORY),
        (FailureKind.EXCEPTION, "OSError: [Errno 28] No space left on device", FaultClass.DISK_FULL),
        (FailureKind.EXCEPTION, "RuntimeError: can't start new thread", FaultClass.PROCESS_LIMIT),
        (FailureKind.SIGNAL, "op.preamble.length <= op.nbytes. 32 vs 8", FaultClass.MISMATCHED_COLLECTIVE),
        (FailureKind.EXCEPTION, "RuntimeError: DataLoader worker (pid 7) is killed", FaultClass.DATA_STALL),
        (FailureKind.EXCEPTION, "ValueError: the loss is nan", FaultClass.NUMERICS),
        (FailureKind.EXCEPTION, "OSError: [Errno 5] Input/output error", FaultClass.STORAGE_STALL),
        (FailureKind.PEER_LOST, "Connection closed by peer", FaultClass.NETWORK),
        (FailureKind.EXCEPTION, "ValueError: information about inference", FaultClass.EXCEPTION),
    ],
)
def test_the_last_words_of_a_worker_say_what_was_wrong(kind: FailureKind, text: str, fault: FaultClass) -> None:
    assert fault_of(failure(kind, message=text)) is fault


def test_one_kill_that_all_nodes_tell_of_is_no_loop() -> None:
    lab = Lab()
    killed = failure(FailureKind.SIGNAL, global_rank=1, message="killed", signal=9)
    for node_rank, node in enumerate(NODES * 2):
        lab.watch.hear_failure(
            FailedWorkers(
                at=lab.now, round=Round(1), node=node, node_rank=NodeRank(node_rank), step=7, failures=(killed,)
            )
        )
    lab.tick()
    assert len(found(lab, FaultClass.DEAD)) == 1
    assert found(lab, FaultClass.CRASH_LOOP) == []


def test_the_same_failure_at_the_same_step_three_times_is_a_loop_and_told_once_each() -> None:
    lab = Lab()
    for number, step in enumerate([3, 7, None, None, 7], 1):
        lab.enter(number)
        boom = failure(FailureKind.EXCEPTION, global_rank=1, traceback="Traceback ... boom", at=number)
        lab.watch.hear_failure(
            FailedWorkers(
                at=lab.now, round=Round(number), node=NODES[0], node_rank=NodeRank(0), step=step, failures=(boom,)
            )
        )
        lab.after(2)
        lab.tick()
        lab.tick()
    assert [ranks(each) for each in found(lab, FaultClass.EXCEPTION)] == [[1]] * 5
    loops = found(lab, FaultClass.CRASH_LOOP)
    assert [ranks(each) for each in loops] == [[1]] * 2
    assert lab.acts() == []


def test_all_nodes_that_tell_of_the_same_failure_make_no_loop_and_a_better_first_one_counts() -> None:
    lab = Lab()
    late, early = (failure(FailureKind.EXCEPTION, global_rank=rank, traceback="boom", at=9 - rank) for rank in (1, 2))
    for first in (late, late, early, early):
        lab.watch.hear_failure(
            FailedWorkers(at=lab.now, round=Round(1), node=NODES[0], node_rank=NodeRank(0), step=7, failures=(first,))
        )
        lab.after(2)
        lab.tick()
    assert found(lab, FaultClass.CRASH_LOOP) == []
    assert [ranks(each) for each in found(lab, FaultClass.EXCEPTION)] == [[1], [2]]


def test_a_jump_of_the_clock_is_counted_once_and_the_next_one_again() -> None:
    lab = Lab()
    hear(lab, resources(clock_jump=5.0))
    for _ in range(3):
        lab.train()
        lab.tick()
    hear(lab, resources(clock_jump=5.0))
    (past,) = lab.watch.diagnosis(10).verdicts
    assert (past.verdict.fault, past.count) == (FaultClass.CLOCK_JUMP, 2)


def test_everything_stays_bounded_in_a_flood() -> None:
    lab = Lab()
    for number in range(2000):
        event = NodeEvent(
            node=NODES[0], incarnation=Incarnation(1), level="info", name="log-pattern", text=str(number) * 900
        )
        lab.watch.hear(event, lab.now)
        lab.watch.hear(resources(clock_jump=5.0 + number), lab.now)
        lab.now = Micros(lab.now + 700_000_000)
        lab.tick()
    picture = lab.watch.picture
    assert len(picture.events) <= 64
    assert len(lab.watch.diagnosis(10_000).verdicts) <= 200
    assert lab.watch.diagnosis(0).verdicts == ()
    assert all(len(sentence) <= 2048 for verdict in lab.told() for sentence in verdict.evidence)
