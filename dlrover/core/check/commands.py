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

from dlrover.core.check.consequences import conclude, conclude_perf, release, terms_of
from dlrover.core.check.cycle import CheckCycle, CheckMode, CheckStatus, CheckVerdict
from dlrover.core.check.evidence import CheckRules, say_ranks
from dlrover.core.check.pairing import SchedulingGroup
from dlrover.core.check.state import CheckJoined, NodeCheck
from dlrover.core.decision import Decision, Handlers
from dlrover.core.happenings import JobEnds, NodeLost, RoundOpened
from dlrover.core.membership.nodes import Node
from dlrover.core.outcome import Deadline
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.check import MAX_CHECK_MESSAGE, ExitClass, ReportCheck
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import DeadlineKind, Done, JoinRendezvous, Micros, NodeRank, Reply, WorldSpec

GRACE = 30.0
"""Seconds that a node has for its report beyond the task's own timeout; and beyond the failure of a partner, after which
a collective can hang for as long as its library allows."""
_MOST_GBPS = 1e9
_PASSED = (CheckStatus.HEALTHY, CheckStatus.STRAGGLER)


# What other rooms tell.


def on_node_expected(decision: Decision, node: Node) -> None:
    """The node shall join a training round: first the check, unless it passed not long ago in this very life."""
    state = decision.state
    if state.terms is None or state.terms.check is None or node.finished_round or node.dismissed is not None:
        return
    if not _is_fresh(state, node, decision.now):
        state.check.needed[node.id] = node.rank
        state.check.joined.pop(node.id, None)
        decision.touch(node.id)


def on_round_opened(decision: Decision, opened: RoundOpened) -> None:
    """Members are checked, and who waits for a round since long ago is checked again with them."""
    state, rdzv = decision.state, decision.state.rendezvous
    if state.terms is None or state.terms.check is None:
        return
    for id_ in opened.members:
        on_node_expected(decision, state.nodes.live[id_])
    for id_ in [*rdzv.waiting, *rdzv.absent]:
        node = state.nodes.live[id_]
        if not _is_fresh(state, node, decision.now):
            rdzv.expect(node.id, node.rank)
            on_node_expected(decision, node)


def on_node_lost(decision: Decision, lost: NodeLost) -> None:
    _lose(decision, lost.node, "it was lost during the check", is_blamed=lost.is_given_up)


def on_node_unexpected(decision: Decision, node: Node) -> None:
    _lose(decision, node, "", is_blamed=False)


def on_job_over(decision: Decision, _: JobEnds | str) -> None:
    decision.state.check.close()


def on_master_restarted(decision: Decision) -> None:
    decision.state.check.master_restarted(decision.state.now, decision.now)


def deadlines(state: JobState) -> list[Deadline]:
    times = ((begins_at(state), DeadlineKind.CHECK_CALL), (state.check.ends_at(), DeadlineKind.CHECK_PHASE))
    return [Deadline(at, kind, state.rendezvous.next_round) for at, kind in times if at is not None]


def _lose(decision: Decision, node: Node, why: str, *, is_blamed: bool) -> None:
    """The node is there no more, or begins a new life. The nodes that ran with it need not wait any longer."""
    check, rank = decision.state.check, node.rank
    check.needed.pop(node.id, None)
    check.joined.pop(node.id, None)
    check.perf.pop(node.id, None)
    cycle = check.cycle
    if cycle is None or check.members.get(rank) != node.id:
        return
    if rank in cycle.waiting:
        _fail_partners(decision, cycle, rank)
    cycle.lose(rank, why=why, is_blamed=is_blamed)
    if not is_blamed and rank in cycle.gone:
        cycle.gone[rank] = ""  # it was given up for dead before, and is back


def begins_at(state: JobState) -> Micros | None:
    """When the next check begins with those who have joined it, maybe long ago; None: not known yet."""
    check, rdzv, terms = state.check, state.rendezvous, state.terms
    if terms is None or check.cycle is not None:
        return None
    if check.perf:
        has_all = all(node in check.joined for node in check.perf)
        return Micros(check.call_began_at + (0 if has_all else micros(GRACE)))
    if not any(map(state.nodes.is_connected, check.joined)):
        return None
    limits, num_nodes = state.limits, rdzv.num_unfinished
    if not rdzv.is_active and limits.num_usable(num_nodes) < limits.min_nodes:
        return None  # nothing can start without more nodes, and together they test each other
    if len(check.joined) < len(check.needed):
        return Micros(check.call_began_at + micros(limits.last_call))
    if rdzv.world is None and num_nodes < limits.max_nodes:
        return Micros(check.call_began_at + micros(limits.first_call))
    return check.call_began_at


