"""
Checkpoints: which storage saves are under way, who makes them count, and what became of them.

Each agent tells when a shard of an attempt is written. When the *set* of shards is complete one of the writers is made the committer; if
it dies, fails or takes too long, another is. Only one attempt of a directory is being committed at a time, and attempts have an order: the
round in which the state was saved, the step, and which was heard of first. One that is older than what was committed before still becomes a
checkpoint, but moves no tracker; so trackers never go back, however late a slow node may be.

An attempt has a deadline and ends with it. What became of it is told to all nodes, because trainers of other nodes may wait for it. A
bounded number of attempts, outcomes and directories is remembered; what is forgotten is only history.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from dlrover.core.checkpoints import break_points
from dlrover.core.checkpoints.break_points import BreakPoints
from dlrover.core.data import books as data_books
from dlrover.core.membership.nodes import after_outage
from dlrover.core.outcome import NotYet, micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import (
    MAX_NAME_CHARS,
    MAX_PATH_CHARS,
    MAX_REASON_CHARS,
    MAX_SHARDS,
    AwaitSaveDuties,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSettled,
    CheckpointStatus,
    CheckpointTrouble,
    CommitCheckpoint,
    CommittedCheckpoint,
    RequestSave,
    SaveDuties,
    SaveRequested,
    ShardWritten,
    SnapshotsHeld,
    digest_of_shards,
)
from dlrover.protocol.messages.job import Command, Done, LookAgain, Micros, NodeId, Query, Reply, Round

if TYPE_CHECKING:
    from dlrover.core.decision import Course
    from dlrover.core.membership.nodes import Node
    from dlrover.core.state import JobState

MAX_UNDER_WAY = 32
"""Attempts; the oldest is given up for one more. Agents write one after the other, so more are left-overs."""
MAX_SETTLED = 16
"""Outcomes that are kept for agents that have not asked for a while."""
MAX_DIRECTORIES = 16
MAX_TRIES = 3
"""Nodes that may try to commit one attempt."""
LONGEST_SAVE = 86_400.0
SHORTEST_COMMIT = 60.0
"""Seconds that a committer has at least. Somebody's short patience with shards says nothing about a busy storage."""
_LARGEST = 2**53


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
    """Shards that nodes which have left are writing: nobody will report them, the committer waits for their files."""
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
    """Somebody wants a storage save, and none was committed since."""
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

    def deadlines(self) -> list[tuple[Micros, int]]:
        return [(attempt.ends_at, attempt.number) for attempt in self.attempts.values()]

    def status(self) -> CheckpointStatus:
        committed = tuple(
            CommittedCheckpoint(directory=directory, step=each.step, attempt=each.attempt, at=each.at)
            for directory, each in self.committed.items()
        )
        return CheckpointStatus(committed=committed, num_under_way=len(self.attempts), trouble=self.trouble)


def key_of(directory: str, attempt: str) -> str:
    return f"{attempt}@{directory}"


def topic_of(node: NodeId) -> str:
    return f"save-duties/{node}"


def lose(course: Course, node: NodeId) -> None:
    """The agent of the node is gone, or begins a new life that knows nothing of what it was told."""
    room = course.state.checkpoints
    break_points.lose(course, node)
    for attempt in room.attempts.values():
        if attempt.committer == node:
            attempt.committer = None
    _appoint(course)


def request_save(course: Course, reason: str) -> None:
    """All trainers shall write their next save to storage."""
    room = course.state.checkpoints
    room.request = SaveRequested(number=room.next_number(), reason=reason)
    tell_all(course)


def give_up_history(course: Course) -> None:
    """
    The ranks went on with an older model. A checkpoint of what they gave up must not become the newest: nobody could tell any more what
    its model had read.
    """
    room, data = course.state.checkpoints, course.state.data
    gone = [each for each in room.attempts.values() if data.last_shared(each.step, each.round) < each.step]
    for attempt in gone:
        if sentence := _give_up(course, attempt, "the ranks have gone on with an older model since", None):
            course.say(sentence)


def expire(course: Course, number: int) -> str:
    """The deadline of an attempt: the sentence that says what was given up; empty if nothing was."""
    room = course.state.checkpoints
    attempt = next((each for each in room.attempts.values() if each.number == number), None)
    if attempt is None or attempt.ends_at > course.now:
        return ""
    if attempt.committer is not None:
        return _commit_failed(course, attempt, attempt.committer, "the commit took too long")
    if attempt.is_complete:
        why = attempt.trouble or "no node that wrote it is there any more"
    else:
        missing = [shard for shard in range(attempt.num_shards) if shard not in attempt.writers]
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        why = (
            f"after {attempt.save_timeout:g} s only {len(attempt.writers)} of {attempt.num_shards} shards were written; "
            f"missing: {shown}"
        )
    return _give_up(course, attempt, why, None)


