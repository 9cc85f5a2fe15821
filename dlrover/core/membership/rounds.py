"""
Rounds that open and complete: when the world grows or shrinks, when it is formed, and when too few are left for one.
"""

from __future__ import annotations

from dlrover.core.decision import Decision
from dlrover.core.happenings import (
    RoundOpened,
    TargetMoved,
    WorkersFailed,
)
from dlrover.core.membership import adoption
from dlrover.core.membership.forming import (
    are_too_few_left,
    choose_world,
    explain_timeout,
    gives_up_at,
    is_too_large,
    lift_expired,
    note_shortage,
    reason_to_grow,
)
from dlrover.core.membership.nodes import Node, Opening, World
from dlrover.core.membership.waiting import pending
from dlrover.protocol.messages.job import (
    ExitReason,
    FirstFailure,
    Leave,
    Limits,
    NodeRank,
    Round,
    StopCause,
)
from dlrover.protocol.messages.precheck import PreCheckStage

EXIT_RENDEZVOUS_TIMEOUT = 22


def expect(decision: Decision, node: Node) -> None:
    """The node shall join the next round; before it may have to do something else."""
    decision.state.rendezvous.expect(node.id, node.rank)
    decision.announce(decision.on.node_expected, node)


def open_round(
    decision: Decision,
    cause: StopCause,
    reason: str,
    *,
    fault: str = "membership",
    node_rank: NodeRank | None = None,
    first: FirstFailure | None = None,
) -> None:
    state, rdzv = decision.state, decision.state.rendezvous
    members = [
        member.node
        for member in (rdzv.world.members if rdzv.world is not None else ())
        if member.node in state.nodes.live and member.node not in rdzv.finished
    ]
    rdzv.open(Opening(cause, reason), members, decision.now)
    decision.touched.update(dict.fromkeys(members))
    decision.announce(decision.on.round_opened, RoundOpened(reason, members, fault, node_rank, first))


def on_workers_failed(decision: Decision, failed: WorkersFailed) -> None:
    state = decision.state
    if failed.reason:
        assert state.terms is not None, "workers ran before any node attached"
        open_round(decision, StopCause.FAILURE, failed.reason, fault=failed.fault, first=failed.first)
        # Else all members can come back.
        has_finished = bool(state.rendezvous.finished)
        failed.is_hopeless = has_finished and are_too_few_left(state.rendezvous, state.limits, decision.now)


def restart_workers(decision: Decision, reason: str) -> None:
    """The members of the world stop their workers and meet again. No node failed, so no budget pays."""
    decision.say(f"{reason[0].upper()}{reason[1:]}.")
    open_round(decision, StopCause.MEMBERSHIP, reason)


def make_room(decision: Decision, why: str) -> None:
    """A world that is too large meets again, and who is too many goes.

    Not in the last minutes of a job, when no worker restarts any more. Nor yet while rounds are held: the members would
    stop for a round that cannot complete, and who holds it might be among those that go.
    """
    state, rdzv, limits = decision.state, decision.state.rendezvous, decision.state.limits
    standby = 0 if state.terms is None else state.terms.standby
    must_shrink = is_too_large(rdzv, limits)
    if rdzv.finished or (must_shrink and rdzv.is_held):
        return
    if must_shrink:
        open_round(decision, StopCause.MEMBERSHIP, why)
    there = [node for node in state.nodes.live.values() if not node.finished_round and node.dismissed is None]
    there.sort(key=lambda node: (not rdzv.is_member(node.id), node.rank))
    for node in there[limits.max_nodes + standby :]:
        if not decision.is_running(node) and node.id not in rdzv.take_up.claims:
            decision.announce(decision.on.node_dismissed, node, Leave("the job was scaled down", 0))


def on_target_moved(decision: Decision, moved: TargetMoved) -> None:
    """A smaller world meets again at once; a larger one when the nodes are there."""
    if decision.state.rendezvous.take_up.size > moved.target:
        adoption.give_up_claims(decision, moved.why)
    if moved.target < moved.former:
        make_room(decision, moved.why)


def on_job_starts_over(decision: Decision, why: str) -> None:
    state, rdzv = decision.state, decision.state.rendezvous
    rdzv.start_over()
    for node in state.nodes.former.values():
        node.finished_round = Round(0)  # should it come back, its work is to be done again
    for node in state.nodes.live.values():
        node.finished_round = Round(0)
        if node.dismissed is None:
            expect(decision, node)
        decision.touch(node.id)
    if state.nodes.live:
        open_round(decision, StopCause.MEMBERSHIP, why)


def on_job_pauses(decision: Decision, why: str) -> None:
    """All leave together: a node that met the others again would stop its workers without the time that they have."""
    state, rdzv = decision.state, decision.state.rendezvous
    if rdzv.take_up.claims:
        adoption.give_up_claims(decision, why)
    if rdzv.is_active:
        open_round(decision, StopCause.MEMBERSHIP, why)
    for node in list(state.nodes.live.values()):
        if node.dismissed is None:
            decision.announce(decision.on.node_dismissed, node, Leave(why, is_pause=True))


