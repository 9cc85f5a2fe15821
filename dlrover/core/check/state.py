"""
The state of the node check: plain data, changed by `node_check` and `check_consequences`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from dlrover.core.check.cycle import CheckCycle
from dlrover.core.membership.nodes import after_outage
from dlrover.protocol.messages.check import CheckResult, CheckTerms
from dlrover.protocol.messages.job import Micros, NodeId, NodeRank, Round, WorldSpec

if TYPE_CHECKING:
    from dlrover.core.state import JobState


class CheckJoined(Struct, frozen=True):
    """A node that has joined a round of the check."""

    round: Round
    local_world_size: int
    offer: str


class NodeCheck(Struct):
    """Who is to be checked, the check that runs, and what was found out."""

    round: Round = Round(0)
    """Of the newest phase; 0: there was none yet."""
    needed: dict[NodeId, NodeRank] = {}
    """Expected in a training round, and must pass before they join it."""
    joined: dict[NodeId, CheckJoined] = {}
    """Those of them who joined the phase that runs, or the next one."""
    call_began_at: Micros = Micros(0)
    """Newest join of a node that had not joined yet: first and last call count from here."""
    cycle: CheckCycle | None = None
    """The check that runs. Its phase has the number `round`."""
    members: dict[NodeRank, NodeId] = {}
    """Who takes part in it, also later; kept until the next one begins."""
    lacking: dict[int, int] = {}
    """How many members of a group have not joined the phase, by index of the group; absent: it runs."""
    worlds: dict[NodeRank, WorldSpec] = {}
    """Places in the groups that run."""
    phase_ends_at: Micros = Micros(0)
    hurried: dict[int, Micros] = {}
    """By when groups in which somebody failed must be done, by index."""
    messages: dict[NodeRank, str] = {}
    """Newest words of a task that failed in this check."""
    bandwidths: dict[NodeRank, float] = {}
    """As reported in this phase."""
    num_attempts: int = 0
    """Checks in a row that could not find out who is at fault."""
    perf: dict[NodeId, None] = {}
    """Passed, and measure the network together before they go on to training."""
    results: dict[NodeRank, CheckResult] = {}
    """Newest of each rank."""
    num_checks: int = 0
    """Checks that had a verdict."""

    @property
    def next_round(self) -> Round:
        return Round(self.round + 1)

    @property
    def is_under_way(self) -> bool:
        """Whether nodes are kept from training by the check itself, however long that takes."""
        return self.cycle is not None or bool(self.perf)

    def ends_at(self) -> Micros | None:
        """When somebody who has not reported counts as failed."""
        if self.cycle is None:
            return None
        return min(self.phase_ends_at, *self.hurried.values()) if self.hurried else self.phase_ends_at

    def master_restarted(self, last_command_at: Micros, now: Micros) -> None:
        """Nobody could join or report while the master was away."""
        self.call_began_at = Micros(self.call_began_at + now - last_command_at)
        self.phase_ends_at = after_outage(self.phase_ends_at, last_command_at, now)
        self.hurried = {group: after_outage(at, last_command_at, now) for group, at in self.hurried.items()}

    def close(self) -> None:
        """The job is over, or begins anew: nobody is checked now. What was found out stays."""
        self.needed = {}
        self.joined = {}
        self.cycle = None
        self.lacking = {}
        self.worlds = {}
        self.hurried = {}
        self.perf = {}
        self.num_attempts = 0

    def end_cycle(self) -> None:
        """It has its verdict; whoever has joined a later round already keeps that."""
        self.cycle = None
        self.lacking, self.worlds, self.hurried = {}, {}, {}
        self.joined = {node: joined for node, joined in self.joined.items() if joined.round > self.round}


def terms_of(state: JobState) -> CheckTerms:
    assert state.terms is not None, "a check before any node came"
    assert state.terms.check is not None, "this job has no node check"
    return state.terms.check
