"""
Who is tested with whom in one phase of the node check.

Pure groupings: each takes node ranks and returns groups of them, each rank in exactly one. When to use which, and what a
failed group means, is decided in `check_cycle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dlrover.protocol.messages.job import NodeRank

Group = tuple[NodeRank, ...]
Groups = tuple[Group, ...]
SchedulingGroup = str | None
"""Name of a rack or a switch domain. All nodes without one count as one more."""


def neighbours(ranks: Iterable[NodeRank]) -> Groups:
    """Consecutive pairs; an odd last one joins the last pair."""
    ordered = list(ranks)
    pairs = [ordered[start : start + 2] for start in range(0, len(ordered), 2)]
    return _with_odd_one(pairs)


def extremes(ranks: Sequence[NodeRank]) -> Groups:
    """`ranks` run from the fastest to the slowest: first with last, moving inwards; an odd middle joins the last pair."""
    half = len(ranks) // 2
    pairs = [[ranks[place], ranks[-1 - place]] for place in range(half)]
    if len(ranks) % 2:
        pairs.append([ranks[half]])
    return _with_odd_one(pairs)


def alone(ranks: Iterable[NodeRank]) -> Groups:
    """Each for itself: shows what is wrong without any other node's help."""
    return tuple((rank,) for rank in ranks)


def together(ranks: Iterable[NodeRank]) -> Groups:
    """One group of all, for the performance test."""
    everybody = tuple(ranks)
    return (everybody,) if everybody else ()


def by_scheduling_group(
    ranks: Iterable[NodeRank], scheduling: Mapping[NodeRank, SchedulingGroup]
) -> list[list[NodeRank]]:
    """The ranks of each scheduling group, in the order of the first that is met."""
    parts: dict[SchedulingGroup, list[NodeRank]] = {}
    for rank in ranks:
        parts.setdefault(scheduling.get(rank), []).append(rank)
    return list(parts.values())


def inside(parts: Iterable[Sequence[NodeRank]], pair: Callable[[Sequence[NodeRank]], Groups]) -> Groups:
    """Each scheduling group by itself: no node is ever tested with a stranger, and an odd one has a partner if there is one."""
    return tuple(group for part in parts for group in pair(part))


def across(parts: Sequence[Sequence[NodeRank]]) -> Groups:
    """
    The same position of every scheduling group together.

    The longest group's tail has no counterpart. Those nodes join groups that exist, from the last backwards and one
    each, so that no group grows large and no node is tested alone.
    """
    length = max((len(part) for part in parts), default=0)
    positions = [[part[place] for part in parts if place < len(part)] for place in range(length)]
    groups = [group for group in positions if len(group) > 1]
    single = [group[0] for group in positions if len(group) == 1]
    if not groups:
        return alone(single)
    for number, rank in enumerate(single):
        groups[-1 - number % len(groups)].append(rank)
    return tuple(tuple(group) for group in groups)


def across_rotated(parts: Sequence[Sequence[NodeRank]]) -> Groups:
    """As `across`, each group shifted by its index: who met in `across` is apart here, as far as the lengths allow."""
    if all(len(part) == 1 for part in parts):
        return extremes([part[0] for part in parts])  # shifting would give the same single group again
    rotated = []
    for index, part in enumerate(parts):
        shift = index % len(part)
        rotated.append([*part[shift:], *part[:shift]])
    return across(rotated)


class Confirmation(NamedTuple):
    """A grouping made to settle doubts."""

    groups: Groups
    """Of the doubtful and the references."""
    num_served: int
    """How many of the doubtful can be settled by it; 0: it would teach nothing."""


def confirmation(
    doubtful: Sequence[NodeRank],
    references: Sequence[NodeRank],
    *,
    has_met: Callable[[NodeRank, NodeRank], bool],
    prefers: Callable[[NodeRank, NodeRank], bool],
    may_pair_up: Callable[[NodeRank], bool],
) -> Confirmation:
    """
    Each doubtful node with a reference, a node that is known to be good; best ones first, new acquaintances before old.

    Doubtful nodes for which no reference is left pair up with each other where `may_pair_up` says that this can teach
    something: two that pass together are both good. A node that is not needed has nothing to prove and runs alone.
    """
    groups: list[Group] = []
    free = list(references)
    without: list[NodeRank] = []
    num_served = 0
    for rank in doubtful:
        partner = _choose(rank, free, has_met, prefers)
        if partner is None:
            without.append(rank)
        else:
            free.remove(partner)
            groups.append((partner, rank))
            num_served += 1
    waiting = [rank for rank in without if may_pair_up(rank)]
    idle = [rank for rank in without if not may_pair_up(rank)]
    while waiting:
        rank = waiting.pop(0)
        partner = next((other for other in waiting if not has_met(rank, other)), None)
        if partner is None:
            idle.append(rank)
        else:
            waiting.remove(partner)
            groups.append((rank, partner))
            num_served += 2
    groups.extend(alone([*idle, *free]))
    return Confirmation(tuple(groups), num_served)


def _choose(
    rank: NodeRank,
    free: Sequence[NodeRank],
    has_met: Callable[[NodeRank, NodeRank], bool],
    prefers: Callable[[NodeRank, NodeRank], bool],
) -> NodeRank | None:
    acquaintance = stranger = None
    for other in free:
        if has_met(rank, other):
            acquaintance = other if acquaintance is None else acquaintance
        elif prefers(rank, other):
            return other
        else:
            stranger = other if stranger is None else stranger
    return acquaintance if stranger is None else stranger


def _with_odd_one(pairs: list[list[NodeRank]]) -> Groups:
    if len(pairs) > 1 and len(pairs[-1]) == 1:
        pairs[-2].extend(pairs.pop())
    return tuple(tuple(pair) for pair in pairs)
