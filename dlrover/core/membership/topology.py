"""
The order of nodes in a world: neighbours in the network become neighbours in rank.

Collectives talk to the next rank, so nodes below one switch should stand together. Switches are given outermost first;
the switch of the lowest rank comes first, the others in the order in which they first appear, and below each the same
rule holds for the next level. Scheduling groups (racks) are kept whole even if they are cabled across switches: a user
who asked for a group relies on it.

The lowest rank is always the first, so the workers of node rank 0 keep the first global ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from dlrover.protocol.messages.job import NodeRank

T = TypeVar("T")


class Placed(Struct, frozen=True):
    """A node, as far as its place matters."""

    node_rank: NodeRank
    place: tuple[str, ...] = ()
    """Outermost switch first. Empty: not known."""
    group: int = -1
    """Scheduling group; -1: none."""


def arrange(nodes: Sequence[Placed], wanted: Sequence[NodeRank] = ()) -> list[NodeRank]:
    """The node ranks in the order of the world. `wanted` is a sorter's word; who is not in it comes after, by our rule."""
    by_place = _by_place(sorted(nodes, key=lambda node: node.node_rank))
    position = {rank: index for index, rank in reversed(list(enumerate(wanted)))}
    # Sorting is stable: those whom the sorter did not name keep our order among themselves.
    return [node.node_rank for node in sorted(by_place, key=lambda node: position.get(node.node_rank, len(wanted)))]


def _by_place(nodes: list[Placed]) -> list[Placed]:
    groups: dict[tuple[int, int], list[Placed]] = {}
    for node in nodes:
        key = (node.group, -1) if node.group >= 0 else (-1, node.node_rank)
        groups.setdefault(key, []).append(node)
    blocks = _nested(list(groups.values()), lambda block: block[0].place, 0)
    return [node for block in blocks for node in _nested(block, lambda node: node.place, 0)]


def _nested(items: list[T], place_of: Callable[[T], tuple[str, ...]], depth: int) -> list[T]:
    """Items of one switch together, in the order of first appearance, and below it by the next level."""
    if len(items) <= 1 or all(len(place_of(item)) <= depth for item in items):
        return items
    switches: dict[str, list[T]] = {}
    for item in items:
        place = place_of(item)
        switches.setdefault(place[depth] if depth < len(place) else "", []).append(item)
    return [item for below in switches.values() for item in _nested(below, place_of, depth + 1)]
