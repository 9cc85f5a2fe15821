"""
What the verdict of a node check leads to: who trains, who leaves, whether the check is made again, or the job ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover.core.check.cycle import CheckCycle, CheckStatus, CheckVerdict
from dlrover.core.check.evidence import say_ranks
from dlrover.core.check.state import NodeCheck, terms_of
from dlrover.core.fleet import life_cycle
from dlrover.core.membership.nodes import Node
from dlrover.core.membership.rendezvous import num_usable
from dlrover.protocol.messages.check import CheckResult
from dlrover.protocol.messages.fleet import NodeExit
from dlrover.protocol.messages.job import ExitReason, Leave, NodeId, NodeRank

if TYPE_CHECKING:
    from dlrover.core.decision import Course
    from dlrover.core.state import JobState

NUM_ATTEMPTS = 2
"""A check that could not find out who is at fault is made once more: what it fell over may have been a passing trouble."""
EXIT_CHECK_FAILED = 20
EXIT_STRAGGLER = 21


def conclude(course: Course, cycle: CheckCycle, verdict: CheckVerdict) -> None:
    state, check = course.state, course.state.check
    course.say(verdict.sentence)
    check.end_cycle()
    check.num_checks += 1
    present = [
        state.nodes.live[check.members[rank]]
        for rank in verdict.statuses
        if rank not in cycle.late and rank not in cycle.gone
    ]
    for rank, status in verdict.statuses.items():
        if rank not in cycle.late:
            _keep_result(course, rank, status, verdict)
    faulty = dict.fromkeys(verdict.faulty)
    for node in [node for node in present if node.rank in faulty]:
        _exclude(course, node, f"the node check found this node faulty: {_reason(check, verdict, node.rank)}")
    # Who did not come to the last phase although its stream is fine was lost from the check, and from nothing else.
    for rank in [rank for rank in faulty if rank in cycle.gone]:
        absent = state.nodes.live.get(check.members[rank])
        if absent is not None:
            _exclude(course, absent, f"the node check found this node faulty: {cycle.gone[rank]}")
    if _is_nobody_left(state):
        _end_job(course, f"{verdict.sentence} No node is left")
        return
    others = [node for node in present if node.rank not in faulty]
    if verdict.unproven and check.num_attempts + 1 < NUM_ATTEMPTS:
        check.num_attempts += 1
        course.say("The node check is made once more, because it did not show who is at fault.")
        check.call_began_at = course.now
        _call_again(course, [node.id for node in others])
        for node in others:
            course.touch(node.id)
        return
    check.num_attempts = 0
    unproven = dict.fromkeys(verdict.unproven)
    _give_up_unproven(course, [node for node in others if node.rank in unproven], verdict)
    if state.end is None:
        _admit(course, [node for node in others if node.rank not in unproven], verdict)


def _admit(course: Course, passed: list[Node], verdict: CheckVerdict) -> None:
    state, check = course.state, course.state.check
    slow = dict.fromkeys(verdict.stragglers if terms_of(state).excludes_stragglers else ())
    for node in [node for node in passed if node.rank in slow]:
        why = f"the node check found this node slow: {verdict.times[node.rank]:.0f} ms (--exclude-straggler)"
        _exclude(course, node, why, EXIT_STRAGGLER)
    good = [node.id for node in passed if node.rank not in slow]
    if terms_of(state).is_perf_test and len(good) > 1:
        check.perf = dict.fromkeys(good)
        check.call_began_at = course.now
        for id_ in good:
            course.touch(id_)
    else:
        release(course, good)


def _give_up_unproven(course: Course, nodes: list[Node], verdict: CheckVerdict) -> None:
    """Nobody knows whether they or what is between them is bad. The job goes on without them, or not at all."""
    state = course.state
    if not nodes or state.terms is None:
        return
    limits = state.terms.limits
    if state.fleet is None and num_usable(state.rendezvous.num_unfinished - len(nodes), limits) < limits.min_nodes:
        _end_job(course, f"{verdict.sentence} It was the second attempt, and without them there are too few nodes")
        return
    for node in nodes:
        why = "no run of the node check with others passed on this node, and none showed whose fault that was"
        _exclude(course, node, f"{why}: {_links(verdict, node.rank)}")


def conclude_perf(course: Course, cycle: CheckCycle) -> None:
    """It measures; it judges nobody, because all of them had passed before."""
    state, check = course.state, course.state.check
    check.end_cycle()
    measured = {rank: gbps for rank, gbps in check.bandwidths.items() if gbps > 0}
    for rank, gbps in check.bandwidths.items():
        check.results[rank] = replace(check.results[rank], bandwidth_gbps=gbps)
    num_nodes = len(cycle.members)
    if len(check.bandwidths) < num_nodes:
        words = next((message for message in check.messages.values() if message), "somebody was lost")
        course.say(
            f"Communication test over {num_nodes} nodes failed: {words}. All of them had passed the node check, so "
            "training goes on."
        )
    elif measured:
        course.say(
            f"Communication test over {num_nodes} nodes: bus bandwidth {min(measured.values()):.2f} to "
            f"{max(measured.values()):.2f} GB/s."
        )
    release(course, [node for node in check.perf if node in state.nodes.live])
    check.perf = {}


def release(course: Course, nodes: list[NodeId]) -> None:
    """They may train."""
    check = course.state.check
    _call_again(course, nodes)
    for node in nodes:
        check.needed.pop(node, None)
        check.joined.pop(node, None)
        check.perf.pop(node, None)
        course.touch(node)


def _call_again(course: Course, nodes: list[NodeId]) -> None:
    """The round waited for these members through their check; they have the whole last call for what they do next."""
    rdzv = course.state.rendezvous
    if any(node in rdzv.group_ranks for node in nodes):
        rdzv.call_began_at = course.now


def _exclude(course: Course, node: Node, why: str, exit_code: int = EXIT_CHECK_FAILED) -> None:
    """The node leaves. A platform brings another one, elsewhere, by the same rules as after any other end."""
    fleet = course.state.fleet
    replaced = None if fleet is None else fleet.of_agent(node.id)
    if replaced is not None:
        life_cycle.unlink(course, replaced)  # it stays for long enough to hear that it shall go
        life_cycle.hear_node_error(course, replaced, NodeExit.CHECK_FAILED, why)
    course.dismiss(node, Leave(why, exit_code))


def _keep_result(course: Course, rank: NodeRank, status: CheckStatus, verdict: CheckVerdict) -> None:
    state, check = course.state, course.state.check
    node = state.nodes.live.get(check.members[rank]) or state.nodes.former.get(rank)
    if node is not None and node.id == check.members[rank]:
        check.results[rank] = CheckResult(
            node=node.id,
            incarnation=node.incarnation,
            status=status,
            at=course.now,
            elapsed_ms=verdict.times.get(rank, 0.0),
            reason="" if status is CheckStatus.HEALTHY else _reason(check, verdict, rank),
        )


def _reason(check: NodeCheck, verdict: CheckVerdict, rank: NodeRank) -> str:
    status = verdict.statuses[rank]
    if status is CheckStatus.STRAGGLER:
        return "slow with quick partners, too"
    reason = verdict.reasons.get(rank) or _links(verdict, rank)
    words = check.messages.get(rank, "").strip().rstrip(".")
    return f"{reason} ({words})" if words and status is CheckStatus.FAULTY else reason


def _links(verdict: CheckVerdict, rank: NodeRank) -> str:
    others = [other for link in verdict.suspect_links if rank in link for other in link if other != rank]
    return f"the link to {say_ranks(others)} is suspect" if others else "it never passed with others"


def _end_job(course: Course, sentence: str) -> None:
    course.end_job(
        ExitReason.NODE_CHECK_FAILED,
        f"{sentence}. Look at the named nodes and the network between them, or start without --network-check.",
        exit_code=EXIT_CHECK_FAILED,
    )


def _is_nobody_left(state: JobState) -> bool:
    """Nor will anybody come by himself. People may start further nodes; but if all that came are bad, they should look."""
    is_awaited = state.fleet is not None and bool(state.fleet.workers.holders)
    return not is_awaited and not any(node.dismissed is None for node in state.nodes.live.values())