def tell_all(course: Course) -> None:
    course.effects.append(LookAgain(tuple(topic_of(node) for node in course.state.nodes.live)))


def _shard_written(command: ShardWritten, course: Course) -> Reply:
    state, room = course.state, course.state.checkpoints
    node = state.nodes.current(command.node, command.incarnation)
    _check_names(command.directory, command.attempt, command.step)
    _check_written(command, state)
    key = key_of(command.directory, command.attempt)
    known = room.attempts.get(key)
    told = (command.target, command.step, command.num_shards, command.round)
    if known is not None and (known.target, known.step, known.num_shards, known.round) != told:
        raise Rejected(
            f"Attempt {command.attempt} is step {known.step} of round {known.round} in {known.num_shards} shards as "
            f"{known.target!r}; {node.label} says something else of it.",
            code="attempt-differs",
        )
    outcome = room.outcome(command.directory, command.attempt)
    if known is None and outcome is not None:
        what = "was committed" if outcome.is_committed else f"was given up: {outcome.reason.rstrip('.')}"
        code = "attempt-committed" if outcome.is_committed else "attempt-over"
        raise Rejected(f"The save of step {command.step} is over; it {what}.", code=code)

    if state.data.last_shared(command.step, command.round) < command.step:
        raise Rejected(
            f"The save of step {command.step} in round {command.round} is over: the ranks have gone on with an older model since.",
            code="attempt-over",
        )

    attempt = known or _begin(course, command, key)
    attempt.writers[command.shard] = node.id
    attempt.digests[command.shard] = command.digest
    _appoint(course)
    return Done()


def _checkpoint_committed(command: CheckpointCommitted, course: Course) -> Reply:
    state, room = course.state, course.state.checkpoints
    node = state.nodes.current(command.node, command.incarnation)
    _check_names(command.directory, command.attempt, command.step)
    attempt = room.attempts.get(key_of(command.directory, command.attempt))
    outcome = room.outcome(command.directory, command.attempt)
    if attempt is None and outcome is not None and outcome.is_committed:
        return Done()
    if not command.is_by_files and (attempt is None or not attempt.is_complete):
        raise Rejected(f"{node.label} was not told to commit {command.attempt}.", code="not-complete")
    if not 0 <= command.round <= state.rendezvous.round:
        raise Rejected(f"There was no round {command.round} yet.", code="unknown-round")

    number = attempt.number if attempt is not None else room.next_number()
    order = attempt.order if attempt is not None else (command.round, command.step, number)
    room.attempts.pop(key_of(command.directory, command.attempt), None)
    newest = room.committed.get(command.directory)
    if newest is None or newest.order < order:
        room.committed.pop(command.directory, None)
        room.committed[command.directory] = NewestCommit(
            step=command.step, attempt=command.attempt, order=order, at=course.now
        )
        for old in list(room.committed)[:-MAX_DIRECTORIES]:
            del room.committed[old]
    room.trouble = None
    data_books.checkpoint_committed(course, command.step, Round(order[0]))
    if room.request is not None and number > room.request.number:
        room.request = None
    _settle(course, command.directory, command.attempt, command.step, "")
    _give_up_older(course, command.directory, order[0])
    _appoint(course)
    return Done()


def _give_up_older(course: Course, directory: str, round_: int) -> None:
    """Of saves of former rounds nobody writes the missing shards any more; who waits for them would wait in vain."""
    room = course.state.checkpoints
    for key, each in list(room.attempts.items()):
        if each.directory == directory and each.round < round_ and not each.is_complete:
            del room.attempts[key]
            missing = each.num_shards - len(each.writers)
            reason = f"{missing} of {each.num_shards} shards were never written, and a newer checkpoint is there"
            _settle(course, each.directory, each.attempt, each.step, reason)


