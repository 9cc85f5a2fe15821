"""
Who keeps whose copy: never the same host while there is another, and another rack or switch while there is one.

Nodes are put in a line so that those that may fail together stand together. The copy of each node goes a fixed distance down that line,
which closes to a ring. A distance of at least the largest domain leads out of every domain, if no domain has more than half of the nodes;
and because it is the same for all, every node keeps exactly as much as it gives. If even a host has more than half of the nodes there is no such
distance, and each node looks for itself; some keep more than others then.

Parity groups are cut from the same line by dealing it out like cards, so that neighbours come into different groups.

The plan belongs to a world: each round makes it anew from the nodes it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from msgspec import Struct


class Spot(Struct, frozen=True):
    """A node, as far as it matters who fails with whom."""

    host: str
    place: tuple[str, ...] = ()
    """Switches above it, outermost first. Empty: not known."""
    group: int = -1
    """Rack; -1: none."""

    @property
    def domains(self) -> tuple[tuple[str, ...], ...]:
        """What it may fail with, the widest first."""
        rack = (f"rack {self.group}",) if self.group >= 0 else ()
        above = (*self.place, *rack)
        levels = [above[:depth] for depth in range(1, len(above) + 1)]
        return (*levels, (*above, f"host {self.host}"))


def place_copies(spots: Sequence[Spot], copies: int) -> tuple[tuple[int, ...], ...]:
    """For each position its keepers, the most valuable first; fewer than `copies` where there are not so many other nodes."""
    count = len(spots)
    wanted = min(max(copies, 0), count - 1)
    if wanted <= 0:
        return ((),) * count
    spots = _one_place_per_host(spots)
    line = _line(spots)
    distance = _safe_distance([spots[index] for index in line])
    if distance is None:
        return _each_for_itself(spots, wanted)
    steps = _steps(count, distance, wanted)
    keepers: list[tuple[int, ...]] = [()] * count
    for position, index in enumerate(line):
        keepers[index] = tuple(line[(position + step) % count] for step in steps)
    return tuple(keepers)


def place_groups(spots: Sequence[Spot], num_data: int, num_parity: int) -> tuple[tuple[int, ...], ...]:
    """
    Groups of `num_data + num_parity` nodes whose members share as few hosts as possible.

    A number of nodes that does not divide gives some larger groups (their parity costs less memory and protects from as many
    losses); with fewer nodes than one group needs there is none.
    """
    size = num_data + num_parity
    count = len(spots)
    if num_data < 1 or num_parity < 1 or count < size:
        return ()
    num_groups = count // size
    hands: list[list[int]] = [[] for _ in range(num_groups)]
    for position, index in enumerate(_line(_one_place_per_host(spots))):
        hands[position % num_groups].append(index)
    return tuple(tuple(sorted(hand)) for hand in hands)


def _one_place_per_host(spots: Sequence[Spot]) -> list[Spot]:
    """Whatever its nodes say, a host is in one place: what the first of them says."""
    known: dict[str, Spot] = {}
    return [known.setdefault(spot.host, spot) for spot in spots]


def _line(spots: Sequence[Spot]) -> list[int]:
    """Positions with those of one domain next to each other, domains in the order of their first member."""
    first: dict[tuple[str, ...], int] = {}
    for index, spot in enumerate(spots):
        for domain in spot.domains:
            first.setdefault(domain, index)
    return sorted(range(len(spots)), key=lambda index: (*(first[domain] for domain in spots[index].domains), index))


def _safe_distance(line: Sequence[Spot]) -> int | None:
    """How far away no node of the same domain is, for the widest domains that allow it. None: not even for hosts."""
    deepest = max(len(spot.domains) for spot in line)
    for depth in range(deepest):
        sizes: dict[tuple[str, ...], int] = {}
        for spot in line:
            domain = spot.domains[min(depth, len(spot.domains) - 1)]
            sizes[domain] = sizes.get(domain, 0) + 1
        largest = max(sizes.values())
        if 2 * largest <= len(line):
            return largest
    return None


def _steps(count: int, distance: int, wanted: int) -> list[int]:
    """Distances of the copies: multiples of the safe one, then others that lead out of the own domain, then the rest."""
    far = range(distance, count - distance + 1)
    apart = (step for step in far if step % distance == 0)
    close = (step for step in far if step % distance)
    inside = (step for step in range(1, count) if not distance <= step <= count - distance)
    return list(itertools.islice(itertools.chain(apart, close, inside), wanted))


def _each_for_itself(spots: Sequence[Spot], wanted: int) -> tuple[tuple[int, ...], ...]:
    """Most nodes share one host: a copy on another host still goes first, wherever there is room."""
    count = len(spots)
    load = [0] * count
    keepers = []
    for index, spot in enumerate(spots):
        others = [other for other in range(count) if other != index]
        others.sort(key=lambda other: (_shared(spot, spots[other]), load[other], (other - index) % count))
        chosen = tuple(others[:wanted])
        for other in chosen:
            load[other] += 1
        keepers.append(chosen)
    return tuple(keepers)


def _shared(one: Spot, other: Spot) -> int:
    """How much of their surroundings two nodes have in common; sharing a host counts most."""
    if one.host == other.host:
        return 1000
    return sum(1 for mine, theirs in zip(one.domains, other.domains, strict=False) if mine == theirs)
