"""
What Brain has not been told yet of this job.

Everything in here is in the journal or in the job's state, so nothing has to be kept when the master ends: the next one fills its own. An entry stays until Brain
has stored it; if it changes meanwhile, the newer one stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dlrover.core.state import JobState
from dlrover.protocol.messages.brain import MAX_DECISIONS_TOLD, NodeEndKind
from dlrover.protocol.messages.fleet import NodeExit, NodeType, Resource
from dlrover.protocol.messages.identity import Micros, PlatformId
from dlrover.protocol.messages.scaling import JobFacts, RunMeasured, ScaleDecision

MAX_RUNS_AT_ONCE = 128
"""At 2 KB each they stay far below what a job may send in a second."""

KINDS = {
    NodeExit.OOM: NodeEndKind.OOM,
    NodeExit.KILLED: NodeEndKind.EVICTED,
    NodeExit.FATAL: NodeEndKind.FAILED,
    NodeExit.HARDWARE: NodeEndKind.FAILED,
    NodeExit.UNKNOWN: NodeEndKind.FAILED,
    NodeExit.NO_HEARTBEAT: NodeEndKind.FAILED,
    NodeExit.DIAGNOSED: NodeEndKind.FAILED,
    NodeExit.CHECK_FAILED: NodeEndKind.FAILED,
}
"""Other ends are no news: the job wanted them."""


@dataclass(frozen=True)
class LostNode:
    """A node that ended before the job did."""

    id: PlatformId
    node_type: NodeType
    kind: NodeEndKind
    resource: Resource
    at: Micros


@dataclass
class BrainOutbox:
    runs: dict[int, RunMeasured] = field(default_factory=dict)
    decisions: dict[int, ScaleDecision] = field(default_factory=dict)
    lost_nodes: dict[PlatformId, LostNode] = field(default_factory=dict)
    facts: JobFacts | None = None
    """None: nothing new is known."""
    _seen_decisions: list[ScaleDecision] | None = None
    _known_decisions: dict[int, ScaleDecision] = field(default_factory=dict)
    _seen_facts: JobFacts = field(default_factory=JobFacts)
    _known_ends: dict[PlatformId, None] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.runs or self.decisions or self.lost_nodes or self.facts)

    def hear_run(self, run: RunMeasured) -> None:
        self.runs[run.number] = run

    def hear_past(self, runs: Iterable[RunMeasured]) -> None:
        """From the journal: what was heard since is newer."""
        self.runs = {run.number: run for run in runs} | self.runs

    def look(self, state: JobState, now: Micros) -> None:
        """What has changed since the last look. Cheap where nothing has: the state makes a new list for each new decision."""
        scaling = state.scaling
        if scaling.decisions is not self._seen_decisions:
            self._seen_decisions = scaling.decisions
            for made in scaling.decisions:
                if self._known_decisions.get(made.number) != made:
                    self.decisions[made.number] = made
            self._known_decisions = {made.number: made for made in scaling.decisions}
        if scaling.facts != self._seen_facts:
            self._seen_facts = self.facts = scaling.facts
        if state.fleet is None or state.end is not None:
            return
        for node in state.fleet.nodes.values():
            if node.ended_at is None or node.id in self._known_ends:
                continue
            self._known_ends[node.id] = None
            kind = KINDS.get(node.exit_reason)
            if kind is not None:
                self.lost_nodes[node.id] = LostNode(node.id, node.node_type, kind, node.resource, node.ended_at)

    def next_runs(self) -> tuple[RunMeasured, ...]:
        return tuple(self.runs[number] for number in sorted(self.runs)[:MAX_RUNS_AT_ONCE])

    def next_decisions(self) -> tuple[ScaleDecision, ...]:
        return tuple(self.decisions[number] for number in sorted(self.decisions)[:MAX_DECISIONS_TOLD])

    def settle_runs(self, told: Iterable[RunMeasured]) -> None:
        """They are stored. What was said of one of them meanwhile is not."""
        for run in told:
            if self.runs.get(run.number) is run:
                del self.runs[run.number]

    def settle_decisions(self, told: Iterable[ScaleDecision]) -> None:
        for made in told:
            if self.decisions.get(made.number) is made:
                del self.decisions[made.number]

    def settle_facts(self, told: JobFacts) -> None:
        if self.facts is told:
            self.facts = None
