"""
What the verdict of a node check leads to: who trains, who leaves, whether the check is made again, or the job ends.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.check.cycle import CheckCycle, CheckStatus, CheckVerdict
from dlrover.core.check.evidence import say_ranks
from dlrover.core.check.state import NodeCheck
from dlrover.core.decision import Decision
from dlrover.core.membership.nodes import Node
from dlrover.core.state import JobState
from dlrover.protocol.messages.check import CheckResult, CheckTerms
from dlrover.protocol.messages.job import ExitReason, Leave, NodeId, NodeRank

NUM_ATTEMPTS = 2
"""A check that could not find out who is at fault is made once more: what it fell over may have been a passing trouble."""
EXIT_CHECK_FAILED = 20
EXIT_STRAGGLER = 21


def conclude(decision: Decision, cycle: CheckCycle, verdict: CheckVerdict) -> None:
    state, check = decision.state, decision.state.check
    decision.say(verdict.sentence)
    check.end_cycle()
    check.num_checks += 1
    present = [
        state.nodes.live[check.members[rank]]
        for rank in verdict.statuses
        if rank not in cycle.late and rank not in cycle.gone
    ]
    for rank, status in verdict.statuses.items():
        if rank not in cycle.late:
            _keep_result(decision, rank, status, verdict)
    faulty = dict.fromkeys(verdict.faulty)
    for node in [node for node in present if node.rank in faulty]:
        _exclude(decision, node, f"the node check found this node faulty: {_reason(check, verdict, node.rank)}")
    # Who did not come to the last phase although its stream is fine was lost from the check, and from nothing else.
    for rank in [rank for rank in faulty if rank in cycle.gone]:
        absent = state.nodes.live.get(check.members[rank])
        if absent is not None:
            _exclude(decision, absent, f"the node check found this node faulty: {cycle.gone[rank]}")
    if _is_nobody_left(state):
        _end_job(decision, f"{verdict.sentence} No node is left")
        return
    others = [node for node in present if node.rank not in faulty]
    if verdict.unproven and check.num_attempts + 1 < NUM_ATTEMPTS:
        check.num_attempts += 1
        decision.say("The node check is made once more, because it did not show who is at fault.")
        check.call_began_at = decision.now
        _call_again(decision, [node.id for node in others])
        for node in others:
            decision.touch(node.id)
        return
    check.num_attempts = 0
    unproven = dict.fromkeys(verdict.unproven)
    _give_up_unproven(decision, [node for node in others if node.rank in unproven], verdict)
    if state.end is None:
        _admit(decision, [node for node in others if node.rank not in unproven], verdict)


def _admit(decision: Decision, passed: list[Node], verdict: CheckVerdict) -> None:
    state, check = decision.state, decision.state.check
    slow = dict.fromkeys(verdict.stragglers if terms_of(state).excludes_stragglers else ())
    for node in [node for node in passed if node.rank in slow]:
        why = f"the node check found this node slow: {verdict.times[node.rank]:.0f} ms (--exclude-straggler)"
        _exclude(decision, node, why, EXIT_STRAGGLER)
    good = [node.id for node in passed if node.rank not in slow]
    if terms_of(state).is_perf_test and len(good) > 1:
        check.perf = dict.fromkeys(good)
        check.call_began_at = decision.now
        for id_ in good:
            decision.touch(id_)
    else:
        release(decision, good)


def _give_up_unproven(decision: Decision, nodes: list[Node], verdict: CheckVerdict) -> None:
    """It is unknown whether they or what is between them is bad. The job goes on without them, or not at all."""
    state = decision.state
    if not nodes or state.terms is None:
        return
    limits = state.limits
    if state.fleet is None and limits.num_usable(state.rendezvous.num_unfinished - len(nodes)) < limits.min_nodes:
        _end_job(decision, f"{verdict.sentence} It was the second attempt, and without them there are too few nodes")
        return
    for node in nodes:
        why = "no run of the node check with others passed on this node, and none showed whose fault that was"
        _exclude(decision, node, f"{why}: {_links(verdict, node.rank)}")


def conclude_perf(decision: Decision, cycle: CheckCycle) -> None:
    """It measures; it judges no node, because all of them had passed before."""
    state, check = decision.state, decision.state.check
    check.end_cycle()
    measured = {rank: gbps for rank, gbps in check.bandwidths.items() if gbps > 0}
    for rank, gbps in check.bandwidths.items():
        check.results[rank] = replace(check.results[rank], bandwidth_gbps=gbps)
    num_nodes = len(cycle.members)
    if len(check.bandwidths) < num_nodes:
        words = next((message for message in check.messages.values() if message), "a node was lost")
        decision.say(
            f"Communication test over {num_nodes} nodes failed: {words}. All of them had passed the node check, so "
            "training goes on."
        )
    elif measured:
        decision.say(
            f"Communication test over {num_nodes} nodes: bus bandwidth {min(measured.values()):.2f} to "
            f"{max(measured.values()):.2f} GB/s."
        )
    release(decision, [node for node in check.perf if node in state.nodes.live])
    check.perf = {}


def release(decision: Decision, nodes: list[NodeId]) -> None:
    """They may train."""
    check = decision.state.check
    _call_again(decision, nodes)
    for node in nodes:
        check.needed.pop(node, None)
        check.joined.pop(node, None)
        check.perf.pop(node, None)
        decision.touch(node)


def _call_again(decision: Decision, nodes: list[NodeId]) -> None:
    """The round waited for these members through their check; they have the whole last call for what they do next."""
    rdzv = decision.state.rendezvous
    if any(node in rdzv.group_ranks for node in nodes):
        rdzv.call_began_at = decision.now


def _exclude(decision: Decision, node: Node, why: str, exit_code: int = EXIT_CHECK_FAILED) -> None:
    """The node leaves. A platform brings another one, elsewhere, by the same rules as after any other end."""
    decision.announce(decision.on.node_excluded, node, why)
    decision.announce(decision.on.node_dismissed, node, Leave(why, exit_code))


def _keep_result(decision: Decision, rank: NodeRank, status: CheckStatus, verdict: CheckVerdict) -> None:
    state, check = decision.state, decision.state.check
    node = state.nodes.live.get(check.members[rank]) or state.nodes.former.get(rank)
    if node is not None and node.id == check.members[rank]:
        check.results[rank] = CheckResult(
            node=node.id,
            incarnation=node.incarnation,
            status=status,
            at=decision.now,
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


def _end_job(decision: Decision, sentence: str) -> None:
    sentence = f"{sentence}. Look at the named nodes and the network between them, or start without --network-check."
    decision.end_job(ExitReason.NODE_CHECK_FAILED, sentence, exit_code=EXIT_CHECK_FAILED)


def _is_nobody_left(state: JobState) -> bool:
    """Nor will any node come by itself. People may start further nodes; but if all that came are bad, they should look."""
    is_awaited = state.fleet is not None and bool(state.fleet.workers.holders)
    return not is_awaited and not any(node.dismissed is None for node in state.nodes.live.values())


def terms_of(state: JobState) -> CheckTerms:
    assert state.terms is not None, "a check before any node came"
    assert state.terms.check is not None, "this job has no node check"
    return state.terms.check
