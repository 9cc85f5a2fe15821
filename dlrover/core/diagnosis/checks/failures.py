"""Diagnosticians of workers that ended: what their last words mean, and whether they end so each time."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dlrover.agreed import worker_failure
from dlrover.core.diagnosis.diagnostician import conclude
from dlrover.core.diagnosis.picture import FailedWorkers, Picture
from dlrover.core.diagnosis.stacks import say_collective
from dlrover.protocol.messages.job import FailureKind, Micros, Round, WorkerFailure
from dlrover.protocol.messages.watch import ActionKind, Collective, Culprit, FaultClass, Verdict

LOOP = 3
_TAIL = 4096
_SAYINGS: tuple[tuple[re.Pattern[str], FaultClass], ...] = (
    (re.compile(r"No space left on device|Disk quota exceeded"), FaultClass.DISK_FULL),
    (re.compile(r"can't start new thread|Resource temporarily unavailable"), FaultClass.PROCESS_LIMIT),
    (re.compile(r"preamble\.length|[Mm]ismatch(?:ed)? between collectives|collective.{0,80}mismatch", re.S), FaultClass.MISMATCHED_COLLECTIVE),
    (re.compile(r"DataLoader worker|DataLoader timed out"), FaultClass.DATA_STALL),
    (re.compile(r"FloatingPointError|(?i:(?:loss|grad\w*)\b[^\n]{0,40}\b(?:nan|inf|not finite|non-finite))"), FaultClass.NUMERICS),
    (re.compile(r"Input/output error|Stale file handle|Transport endpoint is not connected"), FaultClass.STORAGE_STALL),
    (re.compile(r"fallen off the bus|uncorrectable ECC|\bXid\b|device-side assert|GPU is lost"), FaultClass.DEVICE),
)  # fmt: skip


class WorkerEnded:
    """What the first failure of a round was. The job has restarted by then: this is for people."""

    name = "worker_failure"

    def __init__(self) -> None:
        self._said: tuple[Round, WorkerFailure] | None = None

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        if not picture.failures or _incident(picture.failures[-1]) == self._said:
            return
        failed = picture.failures[-1]
        _, failure = self._said = _incident(failed)
        if failure.kind in (FailureKind.DIAGNOSED, FailureKind.STOPPED_BY_US):
            return
        fault = fault_of(failure)
        culprits: tuple[Culprit, ...] = (Culprit(node=failed.node, global_rank=failure.global_rank),)
        extra = ""
        if fault is FaultClass.MISMATCHED_COLLECTIVE and (odd := _odd_collective(picture)) is not None:
            rank, collective, common = odd
            record = picture.ranks[rank]
            culprits = (Culprit(node=record.place.node, global_rank=rank),)
            extra = f"Rank {rank} was in {say_collective(collective)}, the others in {say_collective(common)}."
        if fault is FaultClass.NETWORK:
            culprits = ()
        message = (failure.message or failure.kind.value).strip().rstrip(".")
        yield conclude(
            self.name,
            fault,
            culprits,
            f"Rank {failure.global_rank} ended: {message[:500]}.",
            extra,
            confidence=0.6 if fault in (FaultClass.EXCEPTION, FaultClass.NETWORK) else 0.9,
            action=ActionKind.NOTIFY,
            reasoning="The job has decided about the restart already.",
        )


class CrashLoop:
    name = "crash_loop"

    def __init__(self) -> None:
        self._said: tuple[Round, WorkerFailure] | None = None

    def diagnose(self, picture: Picture, now: Micros) -> Iterable[Verdict]:
        if not picture.failures or _incident(picture.failures[-1]) == self._said:
            return
        _, newest = self._said = _incident(picture.failures[-1])
        digest = worker_failure.traceback_digest(newest)
        count, step = 0, None
        for failed in _newest_by_round(picture.failures):
            # Who fails before the end of its first step tells of none: it got no further, either.
            is_further = failed.step is not None and step is not None and failed.step != step
            if is_further or not _is_same(_first(failed), newest, digest):
                break
            count, step = count + 1, step if failed.step is None else failed.step
        if count < LOOP:
            return
        where = "" if step is None else f" at step {step}"
        yield conclude(
            self.name,
            FaultClass.CRASH_LOOP,
            (Culprit(node=picture.failures[-1].node, global_rank=newest.global_rank),),
            f"The same failure came {count} times{where}: {newest.message[:300]}",
            confidence=0.9,
            reasoning="Restarts do not help: correct the script.",
        )


def fault_of(failure: WorkerFailure) -> FaultClass:
    text = f"{failure.message}\n{failure.traceback[-_TAIL:]}\n{failure.log_tail[-_TAIL:]}"
    if failure.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.MEMORY_ERROR):
        return FaultClass.OUT_OF_MEMORY
    for saying, fault in _SAYINGS:
        if saying.search(text):
            return fault
    if failure.kind is FailureKind.PEER_LOST:
        return FaultClass.NETWORK
    if worker_failure.is_device_fault(failure):
        return FaultClass.DEVICE
    if failure.kind is FailureKind.SIGNAL:
        return FaultClass.DEAD
    return FaultClass.EXCEPTION


def _odd_collective(picture: Picture) -> tuple[int, Collective, Collective] | None:
    """The one rank whose newest collective is another than that of the others."""
    votes: dict[tuple[str, str], list[tuple[int, Collective]]] = {}
    for record in picture.heard():
        collective = record.progress.collective
        if collective is not None:
            key = (collective.operation, collective.shape)
            votes.setdefault(key, []).append((record.global_rank, collective))
    ordered = sorted(votes.values(), key=len)
    if len(ordered) < 2 or len(ordered[0]) == len(ordered[-1]):
        return None
    rank, collective = ordered[0][0]
    return rank, collective, ordered[-1][0][1]


def _newest_by_round(failures: Iterable[FailedWorkers]) -> list[FailedWorkers]:
    """Newest round first. All nodes of a world tell of the same end; who told last knows best what began it."""
    newest = {failed.round: failed for failed in failures}
    return list(reversed(newest.values()))


def _incident(failed: FailedWorkers) -> tuple[Round, WorkerFailure]:
    return failed.round, _first(failed)


def _first(failed: FailedWorkers) -> WorkerFailure:
    return worker_failure.first_of(failed.failures) if failed.first is None else failed.first.failure


def _is_same(one: WorkerFailure, other: WorkerFailure, digest: str) -> bool:
    if digest:
        return worker_failure.traceback_digest(one) == digest
    return (one.kind, one.message, one.exit_code, one.signal) == (
        other.kind,
        other.message,
        other.exit_code,
        other.signal,
    )
