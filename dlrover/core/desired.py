"""
What a live node shall be doing, as a function of the state.

A node that may have got another wish is only marked; at the end of a command all marked nodes are looked at once, and those whose wish did
change are told.
"""

from __future__ import annotations

from dlrover.core.decision import Decision
from dlrover.core.membership.nodes import Node
from dlrover.core.state import JobState
from dlrover.protocol.messages.job import Desired, End, Idle, Join, NodeId, Round, Run, StopCause, TellNode, Wait, Wish


def wish_of(state: JobState, node: Node) -> Wish:
    """What a live node shall be doing."""
    rdzv = state.rendezvous
    if state.end is not None:
        return End(state.end)
    if node.dismissed is not None:
        return node.dismissed
    if state.cluster is not None:
        return state.cluster.wish_of(node.id)
    if node.finished_round:
        return Idle(f"your workers finished in round {node.finished_round}; others still work")
    if node.id in state.check.needed:
        is_called_back = rdzv.opening is not None and rdzv.is_member(node.id)
        return state.check.wish_of(node, rdzv.opening if is_called_back else None)
    if node.id in rdzv.take_up.claims:
        return Run(rdzv.take_up.claims[node.id].world)
    if node.id in rdzv.waiting or node.id in rdzv.absent:
        return Wait("you have joined; a round will start with you when there is room")
    opening, is_member = rdzv.opening, node.id in rdzv.group_ranks and node.id not in rdzv.lost
    if is_member and opening is None and rdzv.world is not None:
        return Run(rdzv.spec(node.id))
    next_round, note = Round(rdzv.round + 1), state.check.note_on(node) if node.rank in state.check.results else ""
    if is_member and opening is not None:
        return Join(next_round, opening.cause, opening.reason, note)
    return Join(next_round, StopCause.MEMBERSHIP, f"round {next_round} is the next to form", note)


def tell_nodes(decision: Decision) -> list[NodeId]:
    """Give new wishes to the touched nodes, and have those told whose wish is another one than before. Gives the touched ones."""
    state, live = decision.state, decision.state.nodes.live
    touched = sorted(live if decision.is_all_touched else decision.touched)
    for id_ in touched:
        node = live.get(id_)
        if node is None:
            continue
        wish = wish_of(state, node)
        if wish != node.desired.wish or node.desired.master_epoch != state.master_epoch or not node.desired.number:
            node.desired = Desired(node.desired.number + 1, state.master_epoch, wish)
            decision.effects.append(TellNode(node.id))
    return touched
