"""
The node check in the course of a job: who must be checked before training, when a check begins, and how it goes on.

A node that is to join a training round and has no fresh pass is *needed* in the check. For the rendezvous it is expected
like any other that has not joined yet; only its wish is another one. So a world that runs is never disturbed by a check,
and no world ever starts with a node that did not pass.

Nodes join the round of the next phase and offer a port. A check begins by the same rules as a training round: with all
that can still come, as soon as they are there. In each phase a group runs as soon as all its members have joined. What
the phases are and what they prove is decided in `check_cycle`, what follows from the verdict in `check_consequences`.
A node that is lost, or fails, does not leave its partners waiting for a collective that cannot complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlrover.core.check.consequences import conclude, conclude_perf, release
from dlrover.core.check.cycle import CheckCycle, CheckMode, CheckStatus, CheckVerdict
from dlrover.core.check.evidence import CheckRules, say_ranks
from dlrover.core.check.pairing import SchedulingGroup
from dlrover.core.check.state import CheckJoined, terms_of
from dlrover.core.membership.nodes import Node
from dlrover.core.membership.rendezvous import num_usable
from dlrover.core.outcome import micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.check import MAX_CHECK_MESSAGE, ExitClass, ReportCheck
from dlrover.protocol.messages.job import (
    Check,
    Command,
    Done,
    JoinCheck,
    JoinRendezvous,
    Limits,
    Micros,
    NodeRank,
    Reply,
    StopCause,
    Wait,
    Wish,
    WorldSpec,
)

if TYPE_CHECKING:  # a course calls us
    from dlrover.core.decision import Course
    from dlrover.core.state import JobState

GRACE = 30.0
"""Seconds that a node has for its report beyond the task's own timeout; and beyond the failure of a partner, after which
a collective can hang for as long as its library allows."""
_MOST_GBPS = 1e9
_PASSED = (CheckStatus.HEALTHY, CheckStatus.STRAGGLER)


# What other rooms tell.


def expect(course: Course, node: Node) -> None:
    """The node shall join a training round: first the check, unless it passed not long ago in this very life."""
    state = course.state
    if state.terms is None or state.terms.check is None or node.finished_round or node.dismissed is not None:
        return
    if not _is_fresh(state, node, course.now):
        state.check.needed[node.id] = node.rank
        state.check.joined.pop(node.id, None)
        course.touch(node.id)


def recall_stale(course: Course) -> None:
    """A round opens: who waits for it since long ago is checked again with the others."""
    state = course.state
    if state.terms is None or state.terms.check is None:
        return
    rdzv = state.rendezvous
    for id_ in [*rdzv.waiting, *rdzv.absent]:
        node = state.nodes.live[id_]
        if not _is_fresh(state, node, course.now):
            rdzv.expect(node.id, node.rank)
            expect(course, node)


def lose(course: Course, node: Node, why: str, *, is_blamed: bool) -> None:
    """The node is there no more, or begins a new life. Whoever ran with it need not wait any longer."""
    check, rank = course.state.check, node.rank
    check.needed.pop(node.id, None)
    check.joined.pop(node.id, None)
    check.perf.pop(node.id, None)
    cycle = check.cycle
    if cycle is None or check.members.get(rank) != node.id:
        return
    if rank in cycle.waiting:
        _fail_partners(course, cycle, rank)
    cycle.lose(rank, why=why, is_blamed=is_blamed)
    if not is_blamed and rank in cycle.gone:
        cycle.gone[rank] = ""  # it was given up for dead before, and is back


def wish_of(state: JobState, node: Node) -> Wish:
    """Of a node that must be checked."""
    check, rdzv, rank = state.check, state.rendezvous, node.rank
    cycle, joined, number = check.cycle, check.joined.get(node.id), check.next_round
    if cycle is not None and check.members.get(rank) == node.id and rank in cycle.places and rank not in cycle.gone:
        if rank not in cycle.waiting:
            return Wait("your part of the node check is done, others still run")
        if rank in check.worlds:
            return Check(check.worlds[rank], cycle.trials[-1].name)
        number = cycle.round
    if joined is not None and joined.round == number:
        return Wait(f"you have joined round {number} of the node check, others have not yet")
    if rdzv.opening is not None and rdzv.is_member(node.id):
        return JoinCheck(number, rdzv.opening.cause, rdzv.opening.reason)
    return JoinCheck(number, StopCause.MEMBERSHIP, "nodes are checked before they train")


def note_on(state: JobState, node: Node) -> str:
    """The verdict on a slow node that trains all the same, for its own console; empty: nothing is to be said of it."""
    result = state.check.results.get(node.rank)
    if result is None or result.node != node.id or result.status != CheckStatus.STRAGGLER:
        return ""
    return f"the node check found this node slow ({result.elapsed_ms:.0f} ms: {result.reason}); it trains all the same"


def begins_at(state: JobState) -> Micros | None:
    """When the next check begins with those who have joined it, maybe long ago; None: nobody can tell yet."""
    check, rdzv, terms = state.check, state.rendezvous, state.terms
    if terms is None or check.cycle is not None:
        return None
    if check.perf:
        has_all = all(node in check.joined for node in check.perf)
        return Micros(check.call_began_at + (0 if has_all else micros(GRACE)))
    if not any(map(state.nodes.is_connected, check.joined)):
        return None
    limits, num_nodes = terms.limits, rdzv.num_unfinished
    if not rdzv.is_active and num_usable(num_nodes, limits) < limits.min_nodes:
        return None  # nothing can start without more nodes, and together they test each other
    if len(check.joined) < len(check.needed):
        return Micros(check.call_began_at + micros(limits.last_call))
    if rdzv.world is None and num_nodes < limits.max_nodes:
        return Micros(check.call_began_at + micros(limits.first_call))
    return check.call_began_at


def are_members_checked(state: JobState) -> bool:
    """Whether the open round shall wait for a check that runs, or begins at a known time, with members of the newest world.

    Others have a fresh pass and wait already, maybe enough of them for a world. If those in the check are as many, that
    world would be a small one, and over as soon as they have passed. For a few the last call is long enough.
    """
    check, rdzv = state.check, state.rendezvous
    if rdzv.opening is None or not rdzv.group_ranks or len(check.needed) < len(rdzv.waiting):
        return False
    if check.cycle is not None:
        return any(node in rdzv.group_ranks and node in check.needed for node in check.members.values())
    return any(node in rdzv.group_ranks for node in check.perf or check.joined) and begins_at(state) is not None


def describe(state: JobState) -> str:
    """What the open round waits for, while all who could join it are in the check first; empty: something else."""
    check, rdzv, terms = state.check, state.rendezvous, state.terms
    if terms is None or not check.needed or rdzv.waiting or len(check.needed) < rdzv.num_coming:
        return ""
    if check.cycle is not None:
        num_left, num_nodes = len(check.cycle.waiting), len(check.cycle.places)
        return f"Round {rdzv.next_round}: {num_left} of {num_nodes} nodes are still being checked."
    num_come = len(check.joined)
    return (
        f"Round {rdzv.next_round}: {num_come} of at least {terms.limits.min_nodes} nodes have come to the node check."
    )


def explain_timeout(state: JobState, limits: Limits) -> str | None:
    """The final sentence of a job whose nodes never were enough for a check; None: that is not the reason."""
    check, rdzv = state.check, state.rendezvous
    if not check.needed:
        return None
    num_come = len(check.joined) + len(rdzv.waiting)
    absent = [rank for node, rank in check.needed.items() if node not in check.joined]
    lack = f"; {say_ranks(absent)} did not join it" if absent else ""
    return (
        f"Round {rdzv.next_round}: {num_come} of at least {limits.min_nodes} nodes came to the node check within "
        f"{limits.join_timeout:g} s{lack}. Start the missing nodes, or allow fewer with --nnodes."
    )


# Commands.


def join(command: JoinRendezvous, course: Course, node: Node) -> Reply:
    """A node comes to the check; the caller has looked at what all joins have in common."""
    state, check = course.state, course.state.check
    if state.terms is None or state.terms.check is None:
        raise Rejected("This job has no node check to join.", code="no-node-check")
    if node.id not in check.needed:
        raise Rejected(f"{node.label} need not be checked now.", code="not-needed")
    cycle = check.cycle
    is_in_phase = cycle is not None and check.members.get(node.rank) == node.id and node.rank in cycle.waiting
    wanted = check.round if is_in_phase else check.next_round
    if command.round != wanted:
        raise Rejected(
            f"{node.label} wants to join round {command.round} of the node check; round {wanted} is the next for it.",
            code="stale-round",
        )
    if is_in_phase and node.rank in check.worlds:
        raise Rejected(f"The check of round {wanted} has begun for {node.label}.", code="stale-round")

    known = check.joined.get(node.id)
    is_new = known is None or known.round != command.round
    check.joined[node.id] = CheckJoined(command.round, command.local_world_size, command.offer)
    if node.id in check.perf:
        # To the end: who is missing stands in front and is found at once, however many have come (`begins_at`).
        check.perf[node.id] = check.perf.pop(node.id)
    course.touch(node.id)
    if is_new:
        check.call_began_at = course.now
        if cycle is not None and is_in_phase:
            group = cycle.places[node.rank]
            check.lacking[group] -= 1
            _run_if_complete(course, cycle, group)
        elif cycle is not None and cycle.mode is not CheckMode.ALL:
            cycle.join(node.rank, _scheduling_group(node))
            check.members[node.rank] = node.id
    course.advance()
    return Done()


def _report(command: ReportCheck, course: Course) -> Reply:
    check = course.state.check
    node = course.state.nodes.current(command.node, command.incarnation)
    cycle, rank = check.cycle, node.rank
    if cycle is None:
        raise Rejected(f"{node.label} reports a check, and none runs.", code="stale-round")
    if check.members.get(rank) != node.id or rank not in check.worlds:
        raise Rejected(f"{node.label} takes no part in the check of round {check.round}.", code="not-a-member")
    if not (math.isfinite(command.bandwidth_gbps) and 0 <= command.bandwidth_gbps <= _MOST_GBPS):
        raise Rejected(f"A bandwidth of {command.bandwidth_gbps} GB/s cannot be.", code="malformed")
    was_waiting = rank in cycle.waiting
    cycle.report(rank, command.round, command.elapsed_ms, command.exit_class)  # refuses before it changes anything

    if was_waiting:
        if command.exit_class is ExitClass.OK:
            check.bandwidths[rank] = round(command.bandwidth_gbps, 3)
        else:
            check.messages[rank] = command.message[-MAX_CHECK_MESSAGE:]
            check.hurried.setdefault(cycle.places[rank], Micros(course.now + micros(GRACE)))
        course.touch(node.id)
    course.advance()
    return Done()


HANDLERS: dict[type[Command], Callable[[Any, Course], Reply]] = {ReportCheck: _report}


# How a check goes on.


def advance(course: Course) -> None:
    """After each command: as far as it goes by itself. May end the job."""
    state, check = course.state, course.state.check
    if state.terms is None or state.terms.check is None:
        return
    while state.end is None:
        cycle = check.cycle
        if cycle is None:
            if not _begin(course):
                return
            continue
        _fail_overdue(course, cycle)
        if not cycle.is_phase_complete():
            return
        step = cycle.go_on()
        course.say(step.node_status)
        course.say(step.elapsed)
        if not isinstance(step, CheckVerdict):
            course.say(step.sentence)
            _begin_phase(course, cycle)
        elif cycle.mode is CheckMode.ALL:
            conclude_perf(course, cycle)
        else:
            conclude(course, cycle, step)


def _begin(course: Course) -> bool:
    """Begin a check if its time has come. Whether it has."""
    state, check = course.state, course.state.check
    at = begins_at(state)
    if at is None or at > course.now or _enlist_idle(course):
        return False
    terms = terms_of(state)
    joined = check.perf if check.perf else check.joined
    nodes = [state.nodes.live[id_] for id_ in joined if id_ in check.joined and state.nodes.is_connected(id_)]
    if check.perf and len(nodes) < 2:
        release(course, list(check.perf))  # too few are left to measure anything
        return False
    if not nodes:
        return False
    check.cycle = CheckCycle.begin(
        {node.rank: _scheduling_group(node) for node in nodes},
        first_round=check.next_round,
        mode=CheckMode.ALL if check.perf else None,
        rules=CheckRules(straggler_ratio=terms.straggler_ratio),
    )
    check.members = {node.rank: node.id for node in nodes}
    check.messages = {}
    what = "Communication test" if check.perf else "Node check"
    course.say(f"{what} of round {check.cycle.round} begins with {say_ranks(sorted(check.members))}.")
    _begin_phase(course, check.cycle)
    return True


def _enlist_idle(course: Course) -> bool:
    """Nodes that wait for the very ones to be checked, and can do nothing without them, test them. Whether there are any.

    A newcomer that is checked alone would have its computation tested, but none of its links.
    """
    state, check, rdzv = course.state, course.state.check, course.state.rendezvous
    limits = state.terms.limits if state.terms is not None else Limits()
    if check.perf or rdzv.opening is None or not rdzv.waiting:
        return False
    if num_usable(len(rdzv.waiting), limits) >= limits.min_nodes:
        return False
    for id_ in list(rdzv.waiting):
        node = state.nodes.live[id_]
        rdzv.expect(id_, node.rank)
        check.needed[id_] = node.rank
        course.touch(id_)
    check.call_began_at = course.now
    return True


def _begin_phase(course: Course, cycle: CheckCycle) -> None:
    check = course.state.check
    check.round = cycle.round
    check.phase_ends_at = Micros(course.now + micros(terms_of(course.state).timeout + GRACE))
    check.worlds, check.hurried, check.bandwidths = {}, {}, {}
    check.joined = {node: joined for node, joined in check.joined.items() if joined.round >= cycle.round}
    check.lacking = {}
    for index, group in enumerate(cycle.groups):
        check.lacking[index] = sum(check.members[rank] not in check.joined for rank in group)
        _run_if_complete(course, cycle, index)
    for node in check.needed:
        course.touch(node)  # also those who have no part in it: their round has another number now


def _run_if_complete(course: Course, cycle: CheckCycle, index: int) -> None:
    """All members of a group have joined: they get their small world."""
    check = course.state.check
    if check.lacking[index]:
        return
    del check.lacking[index]
    group = [rank for rank in cycle.groups[index] if rank in cycle.waiting]
    joined = [check.joined[check.members[rank]] for rank in group]
    world_size = sum(one.local_world_size for one in joined)
    first_global_rank = 0
    for group_rank, (rank, own) in enumerate(zip(group, joined, strict=True)):
        check.worlds[rank] = WorldSpec(
            round=cycle.round,
            group_rank=group_rank,
            group_world_size=len(group),
            first_global_rank=first_global_rank,
            local_world_size=own.local_world_size,
            world_size=world_size,
            coordinator=joined[0].offer,
            restart_count=0,
        )
        first_global_rank += own.local_world_size
        course.touch(check.members[rank])


def _fail_overdue(course: Course, cycle: CheckCycle) -> None:
    """Who has not reported in time has failed; who has not even come is at fault."""
    check = course.state.check
    is_over = check.phase_ends_at <= course.now
    overdue = {group: None for group, at in check.hurried.items() if at <= course.now}
    if not is_over and not overdue:
        return
    for rank in [rank for rank in cycle.waiting if is_over or cycle.places[rank] in overdue]:
        if rank not in cycle.waiting:
            continue  # failed with a partner just now
        course.touch(check.members[rank])
        if rank in check.worlds:
            cycle.report(rank, cycle.round, 0.0, ExitClass.COMMUNICATION)
            check.messages[rank] = "it did not report in time"
        elif check.members[rank] not in check.joined:
            _fail_partners(course, cycle, rank)
            cycle.lose(rank, why="it did not come to the check in time")
    check.hurried = {group: at for group, at in check.hurried.items() if group not in overdue}


def _fail_partners(course: Course, cycle: CheckCycle, rank: NodeRank) -> None:
    """Their collective cannot complete without that node, and it could take minutes until they notice."""
    check = course.state.check
    for other in cycle.groups[cycle.places[rank]]:
        if other != rank and other in cycle.waiting:
            cycle.report(other, cycle.round, 0.0, ExitClass.COMMUNICATION)
            course.touch(check.members[other])


def _is_fresh(state: JobState, node: Node, now: Micros) -> bool:
    result = state.check.results.get(node.rank)
    if result is None or (result.node, result.incarnation) != (node.id, node.incarnation):
        return False
    return result.status in _PASSED and now - result.at < micros(terms_of(state).fresh_for)


def _scheduling_group(node: Node) -> SchedulingGroup:
    return None if node.group < 0 else str(node.group)
