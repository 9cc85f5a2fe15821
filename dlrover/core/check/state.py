"""
The state of the node check: plain data, changed by `node_check` and `check_consequences`.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.core.check.cycle import CheckCycle, CheckStatus
from dlrover.core.check.evidence import say_ranks
from dlrover.core.membership.nodes import Node, Opening, after_outage
from dlrover.protocol.messages.check import CheckResult
from dlrover.protocol.messages.job import (
    Check,
    JoinCheck,
    Limits,
    Micros,
    NodeId,
    NodeRank,
    Round,
    StopCause,
    Wait,
    Wish,
    WorldSpec,
)
from dlrover.protocol.messages.precheck import OperatorResult, PreCheckStage, PreCheckStatus


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
    """By when groups in which a node failed must be done, by index."""
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

    def ends_at(self) -> Micros | None:
        """When a node that has not reported counts as failed."""
        if self.cycle is None:
            return None
        return min(self.phase_ends_at, *self.hurried.values()) if self.hurried else self.phase_ends_at

    def wish_of(self, node: Node, opening: Opening | None) -> Wish:
        """Of a node that must be checked. `opening`: of the round to which the members of a world are called back, if it is one."""
        rank, cycle, joined, number = node.rank, self.cycle, self.joined.get(node.id), self.next_round
        if cycle is not None and self.members.get(rank) == node.id and rank in cycle.places and rank not in cycle.gone:
            if rank not in cycle.waiting:
                return Wait("your part of the node check is done, others still run")
            if rank in self.worlds:
                return Check(self.worlds[rank], cycle.trials[-1].name)
            number = cycle.round
        if joined is not None and joined.round == number:
            return Wait(f"you have joined round {number} of the node check, others have not yet")
        if opening is not None:
            return JoinCheck(number, opening.cause, opening.reason)
        return JoinCheck(number, StopCause.MEMBERSHIP, "nodes are checked before they train")

    def note_on(self, node: Node) -> str:
        """The verdict on a slow node that trains all the same, for its own console; empty: nothing is to be said of it."""
        result = self.results.get(node.rank)
        if result is None or result.node != node.id or result.status != CheckStatus.STRAGGLER:
            return ""
        return (
            f"the node check found this node slow ({result.elapsed_ms:.0f} ms: {result.reason}); it trains all the same"
        )

    def explain_timeout(self, round_: Round, num_waiting: int, limits: Limits) -> str:
        """The final sentence of a job whose nodes never were enough for a check; empty: that is not the reason."""
        if not self.needed:
            return ""
        num_come = len(self.joined) + num_waiting
        absent = [rank for node, rank in self.needed.items() if node not in self.joined]
        lack = f"; {say_ranks(absent)} did not join it" if absent else ""
        return (
            f"Round {round_}: {num_come} of at least {limits.min_nodes} nodes came to the node check within "
            f"{limits.join_timeout:g} s{lack}. Start the missing nodes, or allow fewer with --nnodes."
        )

    def master_restarted(self, last_command_at: Micros, now: Micros) -> None:
        """No node could join or report while the master was away."""
        self.call_began_at = Micros(self.call_began_at + now - last_command_at)
        self.phase_ends_at = after_outage(self.phase_ends_at, last_command_at, now)
        self.hurried = {group: after_outage(at, last_command_at, now) for group, at in self.hurried.items()}

    def close(self) -> None:
        """The job is over, or begins anew: no node is checked now. What was found out stays."""
        self.needed = {}
        self.joined = {}
        self.cycle = None
        self.lacking = {}
        self.worlds = {}
        self.hurried = {}
        self.perf = {}
        self.num_attempts = 0

    def end_cycle(self) -> None:
        """It has its verdict; a node that has joined a later round already keeps that."""
        self.cycle = None
        self.lacking, self.worlds, self.hurried = {}, {}, {}
        self.joined = {node: joined for node, joined in self.joined.items() if joined.round > self.round}


class PreCheck(Struct):
    stage: PreCheckStage = PreCheckStage.DISABLED
    results: tuple[OperatorResult, ...] = ()
    message: str = ""

    def status(self) -> PreCheckStatus:
        return PreCheckStatus(stage=self.stage, results=self.results, message=self.message)
