"""
Workers have failed: which failure was the first one, whether the job restarts, and whether a node goes.

A round fails once, however many report it. The next round opens with the first report; what others add may only make the blame better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover.agreed.reach import NOTHING_TOLD
from dlrover.core.failures import blame
from dlrover.core.failures.blame import Incident
from dlrover.core.fleet import life_cycle
from dlrover.core.membership.waiting import are_too_few_left
from dlrover.core.outcome import micros
from dlrover.protocol.messages.fleet import NodeExit
from dlrover.protocol.messages.job import FailureKind, FirstFailure, StopCause, WorkerFailure
from dlrover.protocol.messages.watch import Reach

if TYPE_CHECKING:
    from dlrover.core.decision import Course


def begin(
    course: Course,
    first: FirstFailure,
    lived: float,
    failures: tuple[WorkerFailure, ...],
    *,
    reach: Reach = NOTHING_TOLD,
    is_node_suspect: bool = False,
) -> None:
    """The first report of a round's failures: decide, and open the next round without waiting for the others."""
    state = course.state
    incident = Incident(round=first.round, first=first, began_at=course.now, step=first.step, lived=lived)
    incident.reach, incident.num_records = reach, state.data.num_consumed
    incident.is_node_suspect = is_node_suspect
    world = state.rendezvous.world
    incident.world_size = world.world_size if world is not None and world.round == first.round else 0
    blame.count(incident, failures, first.node_rank, first.host)
    state.restarts.incident = incident
    course.open_round(StopCause.FAILURE, blame.describe(first), fault=_fault_kind(first), first=first)
    if blame.is_secondary(first.failure):
        course.say(f"{blame.describe(first)} The next round opens; the first failure may still be reported.")
    elif not are_too_few_left(course.state, course.now):
        judge(course, incident)


def hear_more(
    course: Course,
    incident: Incident,
    first: FirstFailure,
    lived: float,
    failures: tuple[WorkerFailure, ...],
    *,
    reach: Reach = NOTHING_TOLD,
) -> None:
    """A further report of a round that has failed already. It never costs a second restart."""
    state = course.state
    if blame.count(incident, failures, first.node_rank, first.host) and state.end is not None:
        state.end = replace(state.end, distinct_failures=tuple(incident.distinct))
        course.touch_all()
    is_late = course.now - incident.began_at > micros(blame.LATE_FAILURE)
    if is_late and (incident.is_settled or state.end is not None):
        return
    is_better = blame.improve(incident, first)
    if is_better:
        state.goodput.fault_named(_fault_kind(first), blame.describe(first), first)
    if incident.is_settled:
        if is_better:
            course.say(f"{blame.describe(incident.first)} It was the first failure of the round.")
        return
    blame.note(incident, first.step, lived, reach)
    incident.num_records = max(incident.num_records, state.data.num_consumed)
    if state.end is not None:
        if state.end.first_failure is not None and is_better:
            message = f"{blame.describe(incident.first)} {state.end_sentence}"
            state.end = replace(state.end, first_failure=incident.first, message=message)
            course.touch_all()
    elif (is_better and not blame.is_secondary(incident.first.failure)) or _is_mistake_proven(course, incident):
        judge(course, incident)


def judge(course: Course, incident: Incident) -> bool:
    """Restart or end the job after this incident. Returns whether it goes on."""
    state = course.state
    assert state.terms is not None, "workers ran before any node attached"
    decision = blame.decide(state.terms.restarts, state.restarts, incident)
    if _is_node_replaced(course, incident, decision):
        return True
    if decision.reason is not None:
        course.end_job(decision.reason, decision.sentence, first=incident.first)
        return False
    course.say(f"{blame.describe(incident.first)} {decision.sentence}")
    return True


def _is_mistake_proven(course: Course, incident: Incident) -> bool:
    terms = course.state.terms
    return terms is not None and blame.is_script_mistaken(terms.restarts, course.state.restarts, incident)


def _is_node_replaced(course: Course, incident: Incident, decision: blame.RestartDecision) -> bool:
    """Where a platform can give another node, that is better than ending, and for a broken device the only way."""
    failure = incident.first.failure
    if incident.is_node_replaced or not blame.calls_for_another_node(incident, decision):
        return incident.is_node_replaced
    exit_reason = NodeExit.HARDWARE if blame.is_device_fault(failure) else NodeExit.FATAL
    if incident.is_node_suspect:
        exit_reason = NodeExit.DIAGNOSED
    if blame.is_out_of_memory(failure):
        exit_reason = NodeExit.OOM
    if not life_cycle.replace_node_of(course, incident.first.node_rank, exit_reason, blame.describe(incident.first)):
        return False
    course.state.restarts.node_replaced(incident)
    return True


def _fault_kind(first: FirstFailure) -> str:
    return "hang" if first.failure.kind is FailureKind.DIAGNOSED else "worker"
