"""
Hangs: what follows when the watch has found that workers stand still, or harm the job.

The finding is a command with its evidence, so a replay needs no observation. It is treated as a failure of the culprit: the same incident, the
same budget, the same blame. What is special: no worker has ended yet, so the next round opens at once and the agents kill what hangs; and a rank
that hangs again and again shows that its node is to blame, or that restarts do not help. Both are counted over one hour.
"""

from __future__ import annotations

import math

from dlrover.core.decision import Decision, Handlers
from dlrover.core.failures.blame import Hang
from dlrover.core.happenings import AnotherNode, WorkersFailed
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.fleet import NodeExit
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import (
    Done,
    ExitReason,
    FailureKind,
    FirstFailure,
    NodeRank,
    Reply,
    Round,
    WorkerFailure,
)
from dlrover.protocol.messages.watch import MAX_TEXT, ActionKind, FaultFound, HangFound, Verdict, WatchTerms

MAX_EVIDENCE = 32
MAX_CULPRITS = 4096
_ACTIONS = (ActionKind.RESTART_WORKERS, ActionKind.RELAUNCH_NODE, ActionKind.STOP_JOB)


def _hang_found(command: HangFound, decision: Decision) -> Reply:
    if not (math.isfinite(command.stalled_for) and command.stalled_for >= 0):
        raise malformed("A hang lasts a finite number of seconds.")
    _check(decision, command.round, command.verdict)

    _act(decision, command.verdict, f"stood still for {command.stalled_for:.1f} s", is_hang=True)
    decision.state.goodput.hung(decision.now, micros(command.stalled_for))
    decision.is_unsettled = True
    return Done()


def _fault_found(command: FaultFound, decision: Decision) -> Reply:
    _check(decision, command.round, command.verdict)

    _act(decision, command.verdict, "was found at fault", is_hang=False)
    decision.is_unsettled = True
    return Done()


def _check(decision: Decision, round_: Round, verdict: Verdict) -> None:
    """A finding comes from our own shell, but may come late."""
    state, rdzv = decision.state, decision.state.rendezvous
    state.check_running()
    if round_ != rdzv.round or not rdzv.is_active:
        raise Rejected(
            f"Round {round_} is not the active one any more; the newest is {rdzv.round}.", code=ErrorCode.STALE_ROUND
        )
    if verdict.action not in _ACTIONS:
        raise malformed(f"A verdict that says {verdict.action.value} changes nothing.")
    texts = (*verdict.evidence, verdict.reasoning, verdict.diagnostician)
    is_small = len(verdict.evidence) <= MAX_EVIDENCE and len(verdict.culprits) <= MAX_CULPRITS
    if not is_small or any(len(text) > MAX_TEXT for text in texts):
        raise Rejected(
            f"The verdict is too long: it may have {MAX_EVIDENCE} sentences of {MAX_TEXT} characters and {MAX_CULPRITS} culprits.",
            code=ErrorCode.TOO_LARGE,
        )


def _act(decision: Decision, verdict: Verdict, what: str, *, is_hang: bool) -> None:
    state, rdzv = decision.state, decision.state.rendezvous
    assert state.terms is not None, "a world before any node came"
    first = _as_failure(decision, verdict, what)
    terms = state.terms.watch
    wanted = AnotherNode(first.node_rank, NodeExit.DIAGNOSED)
    decision.announce(decision.on.another_node, wanted)
    if not is_hang and verdict.action is ActionKind.RELAUNCH_NODE and not wanted.is_given:
        # A restart on the same node would cost everybody and change nothing.
        decision.say(f"{first.failure.message} No platform manages this node. Replace it by hand.")
        return
    state.hangs.add(Hang(decision.now, first.node_rank))
    recent = state.hangs.since(decision.now)
    if verdict.action is ActionKind.STOP_JOB:
        sentence = verdict.reasoning or "The diagnosis says to stop."
        decision.end_job(ExitReason.HANG_ERROR, sentence, first=first)
        return
    if len(recent) > terms.hangs_per_hour:
        sentence = f"It is hang number {len(recent)} within an hour, and restarts do not help. See the autopsy in the job's directory."
        decision.end_job(ExitReason.HANG_ERROR, sentence, first=first)
        return
    is_node_suspect = bool(verdict.culprits) and (
        verdict.action is ActionKind.RELAUNCH_NODE or _is_repeated(terms, recent, first.node_rank)
    )
    lived = (decision.now - rdzv.completed_at) / micros(1.0)
    decision.announce(
        decision.on.workers_failed, WorkersFailed(first, lived, (first.failure,), is_node_suspect=is_node_suspect)
    )


def _is_repeated(terms: WatchTerms, recent: list[Hang], node_rank: NodeRank) -> bool:
    """By the same node, this time included."""
    return sum(hang.node_rank == node_rank for hang in recent) > terms.hangs_per_node


def _as_failure(decision: Decision, verdict: Verdict, what: str) -> FirstFailure:
    """The culprit's; where no rank is to blame, that of the first member."""
    state, rdzv = decision.state, decision.state.rendezvous
    assert rdzv.world is not None, "checked"
    members = {member.node: member for member in rdzv.world.members}
    culprit = next((culprit for culprit in verdict.culprits if culprit.node in members), None)
    member = rdzv.world.members[0] if culprit is None else members[culprit.node]
    rank = member.first_global_rank
    if culprit is not None and culprit.global_rank >= 0:
        rank = culprit.global_rank
    node = state.nodes.live.get(member.node)
    evidence = " ".join(verdict.evidence[:2])
    failure = WorkerFailure(
        global_rank=rank,
        local_rank=max(0, rank - member.first_global_rank),
        pid=0,
        kind=FailureKind.DIAGNOSED,
        exited_at=decision.now,
        message=f"{verdict.fault.value}: the round {what}. {evidence}"[:MAX_TEXT],
    )
    return FirstFailure(
        failure=failure,
        node_rank=member.node_rank,
        host="" if node is None else node.host,
        round=rdzv.round,
        step=max((each.step for each in state.nodes.live.values() if each.step is not None), default=None),
    )


HANDLERS: Handlers = {HangFound: _hang_found, FaultFound: _fault_found}
