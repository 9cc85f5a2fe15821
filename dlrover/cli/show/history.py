"""
The history of a job, read from its journal: what happened, what each node did when, how the step grew, and where the time went.

The journal is replayed by the core that wrote it, so nothing here is guessed afterwards. Where there is no journal to read (a job on other
hosts) the master is asked for what it knows, and the history has no spans.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from dlrover.cli.show.replay import walk_journal
from dlrover.core.goodput.accountant import NodeBooks
from dlrover.core.goodput.events import EventTeller
from dlrover.core.job import Job
from dlrover.master.view.events import events_file, read_events
from dlrover.protocol.codec import Question
from dlrover.protocol.messages.goodput import (
    MAX_EVENTS_PER_ANSWER,
    AccountGoodput,
    AskEvents,
    AskGoodput,
    Events,
    FaultCost,
    GoodputStatus,
    JobEvent,
    TimeClass,
)
from dlrover.protocol.messages.job import AskStatus, JobEnd, JobStatus, Micros, NodeRank, Reply, Round

MAX_PLACES = 128
"""So many node ranks have their spans told; in larger jobs only the rounds."""
MAX_POINTS = 5000
"""Of the curve of steps."""


class HistorySpan(Struct, frozen=True):
    """What a place did from when to when."""

    node_rank: NodeRank
    doing: TimeClass | None
    """None: its workers ran."""
    begins_at: Micros
    ends_at: Micros
    round: Round = Round(0)


class History(Struct, kw_only=True):
    job_name: str
    goodput: GoodputStatus
    faults: list[FaultCost]
    """All of them, also those that the job has forgotten."""
    events: list[JobEvent]
    spans: list[HistorySpan] = []
    steps: list[tuple[Micros, int]] = []
    end: JobEnd | None = None
    num_rounds: int = 0
    num_restarts: int = 0

    @property
    def begins_at(self) -> Micros:
        return Micros(self.goodput.now - round(self.goodput.wall * 1e6))


def read_history(journal: Path) -> History:
    """Raises `JournalError`."""
    reader = _Reader()
    for step, job in walk_journal(journal):
        if step is None:
            reader.begin(job)
        else:
            reader.see(step.record.command, step.outcome, job, step.record.now)
    history = reader.history()
    told = [event for event in read_events(events_file(journal)) if event.name not in reader.names]
    history.events = _numbered(sorted([*history.events, *told], key=lambda event: event.at))
    return history


def ask_history(ask: Callable[[Question], Reply]) -> History:
    goodput, status, events = ask(AskGoodput()), ask(AskStatus()), ask(AskEvents(limit=MAX_EVENTS_PER_ANSWER))
    assert isinstance(goodput, GoodputStatus)
    assert isinstance(status, JobStatus)
    assert isinstance(events, Events)
    return History(
        job_name=status.job_name,
        goodput=goodput,
        faults=list(goodput.faults),
        events=list(events.events),
        end=status.end,
        num_rounds=status.round,
        num_restarts=status.num_restarts,
    )


class _Reader:
    def __init__(self) -> None:
        self._job: Job | None = None
        self._teller: EventTeller | None = None
        self._faults: dict[int, FaultCost] = {}
        self._open: dict[NodeRank, HistorySpan] = {}
        self._spans: list[HistorySpan] = []
        self._steps: list[tuple[Micros, int]] = []
        self._events: list[JobEvent] = []
        self._num_faults = 0
        self.names: set[str] = set()
        """Of events that the journal itself tells."""

    def begin(self, job: Job) -> None:
        self._job = job
        self._teller = EventTeller(job.state)

    def see(self, command: object, outcome: object, job: Job, now: Micros) -> None:
        assert self._teller is not None
        for event in self._teller.tell(command, outcome, job.state, now):  # type: ignore[arg-type]
            self._events.append(event)
            self.names.add(event.name)
        goodput = job.state.goodput
        if isinstance(command, AccountGoodput):
            if goodput.highest_step is not None and (not self._steps or self._steps[-1][1] != goodput.highest_step):
                self._steps.append((now, goodput.highest_step))
                if len(self._steps) > MAX_POINTS:
                    self._steps = self._steps[::2]
            return
        if goodput.num_faults != self._num_faults:
            self._num_faults = goodput.num_faults
            self._faults.update({fault.number: fault for fault in job.goodput(now).faults})
        for rank, place in goodput.places.items():
            self._follow(rank, place, now)
            if len(self._open) >= MAX_PLACES:
                break

    def history(self) -> History:
        job = self._job
        assert job is not None, "an empty journal has a beginning, too"
        now = job.now
        for span in self._open.values():
            self._spans.append(replace(span, ends_at=now))
        goodput = job.goodput(now)
        self._faults.update({fault.number: fault for fault in goodput.faults})
        return History(
            job_name=job.job_name,
            goodput=goodput,
            faults=[self._faults[number] for number in sorted(self._faults)],
            events=self._events,
            spans=self._spans,
            steps=self._steps,
            end=job.end,
            num_rounds=job.state.rendezvous.round,
            num_restarts=job.state.restarts.num_restarts,
        )

    def _follow(self, rank: NodeRank, place: NodeBooks, now: Micros) -> None:
        span = self._open.get(rank)
        round_ = place.round if place.doing is None else Round(0)
        is_closed = place.opened_at is None
        if span is not None and (is_closed or (span.doing, span.round) != (place.doing, round_)):
            self._spans.append(replace(span, ends_at=now))
            del self._open[rank]
            span = None
        if span is None and not is_closed:
            self._open[rank] = HistorySpan(rank, place.doing, now, now, round_)


def _numbered(events: list[JobEvent]) -> list[JobEvent]:
    return [replace(event, number=number) for number, event in enumerate(events, 1)]
