"""
Taking a running world up again when the journal that knew it was lost.

Agents train on without a master and tell a new one which world they are in. The claims of its members, put together,
are the world: when all of them have come and do not contradict each other, the job goes on as if nothing had happened
and no worker restarts. One that is missing or says something else makes the world unknowable; then a new round forms, as
it would after any loss.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.messages.job import Micros, NodeId, NodeRank, Round, WorldSpec

_MOST = 65_536
"""Nodes of a world, and workers of a node: beyond is rubbish."""
_OLDEST = 1e9
"""Seconds: no job is older."""
_MOST_TURNS = 1024


class WorldClaim(Struct, frozen=True):
    """A node says that it runs workers in this world, at this place."""

    node_rank: NodeRank
    world: WorldSpec


class TakeUp(Struct):
    """The claims so far."""

    claims: dict[NodeId, WorldClaim] = {}
    """Of one world only. Changed by `add` and `drop`."""
    places: dict[int, NodeId] = {}
    """Group rank to who claims it."""
    until: Micros = Micros(0)
    """When the claims are given up if a node is still missing."""
    is_over: bool = False
    """It was tried and led to nothing: a node that comes later joins like any other."""

    @property
    def round(self) -> Round:
        """Of the claimed world; 0: no node claims any."""
        return next((claim.world.round for claim in self.claims.values()), Round(0))

    @property
    def size(self) -> int:
        """How many nodes the claimed world has."""
        return next((claim.world.group_world_size for claim in self.claims.values()), 0)

    def add(self, node: NodeId, claim: WorldClaim) -> None:
        """One that contradicts none of the others."""
        self.claims[node] = claim
        self.places[claim.world.group_rank] = node

    def drop(self, node: NodeId) -> None:
        claim = self.claims.pop(node, None)
        if claim is not None:
            del self.places[claim.world.group_rank]

    def contradicts(self, world: WorldSpec) -> bool:
        """Whether this claim and an earlier one cannot both be true. Those agree with each other, so one is enough."""
        first = next(iter(self.claims.values()), None)
        return first is not None and (_common(first.world) != _common(world) or world.group_rank in self.places)

    def in_order(self) -> list[tuple[NodeId, WorldClaim]] | None:
        """All members by group rank; None while some are missing, or if their places do not fit together."""
        if not self.claims or len(self.claims) != self.size:
            return None
        members = sorted(self.claims.items(), key=lambda item: item[1].world.group_rank)
        first_global_rank = 0
        for _, claim in members:
            if claim.world.first_global_rank != first_global_rank:
                return None
            first_global_rank += claim.world.local_world_size
        return members if first_global_rank == members[0][1].world.world_size else None


def is_sane(world: WorldSpec, running_round: Round) -> bool:
    """Whether a claim makes sense by itself. One that does not is ignored: the node joins like any other."""
    return (
        world.round == running_round >= 1
        and 0 <= world.group_rank < world.group_world_size <= _MOST
        and 1 <= world.local_world_size <= _MOST
        and 0 <= world.first_global_rank <= world.world_size - world.local_world_size
        and world.world_size <= _MOST * _MOST
        and world.coordinator != ""
        and 0 <= world.job_age <= _OLDEST
        and len(world.turns) <= _MOST_TURNS
    )


def _common(world: WorldSpec) -> tuple[int, int, int, str]:
    """What all members of a world say alike."""
    return world.round, world.group_world_size, world.world_size, world.coordinator
