"""Jobs that rest, found by a kernel profiler or by idle processors; what is kept of samples; and the chain that leads to a conclusion."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dlrover.core.diagnosis.inference import (
    DROP,
    MAX_PASSES,
    Inference,
    InferenceChain,
    InferenceOperator,
    action_of,
    say_culprits,
)
from dlrover.core.diagnosis.samples import Samples
from dlrover.protocol.messages.job import Incarnation, NodeId
from dlrover.protocol.messages.watch import (
    ActionKind,
    Culprit,
    DeviceSample,
    FaultClass,
    HangStrategy,
    Phase,
    ProcessSample,
    ResourceReport,
    SampleTaken,
    Verdict,
    WatchTerms,
)
from tests.core.diagnosis.watch_lab import NODES, Lab, micros, progress

FLAG = 'XPU_TIMER_COMMON_HANG{rank="%d"}'


def profiled(lab: Lab, *flags: tuple[int, ...] | None) -> None:
    """Of each node; None: it says nothing."""
    for node, of_node in zip(NODES, flags, strict=True):
        if of_node is not None:
            numbers = {FLAG % number: float(flag) for number, flag in enumerate(of_node)}
            taken = SampleTaken(node=node, incarnation=Incarnation(1), kind="xpu-timer", numbers=numbers)
            lab.watch.hear(taken, lab.now)
    lab.tick()
    lab.after(60)


def test_a_job_whose_profilers_all_say_so_for_minutes_is_restarted() -> None:
    lab = Lab()
    for _ in range(6):
        profiled(lab, (1, 1), (1, 1))
    assert lab.acts() == []
    profiled(lab, (1, 1), (1, 1))
    (act,) = lab.acts()
    verdict = act.command.verdict
    assert (verdict.diagnostician, verdict.action) == ("training_hang", ActionKind.RESTART_WORKERS)
    assert "360 s" in verdict.evidence[0]
    assert verdict.reasoning


@pytest.mark.parametrize("last", [((1, 0), (1, 1)), ((), (1, 1)), (None, (1, 1))])
def test_one_healthy_or_mute_node_is_enough_for_no_conclusion(last: tuple[tuple[int, ...] | None, ...]) -> None:
    lab = Lab()
    for _ in range(5):
        profiled(lab, (1, 1), (1, 1))
    for _ in range(4):  # a node that is not heard any more says nothing about now
        profiled(lab, *last)
    assert lab.told() == []


def test_a_new_round_begins_anew_and_a_user_who_only_wants_to_be_told_is() -> None:
    lab = Lab(WatchTerms(strategy=HangStrategy.NOTIFY))
    for _ in range(6):
        profiled(lab, (1,), (1,))
    lab.enter(2)
    profiled(lab, (1,), (1,))
    assert lab.told() == []
    for _ in range(7):
        profiled(lab, (1,), (1,))
    assert lab.acts() == []
    assert "--hang-detection 1" in lab.told()[0].reasoning


def exported(lab: Lab, minutes: int, active: float, phase: Phase = Phase.BACKWARD) -> None:
    """Stalled, and the exporter of each node says how much matrix units work."""
    for _ in range(minutes):
        lab.after(60)
        for node in NODES:
            numbers = {'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0"}': active, "DCGM_FI_DEV_GPU_UTIL": 100.0}
            lab.watch.hear(
                SampleTaken(node=node, incarnation=Incarnation(1), kind="scrape-x", numbers=numbers), lab.now
            )
        lab.stalled_for += 60.0
        lab.tell(*(progress(rank, phase, phase_seconds=lab.stalled_for) for rank in range(4)))


@pytest.mark.parametrize(
    ("active", "phase", "acts"),
    [(0.0, Phase.BACKWARD, 1), (0.3, Phase.BACKWARD, 0), (0.0, Phase.COMPILE, 0)],
)
def test_devices_that_do_nothing_while_nobody_goes_on_are_a_hang(active: float, phase: Phase, acts: int) -> None:
    lab = Lab()
    lab.train(2)
    exported(lab, 4, active, phase)
    assert not _by_devices(lab)
    exported(lab, 3, active, phase)
    assert len(_by_devices(lab)) == acts


def _by_devices(lab: Lab) -> list[Verdict]:
    acted = [act.command.verdict for act in lab.acts()]
    return [verdict for verdict in acted if verdict.evidence and "matrix unit" in verdict.evidence[0]]


def rest(
    lab: Lab,
    minutes: int,
    *,
    cpu: float = 0.01,
    cores: float = 8,
    devices: tuple[DeviceSample, ...] = (),
    has_devices: bool = False,
) -> None:
    for _ in range(minutes):
        for index, node in enumerate(NODES):
            workers = (
                ProcessSample(global_rank=2 * index, cpu=cpu),
                ProcessSample(global_rank=-1, cpu=3.0),  # the agent's own
            )
            report = ResourceReport(
                node=node,
                incarnation=Incarnation(1),
                cores=cores,
                workers=workers,
                devices=devices,
                has_devices=has_devices,
                memory_bytes=1,
            )
            lab.watch.hear(report, lab.now)
        lab.tick()
        lab.after(60)


def test_workers_that_use_nothing_for_two_hours_and_never_told_of_a_step_are_restarted() -> None:
    lab = Lab()
    rest(lab, 60)
    rest(lab, 1, cpu=4.0)
    rest(lab, 119)
    assert lab.acts() == []
    rest(lab, 3)
    assert [act.command.verdict.diagnostician for act in lab.acts()] == ["training_hang"]


def test_a_worker_that_uses_one_of_many_cores_is_at_work() -> None:
    lab = Lab()
    rest(lab, 130, cpu=1.0, cores=64)
    assert lab.told() == []


def test_devices_that_nobody_can_read_may_be_at_work() -> None:
    lab = Lab()
    rest(lab, 130, has_devices=True)
    assert lab.told() == []


def test_devices_or_steps_leave_the_decision_to_others() -> None:
    lab = Lab()
    rest(lab, 130, devices=(DeviceSample(index=0),))
    assert lab.told() == []
    lab = Lab()
    lab.train()
    rest(lab, 130)
    assert lab.acts() == []


def test_a_collector_that_lost_its_gpu_has_the_node_replaced() -> None:
    lab = Lab()
    lab.watch.hear(ResourceReport(node=NODES[1], incarnation=Incarnation(1)), lab.now)
    taken = SampleTaken(node=NODES[1], incarnation=Incarnation(1), kind="mine", trouble="NVML: GPU is lost")
    lab.watch.hear(taken, lab.now)
    lab.tick()
    (verdict,) = lab.told()
    assert (verdict.fault, verdict.action) == (FaultClass.DEVICE, ActionKind.RELAUNCH_NODE)


def test_samples_are_bounded_in_age_size_and_kinds() -> None:
    samples = Samples(max_size=100)
    for number in range(300):
        taken = SampleTaken(node=NODES[0], incarnation=Incarnation(1), kind=f"k{number % 2}", numbers={"a": number})
        samples.add(taken, micros(number))
    assert len(samples) == 50
    assert [sample.taken.numbers["a"] for sample in samples.of_kind("k1")][-1] == 299
    assert len(samples.newest()) == 2
    samples.expire(micros(299 + 599))
    assert len(samples) == 2 - 1
    samples.expire(micros(2000))
    assert list(samples.of_kind("k1")) == []
    for number in range(100):
        samples.add(SampleTaken(node=NODES[0], incarnation=Incarnation(1), kind=str(number)), micros(2000))
    assert len(samples.newest()) <= 64


class Rule(InferenceOperator):
    def __init__(self, name: str, *results: Inference) -> None:
        self.name, self.results = name, results

    def is_compatible(self, inference: Inference) -> bool:
        return inference.name == self.name

    def infer(self, inferences: list[Inference]) -> Sequence[Inference]:
        if self.results and self.results[0].name == "raise":
            raise ValueError("no")
        return self.results


def test_the_chain_goes_on_until_nothing_new_comes_out() -> None:
    a, b, c = Inference("a"), Inference("b", configs={"x": "1"}), Inference("c")
    assert InferenceChain([a], [Rule("a", b, c)]).infer() == [b, c]
    assert InferenceChain([a], [Rule("a", b), Rule("b", c), Rule("c")]).infer() == [c]
    assert InferenceChain([a, c], [Rule("a", DROP)]).infer() == [c]
    assert InferenceChain([a, Inference("a", configs={"y": "2"})], []).infer() == [a]
    broken = InferenceChain([a], [Rule("a", Inference("raise"))])
    assert broken.infer() == [a]
    assert broken.troubles == ["Rule: ValueError: no"]
    circle = InferenceChain([a], [Rule("a", b), Rule("b", a)])
    assert len(circle.infer()) == 1

    class Endless(InferenceOperator):
        num = 0

        def is_compatible(self, inference: Inference) -> bool:
            return True

        def infer(self, inferences: list[Inference]) -> Sequence[Inference]:
            self.num += 1
            return [Inference(str(self.num))]

    assert InferenceChain([a], [endless := Endless()]).infer()
    assert endless.num == MAX_PASSES


def test_a_solution_says_who_is_to_blame_and_what_to_do() -> None:
    culprits = (Culprit(node=NodeId(7), global_rank=2), Culprit(node=NodeId(9), global_rank=-1))
    configs = {"fault": "device", "action": "relaunch-node", "confidence": "0.9", "culprits": say_culprits(culprits)}
    verdict = action_of("mine", [Inference("training"), Inference("action", "is", "event", configs)])
    assert verdict is not None
    assert (verdict.fault, verdict.action, verdict.culprits) == (FaultClass.DEVICE, ActionKind.RELAUNCH_NODE, culprits)
    assert action_of("mine", [Inference("training")]) is None
