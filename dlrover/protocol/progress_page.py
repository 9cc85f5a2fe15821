"""
The progress page: a few kilobytes of shared memory into which a worker writes what it is doing, for its agent to read.

Plain stores into memory and no message: the worker pays less than a microsecond, and the agent can read it although the worker is
stopped, stuck or dead. The layout is here because both sides need it; the writer is `dlrover.trainer.phases`. Everything is a 64-bit
word but a few texts. Instants are nanoseconds of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

from dlrover.protocol.messages.watch import MAX_METRICS, Collective, Phase, Reach, StepShape

SIZE = 32768
MAGIC = 0x31_45_47_41_50_52_4C_44  # "DLRPAGE1"
PHASES: tuple[Phase, ...] = tuple(Phase)

# Words.
MAGIC_AT, SEQUENCE, PID, STARTED_AT, PHASE, SINCE, STEP, STEP_NS, NUM_CHANGES = range(9)
DUMP_SIGNAL, NUM_BATCHES, COLLECTIVE, IS_INSIDE, DIGEST_STEP, NUM_METRICS, STEP_SOURCE = range(9, 16)
PHASE_NS = 16
"""By phase, without the stretch that is under way."""
BUCKETS = 512
"""Of each phase in turn: how many stretches of it lasted how long."""
NUM_BUCKETS = 144
assert PHASE_NS + len(PHASES) <= 30, "more phases than the page has room for"
assert BUCKETS + len(PHASES) * NUM_BUCKETS <= SIZE // 8, "more phases than the page has room for"
MAIN_THREAD = 30
"""Its identity, as Python's dumps of stacks name it."""
NUM_STEPS = 31
"""Done by this worker, however they are numbered."""

# Bytes: offset and room.
OPERATION = (256, 32)
GROUP = (288, 64)
SHAPE = (352, 96)
CURSOR = (448, 128)
DIGEST = (576, 32)
HAS_RECORDER = 76
"""A word: the worker answers when it is asked for torch's record of collectives."""
HAS_HOOKS = 77
"""A word: torch is here and hooked, so that the page tells when the start is over."""
MODEL_STEP, MODEL_START, CHECKPOINT_STEP, DATA_EPOCH, DATA_DONE, HAS_WHOLE_EPOCH, IS_COUNTING_ANEW = range(78, 85)
"""Words: what `Reach` consists of."""
NUM_PLAIN_STEPS, PLAIN_NS = 85, 86
"""Words: steps in which nothing was saved or evaluated, and the computing time of these (`Reading.plain_ns`)."""
STEP_COUNT = 87
"""A word: whether the script's numbers of steps grow by one with each guarded step; 0: no two saves have shown it yet."""
COUNTED, NOT_COUNTED = 1, 2
TIMED_NS, NUM_TIMED_STEPS = 88, 93
"""Words: the time of whole steps without what was saved or evaluated in them, and how many these are."""
MICRO_BATCH, ACCUMULATION, TOTAL_BATCH, LOADER_WORKERS = range(89, 93)
"""Words: what a step consists of (`StepShape`), each plus 1; 0: the worker has not told it."""
METRIC_NAMES = (1024, 40)
METRIC_VALUES = 2560
"""Doubles."""

DEATH_NOTICE_AT = SIZE - 4096
"""Byte at which the room of `dlrover.host.shared_page.death_notice` begins."""
assert (BUCKETS + len(PHASES) * NUM_BUCKETS) * 8 <= DEATH_NOTICE_AT, "more phases than the page has room for"

NO_STEP = -1
INFERRED, TOLD, REPORTED = 0, 1, 2
"""Where the step comes from: counted by the hooks; counted from what a checkpoint said; said by the script."""

_READ_ATTEMPTS = 8
_LARGEST_BATCH = 2**40


class Reading(NamedTuple):
    """What a page says at one instant."""

    pid: int
    """0: no worker has opened it yet."""
    started_at_ns: int
    phase: Phase
    since_ns: int
    step: int | None
    is_step_named: bool
    """The script said the number of the step, or it was counted from what a checkpoint said; else from the beginning of the process."""
    num_steps: int
    model_step: int | None
    model_start: int | None
    reach: Reach
    num_plain_steps: int
    """In which nothing was saved or evaluated."""
    plain_ns: int
    """In forward and optimizer, during these: what a rank computes in a usual step."""
    num_timed_steps: int
    """Whole ones."""
    timed_ns: int
    """All the time of these but for saving and evaluating: what the job needs for its steps."""
    shape: StepShape
    step_seconds: float
    num_changes: int
    """Grows with every change of phase: a reader that sees another number has seen progress."""
    phase_ns: dict[Phase, int]
    """With the stretch under way."""
    collective: Collective | None
    metrics: dict[str, float]
    main_thread: int
    has_recorder: bool
    has_hooks: bool
    dump_signal: int
    """That makes the worker write its stacks; 0: nothing does."""
    cursor: str
    digest: str
    digest_step: int | None
    is_step_counted: bool | None
    """Whether the script numbers its steps as a guard counts them; None: it is not known."""
    copy: bytes
    """Of the whole page."""

    def buckets(self, phase: Phase) -> tuple[int, ...]:
        """How many stretches of this phase lasted how long; the core says what a bucket means."""
        start = BUCKETS + PHASES.index(phase) * NUM_BUCKETS
        counts = tuple(memoryview(self.copy).cast("q")[start : start + NUM_BUCKETS])
        return counts if min(counts) >= 0 else (0,) * NUM_BUCKETS

    def seconds_in_phase(self, now_ns: int) -> float:
        return max(0, now_ns - self.since_ns) / 1e9


