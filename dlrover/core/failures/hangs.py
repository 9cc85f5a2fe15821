"""
Hangs: what follows when the watch has found that workers stand still, or harm the job.

The finding is a command with its evidence, so a replay needs no observation. It is treated as a failure of the culprit: the same incident, the
same budget, the same blame. What is special: nobody has ended yet, so the next round opens at once and the agents kill what hangs; and a rank
that hangs again and again shows that its node is to blame, or that restarts do not help. Both are counted over one hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from dlrover.core.failures import incidents
from dlrover.core.fleet import life_cycle
from dlrover.core.outcome import micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import NodeExit
from dlrover.protocol.messages.job import (
    Command,
    Done,
    ExitReason,
    FailureKind,
    FirstFailure,
    Micros,
    NodeRank,
    Reply,
    Round,
    WorkerFailure,
)
from dlrover.protocol.messages.watch import MAX_TEXT, ActionKind, FaultFound, HangFound, Verdict, WatchTerms

if TYPE_CHECKING:
    from dlrover.core.decision import Course

HOUR = 3600.0
MAX_EVIDENCE = 32
MAX_CULPRITS = 4096
_KEPT = 64
_ACTIONS = (ActionKind.RESTART_WORKERS, ActionKind.RELAUNCH_NODE, ActionKind.STOP_JOB)


class Hang(Struct, frozen=True):
    at: Micros
    node_rank: NodeRank


class Hangs(Struct):
    """What was found within the last hour, oldest first."""

    recent: list[Hang] = []

    def since(self, now: Micros) -> list[Hang]:
        return [hang for hang in self.recent if hang.at > now - micros(HOUR)]

    def add(self, hang: Hang) -> None:
        self.recent = [*self.since(hang.at), hang][-_KEPT:]


def _hang_found(command: HangFound, course: Course) -> Reply:
    if not (math.isfinite(command.stalled_for) and command.stalled_for >= 0):
        raise Rejected("A hang lasts a finite number of seconds.", code="malformed")
    _check(course, command.round, command.verdict)

    _act(course, command.verdict, f"stood still for {command.stalled_for:.1f} s", is_hang=True)
    course.state.goodput.hung(course.now, micros(command.stalled_for))
    course.advance()
    return Done()


def _fault_found(command: FaultFound, course: Course) -> Reply:
    _check(course, command.round, command.verdict)

    _act(course, command.verdict, "was found at fault", is_hang=False)
    course.advance()
    return Done()


def _check(course: Course, round_: Round, verdict: Verdict) -> None:
    """A finding comes from our own shell, but may come late."""
    state, rdzv = course.state, course.state.rendezvous
    if state.end is not None:
        raise Rejected(f"The job has ended: {state.end.message}", code="job-ended")
    if round_ != rdzv.round or not rdzv.is_active:
        raise Rejected(
            f"Round {round_} is not the active one any more; the newest is {rdzv.round}.", code="stale-round"
        )
    if verdict.action not in _ACTIONS:
        raise Rejected(f"A verdict that says {verdict.action.value} changes nothing.", code="malformed")
    texts = (*verdict.evidence, verdict.reasoning, verdict.diagnostician)
    is_small = len(verdict.evidence) <= MAX_EVIDENCE and len(verdict.culprits) <= MAX_CULPRITS
    if not is_small or any(len(text) > MAX_TEXT for text in texts):
        raise Rejected("A verdict that nobody could read.", code="too-large")


def _act(course: Course, verdict: Verdict, what: str, *, is_hang: bool) -> None:
    state, rdzv = course.state, course.state.rendezvous
    assert state.terms is not None, "a world before any node came"
    first = _as_failure(course, verdict, what)
    terms = state.terms.watch
    is_replaceable = life_cycle.can_replace_node_of(course, first.node_rank, NodeExit.DIAGNOSED)
    if not is_hang and verdict.action is ActionKind.RELAUNCH_NODE and not is_replaceable:
        # A restart on the same node would cost everybody and change nothing.
        course.say(f"{first.failure.message} Nobody can replace the node: somebody has to.")
        return
    state.hangs.add(Hang(course.now, first.node_rank))
    recent = state.hangs.since(course.now)
    if verdict.action is ActionKind.STOP_JOB:
        course.end_job(ExitReason.HANG_ERROR, verdict.reasoning or "The diagnosis says to stop.", first=first)
        return
    if len(recent) > terms.hangs_per_hour:
        course.end_job(
            ExitReason.HANG_ERROR,
            f"It is hang number {len(recent)} within an hour, and restarts do not help. See the autopsy in the job's directory.",
            first=first,
        )
        return
    is_node_suspect = bool(verdict.culprits) and (
        verdict.action is ActionKind.RELAUNCH_NODE or _is_repeated(terms, recent, first.node_rank)
    )
    lived = (course.now - rdzv.completed_at) / micros(1.0)
    incidents.begin(course, first, lived, (first.failure,), is_node_suspect=is_node_suspect)


def _is_repeated(terms: WatchTerms, recent: list[Hang], node_rank: NodeRank) -> bool:
    """By the same node, this time included."""
    return sum(hang.node_rank == node_rank for hang in recent) > terms.hangs_per_node


def _as_failure(course: Course, verdict: Verdict, what: str) -> FirstFailure:
    """The culprit's; where nobody is to blame, that of the first member."""
    state, rdzv = course.state, course.state.rendezvous
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
        exited_at=course.now,
        message=f"{verdict.fault.value}: the round {what}. {evidence}"[:MAX_TEXT],
    )
    return FirstFailure(
        failure=failure,
        node_rank=member.node_rank,
        host="" if node is None else node.host,
        round=rdzv.round,
        step=max((each.step for each in state.nodes.live.values() if each.step is not None), default=None),
    )


HANDLERS: dict[type[Command], Callable[[Any, Course], Reply]] = {HangFound: _hang_found, FaultFound: _fault_found}
