"""
All that can be heard of a job without changing it, at every step of its journal: outcomes, events, deadlines, answers.

The referees record it for simulated jobs (`told.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dlrover.core.commit_order import walk
from dlrover.core.goodput.events import EventTeller
from dlrover.core.job import Job
from dlrover.core.outcome import NotYet
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import AwaitSaveDuties
from dlrover.protocol.messages.data import AskDataCheckpoint, AskDataset, AwaitRestore
from dlrover.protocol.messages.fleet import AskClusterVersion, AskPsNodes, VersionType
from dlrover.protocol.messages.goodput import AskFault
from dlrover.protocol.messages.job import AskStatus, Micros, Ping, Query, Round
from dlrover.protocol.messages.peers import AskPeers

LATER = (0, 1, 999_999, 30_000_000, 600_000_000)
"""Microseconds after a command at which somebody looks."""


def said(job: Job, records: Iterable[bytes], ask_every: int) -> Iterator[object]:
    """Walks the journal with a fresh job; questions are asked at the end, and each time after so many records."""
    teller = EventTeller(job.state)
    for step in walk(job, records):
        yield step.outcome
        yield list(teller.tell(step.record.command, step.outcome, job.state, step.record.now))
        deadline = job.next_deadline()
        yield deadline
        if deadline is not None:
            # Nothing passes a microsecond too early, and what the shell is woken for has passed when it comes.
            assert not job.due(Micros(deadline - 1)), f"{job.due(Micros(deadline - 1))} passed before {deadline}"
            yield job.due(deadline)
        if step.record.number % ask_every == 0:
            yield from answers(job)
    yield from answers(job)


def answers(job: Job) -> Iterator[object]:
    for later in LATER:
        yield job.goodput(Micros(job.now + later))
        yield job.due(Micros(job.now + later))
    yield job.suspects()
    yield [job.state.nodes.is_connected(node) for node in job.state.nodes.live]
    for query in _questions(job):
        try:
            answer = job.ask(query)
        except Rejected as error:
            yield error.code
        else:
            yield "not yet" if isinstance(answer, NotYet) else answer


def _questions(job: Job) -> Iterator[Query]:
    state = job.state
    round_ = state.rendezvous.round
    yield from (AskStatus(), Ping(), AskPsNodes(), AwaitRestore(round=round_), AwaitRestore(round=Round(round_ + 1)))
    for number in range(max(0, round_ - 3), round_ + 2):
        yield AskFault(round=Round(number))
    for version_type in VersionType:
        yield AskClusterVersion(version_type=version_type)
    for name in [*state.data.datasets, "of nobody"]:
        yield AskDataset(dataset=name, round=round_)
        yield AskDataCheckpoint(dataset=name)
        yield AskDataCheckpoint(dataset=name, step=state.data.folded + 1, round=round_)
    for node in state.nodes.live.values():
        yield AskPeers(node=node.id, round=round_, copies=1)
        yield AskPeers(node=node.id, round=round_, copies=2, num_data=2, num_parity=1)
        yield AwaitSaveDuties(node=node.id, incarnation=node.incarnation)
