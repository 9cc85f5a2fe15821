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

from dlrover.core.checkpoints import break_points
from dlrover.core.checkpoints.state import NewestCommit, SaveAttempt
from dlrover.core.decision import Answers, Decision, Handlers
from dlrover.core.membership.nodes import Node
from dlrover.core.outcome import Deadline, NotYet
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.checkpoint import (
    MAX_NAME_CHARS,
    MAX_PATH_CHARS,
    MAX_REASON_CHARS,
    MAX_SHARDS,
    AwaitSaveDuties,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSettled,
    CheckpointTrouble,
    CommitCheckpoint,
    RequestSave,
    SaveDuties,
    SaveRequested,
    ShardWritten,
    SnapshotsHeld,
    digest_of_shards,
)
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import DeadlineKind, Done, LookAgain, Micros, NodeId, Reply, Round

MAX_UNDER_WAY = 32
"""Attempts; the oldest is given up for one more. Agents write one after the other, so more are left-overs."""
MAX_SETTLED = 16
"""Outcomes that are kept for agents that have not asked for a while."""
MAX_DIRECTORIES = 16
MAX_TRIES = 3
"""Nodes that may try to commit one attempt."""
LONGEST_SAVE = 86_400.0
SHORTEST_COMMIT = 60.0
"""Seconds that a committer has at least. A caller's short patience with shards says nothing about a busy storage."""
_LARGEST = 2**53


def key_of(directory: str, attempt: str) -> str:
    return f"{attempt}@{directory}"


def topic_of(node: NodeId) -> str:
    return f"save-duties/{node}"


def on_agent_gone(decision: Decision, node: Node) -> None:
    """A new life of it knows nothing of what it was told."""
    room = decision.state.checkpoints
    break_points.lose(decision, node.id)
    for attempt in room.attempts.values():
        if attempt.committer == node.id:
            attempt.committer = None
    _appoint(decision)


def on_node_exchanged(decision: Decision, label: str) -> None:
    request_save(decision, f"{label} is to be exchanged")


def on_master_restarted(decision: Decision) -> None:
    decision.state.checkpoints.master_restarted(decision.state.now, decision.now)


def deadlines(state: JobState) -> list[Deadline]:
    room, open_ = state.checkpoints, state.checkpoints.breaks.open
    running = [Deadline(each.ends_at, DeadlineKind.SAVE_TIMEOUT, each.number) for each in room.attempts.values()]
    return running + ([] if open_ is None else [Deadline(open_.ends_at, DeadlineKind.BREAK_POINT, open_.number)])


def request_save(decision: Decision, reason: str) -> None:
    """All trainers shall write their next save to storage."""
    room = decision.state.checkpoints
    room.request = SaveRequested(number=room.next_number(), reason=reason)
    tell_all(decision)


def on_model_restored(decision: Decision) -> None:
    """
    The ranks went on with an older model. A checkpoint of what they gave up must not become the newest: it would not be known what
    its model had read.
    """
    room, data = decision.state.checkpoints, decision.state.data
    gone = [each for each in room.attempts.values() if data.last_shared(each.step, each.round) < each.step]
    for attempt in gone:
        if sentence := _give_up(decision, attempt, "the ranks have gone on with an older model since", None):
            decision.say(sentence)


def expire(decision: Decision, number: int) -> None:
    """The deadline of an attempt."""
    if sentence := _give_up_overdue(decision, number):
        decision.say(sentence)


def _give_up_overdue(decision: Decision, number: int) -> str:
    """The sentence that says what was given up; empty if nothing was."""
    room = decision.state.checkpoints
    attempt = next((each for each in room.attempts.values() if each.number == number), None)
    if attempt is None or attempt.ends_at > decision.now:
        return ""
    if attempt.committer is not None:
        return _commit_failed(decision, attempt, attempt.committer, "the commit took too long")
    if attempt.is_complete:
        why = attempt.trouble or "all nodes that wrote it are gone"
    else:
        missing = [shard for shard in range(attempt.num_shards) if shard not in attempt.writers]
        shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        why = (
            f"after {attempt.save_timeout:g} s only {len(attempt.writers)} of {attempt.num_shards} shards were written; "
            f"missing: {shown}"
        )
    return _give_up(decision, attempt, why, None)