def _checkpoint_failed(command: CheckpointFailed, course: Course) -> Reply:
    room = course.state.checkpoints
    node = course.state.nodes.current(command.node, command.incarnation)
    _check_names(command.directory, command.attempt, command.step)
    if not command.reason.strip():
        raise Rejected("A failed save needs a reason.", code="malformed")
    if not -1 <= command.shard < MAX_SHARDS:
        raise Rejected(f"There is no shard {command.shard}.", code="malformed")

    reason = command.reason.strip()[:MAX_REASON_CHARS]
    attempt = room.attempts.get(key_of(command.directory, command.attempt))
    sentence = ""
    if command.shard < 0 and attempt is not None:
        if attempt.committer == node.id:
            sentence = _commit_failed(course, attempt, node.id, reason)
    elif attempt is not None:
        sentence = _give_up(course, attempt, reason, node)
    elif room.outcome(command.directory, command.attempt) is None:
        # Nobody has written any of it yet. The others need not begin, or are told when they have.
        sentence = _note_trouble(course, command.directory, command.step, reason, node)
        _settle(course, command.directory, command.attempt, command.step, reason)
    if sentence:
        course.say(sentence)
    return Done()


def _request_save(command: RequestSave, course: Course) -> Reply:
    state = course.state
    if state.end is not None:
        raise Rejected(f"The job has ended: {state.end.message}", code="job-ended")
    if len(command.reason) > MAX_REASON_CHARS:
        raise Rejected(f"A reason has at most {MAX_REASON_CHARS} characters.", code="malformed")

    request_save(course, command.reason or "on request")
    course.say(f"A checkpoint was asked for: {command.reason or 'on request'}.")
    return Done()


def _check_names(directory: str, attempt: str, step: int) -> None:
    is_sane = 0 < len(directory) <= MAX_PATH_CHARS and 0 < len(attempt) <= MAX_NAME_CHARS
    if not is_sane or not 0 <= step <= _LARGEST:
        raise Rejected(
            "A save needs a directory, an attempt and a step from 0 on, none of absurd size.", code="malformed"
        )


def _check_written(command: ShardWritten, state: JobState) -> None:
    is_sane = 0 < len(command.target) <= MAX_NAME_CHARS and 0 < len(command.digest) <= MAX_NAME_CHARS
    if not is_sane or not 1 <= command.num_shards <= MAX_SHARDS or not 0 <= command.shard < command.num_shards:
        raise Rejected(
            f"Shard {command.shard} of {command.num_shards}, or its names, cannot be.",
            code="malformed",
        )
    if not math.isfinite(command.save_timeout) or not command.save_timeout > 0:
        raise Rejected(f"A save_timeout of {command.save_timeout} s cannot be kept.", code="malformed")
    if not 1 <= command.round <= state.rendezvous.round:
        raise Rejected(
            f"There was no round {command.round}; the newest is {state.rendezvous.round}.", code="unknown-round"
        )


def _begin(course: Course, command: ShardWritten, key: str) -> SaveAttempt:
    room = course.state.checkpoints
    while len(room.attempts) >= MAX_UNDER_WAY:
        oldest = min(room.attempts.values(), key=lambda each: each.number)
        _give_up(course, oldest, f"{MAX_UNDER_WAY} saves were under way at the same time", None)
    timeout = min(command.save_timeout, LONGEST_SAVE)
    attempt = SaveAttempt(
        number=room.next_number(),
        directory=command.directory,
        target=command.target,
        step=command.step,
        attempt=command.attempt,
        round=command.round,
        num_shards=command.num_shards,
        save_timeout=timeout,
        ends_at=Micros(course.now + micros(timeout)),
        promised=[shard for shard in room.breaks.promises.get(key, ()) if shard < command.num_shards],
    )
    room.attempts[key] = attempt
    return attempt


def _appoint(course: Course) -> None:
    """A committer for each directory whose oldest complete attempt has none."""
    state, room = course.state, course.state.checkpoints
    if state.end is not None:
        return  # agents that end commit by the files: nobody is left to be told
    busy = {attempt.directory: None for attempt in room.attempts.values() if attempt.committer is not None}
    for attempt in sorted(room.attempts.values(), key=lambda each: each.order):
        if not attempt.is_complete or attempt.committer is not None or attempt.directory in busy:
            continue
        node = _candidate(state, attempt)
        if node is None:
            continue  # a writer may come back; else the deadline ends it
        newest = room.committed.get(attempt.directory)
        attempt.committer = node
        attempt.duty = room.next_number()
        attempt.is_newest = newest is None or newest.order < attempt.order
        attempt.ends_at = Micros(course.now + micros(max(attempt.save_timeout, SHORTEST_COMMIT)))
        busy[attempt.directory] = None
        course.effects.append(LookAgain((topic_of(node),)))


