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

import itertools
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from dlrover.core.membership.claims import TakeUp
from dlrover.core.membership.nodes import REATTACH_WINDOW, Member, Opening, World, after_outage
from dlrover.core.membership.standby import Bystanders
from dlrover.core.membership.topology import Placed, arrange
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, micros
from dlrover.protocol.messages.job import Limits, Micros, NodeId, NodeRank, Round, WorldSpec

NUM_USED_OFFERS = 64
"""So many former coordinators are remembered: long enough for sockets of old rounds to be gone."""

_NUM_NAMED = 8
"""So many ranks are named in a sentence; naming a thousand helps nobody and makes each join cost a thousand."""


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
    """Nodes of the platform from which nobody has come yet. Counted only where some have finished, and the others that
    meet are too few: it is a long list."""
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

    def is_too_large(self, limits: Limits) -> bool:
        """Whether the members run in a world that the limits do not allow any more."""
        return self.world is not None and self.opening is None and len(self.world.members) > limits.max_nodes

    def coming(self) -> str:
        """Those nodes in words."""
        if self.num_coming > _NUM_NAMED:
            return _nodes(self.num_coming)
        return _named([*self.expected.values(), *(joined.node_rank for joined in self.absent.values())])

    def is_member(self, node: NodeId) -> bool:
        """Whether the node belongs to the newest world and has not been lost from it."""
        return node in self.group_ranks and node not in self.lost

    def place_of(self, node: NodeId) -> tuple[int, int]:
        """Group rank and number of workers in the newest world; (-1, 0): it is not a member."""
        if self.world is None or not self.is_member(node):
            return -1, 0
        group_rank = self.group_ranks[node]
        return group_rank, self.world.members[group_rank].local_world_size

    def has_spare(self) -> bool:
        """Whether somebody outside the newest world waits, warm."""
        return self.world is not None and any(node not in self.group_ranks for node in self.waiting)

    def outsiders(self) -> list[NodeId]:
        """Who has joined and is no member of the newest world, by rank."""
        joined = itertools.chain(self.waiting.items(), self.absent.items())
        return [
            node
            for node, _ in sorted(joined, key=lambda item: item[1].node_rank)
            if self.world is not None and node not in self.group_ranks
        ]

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

    def is_offer_used(self, node: NodeId, offer: str) -> bool:
        if offer in self.used_offers:
            return True
        group_rank = self.group_ranks.get(node)
        return self.world is not None and group_rank is not None and self.world.members[group_rank].offer == offer

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
        """The node will not come: nobody waits for it. A member counts as lost unless it has finished."""
        self._drop(node)
        if node in self.group_ranks and node not in self.finished:
            self.lost[node] = node_rank

    def finish(self, node: NodeId, node_rank: NodeRank) -> None:
        """The member's work is done: it is neither expected nor started again."""
        self._drop(node)
        self.finished[node] = node_rank

    def excuse(self, node: NodeId, node_rank: NodeRank) -> None:
        """The node finished in a round that is not ours any more, or that nobody remembers: it need not come."""
        if self.world is None:
            self.finished[node] = node_rank  # before it is dropped: its claim to a world stays good
        self._drop(node)

    def is_all_finished(self) -> bool:
        return self.world is not None and len(self.finished) == len(self.world.members)

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

    def adopt(self, world: World, now: Micros, job_age: float = 0.0, turns: tuple[tuple[Round, int], ...] = ()) -> None:
        """The world that its members claimed is ours from now on; it began before we did, at that age of the job."""
        assert self.world is None, f"round {self.round} has a world already"
        self.began_at = Micros(now - micros(job_age))
        self.turns = turns
        self.round = world.round
        self.world = world
        self.completed_at = now
        self.group_ranks = {member.node: group_rank for group_rank, member in enumerate(world.members)}
        self.finished = {node: rank for node, rank in self.finished.items() if node in self.group_ranks}
        self.pre_check_until = None
        self.opening = None
        self.below_min_since = None
        self.take_up = TakeUp(is_over=True)
        self.used_offers = [*self.used_offers, world.coordinator][-NUM_USED_OFFERS:]

    def give_up_claims(self, now: Micros) -> list[NodeId]:
        """The world that was claimed cannot be had any more: whoever runs in it shall join the open round."""
        nodes = [node for node in self.take_up.claims if node not in self.finished]
        claims, self.take_up = self.take_up.claims, TakeUp(is_over=True)
        for node in nodes:
            self.expect(node, claims[node].node_rank)
        self.call_began_at = now
        return nodes

    def lift_expired(self, now: Micros) -> list[RoundBlock]:
        """End the holds whose time is over, and say which blocks ended so."""
        expired = [block for block in self.blocks.values() if block.until <= now]
        self.blocks = {node: block for node, block in self.blocks.items() if block.until > now}
        if self.order_awaited_until is not None and self.order_awaited_until <= now:
            self.order_awaited_until = None
        if self.pre_check_until is not None and self.pre_check_until <= now:
            self.pre_check_until = None
        return expired

    def hold_ends_at(self) -> Micros | None:
        ends = [block.until for block in self.blocks.values()]
        ends += [until for until in (self.order_awaited_until, self.pre_check_until) if until is not None]
        return min(ends, default=None)

    def why_held(self) -> str:
        """For a sentence, while something holds the round."""
        if self.blocks:
            return "; ".join(f"blocked by {block.owner}: {block.reason}" for block in self.blocks.values())
        if self.take_up.claims:
            come, size = len(self.take_up.claims), self.take_up.size
            return f"the world of round {self.take_up.round} runs on and is taken up when all are back, {come} of {size} are"
        if self.pre_check_until is not None:
            return "the pre-check is not over"
        if self.are_members_checked:
            return "members of the last world are being checked"
        return "the order of the nodes is being asked for"

    def master_restarted(self, limits: Limits, last_command_at: Micros, now: Micros) -> None:
        """Nobody could join while the master was away, and nobody has a stream yet.

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
        """The job is over: nobody meets any more."""
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

    def note_shortage(self, limits: Limits, now: Micros, *, is_excused: bool) -> None:
        """Keep the clock of the join timeout: it runs while the open round is below the minimum."""
        is_enough = limits.num_usable(len(self.waiting)) >= limits.min_nodes
        if self.take_up.claims or is_enough or self.num_pending_launches or is_excused:
            self.below_min_since = None
        elif self.below_min_since is None:
            self.below_min_since = now

    def gives_up_at(self, limits: Limits) -> Micros | None:
        if self.opening is None or self.below_min_since is None:
            return None
        return Micros(self.below_min_since + micros(limits.join_timeout))

    def too_few_at(self, limits: Limits) -> Micros | None:
        """When the open round can lead to nothing, because some have finished and the rest is no world; None: it can.

        Not before those who were lost with their stream had a window for telling us that they finished, too. If the
        world itself was lost with a journal, nobody knows who belongs to it: then everybody has that window.
        """
        num_left = len(self.waiting) + self.num_coming + self.num_unattached
        if self.opening is None or not self.finished or limits.num_usable(num_left) >= limits.min_nodes:
            return None
        if self.take_up.claims:
            return None  # a world is about to be known again
        if self.world is None:
            return Micros(self.call_began_at + micros(REATTACH_WINDOW))
        return max(self.call_began_at, self.may_return_until)

    def are_too_few_left(self, limits: Limits, now: Micros) -> bool:
        at = self.too_few_at(limits)
        return at is not None and at <= now

    def call_ends_at(self, limits: Limits) -> Micros | None:
        """Until when a round that could start holds the door open; None: there is nobody worth waiting for."""
        num_waiting, num_coming = len(self.waiting), self.num_coming
        usable = limits.num_usable(num_waiting)
        if self.opening is None or usable < limits.min_nodes or self.is_held:
            return None
        if limits.num_usable(num_waiting + num_coming) > usable or self._is_member_displaced(usable):
            return Micros(self.call_began_at + micros(limits.last_call))
        if self.world is None and num_waiting + num_coming < limits.max_nodes:
            return Micros(self.call_began_at + micros(limits.first_call))
        return None

    def grows_at(self, limits: Limits) -> Micros | None:
        """When so many nodes are welcome that the healthy world should grow, maybe long ago; None: it should not.

        Nobody is added once a member has finished: the job is in its last minutes and a restart would undo them. Nor
        while rounds are held: members would stop for a round that cannot complete.
        """
        if self.world is None or self.opening is not None or self.finished or not self.waiting or self.is_held:
            return None
        size = len(self.world.members)
        # A world below a raised minimum trains on until the minimum can be had.
        num_needed = max(limits.node_unit - size % limits.node_unit, limits.min_nodes - size)
        if size + num_needed > limits.max_nodes or num_needed > len(self.waiting):
            return None
        return sorted(self.bystanders.welcome_at(joined.node_rank) for joined in self.waiting.values())[num_needed - 1]

    def reason_to_grow(self, limits: Limits, now: Micros) -> str | None:
        """Why the next round should open although the world is healthy; None: it should not, or not yet."""
        grows_at = self.grows_at(limits)
        if self.world is None or grows_at is None or grows_at > now:
            return None
        size = len(self.world.members)
        ranks = [joined.node_rank for joined in self.waiting.values()]
        welcome = [rank for rank in ranks if self.bystanders.welcome_at(rank) <= now]
        possible = limits.num_usable(size + len(ranks))
        return f"{_named(welcome)} can join: the world grows from {size} to up to {possible} nodes"

    def missing_ranks(self, limits: Limits) -> list[NodeRank]:
        """Whom the open round lacks: former members, or before any world the lowest ranks. No more than can be named."""
        present = {joined.node_rank: None for joined in self.waiting.values()}
        wanted: Iterable[NodeRank]
        if self.world is not None:
            wanted = (member.node_rank for member in self.world.members if member.node not in self.finished)
        else:
            wanted = (NodeRank(rank) for rank in range(limits.min_nodes))
        return list(itertools.islice((rank for rank in wanted if rank not in present), _NUM_NAMED + 1))

    def _is_member_displaced(self, usable: int) -> bool:
        """Whether starting now would give a member's place to somebody with less right while the member is on its way.

        To a stranger: a spare has joined long before, the members are only stopping their workers, and hold the state
        in memory. Or, in a world that shall shrink, to a member of a higher rank.
        """
        coming = [
            member.node_rank
            for node in itertools.chain(self.expected, self.absent)
            if self.world is not None and node in self.group_ranks
            for member in (self.world.members[self.group_ranks[node]],)
        ]
        if not coming:
            return False
        ranks = sorted(joined.node_rank for node, joined in self.waiting.items() if node in self.group_ranks)
        return len(ranks) < usable or min(coming) < ranks[usable - 1]

    def _drop(self, node: NodeId) -> None:
        """Out of whichever place it is in."""
        self.waiting.pop(node, None)
        self.absent.pop(node, None)
        self.expected.pop(node, None)
        if node not in self.finished:
            self.take_up.drop(node)


def choose_world(rdzv: Rendezvous, limits: Limits, now: Micros, *, limits_version: int = 0) -> tuple[World | None, str]:
    """Decide whether the open round completes, and say why or why not."""
    num_waiting = len(rdzv.waiting)
    label = f"Round {rdzv.next_round}"
    usable = limits.num_usable(num_waiting)
    if usable < limits.min_nodes:
        unit = f", in multiples of {limits.node_unit}" if limits.node_unit > 1 else ""
        return None, f"{label}: {num_waiting} of at least {limits.min_nodes} nodes wait{unit}."
    if rdzv.is_held:
        return None, f"{label}: {_waiting(num_waiting)}; {rdzv.why_held()}."
    ends_at = rdzv.call_ends_at(limits)
    if ends_at is not None and now < ends_at:
        if rdzv.num_coming:
            return None, f"{label}: {_waiting(num_waiting)}; last call of {limits.last_call:g} s for {rdzv.coming()}."
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
    missing = rdzv.missing_ranks(limits)
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