def tell_all(decision: Decision) -> None:
    decision.effects.append(LookAgain(tuple(topic_of(node) for node in decision.state.nodes.live)))


def _shard_written(command: ShardWritten, decision: Decision) -> Reply:
    state, room = decision.state, decision.state.checkpoints
    node = state.nodes.current(command.node, command.incarnation)
    _check_names(command.directory, command.attempt, command.step)
    _check_written(command, state)
    key = key_of(command.directory, command.attempt)
    known = room.attempts.get(key)
    told = (command.target, command.step, command.num_shards, command.round)
    if known is not None and (known.target, known.step, known.num_shards, known.round) != told:
        raise Rejected(
            f"Attempt {command.attempt} is step {known.step} of round {known.round} in {known.num_shards} shards as "
            f"{known.target!r}; the report of {node.label} differs from that.",
            code=ErrorCode.ATTEMPT_DIFFERS,
        )
    outcome = room.outcome(command.directory, command.attempt)
    if known is None and outcome is not None:
        what = "was committed" if outcome.is_committed else f"was given up: {outcome.reason.rstrip('.')}"
        code = ErrorCode.ATTEMPT_COMMITTED if outcome.is_committed else ErrorCode.ATTEMPT_OVER
        raise Rejected(f"The save of step {command.step} is over; it {what}.", code=code)

    if state.data.last_shared(command.step, command.round) < command.step:
        raise Rejected(
            f"The save of step {command.step} in round {command.round} is over: the ranks have gone on with an older model since.",
            code=ErrorCode.ATTEMPT_OVER,
        )

    attempt = known or _begin(decision, command, key)
    attempt.writers[command.shard] = node.id
    attempt.digests[command.shard] = command.digest
    _appoint(decision)
    return Done()


def _checkpoint_committed(command: CheckpointCommitted, decision: Decision) -> Reply:
    state, room = decision.state, decision.state.checkpoints
    node = state.nodes.current(command.node, command.incarnation)
    _check_names(command.directory, command.attempt, command.step)
    attempt = room.attempts.get(key_of(command.directory, command.attempt))
    outcome = room.outcome(command.directory, command.attempt)
    if attempt is None and outcome is not None and outcome.is_committed:
        return Done()
    if not command.is_by_files and (attempt is None or not attempt.is_complete):
        raise Rejected(f"{node.label} was not told to commit {command.attempt}.", code=ErrorCode.NOT_COMPLETE)
    if not 0 <= command.round <= state.rendezvous.round:
        raise Rejected(f"There was no round {command.round} yet.", code=ErrorCode.UNKNOWN_ROUND)

    number = attempt.number if attempt is not None else room.next_number()
    order = attempt.order if attempt is not None else (command.round, command.step, number)
    room.attempts.pop(key_of(command.directory, command.attempt), None)
    newest = room.committed.get(command.directory)
    if newest is None or newest.order < order:
        room.committed.pop(command.directory, None)
        room.committed[command.directory] = NewestCommit(
            step=command.step, attempt=command.attempt, order=order, at=decision.now
        )
        # A committer whose place was given to an older attempt may have succeeded after all.
        for each in room.attempts.values():
            if each.directory == command.directory and each.order < order:
                each.is_newest = False
        for old in list(room.committed)[:-MAX_DIRECTORIES]:
            del room.committed[old]
    room.trouble = None
    decision.announce(decision.on.checkpoint_counts, command.step, Round(order[0]))
    if room.request is not None and number > room.request.number:
        room.request = None
    _settle(decision, command.directory, command.attempt, command.step, "")
    _give_up_older(decision, command.directory, order[0])
    _appoint(decision)
    return Done()


