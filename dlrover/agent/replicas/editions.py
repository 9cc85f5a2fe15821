"""
Which save can be put together again from what the nodes of a round hold, and which of its shards a node needs.

All shards of one save carry the same attempt, which is never used again: an edition is what bears it. Steps would not do, because training may go
back and reach the same step a second time.

Everything here is a function of what was told. All nodes that were told the same choose the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from dlrover.protocol.messages.peers import HeldList, HeldParity

Rows = tuple[tuple[str, HeldParity], ...]
"""Of one stripe: address and parity, by row."""


class Edition(Struct, frozen=True, kw_only=True):
    attempt: str
    step: int
    round: int
    num_shards: int
    holders: dict[int, tuple[str, ...]]
    """By shard: addresses of those that have it whole, first those that saved it themselves."""
    parity: tuple[tuple[str, HeldParity], ...] = ()

    def obtainable(self) -> set[int]:
        """Shards that a node has, or that can be computed from what nodes have."""
        return set(self.holders) | {shard for shard in range(self.num_shards) if self.is_computable(shard)}

    def is_computable(self, shard: int) -> bool:
        return bool(self.stripes_of(shard))

    def stripes_of(self, shard: int) -> list[Rows]:
        """Parities from which the shard can be computed: for each stripe that it is in. Empty: there are not enough."""
        by_round: dict[int, dict[int, dict[int, tuple[str, HeldParity]]]] = {}
        for address, held in self.parity:
            if any(shard == column for column, _ in held.columns):
                by_round.setdefault(held.made_in, {}).setdefault(held.stripe, {})[held.row] = (address, held)
        for made_in in sorted(by_round, reverse=True):
            stripes = [tuple(rows[row] for row in sorted(rows)) for rows in by_round[made_in].values()]
            if self._is_enough(stripes):
                return stripes
        return []

    def missing(self, rows: Rows) -> list[int]:
        """Columns of a stripe that no node has."""
        columns = rows[0][1].columns
        return [number for number, (shard, _) in enumerate(columns) if shard not in self.holders]

    def _is_enough(self, stripes: list[Rows]) -> bool:
        """All pieces of the shard are there, and no stripe lacks more columns than it has parities."""
        num_data = stripes[0][0][1].num_data
        return len(stripes) == num_data and all(len(self.missing(rows)) <= len(rows) for rows in stripes)


def editions(told: Mapping[str, HeldList]) -> list[Edition]:
    """All that any node holds a part of, by address; the newest first: that of the latest round, and in it of the latest step."""
    shards: dict[str, dict[int, list[tuple[bool, str]]]] = {}
    about: dict[str, tuple[int, int, int]] = {}
    parity: dict[str, list[tuple[str, HeldParity]]] = {}
    for address in sorted(told):
        for item in told[address].items:
            about.setdefault(item.attempt, (item.round, item.step, item.num_shards))
            shards.setdefault(item.attempt, {}).setdefault(item.shard, []).append((item.is_copy, address))
        for held in told[address].parity:
            about.setdefault(held.attempt, (held.round, held.step, held.num_shards))
            parity.setdefault(held.attempt, []).append((address, held))
    found = [
        Edition(
            attempt=attempt,
            step=step,
            round=round_,
            num_shards=num_shards,
            holders={
                shard: tuple(address for _, address in sorted(holders))
                for shard, holders in shards.get(attempt, {}).items()
            },
            parity=tuple(parity.get(attempt, ())),
        )
        for attempt, (round_, step, num_shards) in about.items()
    ]
    return sorted(found, key=lambda each: (each.round, each.step, each.attempt), reverse=True)


def complete(
    all_: Iterable[Edition], *, is_everybody_heard: bool, needed: Mapping[int, tuple[int, ...]]
) -> list[Edition]:
    """
    Those that every rank can have. In a job too large for asking every node, those of which this node's own shards are there.

    `needed`: by number of shards, those of this node.
    """
    return [
        each
        for each in all_
        if (set(range(each.num_shards)) if is_everybody_heard else set(needed[each.num_shards])) <= each.obtainable()
    ]


def shards_of_node(num_shards: int, group_rank: int, group_world_size: int) -> tuple[int, ...]:
    """
    Which shards the workers of a node go on with: an equal part in the order of the nodes; where there are more nodes than shards, they
    begin again from the first. Empty when neither divides: then the state has to be cut anew, and whole shards do not help.
    """
    if num_shards % group_world_size == 0:
        per_node = num_shards // group_world_size
        return tuple(range(group_rank * per_node, (group_rank + 1) * per_node))
    if group_world_size % num_shards == 0 or num_shards == 1:
        return (group_rank % num_shards,)
    return ()
