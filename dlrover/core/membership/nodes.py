"""
The nodes of a job: who is there, in which life, and on which rank.

A node id is one launch, a node rank is a slot that outlives it, and an incarnation counts the lives of an agent on that
slot. A world is some of them in order. Everything that arrives names all it needs to be told apart from a message of a former life; `current` is the one
door that checks it. A live node holds its rank; a node that went or left keeps it only until another node takes it.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import (
    Attach,
    Desired,
    Detection,
    Incarnation,
    Leave,
    Micros,
    NodeId,
    NodeRank,
    Round,
    StopCause,
    Wait,
)

REATTACH_WINDOW = 40.0
"""Seconds that every node has at least for coming back after a master start: no node is suspected before a window of
silence. It is also the patience with a node without which the job must fail."""
MISSED_GRACE = 0.3
"""
Seconds that a node without a stream has where a warm one waits and its neighbours have lost its workers, too. Two witnesses: a connection that only
something on the way has cut does not make workers lose each other. Only an agent that ended without its node could still come back; it finds its
snapshots, so this holds only where no rank needs them.
"""


def reattach_window(detection: Detection) -> float:
    """Who may be silent for longer may also take longer to come back."""
    return max(REATTACH_WINDOW, detection.silence)


def after_outage(deadline: Micros, last_command_at: Micros, now: Micros) -> Micros:
    """A deadline under a new master. Time goes on without one, but no node can meet a deadline then.

    It is unknown how long the former master lived on after its last command. Counting all of that time as an outage
    would let a master that restarts every few minutes postpone a deadline for ever. So the deadline stays where it is,
    but leaves the nodes the window they have for coming back, or what was left if that is less.
    """
    left = min(deadline - last_command_at, micros(REATTACH_WINDOW))
    return Micros(max(deadline, now + left))


class Member(Struct, frozen=True):
    """A node in a world; its position in the tuple is its group rank."""

    node: NodeId
    node_rank: NodeRank
    local_world_size: int
    first_global_rank: int
    offer: str


class World(Struct, frozen=True):
    """What a completed round led to."""

    round: Round
    members: tuple[Member, ...]
    world_size: int
    limits_version: int = 0
    """Of the limits that it obeys: a job may be scaled while it runs."""

    @property
    def coordinator(self) -> str:
        return self.members[0].offer


class Opening(Struct, frozen=True):
    """Why the next round is open."""

    cause: StopCause
    reason: str


class NodeLife(enum.StrEnum):
    ALIVE = "alive"
    GONE = "gone"
    """Given up: its stream broke, or nothing was heard of it."""
    LEFT = "left"
    """It said goodbye."""


class Node(Struct, kw_only=True):
    """One launch of a node."""

    id: NodeId
    rank: NodeRank
    launch: str
    host: str
    incarnation: Incarnation
    local_world_size: int
    process: str = ""
    """`Attach.life` of the agent process that this incarnation was given to."""
    life: NodeLife = NodeLife.ALIVE
    finished_round: Round = Round(0)
    """Round in which all its workers ended well; 0: not yet. A finished node is never started again."""
    step: int | None = None
    """Greatest step that was reported of it."""
    place: tuple[str, ...] = ()
    """Where it is in the network, outermost switch first."""
    group: int = -1
    """Its scheduling group; -1: none."""
    peer: str = ""
    """Where other agents reach its own for snapshots; empty: nowhere."""
    name: str = ""
    """What its platform calls it."""
    node_ip: str = ""
    """Of the machine below, if it is not `host`."""
    foreign_node: int = -1
    """Its number on a platform that is none of ours; -1: it has none."""
    entered_at: Micros | None = None
    """When it became a member of the world, through all rounds since; None: it never was."""
    dismissed: Leave | None = None
    """The job goes on without it; it is in no round any more, and only has to leave."""
    desired: Desired = Desired(number=0, master_epoch=0, wish=Wait("not decided yet"))

    def reached(self, step: int | None) -> None:
        if step is not None and (self.step is None or step > self.step):
            self.step = step

    @property
    def label(self) -> str:
        return f"node rank {self.rank} ({self.host})"


class Broken(Struct, frozen=True):
    """A live node without a stream."""

    gone_at: Micros
    """When it is given up at the latest."""
    broken_at: Micros | None
    """When the stream broke; None if the master restarted or stood still, which says nothing about the node."""


class Nodes(Struct):
    """All nodes that matter, live ones and the newest former holder of each free rank."""

    live: dict[NodeId, Node] = {}
    holders: dict[NodeRank, NodeId] = {}
    """Rank to live node: exactly one entry for each of `live`."""
    former: dict[NodeRank, Node] = {}
    """Gone or left, and no node took the rank since. So the table never outgrows the number of ranks."""
    launches: dict[str, NodeRank] = {}
    """Launch to the rank of its node in `live` or `former`."""
    broken: dict[NodeId, Broken] = {}
    """The live nodes that have no stream now."""
    incarnations: dict[NodeRank, Incarnation] = {}
    """Highest incarnation ever given on a rank."""
    next_id: NodeId = NodeId(1)
    first_free: int = 0
    """All ranks below are held by live nodes: spares the search for the lowest free one."""

    def current(self, node: NodeId, incarnation: Incarnation) -> Node:
        """The live node in exactly this life, or `Rejected`: a message of a former life changes nothing (I6)."""
        found = self.live.get(node)
        if found is None:
            raise Rejected(
                f"Node {node} is not part of the job any more: it was given up, replaced, or has left. Attach again.",
                code=ErrorCode.STALE_INCARNATION,
            )
        if found.incarnation != incarnation:
            raise Rejected(
                f"The message is of incarnation {incarnation} of {found.label}, which is in incarnation "
                f"{found.incarnation} now.",
                code=ErrorCode.STALE_INCARNATION,
            )
        return found

    def of_launch(self, launch: str) -> Node | None:
        """The node of this launch, live or former; None if it never came or its rank was taken by another."""
        rank = self.launches.get(launch)
        if rank is None:
            return None
        holder = self.holders.get(rank)
        return self.live[holder] if holder is not None else self.former[rank]

    def holder(self, rank: NodeRank) -> Node | None:
        node = self.holders.get(rank)
        return None if node is None else self.live[node]

    def is_connected(self, node: NodeId) -> bool:
        return node in self.live and node not in self.broken

    def lowest_free_rank(self) -> NodeRank:
        rank = self.first_free
        while NodeRank(rank) in self.holders:
            rank += 1
        return NodeRank(rank)

    def admit(self, attach: Attach, rank: NodeRank, *, is_continued: bool = False) -> Node:
        """An unknown launch takes a free rank; the former holder is forgotten.

        `is_continued`: the life that it had under a master whose journal was lost goes on, with its workers.
        """
        assert rank not in self.holders, f"node rank {rank} is held by node {self.holders[rank]}"
        former = self.former.pop(rank, None)
        if former is not None:
            del self.launches[former.launch]
        node = Node(
            id=self.next_id,
            rank=rank,
            launch=attach.launch,
            host=attach.host,
            incarnation=self._next_incarnation(rank, Incarnation(attach.incarnation - is_continued)),
            local_world_size=attach.local_world_size,
            process=attach.life,
            place=attach.place,
            group=attach.group,
            peer=attach.peer,
            name=attach.name,
            node_ip=attach.node_ip,
            foreign_node=attach.foreign_node,
        )
        self.next_id = NodeId(self.next_id + 1)
        self.launches[attach.launch] = rank
        self._hold(node)
        return node

    def renew(self, node: Node, attach: Attach) -> None:
        """The agent of a known launch begins a new life; a former node is live again on its old rank."""
        node.incarnation = self._next_incarnation(node.rank, attach.incarnation)
        node.host = attach.host
        node.local_world_size = attach.local_world_size
        node.process = attach.life
        node.place = attach.place
        node.group = attach.group
        node.peer = attach.peer
        node.name, node.node_ip, node.foreign_node = attach.name, attach.node_ip, attach.foreign_node
        if node.life is not NodeLife.ALIVE:
            node.life = NodeLife.ALIVE
            node.entered_at = None
            node.dismissed = None  # it had left, and somebody started it anew
            del self.former[node.rank]
            self._hold(node)
        self.broken.pop(node.id, None)

    def retire(self, node: Node, life: NodeLife) -> None:
        """A live node goes; its rank is free from now on."""
        assert life is not NodeLife.ALIVE, "only the dead retire"
        node.life = life
        del self.live[node.id]
        del self.holders[node.rank]
        self.broken.pop(node.id, None)
        self.former[node.rank] = node
        self.first_free = min(self.first_free, node.rank)

    def stream_broke(self, node: Node, now: Micros, detection: Detection, *, is_our_fault: bool = False) -> None:
        """`is_our_fault`: a master that stood still was taken for dead; its nodes have the time they have after a restart."""
        if is_our_fault:
            self.broken[node.id] = Broken(gone_at=Micros(now + micros(reattach_window(detection))), broken_at=None)
        else:
            self.broken[node.id] = Broken(gone_at=Micros(now + micros(detection.break_grace)), broken_at=now)

    def master_restarted(self, now: Micros, detection: Detection) -> None:
        """No node is connected to a new master, and none is to blame for that."""
        window = Broken(gone_at=Micros(now + micros(reattach_window(detection))), broken_at=None)
        self.broken = dict.fromkeys(self.live, window)

    def gone_at(
        self, node: NodeId, detection: Detection, *, has_spare: bool, is_missed: bool, is_needed: bool
    ) -> Micros:
        """
        When a node without a stream is given up. One without which the job must fail has the longest time. `is_missed`: its neighbours have
        lost its workers, and need nothing that it has in memory.
        """
        broken = self.broken[node]
        if is_needed and broken.broken_at is not None:
            return Micros(broken.broken_at + micros(reattach_window(detection)))
        if has_spare and broken.broken_at is not None:
            grace = detection.break_grace_with_spare
            grace = min(grace, MISSED_GRACE) if is_missed else grace
            return Micros(min(broken.gone_at, broken.broken_at + micros(grace)))
        return broken.gone_at

    def in_rank_order(self) -> list[Node]:
        """Live and former nodes."""
        return sorted([*self.live.values(), *self.former.values()], key=lambda node: node.rank)

    def _hold(self, node: Node) -> None:
        self.live[node.id] = node
        self.holders[node.rank] = node.id
        if node.rank == self.first_free:
            self.first_free = self.lowest_free_rank()

    def _next_incarnation(self, rank: NodeRank, claimed: Incarnation) -> Incarnation:
        """A claim beyond what we gave out comes from a life under a master whose journal was lost; stay above it."""
        given = Incarnation(max(self.incarnations.get(rank, 0), claimed) + 1)
        self.incarnations[rank] = given
        return given
