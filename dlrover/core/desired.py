"""
What a live node shall be doing, as a function of the state.
"""

from __future__ import annotations

from dlrover.core.check import commands as check_commands
from dlrover.core.membership.nodes import Node
from dlrover.core.state import JobState
from dlrover.protocol.messages.job import End, Idle, Join, Run, StopCause, Wait, Wish


def wish_of(state: JobState, node: Node) -> Wish:
    """What a live node shall be doing."""
    rdzv = state.rendezvous
    if state.end is not None:
        return End(state.end)
    if node.dismissed is not None:
        return node.dismissed
    if node.finished_round:
        return Idle(f"your workers finished in round {node.finished_round}; others still work")
    if node.id in state.check.needed:
        return check_commands.wish_of(state, node)
    if node.id in rdzv.take_up.claims:
        return Run(rdzv.take_up.claims[node.id].world)
    if node.id in rdzv.waiting or node.id in rdzv.absent:
        return Wait("you have joined; a round will start with you when there is room")
    if rdzv.is_active and rdzv.is_member(node.id):
        return Run(rdzv.spec(node.id))
    if rdzv.opening is not None and rdzv.is_member(node.id):
        return Join(rdzv.next_round, rdzv.opening.cause, rdzv.opening.reason, check_commands.note_on(state, node))
    reason = f"round {rdzv.next_round} is the next to form"
    return Join(rdzv.next_round, StopCause.MEMBERSHIP, reason, check_commands.note_on(state, node))


def is_running(state: JobState, node: Node) -> bool:
    """Whether the node shall run workers of the active world right now."""
    rdzv = state.rendezvous
    return state.end is None and rdzv.is_active and rdzv.is_member(node.id) and not node.finished_round
