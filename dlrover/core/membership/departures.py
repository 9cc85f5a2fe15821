"""
Nodes that go: lost, sent away, dismissed, or done with their work; and the end of the job, when all shall go.
"""

from __future__ import annotations

from typing import Any

from dlrover.core.decision import Decision
from dlrover.core.happenings import AllFinished, JobEnds, NodeLost
from dlrover.core.membership import adoption
from dlrover.core.membership.forming import is_all_finished
from dlrover.core.membership.nodes import Node, NodeLife, reattach_window
from dlrover.core.membership.rounds import open_round
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import (
    EndStream,
    ExitReason,
    FinishJob,
    JobEnd,
    JobTerms,
    Leave,
    Micros,
    Round,
    Stage,
    StopCause,
)

DRAIN_MARGIN = 5.0
"""Seconds that nodes have for leaving after the end, on top of what their workers have for stopping."""
EXIT_TRAINING = 1


def finish(decision: Decision, node: Node, round_: Round, *, has_more_to_say: bool = False) -> None:
    """All workers of the node ended well in that round: it waits at the exit barrier and is never started again.

    It may tell so late: given up meanwhile, or when the others meet again already, or have met. `has_more_to_say`: what its workers
    said of their data before they ended follows, and only then its report.
    """
    rdzv = decision.state.rendezvous
    if decision.state.end is not None:
        return
    if not has_more_to_say and round_ in (node.finished_round, rdzv.round):
        decision.announce(decision.on.workers_ended, node)
    if node.finished_round:
        return
    if round_ == rdzv.round and node.id in rdzv.group_ranks:
        rdzv.lost.pop(node.id, None)
        rdzv.finish(node.id, node.rank)
    elif not rdzv.is_member(node.id):
        rdzv.excuse(node.id, node.rank)
    else:
        return  # it has a place in a newer world, so it knows that its work was not done
    node.finished_round = round_
    decision.announce(decision.on.node_finished, node)
    decision.touch(node.id)
    _end_if_all_finished(decision)


def _end_if_all_finished(decision: Decision) -> None:
    if decision.state.end is not None or not is_all_finished(decision.state.rendezvous):
        return
    finished = AllFinished()
    decision.announce(decision.on.all_finished, finished)
    if not finished.is_work_left and not finished.is_reading:
        decision.end_job(ExitReason.COMPLETED, "The workers of all nodes ended well.")


def lose(decision: Decision, node: Node, life: NodeLife, why: str, **more: Any) -> None:
    """A live node is there no more; if its world needs it, the others meet again, at no cost of the budget. `more`: see `NodeLost`."""
    state, rdzv = decision.state, decision.state.rendezvous
    lost = NodeLost(
        node=node,
        why=why,
        is_given_up=life is NodeLife.GONE,
        was_running=decision.is_running(node),
        was_member=rdzv.is_member(node.id) and not node.finished_round,
        was_claiming=node.id in rdzv.take_up.claims and not node.finished_round,
        **more,
    )
    state.nodes.retire(node, life)
    decision.announce(decision.on.agent_gone, node)
    decision.announce(decision.on.node_lost, lost)


def on_node_lost(decision: Decision, lost: NodeLost) -> None:
    rdzv, node, why = decision.state.rendezvous, lost.node, lost.why
    rdzv.forget(node.id, node.rank)
    rdzv.blocks.pop(node.id, None)
    if decision.state.end is not None:
        return
    decision.say(f"{why[0].upper()}{why[1:]}.")
    if lost.was_member and node.entered_at is not None:
        # Also if the round is open already: its neighbours are often quicker to tell that they lost somebody.
        rdzv.bystanders.note_loss(node.rank, node.entered_at, decision.now)
    if lost.was_claiming:
        adoption.give_up_claims(decision, why)
    if lost.was_running:
        open_round(decision, StopCause.MEMBERSHIP, why, fault=lost.fault, node_rank=node.rank)


def send_away(decision: Decision, node: Node, why: str, **more: Any) -> None:
    """Lose a node whose agent may be well: it would train on beside its successor until the platform removes it.

    Without its stream it presents itself anew, as one whose stream is down does, and is refused: it ends its workers
    and goes. Who has finished or was dismissed has no workers to end, and knows.
    """
    is_at_work = not node.finished_round and node.dismissed is None
    if decision.state.end is None and is_at_work and decision.state.nodes.is_connected(node.id):
        decision.effects.append(EndStream(node.id, node.incarnation))
    lose(decision, node, NodeLife.GONE, why, **more)


def on_node_succeeded(decision: Decision, node: Node, why: str) -> None:
    finish(decision, node, decision.state.rendezvous.round)
    lose(decision, node, NodeLife.LEFT, why)


def give_up(decision: Decision, node: Node) -> None:
    """Its stream broke and it did not come back in time. It may still, with the news that it has finished."""
    rdzv, broken = decision.state.rendezvous, decision.state.nodes.broken[node.id]
    if broken.broken_at is not None and rdzv.is_member(node.id) and not node.finished_round:
        until = Micros(broken.broken_at + micros(reattach_window(decision.state.detection)))
        rdzv.may_return_until = max(rdzv.may_return_until, until)
    why = f"{node.label} lost its connection and did not come back"
    lose(decision, node, NodeLife.GONE, why, is_presumed=True, ended_at=broken.broken_at)


def on_node_dismissed(decision: Decision, node: Node, leave: Leave) -> None:
    assert not decision.is_running(node), f"{node.label} is needed"
    decision.state.rendezvous.forget(node.id, node.rank)
    decision.state.rendezvous.blocks.pop(node.id, None)
    node.dismissed = leave
    decision.announce(decision.on.node_unexpected, node)
    decision.say(f"{node.label[0].upper()}{node.label[1:]} leaves: {leave.reason}.")
    decision.touch(node.id)


def on_job_ends(decision: Decision, ends: JobEnds) -> None:
    state = decision.state
    assert state.end is None, f"the job ended twice: {state.end} and {ends.sentence}"
    exit_code = ends.exit_code
    if exit_code is None:
        exit_code = 0 if ends.reason is ExitReason.COMPLETED else EXIT_TRAINING
    state.end_sentence = ends.sentence
    state.end = JobEnd(
        reason=ends.reason,
        exit_code=exit_code,
        message=ends.message,
        first_failure=ends.first,
        num_restarts=state.restarts.num_restarts,
        num_rounds=state.rendezvous.round,
        distinct_failures=ends.distinct_failures,
    )
    state.stage = Stage.STOPPING
    terms = JobTerms() if state.terms is None else state.terms
    state.drains_at = Micros(decision.now + micros(terms.shutdown_timeout + DRAIN_MARGIN))
    state.rendezvous.close()
    decision.say(f"The job ends ({ends.reason.value}): {state.end.message}")
    decision.is_all_touched = True


def advance(decision: Decision) -> bool:
    """The job ends when all have finished, and when the last node has left the master may go, too."""
    state, rdzv = decision.state, decision.state.rendezvous
    if rdzv.world is not None and len(rdzv.finished) == len(rdzv.world.members):
        _end_if_all_finished(decision)
    if state.end is not None and state.stage is Stage.STOPPING and not state.nodes.live:
        state.stage = Stage.STOPPED
        state.drains_at = None
        decision.announce(decision.on.job_finished)
        decision.effects.append(FinishJob(state.end))
    return False
