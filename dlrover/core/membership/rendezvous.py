"""
The rendezvous: nodes wait; when the right ones wait, a round completes and all of them get the same world.

A completed world is immutable and stays until the next one replaces it: a newcomer's join waits beside it and can
destroy nothing. Opening the next round is a decision of its own, taken by the job; only then members are asked to come
back.

Each live node that has not finished and was not dismissed is in exactly one place: it waits, it is absent (joined, but
its stream is broken), it is expected (asked to join and has not yet), it claims a world that an earlier master began, or
it is a member of a world whose successor is not open. The counts that decide a round are therefore lengths, and a join
costs the same with ten nodes and with ten thousand.

A round can be held although enough nodes wait: by a node that needs the others to stand still for a while, until the
order of the nodes is known, while members of the newest world are being checked, or while those of a world from before
may still come back. Each hold has an end.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from dlrover.core.membership.claims import TakeUp
from dlrover.core.membership.nodes import Opening, World, after_outage
from dlrover.core.membership.standby import Bystanders
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, micros
from dlrover.protocol.messages.job import Limits, Micros, NodeId, NodeRank, Round, WorldSpec

NUM_USED_OFFERS = 64
"""So many former coordinators are remembered: long enough for sockets of old rounds to be gone."""


class Joined(Struct, frozen=True):
    """A node that waits for a world."""

    node_rank: NodeRank
    local_world_size: int
    offer: str
    place: tuple[str, ...] = ()
    group: int = -1


class RoundBlock(Struct, frozen=True):
    """No round completes before it is lifted or ends."""

    until: Micros
    owner: str
    reason: str


class Rendezvous(Struct):
    """Who waits, who is expected, and the newest world."""

    round: Round = Round(0)
    """The newest completed one; 0: none yet."""
    world: World | None = None
    """Of `round`. None before the first, or if an earlier master's journal was lost."""
    group_ranks: dict[NodeId, int] = {}
    """Member to position in `world`."""
    completed_at: Micros = Micros(0)
    """When `world` began."""
    turns: tuple[tuple[Round, int], ...] = ()
    """As `world` was told when it began: later ones say nothing about the models that it found."""
    began_at: Micros | None = None
    """When the first world of the job began, as far as is known."""
    opening: Opening | None = None
    """Set: the next round is open, members of `world` shall come back. None: `world` is active, or nothing began."""
    waiting: dict[NodeId, Joined] = {}
    absent: dict[NodeId, Joined] = {}
    """Joined, but without a stream now. No world starts with them; they wait again when they are back."""
    expected: dict[NodeId, NodeRank] = {}
    finished: dict[NodeId, NodeRank] = {}
    """Members of `world` whose workers all ended well; if `world` was lost with a journal, all nodes that said so."""
    lost: dict[NodeId, NodeRank] = {}
    """Members of `world` that went or left before they finished."""
    may_return_until: Micros = Micros(0)
    """A member lost with its stream may have finished all the same; until then it may come and tell."""
    call_began_at: Micros = Micros(0)
    """Newest join of a node that did not wait yet, or the opening of the round: first and last call count from here."""
    below_min_since: Micros | None = None
    """Since when too few nodes wait in the open round; None while enough do or nothing is open."""
    granted: int = 0
    """Microseconds that nodes were given for coming back after outages of the master, beyond the join timeout."""
    blocks: dict[NodeId, RoundBlock] = {}
    """By owner."""
    order: tuple[NodeRank, ...] = ()
    """The newest word of the topology sorter; empty: none."""
    order_awaited_until: Micros | None = None
    """The sorter was asked: so long the round waits for its answer."""
    pre_check_until: Micros | None = None
    """Operators look at the job before it begins: so long the first round waits for them."""
    are_members_checked: bool = False
    """Many of `world` are in the node check, which has deadlines of its own: the open round waits for its verdict."""
    take_up: TakeUp = msgspec.field(default_factory=TakeUp)
    bystanders: Bystanders = msgspec.field(default_factory=Bystanders)
    num_pending_launches: int = 0
    """Nodes that the platform has yet to bring; how long is its own matter, not that of the join timeout."""
    num_unattached: int = 0
    """Nodes of the platform from which no agent has come yet. Counted only where some have finished, and the others that
    meet are too few: it is a long list."""
    num_growing: int = 0
    """Nodes that a raised target still waits for: the world grows once, with all of them, and not once for each."""
    used_offers: list[str] = []
    """Coordinators of the last rounds, oldest first: a port is never used for two rounds."""
    verdict: str = "no node has attached yet"

    @property
    def next_round(self) -> Round:
        return Round(self.round + 1)

    @property
    def is_active(self) -> bool:
        """Whether the members shall run the workers of `world` now."""
        return self.world is not None and self.opening is None

    @property
    def num_coming(self) -> int:
        """How many nodes are there and do not wait yet."""
        return len(self.expected) + len(self.absent)

    @property
    def num_unfinished(self) -> int:
        """How many live nodes still have work to do."""
        num_members = 0
        if self.world is not None and self.opening is None:
            num_members = len(self.world.members) - len(self.finished) - len(self.lost)
        num_claiming = len(self.take_up.claims) - sum(1 for node in self.finished if node in self.take_up.claims)
        return len(self.waiting) + self.num_coming + num_claiming + num_members

    @property
    def is_held(self) -> bool:
        """Whether no round may complete now, however many wait."""
        is_asked_about = self.order_awaited_until is not None or self.pre_check_until is not None
        return bool(self.blocks) or bool(self.take_up.claims) or is_asked_about or self.are_members_checked

    def is_member(self, node: NodeId) -> bool:
        """Whether the node belongs to the newest world and has not been lost from it."""
        return node in self.group_ranks and node not in self.lost

    def spec(self, node: NodeId) -> WorldSpec:
        """The member's place in the world."""
        assert self.world is not None, "no world yet"
        group_rank = self.group_ranks[node]
        member = self.world.members[group_rank]
        return WorldSpec(
            round=self.world.round,
            group_rank=group_rank,
            group_world_size=len(self.world.members),
            first_global_rank=member.first_global_rank,
            local_world_size=member.local_world_size,
            world_size=self.world.world_size,
            coordinator=self.world.coordinator,
            restart_count=self.world.round - 1,
            job_age=0.0 if self.began_at is None else (self.completed_at - self.began_at) / MICROS_PER_SECOND,
            turns=self.turns,
        )

    def expect(self, node: NodeId, node_rank: NodeRank) -> None:
        """The node is there and shall join; what it joined with before, if anything, is void."""
        self._drop(node)
        self.expected[node] = node_rank

    def join(self, node: NodeId, joined: Joined, now: Micros, *, is_connected: bool) -> None:
        """A join may have been on its way when the stream broke: then the node is absent at once."""
        if node not in self.waiting and node not in self.absent:  # a repeated join must not prolong the last call
            self.call_began_at = now
        self._drop(node)
        if is_connected:
            self.waiting[node] = joined
        else:
            self.absent[node] = joined

    def stream_broke(self, node: NodeId) -> None:
        if node in self.waiting:
            self.absent[node] = self.waiting.pop(node)

    def stream_back(self, node: NodeId) -> None:
        if node in self.absent:
            self.waiting[node] = self.absent.pop(node)

    def open(self, opening: Opening, members: Iterable[NodeId], now: Micros) -> None:
        """Begin the next round and expect these members of the newest world back."""
        assert self.opening is None, f"round {self.next_round} is open already"
        self.opening = opening
        self.call_began_at = now
        self.below_min_since = None
        self.granted = 0
        for node in members:
            assert self.world is not None, "members without a world"
            self.expected[node] = self.world.members[self.group_ranks[node]].node_rank

    def forget(self, node: NodeId, node_rank: NodeRank) -> None:
        """The node will not come: no node waits for it. A member counts as lost unless it has finished."""
        self._drop(node)
        if node in self.group_ranks and node not in self.finished:
            self.lost[node] = node_rank

    def finish(self, node: NodeId, node_rank: NodeRank) -> None:
        """The member's work is done: it is neither expected nor started again."""
        self._drop(node)
        self.finished[node] = node_rank

    def excuse(self, node: NodeId, node_rank: NodeRank) -> None:
        """The node finished in a round that is not ours any more, or that is forgotten: it need not come."""
        if self.world is None:
            self.finished[node] = node_rank  # before it is dropped: its claim to a world stays good
        self._drop(node)

    def complete(self, world: World, now: Micros) -> None:
        """The chosen nodes have their world; the others go on waiting, their offers stay good."""
        assert world.round == self.next_round, f"round {world.round} completed after round {self.round}"
        self.round = world.round
        self.world = world
        self.completed_at = now
        self.began_at = now if self.began_at is None else self.began_at
        self.group_ranks = {member.node: group_rank for group_rank, member in enumerate(world.members)}
        for node in self.group_ranks:
            del self.waiting[node]
        self.opening = None
        self.finished = {}
        self.lost = {}
        self.may_return_until = Micros(0)
        self.below_min_since = None
        self.granted = 0
        self.used_offers = [*self.used_offers, world.coordinator][-NUM_USED_OFFERS:]

    def master_restarted(self, limits: Limits, last_command_at: Micros, now: Micros) -> None:
        """No node could join while the master was away, and none has a stream yet.

        A call is short and has its rest again. What ends the job goes on through the outage (`after_outage`).
        """
        self.absent.update(self.waiting)
        self.waiting = {}
        self.call_began_at = Micros(self.call_began_at + now - last_command_at)
        self.may_return_until = after_outage(self.may_return_until, last_command_at, now)
        if self.below_min_since is not None:
            timeout = micros(limits.join_timeout)
            former = Micros(self.below_min_since + timeout)
            gives_up_at = after_outage(former, last_command_at, now)
            # Not more than the timeout itself in all, or a master that keeps restarting would put it off for ever.
            if gives_up_at > former and self.granted < timeout:
                self.granted += gives_up_at - now
                self.below_min_since = Micros(gives_up_at - timeout)
        for node, block in self.blocks.items():
            until = Micros(block.until + now - last_command_at)
            self.blocks[node] = RoundBlock(until, block.owner, block.reason)
        if self.order_awaited_until is not None:
            self.order_awaited_until = now  # whoever asked is dead, and so is the answer
        if self.pre_check_until is not None:
            self.pre_check_until = Micros(self.pre_check_until + now - last_command_at)  # it begins again
        self.take_up.until = after_outage(self.take_up.until, last_command_at, now)
        if limits.pend_timeout is not None:
            # Whoever was too many may be needed now: not all members need come back.
            timeout = micros(limits.pend_timeout)
            for node, since in self.bystanders.left_out.items():
                leaves_at = after_outage(Micros(since + timeout), last_command_at, now)
                self.bystanders.left_out[node] = Micros(leaves_at - timeout)

    def start_over(self) -> None:
        """All members are replaced: nothing of the newest world counts any more but its number."""
        self.world = None
        self.group_ranks = {}
        self.opening = None
        self.finished = {}
        self.lost = {}
        self.may_return_until = Micros(0)
        self.below_min_since = None

    def close(self) -> None:
        """The job is over: no round opens any more."""
        self.opening = None
        self.waiting = {}
        self.absent = {}
        self.expected = {}
        self.below_min_since = None
        self.blocks = {}
        self.order_awaited_until = None
        self.pre_check_until = None
        self.are_members_checked = False
        self.take_up = TakeUp(is_over=True)
        self.bystanders.left_out = {}

    def _drop(self, node: NodeId) -> None:
        """Out of whichever place it is in."""
        self.waiting.pop(node, None)
        self.absent.pop(node, None)
        self.expected.pop(node, None)
        if node not in self.finished:
            self.take_up.drop(node)
