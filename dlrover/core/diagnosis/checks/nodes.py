"""Diagnosticians of nodes: memory, disks, clocks, devices, and what agents tell of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from dlrover.core.diagnosis.diagnostician import blame_ranks, conclude
from dlrover.core.diagnosis.picture import Picture, RankRecord
from dlrover.protocol.messages.identity import MICROS_PER_SECOND
from dlrover.protocol.messages.job import Micros, NodeId
from dlrover.protocol.messages.watch import ActionKind, Culprit, FaultClass, ResourceReport, Verdict
from dlrover.protocol.units import MIB, amount

FULL = 0.95
LITTLE_DISK_BYTES = 64 * MIB
CLOCK_JUMP = 1.0
GPU_LOST = "GPU is lost"


class OutOfMemory:
    """Before the kernel kills a process."""

    name = "out_of_memory"

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        for node, report in picture.resources.items():
            for what, used, limit in (
                ("memory", report.memory_bytes, report.memory_limit_bytes),
                ("shared memory", report.shm_bytes, report.shm_limit_bytes),
            ):
                if limit <= 0 or used < FULL * limit:
                    continue
                largest = max(report.workers, key=lambda sample: sample.memory_bytes, default=None)
                rank = -1 if largest is None else largest.global_rank
                yield conclude(
                    self.name,
                    FaultClass.OUT_OF_MEMORY,
                    (Culprit(node=node, global_rank=rank),),
                    f"Node {node} uses {amount(used)} of {amount(limit)} of {what}.",
                    "" if largest is None else f"The largest is rank {rank} with {amount(largest.memory_bytes)}.",
                    confidence=0.8,
                    reasoning="The kernel may kill it at any time, and the job then restarts. The master does not stop it "
                    "first, which would gain nothing.",
                )


class MemoryLeak:
    """A worker that grows and grows: not at once, as for a larger batch, but with each look."""

    name = "memory_leak"
    _samples = 8
    _seconds = 30.0
    _growth = 0.3
    _least_bytes = 100 * MIB

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        if any(len(record.memory) < self._samples for record in picture.ranks.values()):
            return  # whether one grows alone only all together can tell
        leaking = [record for record in picture.ranks.values() if self._is_leaking(record)]
        if not leaking or len(leaking) * 2 > max(2, len(picture.ranks)):
            return  # all alike: the model, the cache, or the first minutes
        record = leaking[0]
        (began_at, first), (ended_at, last) = record.memory[0], record.memory[-1]
        rate = (last - first) / ((ended_at - began_at) / MICROS_PER_SECOND)
        report = picture.resources.get(record.place.node)
        left = ""
        if report is not None and report.memory_limit_bytes > report.memory_bytes > 0 and rate > 0:
            left = f"At this rate the node is full in {(report.memory_limit_bytes - report.memory_bytes) / rate / 60:.0f} minutes."
        yield conclude(
            self.name,
            FaultClass.MEMORY_LEAK,
            blame_ranks(leaking),
            f"The memory of rank {record.global_rank} grew from {amount(first)} to {amount(last)}, by {amount(rate)} each second.",
            left,
            confidence=0.75,
            reasoning="Training goes on. A restart would only let the growth begin anew: look for a leak in the script.",
        )

    def _is_leaking(self, record: RankRecord) -> bool:
        memory = list(record.memory)
        if len(memory) < self._samples:
            return False
        first, middle, last = memory[0][1], memory[len(memory) // 2][1], memory[-1][1]
        growth = last - first
        if growth < max(self._least_bytes, self._growth * first) or last - middle < 0.25 * growth:
            return False
        usual = 0.25 * growth / len(memory)
        grew_at = [at for (_, before), (at, after) in pairwise(memory) if after - before >= usual]
        falls = sum(after < before for (_, before), (_, after) in pairwise(memory))
        is_long = grew_at[-1] - grew_at[0] >= self._seconds * MICROS_PER_SECOND
        return is_long and len(grew_at) >= self._samples - 2 and falls <= len(memory) // 5


class DiskFull:
    name = "disk_full"

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        for node, report in picture.resources.items():
            if report.disk_free_bytes is not None and report.disk_free_bytes < LITTLE_DISK_BYTES:
                yield conclude(
                    self.name,
                    FaultClass.DISK_FULL,
                    _node(node),
                    f"Node {node} has {amount(report.disk_free_bytes)} of disk left.",
                    confidence=0.9,
                    reasoning="Training goes on, but the next checkpoint or log may fail. Free space on that disk.",
                )


class ClockJump:
    """A report tells of a jump since the one before, so each is looked at once."""

    name = "clock_jump"

    def __init__(self) -> None:
        self._seen: dict[NodeId, ResourceReport] = {}

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        former, self._seen = self._seen, dict(picture.resources)
        for node, report in picture.resources.items():
            if abs(report.clock_jump) >= CLOCK_JUMP and report is not former.get(node):
                yield conclude(
                    self.name,
                    FaultClass.CLOCK_JUMP,
                    _node(node),
                    f"The wall clock of node {node} jumped by {report.clock_jump:+.1f} s.",
                    confidence=0.9,
                    reasoning="The job does not depend on wall clocks. Check the clock of the node: logs and tokens there may "
                    "be wrong.",
                )


class Devices:
    """The historical `GPU is lost`, and whatever else a driver says of its devices."""

    name = "resource_collection_failure"

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        by_collectors: dict[NodeId, list[str]] = {}
        for sample in picture.samples.newest():
            if GPU_LOST in sample.taken.trouble:
                by_collectors.setdefault(sample.taken.node, []).append(f"{sample.taken.kind}: {sample.taken.trouble}")
        for node, report in picture.resources.items():
            sick = [f"Device {device.index} says: {device.health}." for device in report.devices if device.health]
            lost = [trouble for trouble in report.troubles if GPU_LOST in trouble]
            lost += by_collectors.get(node, [])
            if lost or sick:
                yield conclude(
                    self.name,
                    FaultClass.DEVICE,
                    _node(node),
                    *lost[:4],
                    *sick[:4],
                    confidence=0.9 if lost else 0.7,
                    action=ActionKind.RELAUNCH_NODE if lost else ActionKind.NOTIFY,
                    reasoning="A restart does not bring the lost device back; the master replaces the node, where a platform "
                    "can."
                    if lost
                    else "Training still works on the device, so the master only reports it.",
                )
            elif report.troubles:
                yield conclude(
                    self.name,
                    FaultClass.UNKNOWN,
                    _node(node),
                    *report.troubles[:4],
                    confidence=0.5,
                    reasoning="The agent could not measure this. The device or disk may still work, so the master only reports it.",
                )


class NodeFailure:
    """Lines in a node's log that people said to look for, or that are well known."""

    name = "node_failure"

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        here = {place.node: None for place in picture.scene.places}
        for event in picture.events:
            if event.name == "log-pattern" and event.node in here:
                yield conclude(
                    self.name,
                    FaultClass.DEVICE,
                    (Culprit(node=event.node, global_rank=-1 if event.rank is None else event.rank),),
                    f"The log of node {event.node} says: {event.text[:500]}",
                    confidence=0.9,
                    action=ActionKind.RELAUNCH_NODE,
                    reasoning="This line means a broken node, which a restart does not repair.",
                )


class NodeInconsistency:
    name = "node_inconsistency"

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        for what, count in sorted(picture.duplicates.items()):
            yield conclude(
                self.name,
                FaultClass.NODE_INCONSISTENCY,
                (),
                f"The platform runs {count} nodes as {what}.",
                confidence=0.8,
                reasoning="The job uses the newest and ignores the other, which only costs money: remove it.",
            )


def _node(node: NodeId) -> tuple[Culprit, ...]:
    return (Culprit(node=node, global_rank=-1),)