def advance(decision: Decision) -> bool:
    """Whatever time and others have made possible: holds end, a world goes on, grows or begins. Whether all rooms have to look again."""
    state, rdzv, terms = decision.state, decision.state.rendezvous, decision.state.terms
    if state.end is not None or terms is None or state.cluster is not None:
        return False
    if rdzv.blocks or rdzv.order_awaited_until is not None or rdzv.pre_check_until is not None:
        for block in lift_expired(rdzv, decision.now):
            decision.say(f"The lease of {block.owner} is over: the rendezvous is blocked no longer ({block.reason}).")
    if rdzv.pre_check_until is None and state.pre_check.stage is PreCheckStage.CHECKING:
        decision.announce(decision.on.pre_check_over)
    if rdzv.take_up.claims and adoption.settle_claims(decision):
        return True
    if _meet(decision):
        return True
    if terms.limits.pend_timeout is not None and rdzv.is_active:
        rdzv.bystanders.note_pending(pending(state), decision.now)
    return False


def _meet(decision: Decision) -> bool:
    """Open the next round if the world should grow, and complete it if its time has come. Whether that ended the job."""
    state, rdzv, limits = decision.state, decision.state.rendezvous, decision.state.limits
    if is_too_large(rdzv, limits) and not rdzv.finished and not rdzv.is_held:
        make_room(decision, f"the job was scaled to {span_of(limits)} nodes")
        decision.announce(decision.on.job_scaled, limits.max_nodes)
    if rdzv.opening is None:
        reason = reason_to_grow(rdzv, limits, decision.now)
        if reason is None:
            return False
        decision.say(f"{reason[0].upper()}{reason[1:]}.")
        open_round(decision, StopCause.MEMBERSHIP, reason)
    if are_too_few_left(rdzv, limits, decision.now):
        _end_unfinished(decision, limits)
        return True
    # A check has deadlines of its own, and who suspends a job does not hurry it.
    is_suspended = state.fleet is not None and state.fleet.is_suspended
    is_excused = state.check.cycle is not None or bool(state.check.perf) or is_suspended
    note_shortage(rdzv, limits, decision.now, is_excused=is_excused)
    give_up_at = gives_up_at(rdzv, limits)
    if give_up_at is not None and give_up_at <= decision.now:
        reason_ = ExitReason.RENDEZVOUS_TIMEOUT if state.nodes.live else ExitReason.NOT_ENOUGH_NODES
        sentence = state.check.explain_timeout(rdzv.next_round, len(rdzv.waiting), limits)
        decision.end_job(reason_, sentence or explain_timeout(rdzv, limits), exit_code=EXIT_RENDEZVOUS_TIMEOUT)
        return True
    world, sentence = choose_world(rdzv, limits, decision.now, limits_version=state.limits_version)
    if world is not None:
        return not _begin(decision, world, sentence)
    if rdzv.waiting and sentence != rdzv.verdict:  # that nobody waits yet is no news
        decision.say(sentence)
    rdzv.verdict = sentence
    return False


def _begin(decision: Decision, world: World, sentence: str) -> bool:
    """Complete the open round. Whether it began: what led to it may end the job instead."""
    state, rdzv, former = decision.state, decision.state.rendezvous, decision.state.rendezvous.group_ranks
    decision.announce(decision.on.round_chosen)
    if state.end is not None:
        return False
    rdzv.complete(world, decision.now)
    decision.announce(decision.on.round_completed)
    rdzv.verdict = sentence
    decision.say(sentence)
    state.enter_running()
    for member in world.members:
        if member.node not in former:
            state.nodes.live[member.node].entered_at = decision.now
        decision.touch(member.node)
    decision.touched.update(dict.fromkeys(rdzv.expected))  # they missed it and are asked for the next
    return True


def _end_unfinished(decision: Decision, limits: Limits) -> None:
    """Some nodes finished, another failed or was lost, and too few are left for a world."""
    rdzv = decision.state.rendezvous
    incident = decision.state.restarts.open_incident(rdzv.round)
    num_left = len(rdzv.waiting) + rdzv.num_coming
    num_finished = len(rdzv.finished)
    assert rdzv.opening is not None, "nothing failed"
    if rdzv.world is None and not num_left and num_finished >= limits.min_nodes:
        sentence = "The workers of all nodes that came to this master had ended well."
        decision.end_job(ExitReason.COMPLETED, sentence)
        return
    sentence = (
        f"{num_finished} node{'' if num_finished == 1 else 's'} had finished already, and the {num_left} left "
        f"cannot form a world of at least {limits.min_nodes}."
    )
    if incident is not None:
        decision.end_job(ExitReason.WORKER_ERROR, sentence, first=incident.first)
    else:
        why = rdzv.opening.reason
        decision.end_job(ExitReason.NOT_ENOUGH_NODES, f"{why[0].upper()}{why[1:]}. {sentence}")


def span_of(limits: Limits) -> str:
    return f"{limits.min_nodes}:{limits.max_nodes}"
