"""Where a finding begins and where it ends: the last number that says nothing, and the first that does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core.diagnosis import autopsy, stacks
from dlrover.core.diagnosis.checks.failures import CrashLoop, fault_of
from dlrover.core.diagnosis.checks.idleness import IdleDevices, IdleJob
from dlrover.core.diagnosis.checks.nodes import Devices, MemoryLeak, OutOfMemory
from dlrover.core.diagnosis.checks.progress import LossSpike, Numerics, Straggler
from dlrover.core.diagnosis.hang import IDLE_CPU, IDLE_IO, IDLE_SWITCHES, Sight, judge, see
from dlrover.core.diagnosis.picture import (
    MAX_DIGESTS,
    WINDOWS,
    FailedWorkers,
    NodePlace,
    Picture,
    RankRecord,
    Scene,
    Window,
)
from dlrover.core.diagnosis.samples import Samples
from dlrover.protocol.messages.job import FailureKind, Incarnation, Micros, NodeId, NodeRank, Round
from dlrover.protocol.messages.watch import (
    Collective,
    DeviceSample,
    FaultClass,
    Phase,
    ProcessSample,
    ProgressReport,
    ResourceReport,
    SampleTaken,
    Verdict,
)
from dlrover.protocol.units import MIB
from tests.core.diagnosis.watch_lab import IN_ALL_REDUCE, IN_BARRIER, IN_LOADER, IN_LOCK, dump, inside, progress
from tests.core.scene import failure

NOW = Micros(1_000_000_000)
SECOND = 1_000_000


def picture(num_nodes: int = 2, num_ranks: int = 2) -> Picture:
    found = Picture()
    places = tuple(
        NodePlace(
            node=NodeId(7 + 2 * index),
            node_rank=NodeRank(index),
            host=f"host{index}",
            first_rank=num_ranks * index,
            num_ranks=num_ranks,
        )
        for index in range(num_nodes)
    )
    found.enter(Scene(round=Round(1), is_active=True, began_at=Micros(NOW - 900 * SECOND), places=places))
    for rank, record in found.ranks.items():
        record.hear(progress(rank, is_stalled=False), NOW)
    return found


def only(verdicts: Any) -> Verdict | None:
    found = list(verdicts)
    assert len(found) <= 1
    return found[0] if found else None


def named(verdict: Verdict | None) -> list[int] | None:
    return None if verdict is None else [culprit.global_rank for culprit in verdict.culprits]


class TestMemoryLeak:
    def leak(
        self, megabytes: Sequence[int], *, ranks: tuple[int, ...] = (1,), every: int = 5, **report: Any
    ) -> Verdict | None:
        """Rank 1 uses so many at each look; the others stay as they are."""
        seen = picture()
        for rank, record in seen.ranks.items():
            for index, used in enumerate(megabytes):
                amount = (used if rank in ranks else megabytes[0]) * MIB
                record.memory.append((Micros(NOW + every * index * SECOND), amount))
        if report:
            seen.resources[NodeId(7)] = ResourceReport(node=NodeId(7), incarnation=Incarnation(1), **report)
        return only(MemoryLeak().diagnose(seen, NOW))

    @pytest.mark.parametrize(
        ("megabytes", "is_leak"),
        [
            ([0, 20, 40, 60, 70, 80, 90, 100], True),
            ([0, 20, 40, 60, 70, 80, 90, 99], False),  # less than is worth a word
            ([1000, 1050, 1100, 1150, 1200, 1230, 1260, 1300], True),
            ([1000, 1050, 1100, 1150, 1200, 1230, 1260, 1299], False),  # less than three tenths
            ([0, 40, 80, 120, 150, 160, 180, 200], True),  # a quarter of it in the second half
            ([0, 40, 80, 120, 151, 160, 180, 200], False),  # it comes to rest
            ([0, 100, 200, 300, 400, 500, 600], False),  # too few looks
            ([0, 100, 200, 300, 299, 400, 500, 600, 700, 800], True),  # now and then something is freed
            ([0, 100, 200, 300, 299, 298, 400, 500, 600, 700], True),  # two of ten
            ([0, 100, 200, 300, 299, 298, 297, 500, 600, 700], False),  # three
            ([0, 25, 50, 75, 200, 201, 400, 800], True),  # each time at least its usual share
            ([0, 24, 50, 51, 200, 201, 400, 800], False),  # too rarely
        ],
    )
    def test_when_it_is_one(self, megabytes: list[int], is_leak: bool) -> None:
        assert named(self.leak(megabytes)) == ([1] if is_leak else None)

    def test_it_lasts(self) -> None:
        growing = [100 * number for number in range(8)]
        assert self.leak(growing, every=5) is not None, "30 s from the first growth to the last"
        assert self.leak(growing, every=4) is None

    def test_half_of_the_ranks_leak_and_more_are_the_model(self) -> None:
        growing = [100 * number for number in range(8)]
        assert named(self.leak(growing, ranks=(1, 2))) == [1, 2]
        assert self.leak(growing, ranks=(1, 2, 3)) is None

    def test_a_single_rank_leaks_alone(self) -> None:
        seen = picture(1, 1)
        for index in range(8):
            seen.ranks[0].memory.append((Micros(NOW + 5 * index * SECOND), 100 * MIB * index))
        assert named(only(MemoryLeak().diagnose(seen, NOW))) == [0]
        seen = picture(1, 2)
        for record in seen.ranks.values():
            for index in range(8):
                record.memory.append((Micros(NOW + 5 * index * SECOND), 100 * MIB * index))
        assert only(MemoryLeak().diagnose(seen, NOW)) is None, "both"

    def test_when_the_node_is_full_is_said_where_it_is_known(self) -> None:
        growing = [100 * number for number in range(8)]
        known = self.leak(growing, memory_bytes=1000 * MIB, memory_limit_bytes=2200 * MIB)
        assert known is not None
        assert "the node is full in 1 minutes" in " ".join(known.evidence)
        for report in (
            {"memory_bytes": 1000 * MIB, "memory_limit_bytes": 1000 * MIB},
            {"memory_bytes": 0, "memory_limit_bytes": 1000 * MIB},
            {},
        ):
            unknown = self.leak(growing, **report)
            assert unknown is not None
            assert "full in" not in " ".join(unknown.evidence)


class TestStraggler:
    def slow(self, *windows: Window, num_slow: int = 1) -> list[int] | None:
        seen = picture()
        for rank, record in seen.ranks.items():
            usual = Window(steps=10, own=1.0, waiting=1.0)
            record.windows.extend(windows if rank < num_slow else (usual, usual))
        return named(only(Straggler().diagnose(seen, NOW)))

    def test_in_both_windows_and_by_enough(self) -> None:
        slow, usual = Window(steps=10, own=2.0, waiting=0.0), Window(steps=10, own=1.0, waiting=1.0)
        assert self.slow(slow, slow) == [0]
        assert self.slow(usual, slow) is None
        assert self.slow(slow, usual) is None
        assert self.slow(slow, slow, num_slow=2) == [0, 1]
        assert self.slow(slow, slow, num_slow=3) is None

    def test_of_three_steps(self) -> None:
        three = Window(steps=3, own=0.6, waiting=0.0)
        assert self.slow(three, three) == [0]
        two = Window(steps=2, own=0.4, waiting=0.0)
        assert self.slow(two, three) is None
        assert self.slow(three, two) is None

    def test_what_the_others_lose_counts_by_the_step(self) -> None:
        long = Window(steps=10, own=2.0, waiting=7.9)
        assert self.slow(long, long) == [0]
        longer = Window(steps=10, own=2.0, waiting=8.5)
        assert self.slow(longer, longer) is None, "a tenth of a step is 105 ms, and it needs only 100 ms more"

    def test_the_newest_windows_count(self) -> None:
        slow, usual = Window(steps=10, own=2.0, waiting=0.0), Window(steps=10, own=1.0, waiting=1.0)
        assert self.slow(usual, slow, slow) == [0]
        assert self.slow(slow, slow, usual) is None


class TestNumbers:
    def test_who_began_is_named_and_nobody_if_all_did(self) -> None:
        seen = picture(1, 2)
        seen.ranks[0].bad_metric = ("loss", 9)
        seen.ranks[1].bad_metric = ("loss", 8)
        assert named(only(Numerics().diagnose(seen, NOW))) == [1]
        seen.ranks[0].bad_metric = ("loss", 8)
        assert named(only(Numerics().diagnose(seen, NOW))) == []
        alone = picture(1, 1)
        alone.ranks[0].bad_metric = ("loss", None)
        assert named(only(Numerics().diagnose(alone, NOW))) == [0]

    @pytest.mark.parametrize(
        ("losses", "is_spike"),
        [
            ([1.0] * 8 + [3.01], True),
            ([1.0] * 8 + [3.0], False),
            ([1.0] * 7 + [9.0], False),  # too few
            ([1.0, 1.4, 0.6, 1.0, 1.4, 0.6, 1.2, 0.8, 3.9], False),  # ten deviations of 0.3
            ([1.0, 1.2, 0.8, 1.0, 1.2, 0.8, 1.2, 0.8, 3.0], False),
            ([1.0, 1.2, 0.8, 1.0, 1.2, 0.8, 1.2, 0.8, 3.2], True),
            ([1.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0, 1.0, 11.0], False),  # just ten times the spread
            ([1.0, 2.0, 0.0, 2.0, 0.0, 2.0, 0.0, 1.0, 11.01], True),
            ([0.0] * 8 + [1.0], True),
        ],
    )
    def test_a_loss_that_jumps(self, losses: list[float], is_spike: bool) -> None:
        seen = picture()
        seen.ranks[2].losses.extend(losses)
        assert named(only(LossSpike().diagnose(seen, NOW))) == ([2] if is_spike else None)

    def test_a_loss_of_all_or_of_one_that_is_all(self) -> None:
        for seen, expected in ((picture(1, 2), []), (picture(1, 1), [0])):
            for record in seen.ranks.values():
                record.losses.extend([1.0] * 8 + [50.0])
            assert named(only(LossSpike().diagnose(seen, NOW))) == expected


class TestNodes:
    def test_a_limit_of_one_byte_is_a_limit(self) -> None:
        seen = picture()
        full = ResourceReport(node=NodeId(7), incarnation=Incarnation(1), memory_bytes=1, memory_limit_bytes=1)
        seen.resources[NodeId(7)] = full
        assert only(OutOfMemory().diagnose(seen, NOW)) is not None

    def test_four_devices_and_four_losses_are_named(self) -> None:
        seen = picture()
        seen.resources[NodeId(7)] = ResourceReport(
            node=NodeId(7),
            incarnation=Incarnation(1),
            devices=tuple(DeviceSample(index=index, health="sick") for index in range(6)),
            troubles=tuple(f"GPU is lost: {index}" for index in range(6)),
        )
        verdict = only(Devices().diagnose(seen, NOW))
        assert verdict is not None
        assert len([each for each in verdict.evidence if "lost" in each]) == 4
        assert len([each for each in verdict.evidence if "sick" in each]) == 4

    def test_a_job_whose_workers_do_next_to_nothing_is_idle(self) -> None:
        def idle(*cores: float) -> Verdict | None:
            seen = picture(1, 2)
            for record in seen.ranks.values():
                record.progress = replace(record.progress, step=None)
            samples = tuple(ProcessSample(global_rank=rank, cpu=cpu) for rank, cpu in enumerate(cores))
            report = ResourceReport(node=NodeId(7), incarnation=Incarnation(1), workers=samples)
            seen.resources[NodeId(7)] = report
            check = IdleJob()
            assert only(check.diagnose(seen, NOW)) is None
            assert only(check.diagnose(seen, Micros(NOW + 7199 * SECOND))) is None
            return only(check.diagnose(seen, Micros(NOW + 7200 * SECOND)))

        assert idle(0.09, 0.01) is not None
        assert idle(0.1, 0.01) is None
        assert idle(0.01, 0.5) is None

    def test_devices_rest_if_all_counters_of_all_samples_of_all_nodes_do(self) -> None:
        def resting(busy_node: int | None, busy_sample: int = 0, busy_counter: int = 0) -> Verdict | None:
            seen = picture()
            for rank, record in seen.ranks.items():
                record.hear(progress(rank, phase_seconds=400.0, is_stalled=True), NOW)
            for rank in seen.ranks:
                told = progress(rank, phase_seconds=400.0, is_stalled=True)
                node = NodeId(7 + 2 * (rank // 2))
                seen.hear_progress(
                    ProgressReport(node=node, incarnation=Incarnation(1), round=Round(1), workers=(told,)), NOW
                )
            for node in (7, 9):
                for number in range(5):
                    counters = {f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{gpu={gpu}}}": 0.0 for gpu in range(2)}
                    if node == busy_node and number == busy_sample:
                        counters[f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{gpu={busy_counter}}}"] = 0.5
                    taken = SampleTaken(node=NodeId(node), incarnation=Incarnation(1), kind="dcgm", numbers=counters)
                    seen.samples.add(taken, Micros(NOW - (100 - number) * SECOND))
            return only(IdleDevices().diagnose(seen, NOW))

        assert resting(None) is not None
        for node in (7, 9):
            for counter in (0, 1):
                assert resting(node, 3, counter) is None


@pytest.mark.parametrize("phase", [Phase.START, Phase.RESTORE, Phase.COMPILE, Phase.CHECKPOINT])
def test_devices_may_rest_while_one_rank_is_elsewhere(phase: Phase) -> None:
    def verdict(of_rank_3: Phase) -> Verdict | None:
        seen = picture()
        for rank in seen.ranks:
            told = progress(rank, of_rank_3 if rank == 3 else Phase.BACKWARD, phase_seconds=400.0, is_stalled=True)
            report = ProgressReport(
                node=NodeId(7 + 2 * (rank // 2)), incarnation=Incarnation(1), round=Round(1), workers=(told,)
            )
            seen.hear_progress(report, NOW)
        for node, number in itertools.product((7, 9), range(5)):
            counters = {"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.0}
            taken = SampleTaken(node=NodeId(node), incarnation=Incarnation(1), kind="dcgm", numbers=counters)
            seen.samples.add(taken, Micros(NOW - (100 - number) * SECOND))
        return only(IdleDevices().diagnose(seen, NOW))

    assert verdict(Phase.BACKWARD) is not None
    assert verdict(phase) is None


def test_samples_are_kept_by_their_size_and_the_newest_always() -> None:
    def taken(lines: int, numbers: int = 0) -> SampleTaken:
        return SampleTaken(
            node=NodeId(7),
            incarnation=Incarnation(1),
            kind="log",
            text="x" * 80 * lines,
            numbers={str(number): 0.0 for number in range(numbers)},
        )

    kept = Samples(max_size=10)
    kept.add(taken(3, 1), NOW)
    kept.add(taken(4), NOW)
    assert len(kept) == 2, "five and five"
    kept.add(taken(0), NOW)
    assert len(kept) == 2, "one more is one too many"
    kept.add(taken(30), NOW)
    assert [len(each.taken.text) for each in kept] == [2400], "too large by itself"
    kept.add(taken(3, 2), NOW)
    kept.add(taken(3), NOW)
    assert len(kept) == 2


def test_digests_of_the_newest_steps_are_kept() -> None:
    record = picture().ranks[0]
    for step in range(MAX_DIGESTS + 1):
        record.hear(progress(0, step=step, digest="d", digest_step=step), NOW)
    assert list(record.digests) == list(range(1, MAX_DIGESTS + 1))


def test_one_plain_step_tells_the_time_of_all() -> None:
    record = RankRecord(picture().scene.places[0], 0)
    record.hear(progress(0, step=1, num_plain_steps=1, plain_seconds=1.0), NOW)
    record.hear(progress(0, step=3, num_plain_steps=2, plain_seconds=1.5), NOW)
    assert record.windows[-1] == Window(steps=2, own=1.0, waiting=0.0)


def test_what_a_report_of_another_node_says_of_a_rank_is_not_heard() -> None:
    seen = picture()
    told = (progress(0, step=500), progress(99, step=500))
    report = ProgressReport(node=NodeId(9), incarnation=Incarnation(1), round=Round(1), workers=told)
    assert seen.hear_progress(report, NOW)
    assert seen.ranks[0].progress.step == 100
    assert not seen.hear_progress(replace(report, round=Round(2)), NOW)
    seen.enter(replace(seen.scene, is_active=False))
    assert not seen.hear_progress(report, NOW)


def test_reports_of_nodes_that_have_left_are_forgotten() -> None:
    seen = picture()
    for node in (7, 9):
        seen.resources[NodeId(node)] = ResourceReport(node=NodeId(node), incarnation=Incarnation(1))
    seen.enter(replace(seen.scene, places=seen.scene.places[1:]))
    assert list(seen.resources) == [9]
    assert list(seen.ranks) == [2, 3]


@pytest.mark.parametrize("place", ["traceback", "log_tail"])
def test_the_last_words_count(place: str) -> None:
    said, rest = "OSError: No space left on device", "x" * 5000
    assert fault_of(failure(message="m", **{place: f"{rest}\n{said}"})) is FaultClass.DISK_FULL
    assert fault_of(failure(message="m", **{place: f"{said}\n{rest}"})) is FaultClass.EXCEPTION


def test_a_rank_keeps_its_newest_windows_only() -> None:
    record = picture().ranks[0]
    for step in range(WINDOWS + 5):
        record.hear(progress(0, step=200 + step), NOW)
    assert len(record.windows) == WINDOWS


def test_a_loop_names_the_node_that_told_last() -> None:
    seen = picture()
    for round_, node in ((1, 7), (2, 7), (3, 9)):
        died = failure(FailureKind.EXCEPTION, message="ValueError: odd")
        seen.failures.append(
            FailedWorkers(
                at=NOW,
                round=Round(round_),
                node=NodeId(node),
                node_rank=NodeRank(0),
                step=4,
                failures=(died,),
            )
        )
    verdict = only(CrashLoop().diagnose(seen, NOW))
    assert verdict is not None
    assert verdict.culprits[0].node == 9


def sight(rank: int, frames: tuple[str, ...] = IN_LOCK, **details: Any) -> Sight:
    own = {name: details.pop(name) for name in ("cpu", "io_bytes", "major_faults", "switches") if name in details}
    moved = {name: details.pop(name) for name in ("is_moving", "is_compared", "is_traced") if name in details}
    seen = dump(rank, frames, details.pop("phase", Phase.FORWARD), **details)
    return Sight(node=NodeId(7 + 2 * (rank // 2)), rank=rank, second=seen, **{"is_compared": True} | own | moved)


class TestHang:
    def test_who_is_still(self) -> None:
        assert sight(0).is_still
        assert sight(0, cpu=IDLE_CPU - 1e-9).is_still
        assert not sight(0, cpu=IDLE_CPU).is_still
        assert sight(0, io_bytes=IDLE_IO).is_still
        assert not sight(0, io_bytes=IDLE_IO + 1).is_still
        assert not sight(0, major_faults=1).is_still
        assert sight(0, switches=IDLE_SWITCHES).is_still
        assert not sight(0, switches=IDLE_SWITCHES + 0.1).is_still
        assert not sight(0, is_compared=False).is_still

    def test_what_may_take_long_is_said(self) -> None:
        assert not judge([sight(0, switches=IDLE_SWITCHES)]).is_long_phase
        assert judge([sight(0, switches=IDLE_SWITCHES + 0.1)]).is_long_phase

    def test_two_dumps_at_once_are_a_tenth_of_a_second_apart(self) -> None:
        first, second = dump(0, IN_LOCK, cpu_seconds=1.0, switches=10), dump(0, IN_LOCK, cpu_seconds=1.01, switches=11)
        seen = see(NodeId(7), first, second, 0.0)
        assert seen.cpu == pytest.approx(0.1)
        assert seen.switches == pytest.approx(10.0)

    def test_one_rank_that_waits_for_itself_is_in_a_deadlock_and_of_two_nobody_knows(self) -> None:
        assert judge([sight(0)]).fault is FaultClass.DEADLOCK
        assert judge([sight(0), sight(1)]).fault is FaultClass.UNKNOWN

    def test_what_they_did_meanwhile_is_said_if_all_were_compared(self) -> None:
        told = judge([sight(0), sight(1)]).evidence
        assert any("did not move" in each for each in told)
        assert not any("two dumps" in each for each in judge([sight(0), sight(1, is_compared=False)]).evidence)

    @pytest.mark.parametrize(
        ("children", "fault"),
        [
            (("91 D pt_data_worker cpu=1.0",), FaultClass.STORAGE_STALL),
            (("90 S pt_data_worker cpu=1.0", "no line of ours"), FaultClass.DATA_STALL),
            (("90 S pt_data_worker", "91 D pt_data_worker"), FaultClass.STORAGE_STALL),
        ],
    )
    def test_a_loader_that_waits_for_storage_is_the_storages_fault(
        self, children: tuple[str, ...], fault: FaultClass
    ) -> None:
        waiting = [sight(rank, IN_ALL_REDUCE, phase=Phase.COLLECTIVE) for rank in (1, 2, 3)]
        found = judge([sight(0, IN_LOADER, phase=Phase.DATA, children=children), *waiting])
        assert found.fault is fault
        if fault is FaultClass.STORAGE_STALL:
            assert "91 D" in found.evidence[0]
            assert found.confidence <= 0.85

    @pytest.mark.parametrize(
        ("steps", "collective", "is_past"),
        [
            ((100, 101), inside(39), True),
            ((100, 100), inside(39), False),  # it is no further
            ((100, 101), inside(40), False),  # it was in the same one
            ((100, 101), None, True),
        ],
    )
    def test_who_went_past_a_collective(
        self, steps: tuple[int, int], collective: Collective | None, is_past: bool
    ) -> None:
        left = None if collective is None else replace(collective, is_inside=False)
        told = [progress(rank, Phase.COLLECTIVE, step=steps[0], collective=inside(40)) for rank in range(3)]
        told.append(progress(3, Phase.COLLECTIVE, step=steps[1], collective=left))
        frames = [IN_ALL_REDUCE, IN_ALL_REDUCE, IN_ALL_REDUCE, IN_BARRIER]
        sights = [sight(rank, frames[rank], progress=told[rank]) for rank in range(4)]
        found = judge(sights)
        assert found.fault is FaultClass.SKIPPED_COLLECTIVE
        assert any("went past" in each for each in found.evidence) == is_past

    def test_three_groups_besides_the_common_one_are_told(self) -> None:
        told = [
            progress(rank, Phase.COLLECTIVE, collective=inside(40 + max(0, rank - 2)), phase_seconds=5.0)
            for rank in range(8)
        ]
        found = judge([sight(rank, IN_ALL_REDUCE, progress=told[rank]) for rank in range(8)])
        assert len(found.evidence) == 4
        assert found.evidence[0].startswith("Ranks 0-2 ")

    def test_of_two_halves_each_is_told_once(self) -> None:
        told = [progress(rank, Phase.COLLECTIVE, collective=inside(41 - rank // 2)) for rank in range(4)]
        found = judge([sight(rank, IN_ALL_REDUCE, progress=told[rank]) for rank in range(4)])
        assert len(found.evidence) == 2 or len(set(found.evidence)) == len(found.evidence)
        assert [culprit.global_rank for culprit in found.culprits] == [0, 1], "those that went ahead"


class TestStacks:
    def test_the_largest_group_comes_first_and_of_equals_that_of_the_lowest_rank(self) -> None:
        frames = [IN_LOCK, IN_LOADER, IN_LOADER, IN_BARRIER]
        groups = stacks.cluster([dump(rank, frames[rank]) for rank in range(4)])
        assert [[each.global_rank for each in group] for group in groups] == [[1, 2], [0], [3]]

    @pytest.mark.parametrize(
        ("frame", "is_collective"),
        [
            ("/venv/torch/distributed/distributed_c10d.py:1 anything", True),
            ("/venv/torch/distributed/other.py:1 barrier", True),
            ("/venv/torch/distributed/other.py:1 anything", False),
            ("/venv/torch/elsewhere/other.py:1 barrier", False),
        ],
    )
    def test_what_a_collective_is(self, frame: str, is_collective: bool) -> None:
        stack = [stacks.parse_frame(frame), stacks.parse_frame("/job/train.py:44 step")]
        assert (stacks.collective_call(stack) is not None) == is_collective

    def test_a_line_that_is_no_frame_is_kept_as_it_is(self) -> None:
        assert stacks.parse_frame("no frame") == stacks.Frame("no frame", 0, "")


class TestPage:
    def page(self, sights: list[Sight], source: str = "") -> list[str]:
        found = judge(sights)
        verdict = Verdict(fault=found.fault, culprits=found.culprits, evidence=found.evidence, diagnostician="hang")
        text = autopsy.write_page(
            job_name="", picture=picture(), sights=sights, verdict=verdict, stalled_for=5.0, source=source
        )
        return text.splitlines()

    @pytest.mark.parametrize("more", [0, 1, 3])
    def test_so_many_frames_and_processes(self, more: int) -> None:
        frames = tuple(f"/job/deep.py:{line} f" for line in range(autopsy.MAX_SHOWN + more))
        lines = self.page([sight(0, frames, children=tuple(f"child {number}" for number in range(10)))])
        assert sum(line.startswith("/job/deep.py") for line in lines) == autopsy.MAX_SHOWN
        assert [line for line in lines if line.startswith("... ")] == ([f"... {more} more"] if more else [])
        assert [line for line in lines if line.startswith("Its own")] == [
            f"Its own process: child {number}." for number in range(8)
        ]

    @pytest.mark.parametrize("more", [0, 1, 2])
    def test_so_many_rows(self, more: int) -> None:
        sights = [
            sight(rank, IN_LOCK, progress=progress(rank, Phase.FORWARD, step=rank))
            for rank in range(autopsy.MAX_ROWS + more)
        ]
        lines = self.page(sights)
        assert sum(line.startswith("| ") for line in lines) == autopsy.MAX_ROWS + 1
        told = [line for line in lines if line.endswith("more rows")]
        assert told == ([f"... and {more} more rows"] if more else [])

    def test_cells_are_cut_and_bars_are_bars(self) -> None:
        collective = replace(inside(40), operation="a|b", shape="x" * 200)
        told = progress(0, Phase.COLLECTIVE, step=7, collective=collective)
        row = self.page([sight(0, IN_ALL_REDUCE, progress=told)])[-1]
        assert row.startswith("| 0 | S | collective | 7 | a\\|b of xxx")
        assert row.count("x") == 120 - len("a\\|b of ")

    def test_where_it_was_made_stands_last(self) -> None:
        assert self.page([sight(0)], "made by hand")[-2:] == ["", "made by hand"]
        assert self.page([sight(0)])[-1].startswith("| 0 |")
