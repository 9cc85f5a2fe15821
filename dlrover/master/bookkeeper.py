"""
The bookkeeper: where the time went and what happened, beside the desk that decides.

It hears what nodes tell of their progress and gives the desk accounts to journal; it sees what was decided, once it is durable, and makes
events of it. It decides nothing.
"""

from __future__ import annotations

from dlrover.core.event_words import EventTeller, of_node
from dlrover.core.job import Job
from dlrover.core.progress_ledger import ProgressLedger
from dlrover.core.turn import Outcome
from dlrover.master.events import EventLog
from dlrover.protocol.goodput_messages import AccountGoodput
from dlrover.protocol.messages import Command, LeaveJob, Micros, Query, ReportFailure, ReportFinished
from dlrover.protocol.watch_messages import HangFound, NodeEvent, ProgressReport, WatchObservation

_ENDS = (ReportFailure, ReportFinished, LeaveJob, HangFound)
"""After these a round may be over: what is known of its workers is booked first."""


class Bookkeeper:
    def __init__(self, events: EventLog | None = None) -> None:
        self.events = EventLog() if events is None else events
        self._ledger = ProgressLedger()
        self._teller: EventTeller | None = None

    def observed(self, observation: WatchObservation, job: Job, now: Micros) -> None:
        if isinstance(observation, ProgressReport):
            self._ledger.heard(observation, job.state, now)
        elif isinstance(observation, NodeEvent):
            self.events.add_from_node(of_node(observation, now))

    def account(self, now: Micros, before: Command | Query | None = None) -> AccountGoodput | None:
        """What is to be journalled now, or before this."""
        return self._ledger.account(now, at_once=isinstance(before, _ENDS))

    def began(self, job: Job) -> None:
        """A master begins, or its state was read anew: what happened before is told already."""
        self._teller = EventTeller(job.state)
        self._ledger = ProgressLedger()  # what it took for booked may not be

    def decided(self, command: Command, outcome: Outcome, job: Job, now: Micros) -> None:
        assert self._teller is not None, "nothing can be decided before the beginning"
        for event in self._teller.tell(command, outcome, job.state, now):
            self.events.add(event)
