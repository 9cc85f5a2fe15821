"""
Rounds that open and complete: when the world grows, when it is formed, and when too few are left for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover.core.check import commands as check_commands
from dlrover.core.data import books as data_books
from dlrover.core.exchange.kv_store import NUM_ROUNDS_KEPT
from dlrover.core.failures import blame, incidents
from dlrover.core.fleet import agents as fleet_agents
from dlrover.core.fleet import targets
from dlrover.core.membership.rendezvous import choose_world, explain_timeout
from dlrover.core.membership.waiting import are_too_few_left
from dlrover.protocol.messages.job import ExitReason, JobTerms, Limits, Round, StopCause

if TYPE_CHECKING:
    from dlrover.core.decision import Course

EXIT_RENDEZVOUS_TIMEOUT = 22


def meet(course: Course, terms: JobTerms) -> None:
    """Open the next round if the world should grow, and complete it if its time has come."""
    state, rdzv, limits = course.state, course.state.rendezvous, terms.limits
    if rdzv.is_too_large(limits) and not rdzv.finished and not rdzv.is_held:
        course.make_room(terms, f"the job was scaled to {span_of(limits)} nodes")
        targets.retarget(course, limits.max_nodes)
    if rdzv.opening is None:
        reason = rdzv.reason_to_grow(limits, course.now)
        if reason is None:
            return
        course.say(f"{reason[0].upper()}{reason[1:]}.")
        course.open_round(StopCause.MEMBERSHIP, reason)
    if are_too_few_left(course.state, course.now):
        _end_unfinished(course, limits)
        course.advance()
        return
    rdzv.note_shortage(limits, course.now)
    is_suspended = state.fleet is not None and state.fleet.is_suspended
    if state.check.is_under_way or is_suspended:
        rdzv.below_min_since = None  # a check has deadlines of its own, and who suspends a job does not hurry it
    gives_up_at = rdzv.gives_up_at(limits)
    if gives_up_at is not None and gives_up_at <= course.now:
        is_anybody_there = bool(state.nodes.live)
        reason_ = ExitReason.RENDEZVOUS_TIMEOUT if is_anybody_there else ExitReason.NOT_ENOUGH_NODES
        sentence = check_commands.explain_timeout(state, limits) or explain_timeout(rdzv, limits)
        course.end_job(reason_, sentence, exit_code=EXIT_RENDEZVOUS_TIMEOUT)
        course.advance()
        return
    _try_world(course, terms)


def _try_world(course: Course, terms: JobTerms) -> None:
    """Complete the open round if its time has come, and charge what led to it."""
    state, rdzv, restarts = course.state, course.state.rendezvous, course.state.restarts
    world, sentence = choose_world(rdzv, terms.limits, course.now, limits_version=state.limits_version)
    if world is None:
        if rdzv.waiting and sentence != rdzv.verdict:  # that nobody waits yet is no news
            course.say(sentence)
        rdzv.verdict = sentence
        return
    incident = restarts.open_incident(rdzv.round)
    if incident is not None and blame.is_secondary(incident.first.failure):
        # No better failure was reported. If a member is missing, that is the cause and nobody's budget pays. A node
        # without power is missed by its peers long before its silence is believed: it just did not come back.
        incident.is_member_lost = any(
            node in rdzv.lost or node in rdzv.expected or not state.nodes.is_connected(node)
            for node in rdzv.group_ranks
        )
        if not incidents.judge(course, incident):
            course.advance()
            return
    restarts.settle(terms.restarts)
    former = rdzv.group_ranks
    rdzv.complete(world, course.now)
    fleet_agents.world_formed(course, (member.node for member in world.members))
    steps = [node.step for node in state.nodes.live.values()]
    state.goodput.round_began(course.now, steps, is_full=len(world.members) >= terms.limits.max_nodes)
    state.kv.drop_before(Round(rdzv.round - NUM_ROUNDS_KEPT + 1))
    state.sync.drop_before(rdzv.round)
    data_books.round_began(course, rdzv.round)
    rdzv.verdict = sentence
    course.say(sentence)
    course.enter_running()
    for member in world.members:
        if member.node not in former:
            state.nodes.live[member.node].entered_at = course.now
        course.touch(member.node)
    for node in rdzv.expected:
        course.touch(node)  # they missed it and are asked for the next


def _end_unfinished(course: Course, limits: Limits) -> None:
    """Some nodes finished, another failed or was lost, and too few are left for a world."""
    rdzv = course.state.rendezvous
    incident = course.state.restarts.open_incident(rdzv.round)
    num_left = len(rdzv.waiting) + rdzv.num_coming
    num_finished = len(rdzv.finished)
    assert rdzv.opening is not None, "nothing failed"
    if rdzv.world is None and not num_left and num_finished >= limits.min_nodes:
        course.end_job(ExitReason.COMPLETED, "The workers of all nodes that came to this master had ended well.")
        return
    sentence = (
        f"{num_finished} node{'' if num_finished == 1 else 's'} had finished already, and the {num_left} left "
        f"cannot form a world of at least {limits.min_nodes}."
    )
    if incident is not None:
        course.end_job(ExitReason.WORKER_ERROR, sentence, first=incident.first)
    else:
        why = rdzv.opening.reason
        course.end_job(ExitReason.NOT_ENOUGH_NODES, f"{why[0].upper()}{why[1:]}. {sentence}")


def span_of(limits: Limits) -> str:
    return f"{limits.min_nodes}:{limits.max_nodes}"