def _are_members_checked(state: JobState) -> bool:
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


# Commands.


def on_joins_check(decision: Decision, node: Node, command: JoinRendezvous) -> None:
    state, check = decision.state, decision.state.check
    if state.terms is None or state.terms.check is None:
        raise Rejected("This job has no node check to join.", code=ErrorCode.NO_NODE_CHECK)
    if node.id not in check.needed:
        raise Rejected(f"{node.label} need not be checked now.", code=ErrorCode.NOT_NEEDED)
    cycle = check.cycle
    is_in_phase = cycle is not None and check.members.get(node.rank) == node.id and node.rank in cycle.waiting
    wanted = check.round if is_in_phase else check.next_round
    if command.round != wanted:
        raise Rejected(
            f"{node.label} wants to join round {command.round} of the node check; round {wanted} is the next for it.",
            code=ErrorCode.STALE_ROUND,
        )
    if is_in_phase and node.rank in check.worlds:
        raise Rejected(f"The check of round {wanted} has begun for {node.label}.", code=ErrorCode.STALE_ROUND)

    known = check.joined.get(node.id)
    is_new = known is None or known.round != command.round
    check.joined[node.id] = CheckJoined(command.round, command.local_world_size, command.offer)
    if node.id in check.perf:
        # To the end: who is missing stands in front and is found at once, however many have come (`begins_at`).
        check.perf[node.id] = check.perf.pop(node.id)
    decision.touch(node.id)
    if is_new:
        check.call_began_at = decision.now
        if cycle is not None and is_in_phase:
            group = cycle.places[node.rank]
            check.lacking[group] -= 1
            _run_if_complete(decision, cycle, group)
        elif cycle is not None and cycle.mode is not CheckMode.ALL:
            cycle.join(node.rank, _scheduling_group(node))
            check.members[node.rank] = node.id
    decision.is_unsettled = True


def _report(command: ReportCheck, decision: Decision) -> Reply:
    check = decision.state.check
    node = decision.state.nodes.current(command.node, command.incarnation)
    cycle, rank = check.cycle, node.rank
    if cycle is None:
        raise Rejected(f"{node.label} reports a node check, but none is running.", code=ErrorCode.STALE_ROUND)
    if check.members.get(rank) != node.id or rank not in check.worlds:
        raise Rejected(f"{node.label} takes no part in the check of round {check.round}.", code=ErrorCode.NOT_A_MEMBER)
    if not (math.isfinite(command.bandwidth_gbps) and 0 <= command.bandwidth_gbps <= _MOST_GBPS):
        raise malformed(f"`bandwidth_gbps` must be from 0 to {_MOST_GBPS:g} (got {command.bandwidth_gbps}).")
    was_waiting = rank in cycle.waiting
    cycle.report(rank, command.round, command.elapsed_ms, command.exit_class)  # refuses before it changes anything

    if was_waiting:
        if command.exit_class is ExitClass.OK:
            check.bandwidths[rank] = round(command.bandwidth_gbps, 3)
        else:
            check.messages[rank] = command.message[-MAX_CHECK_MESSAGE:]
            check.hurried.setdefault(cycle.places[rank], Micros(decision.now + micros(GRACE)))
        decision.touch(node.id)
    decision.is_unsettled = True
    return Done()


HANDLERS: Handlers = {ReportCheck: _report}


# How a check goes on.


def advance(decision: Decision) -> bool:
    """As far as it goes by itself. May end the job."""
    state, check = decision.state, decision.state.check
    if state.terms is not None and state.terms.check is not None:
        while state.end is None and _go_on(decision, check):
            pass
    state.rendezvous.are_members_checked = _are_members_checked(state)
    return False


def _go_on(decision: Decision, check: NodeCheck) -> bool:
    """One step; whether there may be another."""
    cycle = check.cycle
    if cycle is None:
        return _begin(decision)
    _fail_overdue(decision, cycle)
    if not cycle.is_phase_complete():
        return False
    step = cycle.go_on()
    decision.say(step.node_status)
    decision.say(step.elapsed)
    if not isinstance(step, CheckVerdict):
        decision.say(step.sentence)
        _begin_phase(decision, cycle)
    elif cycle.mode is CheckMode.ALL:
        conclude_perf(decision, cycle)
    else:
        conclude(decision, cycle, step)
    return True