def _candidate(state: JobState, attempt: SaveAttempt) -> NodeId | None:
    """The writer of the lowest shard who is there and has not failed; who has no stream only if nobody else is left."""
    writers = dict.fromkeys(attempt.writers[shard] for shard in sorted(attempt.writers))
    left = [node for node in writers if node in state.nodes.live and node not in attempt.tried]
    connected = [node for node in left if state.nodes.is_connected(node)]
    return next(iter([*connected, *left]), None)


def _commit_failed(course: Course, attempt: SaveAttempt, node: NodeId, reason: str) -> str:
    attempt.committer = None
    attempt.trouble = reason
    attempt.tried.append(node)
    is_hopeless = len(attempt.tried) >= MAX_TRIES or _candidate(course.state, attempt) is None
    if is_hopeless:
        return _give_up(course, attempt, reason, course.state.nodes.live.get(node))
    attempt.ends_at = Micros(course.now + micros(attempt.save_timeout))
    _appoint(course)
    return ""


def _give_up(course: Course, attempt: SaveAttempt, reason: str, node: Node | None) -> str:
    del course.state.checkpoints.attempts[key_of(attempt.directory, attempt.attempt)]
    sentence = _note_trouble(course, attempt.directory, attempt.step, reason, node)
    _settle(course, attempt.directory, attempt.attempt, attempt.step, reason)
    _appoint(course)
    return sentence


def _note_trouble(course: Course, directory: str, step: int, reason: str, node: Node | None) -> str:
    """The sentence for people; empty when the same was said of the save before."""
    room, last = course.state.checkpoints, course.state.checkpoints.trouble
    is_same = last is not None and (last.reason, last.directory) == (reason, directory)
    room.trouble = CheckpointTrouble(
        reason=reason,
        step=step,
        directory=directory,
        node=NodeId(-1) if node is None else node.id,
        host="" if node is None else node.host,
        at=course.now,
        count=last.count + 1 if last is not None and is_same else 1,
    )
    where = "" if node is None else f" {node.label}:"
    return "" if is_same else f"The checkpoint of step {step} in {directory} was not made.{where} {reason}"


def _settle(course: Course, directory: str, attempt: str, step: int, reason: str) -> None:
    room = course.state.checkpoints
    former = room.outcome(directory, attempt)
    if former is not None:
        room.settled.remove(former)
    room.settled.append(
        CheckpointSettled(
            step=step,
            attempt=attempt,
            is_committed=not reason,
            reason=reason,
            directory=directory,
            number=room.next_number(),
        )
    )
    del room.settled[:-MAX_SETTLED]
    tell_all(course)


def _duties(query: AwaitSaveDuties, state: JobState) -> Reply | NotYet:
    room = state.checkpoints
    node = state.nodes.current(query.node, query.incarnation).id
    since = (
        query.since if 0 <= query.since <= room.last_number else 0
    )  # greater: told by a master whose journal was lost
    mine = [each for each in room.attempts.values() if each.committer == node and each.duty > since]
    commits = tuple(_duty_of(each, data_books.state_for_manifest(state, each.step, each.round)) for each in mine)
    settled = tuple(each for each in room.settled if each.number > since)
    persists = room.breaks.duties_of(node, since)
    request = room.request if room.request is not None and room.request.number > since else None
    numbers = [duty.number for duty in commits] + [each.number for each in settled] + [each.number for each in persists]
    if request is not None:
        numbers.append(request.number)
    if not numbers:
        return NotYet((topic_of(node),), SaveDuties(number=since))
    return SaveDuties(number=max(numbers), commits=commits, settled=settled, persists=persists, request=request)


def _duty_of(attempt: SaveAttempt, data_state: str) -> CommitCheckpoint:
    return CommitCheckpoint(
        number=attempt.duty,
        directory=attempt.directory,
        target=attempt.target,
        step=attempt.step,
        attempt=attempt.attempt,
        num_shards=attempt.num_shards,
        digest="" if attempt.num_awaited else digest_of_shards(attempt.digests),
        is_newest=attempt.is_newest,
        is_waiting=attempt.num_awaited > 0,
        data_state=data_state,
    )


def _snapshots_held(command: SnapshotsHeld, course: Course) -> Reply:
    return break_points.hear(command, course)


HANDLERS: dict[type[Command], Callable[[Any, Course], Reply]] = {
    ShardWritten: _shard_written,
    CheckpointCommitted: _checkpoint_committed,
    CheckpointFailed: _checkpoint_failed,
    SnapshotsHeld: _snapshots_held,
    RequestSave: _request_save,
}
ANSWERS: dict[type[Query], Callable[[Any, JobState], Reply | NotYet]] = {AwaitSaveDuties: _duties}
