"""
The ledger of progress: what workers tell of their phases, as sums by class of time, ready to be booked.

Volatile like all observations. It keeps nothing that the job would miss: accounts are sums since a round began, so a new master makes the same
ones from the next reports, and one that is lost costs nothing. What only the job knows (which steps were done before, what was booked already)
is asked of it when a node is first heard of in a round.

The phase that a worker is in right now is not accounted for once it lasts: it may turn out to be a hang. Nor is the start of a worker that has no hooks
and reports nothing: for it that is the only phase, and what is not accounted for counts as computing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

from dlrover.core.state import JobState
from dlrover.protocol.messages.goodput import SPLIT, AccountGoodput, NodeAccount, TimeClass
from dlrover.protocol.messages.identity import MICROS_PER_SECOND
from dlrover.protocol.messages.job import Incarnation, Micros, NodeId, Round
from dlrover.protocol.messages.watch import Phase, ProgressReport, WorkerProgress

SHORTEST_PERIOD, LONGEST_PERIOD = 5.0, 30.0
PERIOD_PER_NODE = 0.05
"""Seconds between two accounts for each node, so that large jobs write no more per second than small ones."""
OPEN_PHASE = 1.0
"""Seconds after which a phase that goes on is held back."""
NOTICEABLE = 0.05
"""Share of its time that a node must wait in collectives beyond the one that waits least, to count as waiting for a straggler."""
MAX_WORKERS = 65_536

_STEPS = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.COLLECTIVE)
_CLASSES = {
    Phase.START: TimeClass.START_UP,
    Phase.COMPILE: TimeClass.START_UP,
    Phase.RESTORE: TimeClass.RESTORE,
    Phase.DATA: TimeClass.DATA_WAIT,
    Phase.CHECKPOINT: TimeClass.CHECKPOINT,
    Phase.EVALUATION: TimeClass.EVALUATION,
    Phase.END: TimeClass.STOPPING,
}


class _Told(Struct):
    """What one worker said last."""

    seconds: dict[Phase, float]
    step: int | None
    """Only one that means the same in each life."""
    num_steps: int
    model_step: int | None
    model_start: int | None
    has_step: bool
    """Whether it told any step."""
    has_hooks: bool


class _Book(Struct):
    """One node in one round."""

    incarnation: Incarnation
    round: Round
    before: int | None
    """The step up to which steps are done again."""
    model_before: int | None
    """The same by the steps in the model."""
    workers: dict[int, _Told] = {}
    gap: float = 0.0
    """Seconds from the beginning of the round to that of the workers."""
    steps: dict[TimeClass, float] = {}
    """Seconds in steps, by what they were good for."""
    booked: float = 0.0
    """Seconds in steps that `steps` covers."""
    step: int | None = None
    num_steps: int | None = 0
    """None: a former master heard the beginning."""
    model_step: int | None = None
    is_redo_known: bool = True
    collective: float | None = None
    collective_share: float | None = None
    sent: tuple[int, ...] = ()


class ProgressLedger:
    def __init__(self) -> None:
        self._books: dict[NodeId, _Book] = {}
        self._due_at = Micros(0)
        self._has_news = False

    def heard(self, report: ProgressReport, state: JobState, now: Micros) -> None:
        """Reports of rounds that are over are looked at as well: the last words of killed workers come late."""
        node = state.nodes.live.get(report.node)
        place = None if node is None else state.goodput.places.get(node.rank)
        if node is None or place is None or node.incarnation != report.incarnation or place.round != report.round:
            return
        book = self._books.get(report.node)
        if book is None or (book.incarnation, book.round) != (report.incarnation, report.round):
            booked = dict(zip(SPLIT, place.told, strict=False))
            steps = {
                class_: booked.get(class_, 0) / 1000
                for class_ in (TimeClass.COMPUTE, TimeClass.REDO, TimeClass.STRAGGLER_WAIT)
            }
            before, model_before = state.goodput.before_round, state.goodput.model_before_round
            book = _Book(report.incarnation, report.round, before, model_before, steps=steps, sent=place.told)
            book.booked, book.step, book.model_step = sum(steps.values()), place.step, place.model_step
            book.num_steps = None if book.booked else 0
            self._books[report.node] = book
            if len(self._books) > 2 * len(state.nodes.live) + 8:
                self._books = {id_: book for id_, book in self._books.items() if id_ in state.nodes.live}
        for worker in report.workers[:MAX_WORKERS]:
            self._note(book, worker)
        if not book.workers:
            return
        began_at = state.rendezvous.completed_at if state.rendezvous.round == report.round else None
        if began_at is not None and not book.gap and _has_told(book):
            age = max(_sum(worker.seconds.values()) for worker in report.workers)
            book.gap = max(0.0, (now - began_at) / MICROS_PER_SECOND - age)
        self._split_steps(book)
        self._has_news = True

    def account(self, now: Micros, *, at_once: bool = False) -> AccountGoodput | None:
        """What there is to book, if it is time or if a worker is about to end."""
        if not self._has_news or (now < self._due_at and not at_once):
            return None
        accounts = []
        for node, book in self._books.items():
            millis = self._millis(book)
            if millis != book.sent and _has_told(book):
                book.sent = millis
                counts = (book.step, millis, book.model_step, book.is_redo_known)
                accounts.append(NodeAccount(node, book.incarnation, book.round, *counts))
        self._has_news = False
        period = min(LONGEST_PERIOD, max(SHORTEST_PERIOD, PERIOD_PER_NODE * len(self._books)))
        self._due_at = Micros(now + round(period * MICROS_PER_SECOND))
        return AccountGoodput(accounts=tuple(accounts)) if accounts else None

    def _note(self, book: _Book, worker: WorkerProgress) -> None:
        seconds = {phase: value for phase, value in worker.seconds.items() if math.isfinite(value) and value > 0}
        if not worker.has_hooks and not any(phase in seconds for phase in _STEPS):
            started = seconds.pop(Phase.START, 0.0)
            if started and seconds:  # it saves, or ends: then it has worked before
                seconds[Phase.FORWARD] = started
        is_open = worker.is_stalled or worker.phase_seconds >= OPEN_PHASE
        if is_open and worker.phase in seconds and worker.phase not in (Phase.START, Phase.COMPILE, Phase.END):
            seconds[worker.phase] = max(0.0, seconds[worker.phase] - worker.phase_seconds)
        known = book.workers.get(worker.local_rank)
        if known is not None:
            seconds = {phase: max(seconds.get(phase, 0.0), known.seconds.get(phase, 0.0)) for phase in Phase}
        book.workers[worker.local_rank] = _Told(
            seconds=seconds,
            step=worker.step if worker.is_step_comparable else None,
            num_steps=worker.num_steps,
            model_step=worker.model_step,
            model_start=worker.model_start,
            has_step=worker.step is not None,
            has_hooks=worker.has_hooks,
        )

    def _split_steps(self, book: _Book) -> None:
        """The seconds in steps since the last look: new ones, repeated ones, or waiting for a slower worker."""
        workers = book.workers.values()
        spent = _sum(worker.seconds.get(phase, 0.0) for worker in workers for phase in _STEPS) / len(workers)
        collective = _sum(worker.seconds.get(Phase.COLLECTIVE, 0.0) for worker in workers) / len(workers)
        news = spent - book.booked
        is_again = book.before is not None or book.model_before is not None
        is_in_first = all(worker.has_hooks and not worker.has_step for worker in workers)
        if news <= 0 or (is_again and is_in_first):  # whether the first step is new is known when it has ended
            return
        step = max((worker.step for worker in workers if worker.step is not None), default=None)
        num_steps = max((worker.num_steps for worker in workers), default=0)
        model = max(workers, key=lambda worker: -1 if worker.model_step is None else worker.model_step)
        if book.collective is not None or not book.booked:  # else a former master heard the beginning
            book.collective_share = min(1.0, max(0.0, collective - (book.collective or 0.0)) / news)
        waited = self._waited(book) * news
        share = self._share_redone(book, step, num_steps) if step is not None else self._share_in_model(book, model)
        redone = share * (news - waited)
        for class_, seconds in (
            (TimeClass.STRAGGLER_WAIT, waited),
            (TimeClass.REDO, redone),
            (TimeClass.COMPUTE, news - waited - redone),
        ):
            book.steps[class_] = book.steps.get(class_, 0.0) + seconds
        book.booked, book.collective = spent, collective
        book.step, book.num_steps = step if step is not None else book.step, num_steps
        book.model_step = model.model_step if model.model_step is not None else book.model_step

    def _share_in_model(self, book: _Book, worker: _Told) -> float:
        """Of workers whose own steps, if they tell any, cannot be compared with those of other lives."""
        if worker.model_step is None:
            # Nothing counts what is in the model. Of a script that tells no steps at all this is nothing new.
            book.is_redo_known = book.is_redo_known and not (worker.has_step and book.round > 1)
            return 0.0
        if book.model_before is None:
            return 0.0
        if worker.model_start is None:
            book.is_redo_known = False
            return 0.0
        if worker.model_step <= book.model_before:
            return 1.0
        start = worker.model_start if book.model_step is None else book.model_step
        return max(0, book.model_before - start) / (worker.model_step - start) if worker.model_step > start else 0.0

    def _share_redone(self, book: _Book, step: int, num_steps: int) -> float:
        if book.before is None:
            return 0.0
        if step <= book.before:
            return 1.0
        done = num_steps - book.num_steps if num_steps and book.num_steps is not None else 0
        if done <= 0 and book.step is not None:
            done = step - book.step
        if done <= 0:
            return 0.0  # nobody knows where it began: then most likely where the others had stopped
        return min(1.0, max(0.0, book.before - (step - done)) / done)

    def _waited(self, book: _Book) -> float:
        if book.collective_share is None:
            return 0.0
        shares = [other.collective_share for other in self._books.values() if other.round == book.round]
        excess = book.collective_share - min(share for share in shares if share is not None)
        return excess if excess > NOTICEABLE else 0.0

    def _millis(self, book: _Book) -> tuple[int, ...]:
        totals = dict.fromkeys(SPLIT, 0.0)
        for worker in book.workers.values():
            for phase, seconds in worker.seconds.items():
                if phase in _CLASSES:
                    totals[_CLASSES[phase]] += seconds / len(book.workers)
        for class_, seconds in book.steps.items():
            totals[class_] += seconds
        totals[TimeClass.START_UP] += book.gap
        told = tuple(min(2**44, round(totals[class_] * 1000)) for class_ in SPLIT)
        return tuple(map(max, told, book.sent)) if book.sent else told


def _has_told(book: _Book) -> bool:
    return any(seconds for worker in book.workers.values() for seconds in worker.seconds.values())


def _sum(values: Iterable[float]) -> float:
    return math.fsum(value for value in values if math.isfinite(value) and value > 0)