def _give_up_older(decision: Decision, directory: str, round_: int) -> None:
    """Of saves of former rounds no rank writes the missing shards any more; who waits for them would wait in vain."""
    room = decision.state.checkpoints
    for key, each in list(room.attempts.items()):
        if each.directory == directory and each.round < round_ and not each.is_complete:
            del room.attempts[key]
            missing = each.num_shards - len(each.writers)
            reason = f"{missing} of {each.num_shards} shards were never written, and a newer checkpoint is there"
            _settle(decision, each.directory, each.attempt, each.step, reason)


def _checkpoint_failed(command: CheckpointFailed, decision: Decision) -> Reply:
    room = decision.state.checkpoints
    node = decision.state.nodes.current(command.node, command.incarnation)
    _check_names(command.directory, command.attempt, command.step)
    if not command.reason.strip():
        raise malformed("A failed save needs a reason.")
    if not -1 <= command.shard < MAX_SHARDS:
        raise malformed(f"There is no shard {command.shard}.")

    reason = command.reason.strip()[:MAX_REASON_CHARS]
    attempt = room.attempts.get(key_of(command.directory, command.attempt))
    sentence = ""
    if command.shard < 0 and attempt is not None:
        if attempt.committer == node.id:
            sentence = _commit_failed(decision, attempt, node.id, reason)
    elif attempt is not None:
        sentence = _give_up(decision, attempt, reason, node)
    elif room.outcome(command.directory, command.attempt) is None:
        # Nobody has written any of it yet. The others need not begin, or are told when they have.
        sentence = _note_trouble(decision, command.directory, command.step, reason, node)
        _settle(decision, command.directory, command.attempt, command.step, reason)
    if sentence:
        decision.say(sentence)
    return Done()


def _request_save(command: RequestSave, decision: Decision) -> Reply:
    decision.state.check_running()
    if len(command.reason) > MAX_REASON_CHARS:
        raise malformed(f"A reason has at most {MAX_REASON_CHARS} characters.")

    request_save(decision, command.reason or "on request")
    decision.say(f"A checkpoint was asked for: {command.reason or 'on request'}.")
    return Done()


def _check_names(directory: str, attempt: str, step: int) -> None:
    is_sane = 0 < len(directory) <= MAX_PATH_CHARS and 0 < len(attempt) <= MAX_NAME_CHARS
    if not is_sane or not 0 <= step <= _LARGEST:
        raise malformed(
            f"A save needs a directory of 1 to {MAX_PATH_CHARS} characters, an attempt of 1 to {MAX_NAME_CHARS}, and a step of at least 0."
        )


def _check_written(command: ShardWritten, state: JobState) -> None:
    is_sane = 0 < len(command.target) <= MAX_NAME_CHARS and 0 < len(command.digest) <= MAX_NAME_CHARS
    if not is_sane or not 1 <= command.num_shards <= MAX_SHARDS or not 0 <= command.shard < command.num_shards:
        raise malformed(
            f"`shard` must be from 0 to `num_shards` - 1 (got {command.shard} of {command.num_shards}, at most {MAX_SHARDS}). Its names must have 1 to {MAX_NAME_CHARS} characters."
        )
    if not math.isfinite(command.save_timeout) or not command.save_timeout > 0:
        raise malformed(f"`save_timeout` must be a finite number above 0 (got {command.save_timeout}).")
    if not 1 <= command.round <= state.rendezvous.round:
        raise Rejected(
            f"There was no round {command.round}; the newest is {state.rendezvous.round}.", code=ErrorCode.UNKNOWN_ROUND
        )