def _begin(decision: Decision) -> bool:
    """Begin a check if its time has come. Whether it has."""
    state, check = decision.state, decision.state.check
    at = begins_at(state)
    if at is None or at > decision.now or _enlist_idle(decision):
        return False
    terms = terms_of(state)
    joined = check.perf if check.perf else check.joined
    nodes = [state.nodes.live[id_] for id_ in joined if id_ in check.joined and state.nodes.is_connected(id_)]
    if check.perf and len(nodes) < 2:
        release(decision, list(check.perf))  # too few are left to measure anything
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
    decision.say(f"{what} of round {check.cycle.round} begins with {say_ranks(sorted(check.members))}.")
    _begin_phase(decision, check.cycle)
    return True


def _enlist_idle(decision: Decision) -> bool:
    """Nodes that wait for the very ones to be checked, and can do nothing without them, test them. Whether there are any.

    A newcomer that is checked alone would have its computation tested, but none of its links.
    """
    state, check, rdzv = decision.state, decision.state.check, decision.state.rendezvous
    limits = state.limits
    if check.perf or rdzv.opening is None or not rdzv.waiting:
        return False
    if limits.num_usable(len(rdzv.waiting)) >= limits.min_nodes:
        return False
    for id_ in list(rdzv.waiting):
        node = state.nodes.live[id_]
        rdzv.expect(id_, node.rank)
        check.needed[id_] = node.rank
        decision.touch(id_)
    check.call_began_at = decision.now
    return True


def _begin_phase(decision: Decision, cycle: CheckCycle) -> None:
    check = decision.state.check
    check.round = cycle.round
    check.phase_ends_at = Micros(decision.now + micros(terms_of(decision.state).timeout + GRACE))
    check.worlds, check.hurried, check.bandwidths = {}, {}, {}
    check.joined = {node: joined for node, joined in check.joined.items() if joined.round >= cycle.round}
    check.lacking = {}
    for index, group in enumerate(cycle.groups):
        check.lacking[index] = sum(check.members[rank] not in check.joined for rank in group)
        _run_if_complete(decision, cycle, index)
    for node in check.needed:
        decision.touch(node)  # also those who have no part in it: their round has another number now


def _run_if_complete(decision: Decision, cycle: CheckCycle, index: int) -> None:
    """All members of a group have joined: they get their small world."""
    check = decision.state.check
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
        decision.touch(check.members[rank])


def _fail_overdue(decision: Decision, cycle: CheckCycle) -> None:
    """Who has not reported in time has failed; who has not even come is at fault."""
    check = decision.state.check
    is_over = check.phase_ends_at <= decision.now
    overdue = {group: None for group, at in check.hurried.items() if at <= decision.now}
    if not is_over and not overdue:
        return
    for rank in [rank for rank in cycle.waiting if is_over or cycle.places[rank] in overdue]:
        if rank not in cycle.waiting:
            continue  # failed with a partner just now
        decision.touch(check.members[rank])
        if rank in check.worlds:
            cycle.report(rank, cycle.round, 0.0, ExitClass.COMMUNICATION)
            check.messages[rank] = "it did not report in time"
        elif check.members[rank] not in check.joined:
            _fail_partners(decision, cycle, rank)
            cycle.lose(rank, why="it did not join the check in time")
    check.hurried = {group: at for group, at in check.hurried.items() if group not in overdue}


def _fail_partners(decision: Decision, cycle: CheckCycle, rank: NodeRank) -> None:
    """Their collective cannot complete without that node, and it could take minutes until they notice."""
    check = decision.state.check
    for other in cycle.groups[cycle.places[rank]]:
        if other != rank and other in cycle.waiting:
            cycle.report(other, cycle.round, 0.0, ExitClass.COMMUNICATION)
            decision.touch(check.members[other])


def _is_fresh(state: JobState, node: Node, now: Micros) -> bool:
    result = state.check.results.get(node.rank)
    if result is None or (result.node, result.incarnation) != (node.id, node.incarnation):
        return False
    return result.status in _PASSED and now - result.at < micros(terms_of(state).fresh_for)


def _scheduling_group(node: Node) -> SchedulingGroup:
    return None if node.group < 0 else str(node.group)
