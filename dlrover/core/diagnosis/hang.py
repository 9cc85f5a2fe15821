"""
The judgement over a job that stands still: from two dumps of every rank to a culprit, a class of fault, and whether that is proof.

Proof is what cannot be mistaken for slow work: a process that is stopped; or a rank that rests outside the collective in which the others
wait for it, at the same place in both dumps, without any processor time, input, output or page fault between them, though by its own
experience it should have gone on long ago. A rank that computes, reads, evaluates or is in its first step may just be slow.
Everything else is a suspicion, told to people at once and acted upon after the hang timeout only.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from dlrover.core.diagnosis import stacks
from dlrover.core.diagnosis.cut_off import CutOff, find_cut_off, lasting
from dlrover.core.diagnosis.shared_groups import SharedGroup, find_shared_group
from dlrover.core.diagnosis.stacks import say_collective, say_ranks
from dlrover.protocol.messages.job import NodeId
from dlrover.protocol.messages.watch import Collective, Culprit, FaultClass, Phase, WorkerDump

IDLE_CPU = 0.02
"""Cores. Below it a process only turns over in its sleep: threads of libraries that wake up now and then."""
WAITING_CPU = 0.1
"""Cores. Who rests in backward with less waits for others: the threads of its communication turn over more often on a busy machine."""
IDLE_IO = 64 * 1024
"""Bytes between two dumps: a log line, a heartbeat."""
IDLE_SWITCHES = 5.0
"""Each second. Waits with a timeout wake up now and then to look at the clock."""
DATA_PATIENCE = 60.0
"""Seconds before a rank that waits for data or for storage is restarted: both often come back, and a restart makes neither quicker."""
ENDING = 30.0
"""Seconds that an interpreter may take to end before it counts as one that does not."""
LONG_PHASES = (Phase.START, Phase.COMPILE, Phase.EVALUATION)
MAX_SENTENCES = 12
_STORAGE_CHANNELS = (
    "fuse",
    "nfs",
    "rpc_wait",
    "io_schedule",
    "folio_wait",
    "wait_on_page",
    "jbd2",
    "ceph",
    "lustre",
    "request_wait_answer",
)


class Sight(Struct, frozen=True, kw_only=True):
    """One rank in one look: both dumps and what happened between them."""

    node: NodeId
    rank: int
    second: WorkerDump
    """The newest one."""
    is_compared: bool = False
    """There are two dumps."""
    is_moving: bool = False
    """It is elsewhere than before, or in another step."""
    is_traced: bool = False
    """A debugger held it at both dumps. At one of them it may have been our own sampler of native stacks."""
    cpu: float = 0.0
    """Cores in use between the dumps, its own processes included."""
    io_bytes: int = 0
    major_faults: int = 0
    switches: float = 0.0
    """Of its main thread, each second: one that sleeps and wakes and sleeps again does something, however little."""

    @property
    def is_computing(self) -> bool:
        """Who waits for its device may well spin meanwhile."""
        return self.cpu >= IDLE_CPU and stacks.device_collective(self.second) is None

    @property
    def is_still(self) -> bool:
        is_active = self.is_computing or self.io_bytes > IDLE_IO or self.major_faults > 0
        is_active = is_active or self.switches > IDLE_SWITCHES
        return self.is_compared and not self.is_moving and not is_active

    @property
    def is_overdue(self) -> bool:
        """By what it has learned itself; a rank that reported nothing is not."""
        progress = self.second.progress
        return progress is not None and progress.is_stalled

    @property
    def is_in_long_phase(self) -> bool:
        """Or in the first step of this life, or in a debugger, or it is unknown."""
        progress = self.second.progress
        if progress is None or progress.phase in LONG_PHASES or not progress.step_seconds:
            return True
        return stacks.is_debugged(self.second)

    @property
    def waits(self) -> bool:
        return stacks.waits_for_others(self.second, is_computing=self.cpu >= WAITING_CPU)


class HangFinding(Struct, frozen=True, kw_only=True):
    """What the dumps say, before it is decided what to do."""

    fault: FaultClass
    culprits: tuple[Culprit, ...]
    evidence: tuple[str, ...]
    confidence: float
    is_proof: bool = False
    patience: float = 0.0
    """Seconds of standing still before the proof counts, if more than usual."""
    is_long_phase: bool = False
    """A rank to blame computes or goes on, if slowly, or is in a phase that is known to take long."""
    is_urgent: bool = False
    """Proof that needs no second dump: stopped."""
    is_premature: bool = False
    """A worker is just ending or has just come: the next look will say more."""


def see(node: NodeId, first: WorkerDump | None, second: WorkerDump, interval: float) -> Sight:
    """`interval`: seconds between the two."""
    second = replace(second, unanswered=lasting(first, second))
    if first is None or first.pid != second.pid:
        return Sight(node=node, rank=second.global_rank, second=second)
    used = second.cpu_seconds - first.cpu_seconds
    used += max(0.0, stacks.children_cpu(second) - stacks.children_cpu(first))
    return Sight(
        node=node,
        rank=second.global_rank,
        second=second,
        is_compared=True,
        is_traced=first.state == second.state == "t",
        is_moving=stacks.signature(first) != stacks.signature(second) or _has_gone_on(first, second),
        cpu=max(0.0, used) / max(interval, 0.1),
        io_bytes=max(0, second.io_bytes - first.io_bytes),
        major_faults=max(0, second.major_faults - first.major_faults),
        switches=max(0, second.switches - first.switches) / max(interval, 0.1),
    )


def judge(sights: Sequence[Sight], missing: Sequence[int] = ()) -> HangFinding:
    """`missing`: ranks whose node has not answered."""
    absent = (
        f"The agents of {say_ranks(missing)} did not answer when the master asked all ranks for their stacks."
        if missing
        else ""
    )
    found = _judge(sights)
    if not absent:
        return found
    return replace(
        found,
        evidence=(*found.evidence, absent)[:MAX_SENTENCES],
        confidence=found.confidence * (1.0 if found.is_urgent else 0.6),
        is_proof=found.is_urgent,
    )


def _judge(sights: Sequence[Sight]) -> HangFinding:
    if not sights:
        return HangFinding(fault=FaultClass.UNKNOWN, culprits=(), evidence=(), confidence=0.0)
    ended = [sight for sight in sights if sight.second.state in "ZXx"]
    if ended:
        return _judge_without(ended, [sight for sight in sights if sight not in ended])
    stopped = [sight for sight in sights if sight.second.state == "T"]
    traced = [sight for sight in sights if sight.is_traced]
    if stopped or traced:
        by = "by a signal" if stopped else "by a debugger"
        text = f"{_subject(stopped or traced)} {_is(stopped or traced)} stopped {by} (state {'T' if stopped else 't'})."
        evidence = (text, *_where_others_wait(sights, stopped or traced))
        # Whoever holds a process in a debugger may be looking for the very fault: people have their time.
        is_proof = bool(stopped)
        return _blame(FaultClass.STOPPED, stopped or traced, evidence, 0.99, is_proof=is_proof, is_urgent=is_proof)
    waiting = [sight for sight in sights if sight.waits]
    others = [sight for sight in sights if not sight.waits]
    if waiting and others:
        return _judge_outsiders(others, waiting)
    if waiting:
        return _judge_collectives(waiting)
    return _judge_all_elsewhere(sights)


def _judge_without(ended: Sequence[Sight], rest: Sequence[Sight]) -> HangFinding:
    """A process that ended badly is reported by its agent, at once; so these have ended well, or their report is on its way. No proof."""
    found = _judge(rest)
    text = f"{_subject(ended)} {'has' if len(ended) == 1 else 'have'} ended."
    waiting = [sight for sight in rest if sight.waits]
    if waiting and len(waiting) == len(rest):
        evidence = (text, _what_they_do(waiting))
        return _blame(FaultClass.DEAD, ended, evidence, 0.7)
    return replace(found, evidence=(*found.evidence, text)[:MAX_SENTENCES], is_proof=found.is_urgent)


def _judge_outsiders(others: Sequence[Sight], waiting: Sequence[Sight]) -> HangFinding:
    """Some wait for the rest. Those that move may only be slow; if some of the rest are still, or cannot move, they are the ones."""
    still = [sight for sight in others if sight.is_still]
    held = [sight for sight in others if _is_blocked(sight.second) or stacks.stopped_children(sight.second)]
    culprits = still or held or list(others)
    fault, sentence, confidence = _own_fault(culprits)
    is_proof = all(sight.is_still and sight.is_overdue and not sight.is_in_long_phase for sight in others)
    is_proof = is_proof and not any(sight.is_moving for sight in waiting)
    needs_patience = fault in (FaultClass.DATA_STALL, FaultClass.STORAGE_STALL)
    is_hopeless = any(stacks.stopped_children(sight.second) for sight in culprits)
    if fault is FaultClass.STORAGE_STALL:
        is_proof = False
    found = _blame(
        fault,
        culprits,
        (sentence, *_where_others_wait(waiting, ()), *_activity(culprits)),
        confidence if is_proof else min(confidence, 0.8),
        is_proof=is_proof,
        patience=DATA_PATIENCE if needs_patience and not is_hopeless else 0.0,
    )
    return replace(found, is_premature=all(_is_ending(sight) for sight in culprits))


def _is_ending(sight: Sight) -> bool:
    """The script is over, and what it leaves is being tidied up, which takes seconds on a busy machine."""
    progress = sight.second.progress
    return (
        progress is not None and progress.phase is Phase.END and progress.phase_seconds < ENDING and not sight.is_still
    )


def _own_fault(culprits: Sequence[Sight]) -> tuple[FaultClass, str, float]:
    """What keeps a rank that does not wait for others. The first one speaks for all."""
    one = culprits[0]
    dump, who, are_several = one.second, _subject(culprits), len(culprits) > 1
    waits = f"{who} wait" if are_several else f"{who} waits"
    their = "their" if are_several else "its"
    where = stacks.user_frame(dump)
    place = f" at {where.file}:{where.line} ({where.function})" if where is not None else ""
    phase = "" if dump.progress is None else f" in phase {dump.progress.phase.value}"
    if dump.progress is not None and dump.progress.phase is Phase.END:
        return FaultClass.SKIPPED_COLLECTIVE, f"{who} ended the script while the others are in a collective.", 0.9
    if stopped := stacks.stopped_children(dump):
        return (
            FaultClass.DATA_STALL,
            f"{waits} for a process of {their} own that is stopped or dead: {stopped[0]}.",
            0.95,
        )
    if _is_blocked(dump):
        channel = f" in {dump.wait_channel}" if dump.wait_channel else ""
        return FaultClass.STORAGE_STALL, f"{who} {_is(culprits)} in uninterruptible sleep{channel}{place}.", 0.9
    if stacks.is_loading(dump):
        if blocked := stacks.blocked_children(dump):
            return FaultClass.STORAGE_STALL, f"{waits} for data, and {their} loader for storage: {blocked[0]}.", 0.85
        return FaultClass.DATA_STALL, f"{waits} for {their} next batch{place}.", 0.9
    if one.is_computing or dump.state == "R":
        return (
            FaultClass.BUSY,
            f"{who} {'compute' if are_several else 'computes'} on{phase}{place}, with {one.cpu:.2f} cores, while the others wait.",
            0.85,
        )
    if not dump.threads and dump.source == "none":
        return (
            FaultClass.BUSY,
            f"{who} {'do' if are_several else 'does'} not answer: something holds the interpreter lock{phase}.",
            0.7,
        )
    if dump.progress is not None and dump.progress.phase is Phase.CHECKPOINT:
        return (
            FaultClass.STORAGE_STALL,
            f"{who} {'stand' if are_several else 'stands'} still in a checkpoint{place}.",
            0.7,
        )
    return FaultClass.DEADLOCK, f"{waits} for something of {their} own{phase}{place}, not for the others.", 0.9


def _judge_collectives(waiting: Sequence[Sight]) -> HangFinding:
    """Every rank is in a collective: in the same one?"""
    cut_off = find_cut_off([sight.second for sight in waiting])
    if cut_off is not None:
        return _blame_network(waiting, cut_off)  # who has got what and who has not is chance then
    shared = find_shared_group([sight.second for sight in waiting])
    if shared is not None:
        return _blame_threads(waiting, shared)
    known = [(sight, stacks.own_collective(sight.second)) for sight in waiting]
    groups: dict[tuple[object, ...], list[Sight]] = {}
    for sight, collective in known:
        if collective is None:
            key: tuple[object, ...] = ("", stacks.user_frame(sight.second))
        else:
            key = (collective.group, collective.sequence, collective.operation, collective.shape)
        groups.setdefault(key, []).append(sight)
    if len(groups) == 1:
        return _blame_network(waiting)
    ordered = sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))
    common, odd = ordered[0], [sight for group in ordered[1:] for sight in group]
    if len(common) == len(odd):
        common, odd = _ahead_last(common, odd)
    ours, theirs = stacks.own_collective(common[0].second), stacks.own_collective(odd[0].second)
    sentences = [_what_they_do(common), *(_what_they_do(group) for group in ordered[1:4] if group is not common)]
    is_still = all(sight.is_still and sight.is_overdue for sight in waiting)
    if ours is None or theirs is None:
        gone_past = _who_went_past(known)
        if gone_past:
            sentences.insert(0, f"{_subject(gone_past)} went past a collective that the others are in.")
            return _blame(FaultClass.SKIPPED_COLLECTIVE, gone_past, tuple(sentences), 0.9, is_proof=is_still)
        return _blame(FaultClass.SKIPPED_COLLECTIVE, odd, tuple(sentences), 0.6)
    is_same_group = ours.group == theirs.group
    is_mismatch = is_same_group and ours.sequence == theirs.sequence
    fault = FaultClass.MISMATCHED_COLLECTIVE if is_mismatch else FaultClass.SKIPPED_COLLECTIVE
    return _blame(fault, odd, tuple(sentences), 0.95 if is_same_group else 0.7, is_proof=is_still and is_same_group)


def _who_went_past(known: Sequence[tuple[Sight, Collective | None]]) -> list[Sight]:
    """Ranks that are in a later step than those inside, and have left out the collective that these are in."""
    inside = [(sight, collective) for sight, collective in known if collective is not None]
    if not inside or len({collective.sequence for _, collective in inside}) > 1 or inside[0][1].backend:
        return []  # numbers of torch's record cannot be compared with those that ranks tell
    sight, collective = inside[0]
    step = None if sight.second.progress is None else sight.second.progress.step
    past = []
    for other, own in known:
        told = other.second.progress
        if own is not None or told is None or told.step is None or step is None:
            continue
        is_left_out = told.collective is None or told.collective.sequence < collective.sequence
        if told.step > step and is_left_out:
            past.append(other)
    return past


def _ahead_last(one: list[Sight], other: list[Sight]) -> tuple[list[Sight], list[Sight]]:
    """As many here as there: those that went ahead are the odd ones."""
    ours, theirs = stacks.own_collective(one[0].second), stacks.own_collective(other[0].second)
    if ours is not None and theirs is not None and ours.sequence > theirs.sequence:
        return other, one
    return one, other


def _blame_network(waiting: Sequence[Sight], cut_off: CutOff | None = None) -> HangFinding:
    if cut_off is None:
        sentence = f"{_what_they_do(waiting)} All ranks are in it, so the network does not deliver what they send."
        has_moved = any(sight.is_moving for sight in waiting)  # whoever was late has only just come
        return HangFinding(
            fault=FaultClass.NETWORK, culprits=(), evidence=(sentence,), confidence=0.6, is_premature=has_moved
        )
    culprits = [sight for sight in waiting if sight.rank in cut_off.ranks]
    evidence = (cut_off.sentence, _what_they_do(waiting))
    return _blame(FaultClass.NETWORK, culprits, evidence, 0.85 if culprits else 0.7)


def _blame_threads(waiting: Sequence[Sight], shared: SharedGroup) -> HangFinding:
    culprits = [sight for sight in waiting if sight.rank in shared.ranks]
    is_still = all(sight.is_still and sight.is_overdue for sight in waiting)
    is_proof = is_still and shared.is_order_different
    evidence = (*shared.evidence, *_activity(culprits))
    return _blame(FaultClass.CONCURRENT_COLLECTIVES, culprits, evidence, 0.95 if is_proof else 0.8, is_proof=is_proof)


def _judge_all_elsewhere(sights: Sequence[Sight]) -> HangFinding:
    """No rank waits for another."""
    overdue = [sight for sight in sights if sight.is_overdue] or list(sights)
    fault, sentence, confidence = _own_fault(overdue)
    if fault is FaultClass.DEADLOCK and len(sights) > 1:
        fault, confidence = FaultClass.UNKNOWN, 0.5
    return _blame(fault, overdue, (sentence, *_activity(overdue)), min(confidence, 0.7))


def _blame(
    fault: FaultClass,
    sights: Sequence[Sight],
    evidence: tuple[str, ...],
    confidence: float,
    *,
    is_proof: bool = False,
    is_urgent: bool = False,
    patience: float = 0.0,
) -> HangFinding:
    return HangFinding(
        fault=fault,
        culprits=tuple(Culprit(node=sight.node, global_rank=sight.rank) for sight in sights),
        evidence=evidence[:MAX_SENTENCES],
        confidence=confidence,
        is_proof=is_proof,
        is_urgent=is_urgent,
        patience=patience,
        is_long_phase=any(_may_take_long(sight) for sight in sights),
    )


def _may_take_long(sight: Sight) -> bool:
    return sight.is_in_long_phase or sight.is_moving or sight.is_computing or sight.switches > IDLE_SWITCHES


def _where_others_wait(sights: Sequence[Sight], without: Sequence[Sight]) -> tuple[str, ...]:
    apart = {sight.rank: None for sight in without}
    waiting = [sight for sight in sights if sight.rank not in apart and sight.waits]
    return (_what_they_do(waiting),) if waiting else ()


def _what_they_do(sights: Sequence[Sight]) -> str:
    dump = sights[0].second
    verb = "waits" if len(sights) == 1 else "wait"
    collective = stacks.own_collective(dump)
    if collective is not None:
        return f"{_subject(sights)} {verb} in {say_collective(collective)}."
    where = stacks.user_frame(dump)
    place = f", called at {where.file}:{where.line} ({where.function})" if where is not None else ""
    return f"{_subject(sights)} {verb} for the others{place}."


def _activity(sights: Sequence[Sight]) -> tuple[str, ...]:
    if not all(sight.is_compared for sight in sights):
        return ()
    cpu, io_bytes = max(sight.cpu for sight in sights), max(sight.io_bytes for sight in sights)
    if all(sight.is_still for sight in sights):
        return ("Between two dumps of its stack it did not move, compute, read or write.",)
    return (f"Between two dumps of its stack it used {cpu:.2f} cores and moved {io_bytes} bytes.",)


def _is_blocked(dump: WorkerDump) -> bool:
    return dump.state == "D" or any(name in dump.wait_channel for name in _STORAGE_CHANNELS)


def _has_gone_on(first: WorkerDump, second: WorkerDump) -> bool:
    before, now = first.progress, second.progress
    if before is None or now is None:
        return False
    return (before.step, before.phase, _sequence(first)) != (now.step, now.phase, _sequence(second)) or (
        now.phase_seconds < before.phase_seconds
    )


def _sequence(dump: WorkerDump) -> int:
    return -1 if dump.progress is None or dump.progress.collective is None else dump.progress.collective.sequence


def _is(sights: Sequence[Sight]) -> str:
    return "is" if len(sights) == 1 else "are"


def _subject(sights: Sequence[Sight]) -> str:
    text = say_ranks([sight.rank for sight in sights])
    return text[0].upper() + text[1:]
