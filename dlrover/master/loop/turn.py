"""
One turn of the master's loop: in which order what gathered is decided, and what may be seen of it once it is durable.

No I/O, no clock, no task. The loop (`loop.py`) hosts it beside a real disk and real streams; the simulator hosts it too, and dies
between any two of its lines. What is specific to a host comes as an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from dlrover.core.commit_order import Released
from dlrover.core.outcome import Outcome
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import LaunchNode, RemoveNode
from dlrover.protocol.messages.job import (
    Command,
    EndStream,
    FinishJob,
    JobEnd,
    LookAgain,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    Query,
    TellNode,
)

NO_SPIN = 100_000
"""Microseconds until a deadline that was refused may be tried again."""
COMING_BACK = 5_000_000
"""Microseconds in which those that were refused while the journal could not be written have come again: they wait up
to twice the second that they were told, and some have to attach before they can say what matters."""

Finding = NodeDisconnected | NodeSilent


class TurnWork(Protocol):
    """One request, or a finding of the master's own."""

    @property
    def body(self) -> Command | Query: ...

    @property
    def is_from_outside(self) -> bool: ...


Work = TypeVar("Work", bound=TurnWork)


def finding_of(work: TurnWork) -> Finding | None:
    """What the master found out by itself, and does not look for again when the job knows it; else None."""
    is_finding = not work.is_from_outside and isinstance(work.body, Finding)
    return work.body if is_finding and isinstance(work.body, Finding) else None


class Turn(Generic[Work]):
    """Decide, write `CommitSequence.take()` as one transaction, then release."""

    def __init__(self) -> None:
        self.staged: dict[int, Work] = {}
        """By ticket."""
        self.rejected: list[tuple[Work, Rejected]] = []
        self.current: Work | None = None
        """The one that is being decided: the culprit, if the core fails on it."""
        self.told: dict[NodeId, None] = {}
        """Nodes that shall hear what they are to do, after the answers."""
        self.ended: list[EndStream] = []
        """Streams to close, behind what was sent on them."""
        self.touched: dict[str, None] = {}
        """Topics on which questions may wait."""
        self.end: JobEnd | None = None
        """The job is over, and the master may go."""

    def decide(
        self,
        works: Iterable[Work],
        stage: Callable[[Work], int | None],
        *,
        findings: Iterable[Work],
        due: Callable[[], Iterable[Work]],
        before: Callable[[Work | None], Iterable[Work]] | None = None,
        after: Callable[[Work], Iterable[Work]] | None = None,
    ) -> None:
        """
        What silence says, what was sent, and last what time says: `due` is asked when all that came in time to meet a deadline
        is applied. `before`, `after`: what the host has to say before the first and around each request. `stage` gives the ticket
        of an outcome; None: a question that goes on waiting.
        """
        self._decide(findings, stage)
        self._decide(() if before is None else before(None), stage)
        for work in works:
            if before is not None:
                self._decide(before(work), stage)
            self._decide((work,), stage)
            if after is not None:
                self._decide(after(work), stage)
        self._decide(due(), stage)

    def _decide(self, works: Iterable[Work], stage: Callable[[Work], int | None]) -> None:
        for work in works:
            self.current = work
            try:
                ticket = stage(work)
            except Rejected as error:
                self.rejected.append((work, error))
            else:
                if ticket is not None:
                    self.staged[ticket] = work

    @property
    def works(self) -> list[Work]:
        """All that were decided, in whatever way."""
        return [*self.staged.values(), *(work for work, _ in self.rejected)]

    def release(self, released: Iterable[Released]) -> Iterator[tuple[Work, Outcome, list[LaunchNode | RemoveNode]]]:
        """Durable: each outcome with what the platform shall do. What concerns all of them is gathered for the end of the turn."""
        for one in released:
            intents: list[LaunchNode | RemoveNode] = []
            for effect in one.outcome.effects:
                match effect:
                    case TellNode(node=node):
                        self.told[node] = None
                    case EndStream():
                        self.ended.append(effect)
                    case FinishJob(end=end):
                        self.end = end
                    case LookAgain(topics=topics):
                        self.touched.update(dict.fromkeys(topics))
                    case LaunchNode() | RemoveNode():
                        intents.append(effect)
            yield self.staged[one.ticket], one.outcome, intents
