"""
What this worker is doing, written into its progress page.

The hot path of watching: a change of phase is a handful of stores into shared memory. Only the main thread of the worker itself
writes; other threads and forked children (data loading) find that they have no page. Outside `dlrover-run` there is none at all, and
everything here does nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from dlrover.protocol import progress_page as layout
from dlrover.protocol.messages.watch import MAX_METRICS, Phase

_INDEX = {phase: number for number, phase in enumerate(layout.PHASES)}
START, COMPILE, DATA, FORWARD, BACKWARD, OPTIMIZER, COLLECTIVE, CHECKPOINT, EVALUATION, RESTORE, END = (
    _INDEX[phase]
    for phase in (
        Phase.START,
        Phase.COMPILE,
        Phase.DATA,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.COLLECTIVE,
        Phase.CHECKPOINT,
        Phase.EVALUATION,
        Phase.RESTORE,
        Phase.END,
    )
)
AFTER_DATA = {START: FORWARD, OPTIMIZER: FORWARD}
"""Where a phase leads back to, where not to what was before: a batch ends the start, and an optimizer step that raised."""
AFTER_WORK = {START: FORWARD, EVALUATION: FORWARD}

_SEQUENCE, _PHASE, _SINCE = layout.SEQUENCE, layout.PHASE, layout.SINCE
_NUM_CHANGES, _PHASE_NS, _BUCKETS, _NUM_BUCKETS = (
    layout.NUM_CHANGES,
    layout.PHASE_NS,
    layout.BUCKETS,
    layout.NUM_BUCKETS,
)
_SHAPE = (layout.MICRO_BATCH, layout.ACCUMULATION, layout.TOTAL_BATCH, layout.LOADER_WORKERS)


class _Texts:
    """The texts in a page: each has its place and is cut to it."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._encoded: dict[tuple[int, str], bytes] = {}

    def write(self, place: tuple[int, int], text: str) -> None:
        start, room = place
        key = (start, text)
        raw = self._encoded.get(key)
        if raw is None:
            raw = text.encode("utf-8", "replace")[: room - 1].ljust(room, b"\0")
            if len(self._encoded) < 1024:  # names repeat; cursors do not
                self._encoded[key] = raw
        self._memory[start : start + room] = raw