def _begin(decision: Decision, command: ShardWritten, key: str) -> SaveAttempt:
    room = decision.state.checkpoints
    while len(room.attempts) >= MAX_UNDER_WAY:
        oldest = min(room.attempts.values(), key=lambda each: each.number)
        _give_up(decision, oldest, f"{MAX_UNDER_WAY} saves were under way at the same time", None)
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
        ends_at=Micros(decision.now + micros(timeout)),
        promised=[shard for shard in room.breaks.promises.get(key, ()) if shard < command.num_shards],
    )
    room.attempts[key] = attempt
    return attempt


def _appoint(decision: Decision) -> None:
    """A committer for each directory whose oldest complete attempt has none."""
    state, room = decision.state, decision.state.checkpoints
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
        attempt.ends_at = Micros(decision.now + micros(max(attempt.save_timeout, SHORTEST_COMMIT)))
        busy[attempt.directory] = None
        decision.effects.append(LookAgain((topic_of(node),)))


def _candidate(state: JobState, attempt: SaveAttempt) -> NodeId | None:
    """The writer of the lowest shard who is there and has not failed; who has no stream only if no other is left."""
    writers = dict.fromkeys(attempt.writers[shard] for shard in sorted(attempt.writers))
    left = [node for node in writers if node in state.nodes.live and node not in attempt.tried]
    connected = [node for node in left if state.nodes.is_connected(node)]
    return next(iter([*connected, *left]), None)


def _commit_failed(decision: Decision, attempt: SaveAttempt, node: NodeId, reason: str) -> str:
    attempt.committer = None
    attempt.trouble = reason
    attempt.tried.append(node)
    is_hopeless = len(attempt.tried) >= MAX_TRIES or _candidate(decision.state, attempt) is None
    if is_hopeless:
        return _give_up(decision, attempt, reason, decision.state.nodes.live.get(node))
    attempt.ends_at = Micros(decision.now + micros(attempt.save_timeout))
    _appoint(decision)
    return ""


def _give_up(decision: Decision, attempt: SaveAttempt, reason: str, node: Node | None) -> str:
    del decision.state.checkpoints.attempts[key_of(attempt.directory, attempt.attempt)]
    sentence = _note_trouble(decision, attempt.directory, attempt.step, reason, node)
    _settle(decision, attempt.directory, attempt.attempt, attempt.step, reason)
    _appoint(decision)
    return sentence


def _note_trouble(decision: Decision, directory: str, step: int, reason: str, node: Node | None) -> str:
    """The sentence for people; empty when the same was said of the save before."""
    room, last = decision.state.checkpoints, decision.state.checkpoints.trouble
    is_same = last is not None and (last.reason, last.directory) == (reason, directory)
    room.trouble = CheckpointTrouble(
        reason=reason,
        step=step,
        directory=directory,
        node=NodeId(-1) if node is None else node.id,
        host="" if node is None else node.host,
        at=decision.now,
        count=last.count + 1 if last is not None and is_same else 1,
    )
    where = "" if node is None else f" {node.label}:"
    return "" if is_same else f"The checkpoint of step {step} in {directory} was not made.{where} {reason}"


def _settle(decision: Decision, directory: str, attempt: str, step: int, reason: str) -> None:
    room = decision.state.checkpoints
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
    tell_all(decision)


def _duties(query: AwaitSaveDuties, state: JobState) -> Reply | NotYet:
    room = state.checkpoints
    node = state.nodes.current(query.node, query.incarnation).id
    since = (
        query.since if 0 <= query.since <= room.last_number else 0
    )  # greater: told by a master whose journal was lost
    mine = [each for each in room.attempts.values() if each.committer == node and each.duty > since]
    commits = tuple(_duty_of(each, state.data.state_for_manifest(each.step, each.round)) for each in mine)
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


HANDLERS: Handlers = {
    ShardWritten: _shard_written,
    CheckpointCommitted: _checkpoint_committed,
    CheckpointFailed: _checkpoint_failed,
    SnapshotsHeld: break_points.hear,
    RequestSave: _request_save,
}
ANSWERS: Answers = {AwaitSaveDuties: _duties}
