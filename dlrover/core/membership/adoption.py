"""
A world from before our time: the journal was lost, and nodes come whose workers run.

Each node claims its place. When all of them are back the world goes on, and no worker restarts; when one cannot come, or they contradict each
other, a new round forms.
"""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.core.decision import Decision
from dlrover.core.happenings import AllFinished
from dlrover.core.membership.claims import TakeUp, WorldClaim, is_sane
from dlrover.core.membership.forming import is_all_finished
from dlrover.core.membership.nodes import Member, World, reattach_window
from dlrover.core.membership.rendezvous import NUM_USED_OFFERS, Rendezvous
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Attach, ExitReason, Micros, NodeId, NodeRank, Round


def hear_claim(decision: Decision, command: Attach, rank: NodeRank) -> WorldClaim | None:
    """A node that is about to be admitted runs workers of a world that we know nothing of: our journal was lost.

    None: it does not, or what it says cannot count.
    """
    rdzv, world = decision.state.rendezvous, command.world
    if decision.state.end is not None or rdzv.world is not None:
        return None
    if command.running_round > rdzv.round:
        if rdzv.take_up.claims:
            give_up_claims(decision, f"{command.host} ran in round {command.running_round}")
        # Rounds of a life whose journal was lost must not be numbered again: their stores may still answer.
        rdzv.round = command.running_round
        decision.is_all_touched = True
    is_possible = world is not None and is_sane(world, command.running_round) and world.round == rdzv.round
    is_newest_life = command.incarnation > decision.state.nodes.incarnations.get(rank, 0)
    if world is None or not is_possible or not is_newest_life or rdzv.take_up.is_over:
        return None
    if rdzv.take_up.contradicts(world):
        give_up_claims(decision, f"what {command.host} says of round {world.round} contradicts the others")
        return None
    if not rdzv.take_up.claims:
        rdzv.take_up.until = Micros(decision.now + micros(reattach_window(decision.state.detection)))
    return WorldClaim(rank, world)


def give_up_claims(decision: Decision, why: str) -> None:
    """The world from before our time cannot be taken up: a new round forms."""
    rdzv = decision.state.rendezvous
    # Its number, also if the only one who claimed it is lost by now: no round has completed since.
    decision.say(f"The world of round {rdzv.round} cannot be taken up again: {why}. A new round forms.")
    for node in _drop_claims(rdzv, decision.now):
        decision.touch(node)
        decision.announce(decision.on.node_expected, decision.state.nodes.live[node])


def settle_claims(decision: Decision) -> bool:
    """The claimed world goes on if all are back, or is given up if its time is over. Whether all have been back."""
    taken = decision.state.rendezvous.take_up
    if not taken.claims:
        return False
    if taken.in_order() is not None:
        _take_up(decision)
        return True
    if taken.until <= decision.now:
        give_up_claims(decision, f"only {len(taken.claims)} of its {taken.size} nodes came back in time")
    return False


def _take_up(decision: Decision) -> None:
    """All members of the claimed world are back: it goes on, and no worker restarts."""
    state, rdzv = decision.state, decision.state.rendezvous
    claimed = rdzv.take_up.in_order()
    assert claimed is not None, "nothing to take up"
    assert state.terms is not None, "a claim without a node"
    first, size = claimed[0][1].world, len(claimed)
    if size % state.terms.limits.node_unit:
        give_up_claims(decision, f"{size} nodes are no multiple of --node-unit {state.terms.limits.node_unit}")
        return
    limits = state.terms.limits
    if not state.limits_version and not limits.min_nodes <= size <= limits.max_nodes:
        # It did run, so the job had been scaled; nobody has told us yet what it shall be.
        limits = replace(limits, min_nodes=min(limits.min_nodes, size), max_nodes=max(limits.max_nodes, size))
        state.terms = replace(state.terms, limits=limits)
        state.limits_version += 1
    members = tuple(
        Member(
            node,
            claim.node_rank,
            claim.world.local_world_size,
            claim.world.first_global_rank,
            # What the others had offered nobody knows any more, and nobody needs.
            first.coordinator if not claim.world.group_rank else "",
        )
        for node, claim in claimed
    )
    limits_version = state.limits_version if size >= limits.min_nodes else 0  # it began under lower limits
    decision.announce(decision.on.world_taken_up, size)
    _adopt(
        rdzv, World(first.round, members, first.world_size, limits_version), decision.now, first.job_age, first.turns
    )
    rdzv.verdict = (
        f"Round {rdzv.round} goes on: the journal was lost, all {size} nodes of its world are back, and no worker "
        "restarts."
    )
    decision.say(rdzv.verdict)
    state.enter_running()
    for member in members:
        if (node := state.nodes.live.get(member.node)) is not None:
            node.entered_at = decision.now
        decision.touch(member.node)
    if is_all_finished(rdzv):
        finished = AllFinished()
        decision.announce(decision.on.all_finished, finished)
        if not finished.is_work_left:
            decision.end_job(ExitReason.COMPLETED, "The workers of all nodes ended well.")


def _adopt(
    rdzv: Rendezvous, world: World, now: Micros, job_age: float = 0.0, turns: tuple[tuple[Round, int], ...] = ()
) -> None:
    """The world that its members claimed is ours from now on; it began before we did, at that age of the job."""
    assert rdzv.world is None, f"round {rdzv.round} has a world already"
    rdzv.began_at = Micros(now - micros(job_age))
    rdzv.turns = turns
    rdzv.round = world.round
    rdzv.world = world
    rdzv.completed_at = now
    rdzv.group_ranks = {member.node: group_rank for group_rank, member in enumerate(world.members)}
    rdzv.finished = {node: rank for node, rank in rdzv.finished.items() if node in rdzv.group_ranks}
    rdzv.pre_check_until = None
    rdzv.opening = None
    rdzv.below_min_since = None
    rdzv.take_up = TakeUp(is_over=True)
    rdzv.used_offers = [*rdzv.used_offers, world.coordinator][-NUM_USED_OFFERS:]


def _drop_claims(rdzv: Rendezvous, now: Micros) -> list[NodeId]:
    """The world that was claimed cannot be had any more: the nodes that run in it shall join the open round."""
    nodes = [node for node in rdzv.take_up.claims if node not in rdzv.finished]
    claims, rdzv.take_up = rdzv.take_up.claims, TakeUp(is_over=True)
    for node in nodes:
        rdzv.expect(node, claims[node].node_rank)
    rdzv.call_began_at = now
    return nodes
