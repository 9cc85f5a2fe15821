"""
Which nodes have to do with each other's snapshots: the answer to `AskPeers`.

A plan depends on nothing but the world and the wish, so it is made once per round and then looked up: with ten thousand nodes ten
thousand of them ask. It is no state: another master makes the same one from the same world.
"""

from __future__ import annotations

from dlrover.core.checkpoints.placement import Spot, place_copies, place_groups
from dlrover.core.membership.nodes import Node, World
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.identity import NodeId
from dlrover.protocol.messages.peers import LARGEST_GROUP, MOST_COPIES, MOST_NEIGHBOURS, AskPeers, Peer, Peers

Wish = tuple[int, int, int]
Plan = tuple[tuple[tuple[int, ...], ...], dict[int, tuple[int, ...]]]
"""Keepers by position, and the parity group of each position that has one."""


class PeerDirectory:
    """Remembers the plans of the newest world."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._plans: dict[Wish, Plan] = {}

    def answer(self, query: AskPeers, state: JobState) -> Peers:
        rdzv = state.rendezvous
        world = rdzv.world
        if world is None or world.round != query.round:
            raise Rejected(f"The newest round is {rdzv.round}, not {query.round}.", code=ErrorCode.STALE_ROUND)
        if query.node not in rdzv.group_ranks:
            raise Rejected(f"Node {query.node} is no member of round {world.round}.", code=ErrorCode.NO_MEMBER)
        size = query.num_data + query.num_parity
        if not 0 <= query.copies <= MOST_COPIES or min(query.num_data, query.num_parity) < 0 or size > LARGEST_GROUP:
            raise malformed(
                f"{query.copies} copies and parity {query.num_data}+{query.num_parity}: at most {MOST_COPIES} copies and "
                f"groups of {LARGEST_GROUP} nodes."
            )
        keepers, groups = self._plan(world, (query.copies, query.num_data, query.num_parity), state)
        own = rdzv.group_ranks[query.node]
        count = len(world.members)
        nearest = [(own + step) % count for step in range(1, min(count, MOST_NEIGHBOURS + 1))]
        return Peers(
            round=world.round,
            keepers=_reachable(world, keepers[own], state),
            group=_all_reachable(world, groups.get(own, ()), state),
            neighbours=_reachable(world, nearest, state),
            num_members=count,
        )

    def _plan(self, world: World, wish: Wish, state: JobState) -> Plan:
        if self._world is not world:
            self._world, self._plans = world, {}
        if wish not in self._plans:
            spots = [_spot(state.nodes.live.get(member.node), member.node) for member in world.members]
            copies, num_data, num_parity = wish
            groups = place_groups(spots, num_data, num_parity)
            self._plans[wish] = (
                place_copies(spots, copies),
                {position: group for group in groups for position in group},
            )
        return self._plans[wish]


def _spot(node: Node | None, id_: NodeId) -> Spot:
    return Spot(f"gone {id_}") if node is None else Spot(node.host, node.place, node.group)


def _peer(world: World, position: int, state: JobState) -> Peer | None:
    """None: it is gone, or serves no other node."""
    member = world.members[position]
    node = state.nodes.live.get(member.node)
    return None if node is None or not node.peer else Peer(node.id, node.rank, node.peer)


def _reachable(world: World, positions: tuple[int, ...] | list[int], state: JobState) -> tuple[Peer, ...]:
    found = [_peer(world, position, state) for position in positions]
    return tuple(peer for peer in found if peer is not None)


def _all_reachable(world: World, positions: tuple[int, ...], state: JobState) -> tuple[Peer, ...]:
    """A parity group with a gap is none: whose turn it is depends on the place in it."""
    found = _reachable(world, positions, state)
    return found if len(found) == len(positions) else ()
