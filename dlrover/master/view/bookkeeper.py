"""
The bookkeeper: where the time went and what happened, beside the loop that decides.

It hears what nodes tell of their progress and gives the loop accounts to journal; it sees what was decided, once it is durable, and makes
events of it. It decides nothing.
"""

from __future__ import annotations

from dlrover.core.goodput.events import EventTeller, of_node
from dlrover.core.goodput.progress_ledger import ProgressLedger
from dlrover.core.job import Job
from dlrover.core.outcome import Outcome
from dlrover.master.statistics import RunStatistics
from dlrover.master.view.events import EventLog
from dlrover.protocol.messages.goodput import AccountGoodput
from dlrover.protocol.messages.job import Command, LeaveJob, Micros, NodeId, Query, ReportFailure, ReportFinished
from dlrover.protocol.messages.scaling import RunMeasured
from dlrover.protocol.messages.watch import (
    Activity,
    AskActivity,
    HangFound,
    NodeActivity,
    NodeEvent,
    ProgressReport,
    ResourceReport,
    WatchObservation,
)

_ENDS = (ReportFailure, ReportFinished, LeaveJob, HangFound)
"""After these a round may be over: what is known of its workers is booked first."""


class Bookkeeper:
    def __init__(self, events: EventLog | None = None) -> None:
        self.events = EventLog() if events is None else events
        self._ledger = ProgressLedger()
        self._teller: EventTeller | None = None
        self._progress: dict[NodeId, ProgressReport] = {}
        self._resources: dict[NodeId, ResourceReport] = {}
        self._runs = RunStatistics()

    def observed(self, observation: WatchObservation, job: Job, now: Micros) -> None:
        if isinstance(observation, ProgressReport):
            self._ledger.heard(observation, job.state, now)
            self._runs.heard_progress(observation, job.state, now)
            self._progress[observation.node] = observation
        elif isinstance(observation, ResourceReport):
            self._runs.heard_resources(observation, job.state, now)
            self._resources[observation.node] = observation
        elif isinstance(observation, NodeEvent):
            self.events.add_from_node(of_node(observation, now))

    def activity(self, ask: AskActivity) -> Activity:
        """What nodes do now, of those that are there."""
        nodes = sorted(self._progress.keys() | self._resources.keys())
        return Activity(nodes=tuple(self._of_node(node) for node in nodes))

    def _of_node(self, node: NodeId) -> NodeActivity:
        progress, resources = self._progress.get(node), self._resources.get(node)
        workers = () if progress is None else progress.workers
        slowest = max(workers, key=lambda worker: worker.phase_seconds, default=None)
        return NodeActivity(
            node=node,
            phase=None if slowest is None else slowest.phase,
            step=max((worker.step for worker in workers if worker.step is not None), default=None),
            step_seconds=max((worker.step_seconds for worker in workers), default=0.0),
            is_stalled=any(worker.is_stalled for worker in workers),
            cpu=None if resources is None else resources.cpu,
            memory_bytes=None if resources is None else resources.memory_bytes,
            memory_limit_bytes=0 if resources is None else resources.memory_limit_bytes,
            metrics=next((worker.metrics for worker in workers if worker.metrics), {}),
        )

    def _forget_the_gone(self, job: Job) -> None:
        live = job.state.nodes.live
        for seen in (self._progress, self._resources):
            for node in [node for node in seen if node not in live]:
                del seen[node]

    def account(self, now: Micros, before: Command | Query | None = None) -> AccountGoodput | None:
        """What is to be journalled now, or before this."""
        return self._ledger.account(now, at_once=isinstance(before, _ENDS))

    def measured(self, job: Job, now: Micros) -> RunMeasured | None:
        """What is to be journalled now of how fast the job is."""
        return self._runs.measure(job.state, now)

    def began(self, job: Job) -> None:
        """A master begins, or its state was read anew: what happened before is told already."""
        self._teller = EventTeller(job.state)
        self._ledger = ProgressLedger()  # what it took for booked may not be
        self._runs.began(job.state)

    def decided(self, command: Command, outcome: Outcome, job: Job, now: Micros) -> None:
        assert self._teller is not None, "nothing can be decided before the beginning"
        for event in self._teller.tell(command, outcome, job.state, now):
            self.events.add(event)
        if len(self._progress) + len(self._resources) > 2 * len(job.state.nodes.live):
            self._forget_the_gone(job)
