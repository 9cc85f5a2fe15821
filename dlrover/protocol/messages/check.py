"""
What master and agents say to each other about the node check, apart from the wishes (`messages`).

A check runs in phases, and each phase has the number of a round of its own rendezvous. A node joins the round, is told
its place in a small group, runs the task there and reports. Its report names the round, so that a late one cannot be
taken for a report of the next phase.
"""

from __future__ import annotations

import enum
import math

from msgspec import Struct

from dlrover.protocol.messages.identity import Incarnation, Micros, NodeId, Round

MAX_CHECK_MESSAGE = 1000
"""Characters of what went wrong that the master keeps for each node."""


class ExitClass(enum.IntEnum):
    """How the task of a node check ended: its exit code, or what the master saw of it."""

    OK = 0
    COMPUTE = 10
    """The node's own fault, whatever its partners did. Also devices that are busy before anything was tested."""
    COMMUNICATION = 11
    """Of any node in the group."""
    SETUP = 12
    """No device, no process group: of any node in the group too, because a partner that never comes looks the same."""


class CheckTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes are checked before they train. All of them agree on it, like on the other terms of the job."""

    module: str
    """Run as the task, by name; chosen from the accelerator."""
    accelerator: str = "cpu"
    """Whose memory is looked at before the first check of an agent."""
    is_perf_test: bool = False
    """After a check that passed, all nodes measure the network in one group."""
    excludes_stragglers: bool = False
    """A slow node leaves; otherwise it is only named."""
    straggler_ratio: float = 2.0
    """Slow: more than so many times the median."""
    timeout: float = 300.0
    """Seconds that the task of one phase may take; then it is stopped and has failed."""
    fresh_for: float = 600.0
    """Seconds during which a node that passed is not checked again before a restart. A check takes longer than a
    restart; a node that was well ten minutes ago rarely is the reason for one. 0: before every restart."""
    memory_limit: float = 0.3
    """Part of a device's memory that may be in use before the job begins."""

    def __post_init__(self) -> None:
        if not self.module:
            raise ValueError("the node check needs at least one module to run")
        if not 1.0 <= self.straggler_ratio < 1e6:
            raise ValueError(f"--straggler-ratio {self.straggler_ratio:g}: give a number of at least 1, for example 2")
        if not 0 < self.timeout < 1e6:
            raise ValueError(f"a timeout of {self.timeout:g} s for the node check: give a number of seconds above 0")
        if not 0 <= self.fresh_for < math.inf:
            raise ValueError(f"--check-fresh-for {self.fresh_for:g}: give a finite number of seconds of at least 0")
        if not 0 < self.memory_limit <= 1:
            raise ValueError(f"a memory limit of {self.memory_limit:g}: give a part between 0 and 1, for example 0.3")


class ReportCheck(Struct, tag=True, frozen=True, kw_only=True):
    """How the task of one phase ended on this node. Repeating it is harmless; the first counts."""

    node: NodeId
    incarnation: Incarnation
    round: Round
    exit_class: ExitClass
    elapsed_ms: float = 0.0
    """Of the slowest local rank; 0 after a failure."""
    bandwidth_gbps: float = 0.0
    """Bus bandwidth of the collective in 10^9 bytes a second; 0 where there was no partner."""
    message: str = ""
    """The last words of a task that failed."""


class CheckResult(Struct, frozen=True, kw_only=True):
    """What the newest check found out about one life of a node."""

    node: NodeId
    incarnation: Incarnation
    status: str
    """healthy, straggler, faulty or unproven."""
    at: Micros
    elapsed_ms: float = 0.0
    """Best time; 0: it never passed."""
    reason: str = ""
    bandwidth_gbps: float = 0.0
    """Of the performance test; 0: none was made, or it failed."""