class PhaseWriter:
    """The writer's end of a page. `current()` finds it."""

    def __init__(self, path: str, *, now: Callable[[], int] = time.monotonic_ns) -> None:
        """`now`: nanoseconds on the clock that the reader of the page has, too."""
        self._now = now
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, layout.SIZE)
        finally:
            os.close(descriptor)
        self.words = memoryview(self._memory).cast("q")
        if self.words[layout.MAGIC_AT] != layout.MAGIC:
            raise ValueError(f"{path} is not a progress page of this version of dlrover")
        self._doubles = memoryview(self._memory).cast("d")
        self._texts = _Texts(self._memory)
        self.main_thread = threading.get_ident()
        self.phase = START
        self._since = now()
        self._step_ended_at = 0
        self._lowest_step = 0
        """Of the source that counts now."""
        self.num_optimizer_steps = 0
        self._spent_before = (0, 0)
        """Nanoseconds of computing, and of saving and evaluating, up to the end of the newest step."""
        words = self.words
        words[layout.STARTED_AT] = words[_SINCE] = self._since
        words[layout.MAIN_THREAD] = self.main_thread
        words[layout.PID] = os.getpid()

    def enter(self, phase: int) -> int:
        """The phase before, to come back to."""
        before = self.phase
        self._change(phase)
        return before

    def leave(self, before: int, after: Mapping[int, int] | None = None) -> None:
        self._change(before if after is None else after.get(before, before))

    def _change(self, phase: int) -> None:
        now = self._now()
        words, old = self.words, self.phase
        lasted = now - self._since
        # `bucket_of` of the core, here without a call.
        bits = lasted.bit_length()
        bucket = _BUCKETS + old * _NUM_BUCKETS
        if bits >= 10:
            bucket += min(((bits - 10) << 2) + ((lasted >> (bits - 3)) & 3) + 1, _NUM_BUCKETS - 1)
        words[_SEQUENCE] += 1  # odd: do not trust what you read
        words[bucket] += 1
        words[_PHASE_NS + old] += lasted
        words[_PHASE] = phase
        words[_SINCE] = now
        words[_NUM_CHANGES] += 1
        words[_SEQUENCE] += 1
        self.phase = phase
        self._since = now

    def touch(self) -> None:
        """The main thread has come by: a stretch of the phase ends and another begins."""
        self._change(FORWARD if self.phase == START else self.phase)

    def set_step(self, step: int, source: int) -> None:
        """What the script reports wins over what a checkpoint says, and that over what the hooks count."""
        words = self.words
        if source < words[layout.STEP_SOURCE]:
            if source == layout.INFERRED and words[layout.STEP_SOURCE] == layout.TOLD:
                words[layout.NUM_STEPS] += 1
                self._write_step(words[layout.STEP] + 1)
            return
        if source != words[layout.STEP_SOURCE]:
            self._lowest_step = step
            if source == layout.REPORTED:
                words[layout.NUM_STEPS] = 1  # the hooks may have counted it, too
        elif step < words[layout.STEP] and source != layout.INFERRED:
            # The script went back. To where it began or before: it counts anew, an epoch is over. Else it takes back its last steps.
            if step <= self._lowest_step:
                self.count_anew(is_epoch_over=True)
            self._lowest_step = min(step, self._lowest_step)
            words[layout.NUM_STEPS] += source == layout.REPORTED
        elif source != layout.TOLD and words[layout.STEP] != step:
            words[layout.NUM_STEPS] += 1
        words[layout.STEP_SOURCE] = source
        self._write_step(step)

    def count_anew(self, *, is_epoch_over: bool) -> None:
        """The script's steps begin again: they say nothing about other lives."""
        self.words[layout.IS_COUNTING_ANEW] = 1
        if is_epoch_over:
            self.end_epoch()

    def end_epoch(self) -> None:
        """A pass over the data was trained to its end."""
        self.words[layout.HAS_WHOLE_EPOCH] = 1

    def set_model_step(self, step: int) -> None:
        self.words[layout.MODEL_STEP] = step

    def set_model_start(self, step: int | None) -> None:
        """Steps that were in the model before the first of this life; None: unknown."""
        self.words[layout.MODEL_START] = layout.NO_STEP if step is None else step

    def set_data(self, epoch: int, num_done: int) -> None:
        words = self.words
        if (epoch, num_done) > (words[layout.DATA_EPOCH], words[layout.DATA_DONE]):
            words[layout.DATA_EPOCH], words[layout.DATA_DONE] = epoch, num_done

    def _write_step(self, step: int) -> None:
        words = self.words
        if words[layout.STEP] != step:
            now = self._now()
            if self._step_ended_at:
                words[layout.STEP_NS] = now - self._step_ended_at
            self._count_plain(now)
            self._step_ended_at = now
            words[layout.STEP] = step

    def _count_plain(self, now: int) -> None:
        """
        The time of a step without saves and evaluations; and its computing time, unless something was saved or evaluated in it: around a save a rank opens, closes and
        synchronises files, which looks like computing and is not what it does in each step.
        """
        words, computing, beside = self.words, 0, 0
        for phase in (FORWARD, OPTIMIZER):
            computing += words[_PHASE_NS + phase] + (now - self._since if phase == self.phase else 0)
        for phase in (CHECKPOINT, EVALUATION):
            beside += words[_PHASE_NS + phase] + (now - self._since if phase == self.phase else 0)
        if self._step_ended_at:
            words[layout.NUM_TIMED_STEPS] += 1
            words[layout.TIMED_NS] += now - self._step_ended_at - (beside - self._spent_before[1])
        if self._step_ended_at and beside == self._spent_before[1]:
            words[layout.NUM_PLAIN_STEPS] += 1
            words[layout.PLAIN_NS] += computing - self._spent_before[0]
        self._spent_before = (computing, beside)

    def set_shape(
        self,
        *,
        micro_batch: int | None = None,
        accumulation: int | None = None,
        total_batch: int | None = None,
        loader_workers: int | None = None,
    ) -> None:
        """None: as told before."""
        told = (micro_batch, accumulation, total_batch, loader_workers)
        for word, value in zip(_SHAPE, told, strict=True):
            if value is not None:
                self.words[word] = value + 1

    def count_batch(self) -> None:
        self.words[layout.NUM_BATCHES] += 1

    def begin_collective(self, sequence: int, operation: str, group: str, shape: str) -> None:
        words = self.words
        words[_SEQUENCE] += 1
        self._texts.write(layout.OPERATION, operation)
        self._texts.write(layout.GROUP, group)
        self._texts.write(layout.SHAPE, shape)
        words[layout.COLLECTIVE] = sequence
        words[layout.IS_INSIDE] = 1
        words[_SEQUENCE] += 1

    def end_collective(self) -> None:
        self.words[layout.IS_INSIDE] = 0

    def set_metrics(self, metrics: Mapping[str, float]) -> None:
        words, doubles = self.words, self._doubles
        start, room = layout.METRIC_NAMES
        words[_SEQUENCE] += 1
        number = 0
        for name, value in metrics.items():
            if number == MAX_METRICS:
                break
            self._texts.write((start + number * room, room), name)
            doubles[layout.METRIC_VALUES // 8 + number] = value
            number += 1
        words[layout.NUM_METRICS] = number
        words[_SEQUENCE] += 1

    def set_cursor(self, text: str) -> None:
        self._texts.write(layout.CURSOR, text)

    def set_digest(self, digest: str, step: int) -> None:
        words = self.words
        words[_SEQUENCE] += 1
        self._texts.write(layout.DIGEST, digest)
        words[layout.DIGEST_STEP] = step
        words[_SEQUENCE] += 1


_writer: PhaseWriter | None = None


def open_page(path: str) -> PhaseWriter | None:
    """Become the writer of this page, in this thread. None, and no page, if that cannot be: training goes on without."""
    global _writer
    try:
        _writer = PhaseWriter(path)
    except (OSError, ValueError):
        return None
    os.register_at_fork(after_in_child=_forget)
    return _writer


def _forget() -> None:
    """In a forked child: the page is its parent's."""
    global _writer
    _writer = None


def current() -> PhaseWriter | None:
    """The page, for the main thread of a worker; None for all others."""
    writer = _writer
    return writer if writer is not None and writer.main_thread == threading.get_ident() else None


@contextlib.contextmanager
def span(phase: int) -> Iterator[None]:
    """For our own code: saving, restoring, waiting for data."""
    writer = current()
    if writer is None:
        yield
        return
    before = writer.enter(phase)
    try:
        yield
    finally:
        writer.leave(before)


def tell_step(step: int) -> None:
    """A checkpoint of this step was restored or taken, so that counting can go on from there."""
    writer = current()
    if writer is not None:
        writer.set_step(step, layout.TOLD)
        writer.words[layout.CHECKPOINT_STEP] = max(step, writer.words[layout.CHECKPOINT_STEP])


def tell_data(epoch: int, num_done: int) -> None:
    """The sampler begins or goes on here: so many records of the epoch are done."""
    writer = current()
    if writer is not None:
        writer.set_data(epoch, num_done)


def tell_shape(**told: int | None) -> None:
    """What a step consists of: arguments of `PhaseWriter.set_shape`."""
    writer = current()
    if writer is not None:
        writer.set_shape(**told)


def tell_count_anew(*, is_epoch_over: bool) -> None:
    """The steps that are reported begin from 0 again."""
    writer = current()
    if writer is not None:
        writer.count_anew(is_epoch_over=is_epoch_over)
