"""
A world from before our time: the journal was lost, and nodes come whose workers run.

Each node claims its place. When all of them are back the world goes on, and nobody restarts; when one cannot come, or they contradict each
other, a new round forms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover.core.check import commands as check_commands
from dlrover.core.fleet import reconcile
from dlrover.core.membership.claims import WorldClaim, is_sane
from dlrover.core.membership.nodes import reattach_window
from dlrover.core.membership.rendezvous import Member, World
from dlrover.core.outcome import micros
from dlrover.protocol.messages.job import Attach, ExitReason, Micros, NodeRank

if TYPE_CHECKING:
    from dlrover.core.decision import Course


def hear_claim(course: Course, command: Attach, rank: NodeRank) -> WorldClaim | None:
    """A node that is about to be admitted runs workers of a world that we know nothing of: our journal was lost.

    None: it does not, or what it says cannot count.
    """
    rdzv, world = course.state.rendezvous, command.world
    if course.state.end is not None or rdzv.world is not None:
        return None
    if command.running_round > rdzv.round:
        if rdzv.take_up.claims:
            give_up_claims(course, f"{command.host} ran in round {command.running_round}")
        # Rounds of a life whose journal was lost must not be numbered again: their stores may still answer.
        rdzv.round = command.running_round
        course.touch_all()
    is_possible = world is not None and is_sane(world, command.running_round) and world.round == rdzv.round
    is_newest_life = command.incarnation > course.state.nodes.incarnations.get(rank, 0)
    if world is None or not is_possible or not is_newest_life or rdzv.take_up.is_over:
        return None
    if rdzv.take_up.contradicts(world):
        give_up_claims(course, f"what {command.host} says of round {world.round} contradicts the others")
        return None
    if not rdzv.take_up.claims:
        rdzv.take_up.until = Micros(course.now + micros(reattach_window(course.detection)))
    return WorldClaim(rank, world)


def give_up_claims(course: Course, why: str) -> None:
    """The world from before our time cannot be taken up: a new round forms."""
    rdzv = course.state.rendezvous
    # Its number, also if the only one who claimed it is lost by now: no round has completed since.
    course.say(f"The world of round {rdzv.round} cannot be taken up again: {why}. A new round forms.")
    for node in rdzv.give_up_claims(course.now):
        course.touch(node)
        check_commands.expect(course, course.state.nodes.live[node])


def take_up(course: Course) -> None:
    """All members of the claimed world are back: it goes on, and nobody restarts."""
    state, rdzv = course.state, course.state.rendezvous
    claimed = rdzv.take_up.in_order()
    assert claimed is not None, "nothing to take up"
    assert state.terms is not None, "a claim without a node"
    first, size = claimed[0][1].world, len(claimed)
    if size % state.terms.limits.node_unit:
        give_up_claims(course, f"{size} nodes are no multiple of --node-unit {state.terms.limits.node_unit}")
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
    rdzv.adopt(World(first.round, members, first.world_size, limits_version), course.now, first.job_age, first.turns)
    rdzv.verdict = (
        f"Round {rdzv.round} goes on: the journal was lost, all {size} nodes of its world are back, and no worker "
        "restarts."
    )
    course.say(rdzv.verdict)
    course.enter_running()
    for member in members:
        if (node := state.nodes.live.get(member.node)) is not None:
            node.entered_at = course.now
        course.touch(member.node)
    if rdzv.is_all_finished() and not reconcile.is_work_left_beside(state):
        course.end_job(ExitReason.COMPLETED, "The workers of all nodes ended well.")
