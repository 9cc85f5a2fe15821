"""
Diagnosticians of jobs that rest, for those that the watch cannot look into: by what a profiler of kernels says, and by processors that are not used.

Both need long, because what they see has many innocent reasons. Where workers tell of their progress the watch is quicker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from dlrover.core.diagnosis.diagnostician import conclude
from dlrover.core.diagnosis.inference import (
    Inference,
    InferenceAttribute,
    InferenceChain,
    InferenceDescription,
    InferenceName,
    InferenceOperator,
    action_of,
)
from dlrover.core.diagnosis.picture import Picture
from dlrover.core.diagnosis.samples import Sample
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, micros
from dlrover.protocol.messages.job import Micros, NodeId, Round
from dlrover.protocol.messages.watch import ActionKind, FaultClass, Phase, ResourceReport, Verdict

HANG = "training_hang"
"""Of all that say training stands still; the watch itself is the first of them, because it needs looks."""
XPU_TIMER = "xpu-timer"
HANG_FLAG = "XPU_TIMER_COMMON_HANG"
IS_HANGING = Inference(InferenceName.TRAINING, InferenceAttribute.ISORNOT, InferenceDescription.HANG)


class HangingRun(Struct, frozen=True):
    """The newest samples of a node, as long as all of them say that it hangs."""

    node: NodeId
    seconds: float


class ProfilerHang:
    """The profiler of every node has said for minutes that kernels do not end. One that is not heard, or says nothing of it, proves nothing."""

    name = HANG

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        if not picture.scene.is_active:
            return
        operators = (CheckTrainingHang(picture, now), ResolveTrainingHang())
        verdict = action_of(self.name, InferenceChain([IS_HANGING], operators).infer())
        if verdict is not None:
            yield verdict


class CheckTrainingHang(InferenceOperator):
    """From the question whether training hangs to the answer, by what the kernel profiler says."""

    lasting = 300.0
    """Seconds for which all have to say so."""
    silent = 180.0
    """Seconds after which the newest sample of a node says nothing about now."""

    def __init__(self, picture: Picture, now: Micros) -> None:
        self._picture = picture
        self._now = now

    def is_compatible(self, inference: Inference) -> bool:
        return inference.is_same(IS_HANGING)

    def infer(self, inferences: list[Inference]) -> Sequence[Inference]:
        runs = self._runs()
        if runs is None:
            return []  # nobody knows
        shortest = min(runs, key=lambda run: run.seconds)
        if shortest.seconds <= self.lasting:
            return [Inference(InferenceName.TRAINING, InferenceAttribute.NOT, InferenceDescription.HANG)]
        text = f"The kernel profilers of all {len(runs)} nodes have said for {shortest.seconds:.0f} s that kernels do not end."
        found = {"event_msg": text, "seconds": f"{shortest.seconds:.0f}"}
        return [Inference(InferenceName.TRAINING, InferenceAttribute.IS, InferenceDescription.HANG, found)]

    def _runs(self) -> list[HangingRun] | None:
        """None: some node has no answer."""
        nodes = [place.node for place in self._picture.scene.places]
        samples: dict[NodeId, list[Sample]] = {node: [] for node in nodes}
        began_at = self._picture.scene.began_at
        for sample in self._picture.samples.of_kind(XPU_TIMER):
            if sample.taken.node in samples and sample.at >= began_at:
                samples[sample.taken.node].append(sample)
        if not nodes or not all(samples.values()):
            return None
        if any(of_node[-1].at < self._now - micros(self.silent) for of_node in samples.values()):
            return None
        runs = []
        for node, of_node in samples.items():
            first = None
            for sample in reversed(of_node):
                is_hung = _is_hung(sample)
                if is_hung is None and first is None:
                    return None
                if not is_hung:
                    break
                first = sample
            seconds = 0.0 if first is None else (of_node[-1].at - first.at) / MICROS_PER_SECOND
            runs.append(HangingRun(node, seconds))
        return runs


class ResolveTrainingHang(InferenceOperator):
    """From a hang to what is done about it."""

    def is_compatible(self, inference: Inference) -> bool:
        hang = (InferenceName.TRAINING, InferenceAttribute.IS, InferenceDescription.HANG)
        return inference.words == hang

    def infer(self, inferences: list[Inference]) -> Sequence[Inference]:
        solution = {
            **inferences[0].configs,
            "fault": FaultClass.NETWORK.value,
            "confidence": "0.8",
            "action": ActionKind.RESTART_WORKERS.value,
            "reasoning": "Kernels that wait for each other for minutes do not go on by themselves. It is unknown "
            "which rank causes it.",
        }
        return [Inference(InferenceName.ACTION, InferenceAttribute.IS, InferenceDescription.EVENT, solution)]


def _is_hung(sample: Sample) -> bool | None:
    """None: it says nothing of it."""
    flags = [value for series, value in sample.taken.numbers.items() if series.startswith(HANG_FLAG)]
    return all(flag == 1 for flag in flags) if flags else None


class IdleDevices:
    """
    Training tells of no progress, and no device of any node computes, for minutes: not even the rank that looks busy is at work.

    By the counters of matrix units in whatever exporter is scraped. A device that is only "in use" proves nothing: waiting kernels use it.
    """

    name = HANG
    lasting = 300.0
    counters = (
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0.001),
        ("DCGM_FI_PROF_PIPE_MT_TENSOR_ACTIVE", 0.001),
        ("npu_chip_info_utilization", 0.5),
    )
    """Series, and up to which number they mean rest: a share of the time, and of Ascend percent."""
    least = 4
    """Samples of each node: fewer may miss the work between them."""
    _elsewhere = (Phase.START, Phase.RESTORE, Phase.COMPILE, Phase.CHECKPOINT)
    """What may take long without any device."""

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        ranks = list(picture.heard())
        if not picture.scene.is_active or not ranks or len(ranks) < len(picture.ranks) or not picture.stalled:
            return
        seconds = (now - picture.newest_progress_at()) / MICROS_PER_SECOND
        is_elsewhere = any(record.progress.phase in self._elsewhere for record in ranks)
        if seconds < self.lasting or is_elsewhere or picture.newest_step() is None:
            return
        since = Micros(now - micros(self.lasting))
        rests: dict[NodeId, list[bool]] = {place.node: [] for place in picture.scene.places}
        for sample in picture.samples:
            is_at_rest = self._is_at_rest(sample)
            if is_at_rest is not None and sample.at >= since and sample.taken.node in rests:
                rests[sample.taken.node].append(is_at_rest)
        if all(len(of_node) >= self.least and all(of_node) for of_node in rests.values()):
            yield conclude(
                self.name,
                FaultClass.NETWORK,
                (),
                f"No rank has made progress for {seconds:.0f} s, and no matrix unit of the devices of all {len(rests)} nodes has worked for {self.lasting:.0f} s.",
                confidence=0.8,
                action=ActionKind.RESTART_WORKERS,
                reasoning="Devices that do nothing while no rank makes progress wait for each other. It is unknown which "
                "rank causes it.",
            )

    def _is_at_rest(self, sample: Sample) -> bool | None:
        """None: it says nothing of it."""
        found = [
            value <= idle
            for series, value in sample.taken.numbers.items()
            for name, idle in self.counters
            if series.startswith(name)
        ]
        return all(found) if found else None


class IdleJob:
    """Workers that use no processor for hours, whose progress is not known. Where steps are told the watch decides."""

    name = HANG
    lasting = 7200.0
    """Seconds."""
    cores = 0.1
    """Of one worker: below nothing is going on. Not a share of what the node has: one thread at work is little of 64 cores."""

    def __init__(self) -> None:
        self._round = Round(0)
        self._idle_since: dict[NodeId, Micros] = {}

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        scene = picture.scene
        if scene.round != self._round or not scene.is_active:
            self._round, self._idle_since = scene.round, {}
        if not scene.is_active or not scene.places or picture.newest_step() is not None:
            return
        for place in scene.places:
            report = picture.resources.get(place.node)
            if report is None or not self._is_idle(report):
                self._idle_since.pop(place.node, None)
            else:
                self._idle_since.setdefault(place.node, now)
        if len(self._idle_since) < len(scene.places):
            return
        seconds = (now - max(self._idle_since.values())) / MICROS_PER_SECOND
        if seconds >= self.lasting:
            yield conclude(
                self.name,
                FaultClass.UNKNOWN,
                (),
                f"The workers of all {len(scene.places)} nodes have used next to no processor for {seconds / 60:.0f} minutes.",
                confidence=0.6,
                action=ActionKind.RESTART_WORKERS,
                reasoning="No progress is reported, and training on processors is never idle for so long.",
            )

    def _is_idle(self, report: ResourceReport) -> bool:
        """Not where there are devices: they may be at work, whether or not they can be read."""
        used = [sample.cpu for sample in report.workers if sample.global_rank >= 0]
        return bool(used) and max(used) < self.cores and not report.has_devices and not report.devices
