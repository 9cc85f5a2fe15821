"""
The open round: until when it waits, what holds it, whom it lacks, and which world it becomes.

All of it is read from the rendezvous, which owns the state. `choose_world` decides; the others say when to ask it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from dlrover.core.membership.nodes import REATTACH_WINDOW, Member, World
from dlrover.core.membership.rendezvous import Rendezvous, RoundBlock
from dlrover.core.membership.topology import Placed, arrange
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Limits, Micros, NodeId, NodeRank

_NUM_NAMED = 8
"""So many ranks are named in a sentence; naming a thousand does not help and makes each join cost a thousand."""


def choose_world(rdzv: Rendezvous, limits: Limits, now: Micros, *, limits_version: int = 0) -> tuple[World | None, str]:
    """Decide whether the open round completes, and say why or why not."""
    num_waiting = len(rdzv.waiting)
    label = f"Round {rdzv.round + 1}"
    usable = limits.num_usable(num_waiting)
    if usable < limits.min_nodes:
        unit = f", in multiples of {limits.node_unit}" if limits.node_unit > 1 else ""
        return None, f"{label}: {num_waiting} of at least {limits.min_nodes} nodes wait{unit}."
    if rdzv.is_held:
        return None, f"{label}: {_waiting(num_waiting)}; {why_held(rdzv)}."
    ends_at = call_ends_at(rdzv, limits)
    if ends_at is not None and now < ends_at:
        if rdzv.num_coming:
            return None, f"{label}: {_waiting(num_waiting)}; last call of {limits.last_call:g} s for {coming(rdzv)}."
        return None, (
            f"{label}: {_waiting(num_waiting)}, at most {limits.max_nodes} can start; "
            f"first call of {limits.first_call:g} s for more."
        )
    # Members of the newest world first: they hold its state. Otherwise ranks say who, and the network in which order.
    candidates = sorted(rdzv.waiting.items(), key=lambda item: (item[0] not in rdzv.group_ranks, item[1].node_rank))
    chosen = {joined.node_rank: (node, joined) for node, joined in candidates[:usable]}
    placed = [Placed(rank, joined.place, joined.group) for rank, (_, joined) in chosen.items()]
    members: list[Member] = []
    first_global_rank = 0
    for node_rank in arrange(placed, rdzv.order):
        node, joined = chosen[node_rank]
        members.append(Member(node, joined.node_rank, joined.local_world_size, first_global_rank, joined.offer))
        first_global_rank += joined.local_world_size
    world = World(rdzv.next_round, tuple(members), first_global_rank, limits_version)
    workers = f"{first_global_rank} worker{'' if first_global_rank == 1 else 's'}"
    return world, f"{label} starts: {usable} of {_nodes(num_waiting, 'waiting ')}, {workers}."


def explain_timeout(rdzv: Rendezvous, limits: Limits) -> str:
    """The final sentence of a round that stayed below the minimum for too long."""
    num_waiting = len(rdzv.waiting)
    missing = missing_ranks(rdzv, limits)
    verb = "is" if len(missing) == 1 else "are"
    named = f"{_named(missing[:_NUM_NAMED])} and others" if len(missing) > _NUM_NAMED else _named(missing)
    lack = f"; {named} {verb} missing" if missing else ""
    log = "its log" if len(missing) == 1 else "their logs"
    fewer = limits.num_usable(num_waiting)
    remedy = f"or allow fewer with --nnodes {fewer}:{limits.max_nodes}" if fewer else "and whether they reach us"
    return (
        f"Round {rdzv.next_round}: {num_waiting} of at least {limits.min_nodes} nodes joined within "
        f"{limits.join_timeout:g} s{lack}. See {log}, {remedy}."
    )


def call_ends_at(rdzv: Rendezvous, limits: Limits) -> Micros | None:
    """Until when a round that could start holds the door open; None: there is no node worth waiting for."""
    num_waiting, num_coming = len(rdzv.waiting), rdzv.num_coming
    usable = limits.num_usable(num_waiting)
    if rdzv.opening is None or usable < limits.min_nodes or rdzv.is_held:
        return None
    if limits.num_usable(num_waiting + num_coming) > usable or _is_member_displaced(rdzv, usable):
        return Micros(rdzv.call_began_at + micros(limits.last_call))
    if rdzv.world is None and num_waiting + num_coming < limits.max_nodes:
        return Micros(rdzv.call_began_at + micros(limits.first_call))
    return None


def _is_member_displaced(rdzv: Rendezvous, usable: int) -> bool:
    """Whether starting now would give a member's place to a node with less right while the member is on its way.

    To a stranger: a spare has joined long before, the members are only stopping their workers, and hold the state
    in memory. Or, in a world that shall shrink, to a member of a higher rank.
    """
    coming = [
        member.node_rank
        for node in itertools.chain(rdzv.expected, rdzv.absent)
        if rdzv.world is not None and node in rdzv.group_ranks
        for member in (rdzv.world.members[rdzv.group_ranks[node]],)
    ]
    if not coming:
        return False
    ranks = sorted(joined.node_rank for node, joined in rdzv.waiting.items() if node in rdzv.group_ranks)
    return len(ranks) < usable or min(coming) < ranks[usable - 1]


def gives_up_at(rdzv: Rendezvous, limits: Limits) -> Micros | None:
    if rdzv.opening is None or rdzv.below_min_since is None:
        return None
    return Micros(rdzv.below_min_since + micros(limits.join_timeout))


def too_few_at(rdzv: Rendezvous, limits: Limits) -> Micros | None:
    """When the open round can lead to nothing, because some have finished and the rest is no world; None: it can.

    Not before those who were lost with their stream had a window for telling us that they finished, too. If the
    world itself was lost with a journal, it is unknown which nodes belong to it: then every node has that window.
    """
    if rdzv.opening is None or not rdzv.finished:
        return None
    num_left = len(rdzv.waiting) + rdzv.num_coming + rdzv.num_unattached
    if limits.num_usable(num_left) >= limits.min_nodes:
        return None
    if rdzv.take_up.claims:
        return None  # a world is about to be known again
    if rdzv.world is None:
        return Micros(rdzv.call_began_at + micros(REATTACH_WINDOW))
    return max(rdzv.call_began_at, rdzv.may_return_until)


def are_too_few_left(rdzv: Rendezvous, limits: Limits, now: Micros) -> bool:
    at = too_few_at(rdzv, limits)
    return at is not None and at <= now


def note_shortage(rdzv: Rendezvous, limits: Limits, now: Micros, *, is_excused: bool) -> None:
    """Keep the clock of the join timeout: it runs while the open round is below the minimum."""
    is_enough = limits.num_usable(len(rdzv.waiting)) >= limits.min_nodes
    if rdzv.take_up.claims or is_enough or rdzv.num_pending_launches or is_excused:
        rdzv.below_min_since = None
    elif rdzv.below_min_since is None:
        rdzv.below_min_since = now


def hold_ends_at(rdzv: Rendezvous) -> Micros | None:
    ends = [block.until for block in rdzv.blocks.values()]
    ends += [until for until in (rdzv.order_awaited_until, rdzv.pre_check_until) if until is not None]
    return min(ends, default=None)


def why_held(rdzv: Rendezvous) -> str:
    """For a sentence, while something holds the round."""
    if rdzv.blocks:
        return "; ".join(f"blocked by {block.owner}: {block.reason}" for block in rdzv.blocks.values())
    if rdzv.take_up.claims:
        come, size = len(rdzv.take_up.claims), rdzv.take_up.size
        return (
            f"the world of round {rdzv.take_up.round} runs on and is taken up when all are back, {come} of {size} are"
        )
    if rdzv.pre_check_until is not None:
        return "the pre-check is not over"
    if rdzv.are_members_checked:
        return "members of the last world are being checked"
    return "the order of the nodes is being asked for"


def lift_expired(rdzv: Rendezvous, now: Micros) -> list[RoundBlock]:
    """End the holds whose time is over, and say which blocks ended so."""
    expired = [block for block in rdzv.blocks.values() if block.until <= now]
    rdzv.blocks = {node: block for node, block in rdzv.blocks.items() if block.until > now}
    if rdzv.order_awaited_until is not None and rdzv.order_awaited_until <= now:
        rdzv.order_awaited_until = None
    if rdzv.pre_check_until is not None and rdzv.pre_check_until <= now:
        rdzv.pre_check_until = None
    return expired


def grows_at(rdzv: Rendezvous, limits: Limits) -> Micros | None:
    """When so many nodes are welcome that the healthy world should grow, maybe long ago; None: it should not.

    No node is added once a member has finished: the job is in its last minutes and a restart would undo them. Nor
    while rounds are held: members would stop for a round that cannot complete.
    """
    if rdzv.world is None or rdzv.opening is not None or rdzv.finished or not rdzv.waiting or rdzv.is_held:
        return None
    size = len(rdzv.world.members)
    # A world below a raised minimum trains on until the minimum can be had.
    num_needed = max(limits.node_unit - size % limits.node_unit, limits.min_nodes - size)
    if size + num_needed > limits.max_nodes or num_needed > len(rdzv.waiting):
        return None
    welcome = sorted(rdzv.bystanders.welcome_at(joined.node_rank) for joined in rdzv.waiting.values())
    if rdzv.num_growing and size + len(rdzv.waiting) < limits.max_nodes:
        return max(welcome[num_needed - 1], Micros(rdzv.call_began_at + micros(limits.last_call)))
    return welcome[num_needed - 1]


def reason_to_grow(rdzv: Rendezvous, limits: Limits, now: Micros) -> str | None:
    """Why the next round should open although the world is healthy; None: it should not, or not yet."""
    at = grows_at(rdzv, limits)
    if rdzv.world is None or at is None or at > now:
        return None
    size = len(rdzv.world.members)
    ranks = [joined.node_rank for joined in rdzv.waiting.values()]
    welcome = [rank for rank in ranks if rdzv.bystanders.welcome_at(rank) <= now]
    possible = limits.num_usable(size + len(ranks))
    return f"{_named(welcome)} can join: the world grows from {size} to up to {possible} nodes"


def missing_ranks(rdzv: Rendezvous, limits: Limits) -> list[NodeRank]:
    """Whom the open round lacks: former members, or before any world the lowest ranks. No more than can be named."""
    present = {joined.node_rank: None for joined in rdzv.waiting.values()}
    wanted: Iterable[NodeRank]
    if rdzv.world is not None:
        wanted = (member.node_rank for member in rdzv.world.members if member.node not in rdzv.finished)
    else:
        wanted = (NodeRank(rank) for rank in range(limits.min_nodes))
    return list(itertools.islice((rank for rank in wanted if rank not in present), _NUM_NAMED + 1))


def coming(rdzv: Rendezvous) -> str:
    """Those nodes in words."""
    if rdzv.num_coming > _NUM_NAMED:
        return _nodes(rdzv.num_coming)
    return _named([*rdzv.expected.values(), *(joined.node_rank for joined in rdzv.absent.values())])


def is_too_large(rdzv: Rendezvous, limits: Limits) -> bool:
    """Whether the members run in a world that the limits do not allow any more."""
    return rdzv.world is not None and rdzv.opening is None and len(rdzv.world.members) > limits.max_nodes


def is_all_finished(rdzv: Rendezvous) -> bool:
    return rdzv.world is not None and len(rdzv.finished) == len(rdzv.world.members)


def place_of(rdzv: Rendezvous, node: NodeId) -> tuple[int, int]:
    """Group rank and number of workers in the newest world; (-1, 0): it is not a member."""
    if rdzv.world is None or not rdzv.is_member(node):
        return -1, 0
    group_rank = rdzv.group_ranks[node]
    return group_rank, rdzv.world.members[group_rank].local_world_size


def has_spare(rdzv: Rendezvous) -> bool:
    """Whether a node outside the newest world waits, warm. Asked in each turn while a node is missed: not with a loop of our own."""
    return rdzv.world is not None and not rdzv.waiting.keys() <= rdzv.group_ranks.keys()


def outsiders(rdzv: Rendezvous) -> list[NodeId]:
    """Who has joined and is no member of the newest world, by rank."""
    joined = itertools.chain(rdzv.waiting.items(), rdzv.absent.items())
    return [
        node
        for node, _ in sorted(joined, key=lambda item: item[1].node_rank)
        if rdzv.world is not None and node not in rdzv.group_ranks
    ]


def is_offer_used(rdzv: Rendezvous, node: NodeId, offer: str) -> bool:
    if offer in rdzv.used_offers:
        return True
    group_rank = rdzv.group_ranks.get(node)
    return rdzv.world is not None and group_rank is not None and rdzv.world.members[group_rank].offer == offer


def _nodes(count: int, kind: str = "") -> str:
    return f"{count} {kind}node{'' if count == 1 else 's'}"


def _waiting(count: int) -> str:
    return "1 node waits" if count == 1 else f"{count} nodes wait"


def _named(node_ranks: Iterable[NodeRank]) -> str:
    ranks = list(node_ranks)
    if len(ranks) > _NUM_NAMED:
        return f"{len(ranks)} nodes"
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"node rank{'' if len(ranks) == 1 else 's'} {listed}"
