"""
The state of checkpoints: saves that are under way, what became of others, and what is kept of workers that ended.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dlrover.core.membership.nodes import after_outage
from dlrover.protocol.messages.checkpoint import (
    CheckpointSettled,
    CheckpointStatus,
    CheckpointTrouble,
    CommittedCheckpoint,
    HeldSnapshot,
    PersistSnapshot,
    SaveRequested,
)
from dlrover.protocol.messages.job import Micros, NodeId, Round


class BreakPoint(Struct, kw_only=True):
    """The gathering of reports after one round."""

    number: int
    round: Round
    ends_at: Micros
    missing: list[NodeId]
    """Members that have not told yet."""
    held: dict[NodeId, tuple[HeldSnapshot, ...]] = {}
    promised: dict[NodeId, tuple[HeldSnapshot, ...]] = {}
    """What nodes that have left are writing by themselves."""


class BreakPointDecision(Struct, kw_only=True):
    """What was decided after a round, for one directory."""

    number: int
    round: Round
    nodes: list[NodeId]
    """Who had told, and may let go of everything else."""
    directory: str = ""
    attempt: str = ""
    step: int = -1
    shards: dict[NodeId, list[int]] = {}


class BreakPoints(Struct):
    open: BreakPoint | None = None
    decisions: list[BreakPointDecision] = []
    """Of the newest round that had any."""
    promises: dict[str, list[int]] = {}
    """By attempt and directory of those decisions: shards that are written by nodes which have left."""

    def duties_of(self, node: NodeId, since: int) -> tuple[PersistSnapshot, ...]:
        return tuple(
            PersistSnapshot(
                number=each.number,
                round=each.round,
                directory=each.directory,
                attempt=each.attempt,
                step=each.step,
                shards=tuple(each.shards.get(node, ())),
            )
            for each in self.decisions
            if each.number > since and node in each.nodes
        )

    def master_restarted(self, last_command_at: Micros, now: Micros) -> None:
        if self.open is not None:
            self.open.ends_at = after_outage(self.open.ends_at, last_command_at, now)


class SaveAttempt(Struct, kw_only=True):
    """One storage save, from its first written shard to its end."""

    number: int
    """In the order in which they were heard of; names its deadline."""
    directory: str
    target: str
    step: int
    attempt: str
    round: Round
    num_shards: int
    save_timeout: float
    ends_at: Micros
    """When the shards that are missing are waited for no longer, or the committer."""
    writers: dict[int, NodeId] = {}
    """By shard: who wrote it last."""
    digests: dict[int, str] = {}
    promised: list[int] = []
    """Shards that nodes which have left are writing: no node will report them, the committer waits for their files."""
    committer: NodeId | None = None
    duty: int = 0
    """Number under which the committer is told."""
    is_newest: bool = True
    tried: list[NodeId] = []
    """Committers that failed."""
    trouble: str = ""
    """What the last of them said."""

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.round, self.step, self.number)

    @property
    def is_complete(self) -> bool:
        """Shards are checked when they are reported, so a full count is the full set."""
        return bool(self.writers) and len(self.writers) + self.num_awaited == self.num_shards

    @property
    def num_awaited(self) -> int:
        return sum(shard not in self.writers for shard in self.promised)


class NewestCommit(Struct, frozen=True, kw_only=True):
    """The newest checkpoint of a directory, as far as this job made it."""

    step: int
    attempt: str
    order: tuple[int, int, int]
    at: Micros


class Checkpoints(Struct):
    attempts: dict[str, SaveAttempt] = {}
    """Under way, by `key_of`."""
    settled: list[CheckpointSettled] = []
    """The newest outcomes, oldest first; each attempt once."""
    committed: dict[str, NewestCommit] = {}
    """By directory, the one that got a checkpoint last at the end."""
    trouble: CheckpointTrouble | None = None
    """The newest failure, until a checkpoint is committed."""
    request: SaveRequested | None = None
    """A storage save is wanted, and none was committed since."""
    breaks: BreakPoints = msgspec.field(default_factory=BreakPoints)
    last_number: int = 0
    """Of attempts, duties, outcomes, requests and decisions together."""

    def next_number(self) -> int:
        self.last_number += 1
        return self.last_number

    def outcome(self, directory: str, attempt: str) -> CheckpointSettled | None:
        found = (each for each in self.settled if (each.directory, each.attempt) == (directory, attempt))
        return next(found, None)

    def master_restarted(self, last_command_at: Micros, now: Micros) -> None:
        for attempt in self.attempts.values():
            attempt.ends_at = after_outage(attempt.ends_at, last_command_at, now)
        self.breaks.master_restarted(last_command_at, now)

    def status(self) -> CheckpointStatus:
        committed = tuple(
            CommittedCheckpoint(directory=directory, step=each.step, attempt=each.attempt, at=each.at)
            for directory, each in self.committed.items()
        )
        return CheckpointStatus(committed=committed, num_under_way=len(self.attempts), trouble=self.trouble)