class ProgressPage:
    """The agent's hold on one page. Anonymous memory: nothing of it remains, however we end."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("dlrover-progress", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, SIZE)
        self._memory = mmap.mmap(self.descriptor, SIZE)
        words = memoryview(self._memory).cast("q")
        for word in (STEP, DIGEST_STEP, MODEL_STEP, MODEL_START, CHECKPOINT_STEP):
            words[word] = NO_STEP
        words[MAGIC_AT] = MAGIC
        words.release()

    @property
    def path(self) -> str:
        """For processes of this user, for as long as we live."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def read(self, now_ns: int) -> Reading:
        """
        A consistent state. A worker that was stopped in the middle of a change never finishes it: then what is there counts, in which
        at most the last stretch is missing.
        """
        return decode(stable_copy(self._memory), now_ns)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


def stable_copy(memory: mmap.mmap) -> bytes:
    copy = bytes(memory)
    for _ in range(_READ_ATTEMPTS):
        before = _word(copy, SEQUENCE)
        if before % 2 == 0 and memory[SEQUENCE * 8 : SEQUENCE * 8 + 8] == copy[SEQUENCE * 8 : SEQUENCE * 8 + 8]:
            break
        copy = bytes(memory)
    return copy


def decode(copy: bytes, now_ns: int) -> Reading:
    """Whatever a script may have written into the page: nothing in it can raise."""
    words = memoryview(copy).cast("q")
    index = words[PHASE] if 0 <= words[PHASE] < len(PHASES) else 0
    phase_ns = {phase: max(0, words[PHASE_NS + number]) for number, phase in enumerate(PHASES)}
    if words[PID]:
        phase_ns[PHASES[index]] += max(0, now_ns - words[SINCE])
    return Reading(
        pid=words[PID],
        started_at_ns=words[STARTED_AT],
        phase=PHASES[index],
        since_ns=words[SINCE],
        step=None if words[STEP] == NO_STEP else words[STEP],
        is_step_named=words[STEP_SOURCE] in (TOLD, REPORTED),
        num_steps=max(0, words[NUM_STEPS]),
        model_step=None if words[MODEL_STEP] < 0 else words[MODEL_STEP],
        model_start=None if words[MODEL_START] < 0 else words[MODEL_START],
        reach=_reach(words),
        num_plain_steps=max(0, words[NUM_PLAIN_STEPS]),
        plain_ns=max(0, words[PLAIN_NS]),
        num_timed_steps=max(0, words[NUM_TIMED_STEPS]),
        timed_ns=max(0, words[TIMED_NS]),
        shape=_shape(words),
        step_seconds=max(0, words[STEP_NS]) / 1e9,
        num_changes=words[NUM_CHANGES],
        phase_ns=phase_ns,
        collective=_collective(copy, words),
        metrics=_metrics(copy, words[NUM_METRICS]),
        main_thread=words[MAIN_THREAD],
        has_recorder=words[HAS_RECORDER] == 1,
        has_hooks=words[HAS_HOOKS] == 1,
        dump_signal=words[DUMP_SIGNAL] if 0 < words[DUMP_SIGNAL] < 65 else 0,
        cursor=_text(copy, *CURSOR) or (f"batch {words[NUM_BATCHES]}" if words[NUM_BATCHES] > 0 else ""),
        digest=_text(copy, *DIGEST),
        digest_step=None if words[DIGEST_STEP] == NO_STEP else words[DIGEST_STEP],
        is_step_counted={COUNTED: True, NOT_COUNTED: False}.get(words[STEP_COUNT]),
        copy=copy,
    )


def _word(copy: bytes, index: int) -> int:
    return int.from_bytes(copy[index * 8 : index * 8 + 8], "little", signed=True)


def _reach(words: memoryview) -> Reach:
    return Reach(
        model_step=max(0, words[MODEL_STEP]),
        model_start=max(NO_STEP, words[MODEL_START]),
        checkpoint_step=max(NO_STEP, words[CHECKPOINT_STEP]),
        data=(max(0, words[DATA_EPOCH]), max(0, words[DATA_DONE])),
        has_whole_epoch=words[HAS_WHOLE_EPOCH] == 1,
        is_counting_anew=words[IS_COUNTING_ANEW] == 1,
    )


def _shape(words: memoryview) -> StepShape:
    told = (words[MICRO_BATCH], words[ACCUMULATION], words[TOTAL_BATCH], words[LOADER_WORKERS])
    micro_batch, accumulation, total_batch, loader_workers = (min(max(0, each), _LARGEST_BATCH) - 1 for each in told)
    return StepShape(
        micro_batch=max(0, micro_batch),
        accumulation=max(1, accumulation),
        total_batch=max(0, total_batch),
        loader_workers=loader_workers,
    )


def _collective(copy: bytes, words: memoryview) -> Collective | None:
    if words[COLLECTIVE] <= 0:
        return None
    return Collective(
        sequence=words[COLLECTIVE],
        operation=_text(copy, *OPERATION),
        group=_text(copy, *GROUP),
        shape=_text(copy, *SHAPE),
        is_inside=bool(words[IS_INSIDE]),
    )


def _metrics(copy: bytes, count: int) -> dict[str, float]:
    values = memoryview(copy).cast("d")
    start, room = METRIC_NAMES
    found = {}
    for number in range(min(max(count, 0), MAX_METRICS)):
        name = _text(copy, start + number * room, room)
        if name:
            found[name] = values[METRIC_VALUES // 8 + number]
    return found


def _text(copy: bytes, start: int, room: int) -> str:
    return copy[start : start + room].split(b"\0", 1)[0].decode("utf-8", "replace")
