"""
Break points: what is worth keeping of the memory of workers that have ended.

When the workers of a round end, each node tells which complete snapshots it has and keeps them from being overwritten. As soon as all
members of the world have told, or after a short while, the newest snapshot is chosen of which every shard is somewhere, and one holder
of each shard writes it. A node that is dead holds nothing; if nobody else has its shard, that snapshot is lost and an older one is taken, or
none. The workers of the next round need not wait for any of it: what they may not overwrite is held by their agents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from dlrover.core.membership.nodes import after_outage
from dlrover.core.outcome import micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import (
    MAX_NAME_CHARS,
    MAX_PATH_CHARS,
    MAX_SHARDS,
    HeldSnapshot,
    PersistSnapshot,
    SnapshotsHeld,
)
from dlrover.protocol.messages.job import Done, LookAgain, Micros, NodeId, Reply, Round

if TYPE_CHECKING:
    from dlrover.core.decision import Course
    from dlrover.core.state import JobState

BREAK_GRACE = 10.0
"""Seconds from the first report to the decision, if somebody's is missing."""
MAX_HELD = 4096
"""Snapshots of one node: its workers times their slots."""
_LARGEST = 2**53


class BreakPoint(Struct, kw_only=True):
    """The gathering of reports after one round."""

    number: int
    round: Round
    ends_at: Micros
    missing: list[NodeId]
    """Members that have not told yet."""
    held: dict[NodeId, tuple[HeldSnapshot, ...]] = {}
    promised: dict[NodeId, tuple[HeldSnapshot, ...]] = {}
    """What nodes that have left are writing by themselves."""


class BreakPointDecision(Struct, kw_only=True):
    """What was decided after a round, for one directory."""

    number: int
    round: Round
    nodes: list[NodeId]
    """Who had told, and may let go of everything else."""
    directory: str = ""
    attempt: str = ""
    step: int = -1
    shards: dict[NodeId, list[int]] = {}


class BreakPoints(Struct):
    open: BreakPoint | None = None
    decisions: list[BreakPointDecision] = []
    """Of the newest round that had any."""
    promises: dict[str, list[int]] = {}
    """By attempt and directory of those decisions: shards that are written by nodes which have left."""

    def duties_of(self, node: NodeId, since: int) -> tuple[PersistSnapshot, ...]:
        return tuple(
            PersistSnapshot(
                number=each.number,
                round=each.round,
                directory=each.directory,
                attempt=each.attempt,
                step=each.step,
                shards=tuple(each.shards.get(node, ())),
            )
            for each in self.decisions
            if each.number > since and node in each.nodes
        )

    def master_restarted(self, last_command_at: Micros, now: Micros) -> None:
        if self.open is not None:
            self.open.ends_at = after_outage(self.open.ends_at, last_command_at, now)


def hear(command: SnapshotsHeld, course: Course) -> Reply:
    state, breaks = course.state, course.state.checkpoints.breaks
    node = state.nodes.current(command.node, command.incarnation)
    rdzv = state.rendezvous
    if not rdzv.round - 1 <= command.round <= rdzv.round or command.round < 1:
        raise Rejected(
            f"Workers of round {command.round} have ended; the newest round is {rdzv.round}.", code="stale-round"
        )
    if breaks.open is not None and command.round < breaks.open.round:
        raise Rejected(f"Snapshots of round {command.round} come too late.", code="stale-round")
    if len(command.held) > MAX_HELD or not all(_is_sane(each) for each in command.held):
        raise Rejected("What a node holds names shards, steps or directories that cannot be.", code="malformed")
    if breaks.open is None and any(each.round >= command.round for each in breaks.decisions):
        raise Rejected(f"What is kept of round {command.round} was decided without this node.", code="too-late")

    open_ = _open(course, command.round)
    open_.held[node.id] = command.held
    if node.id in open_.missing:
        open_.missing.remove(node.id)
    _decide_if_due(course)
    return Done()


def promise(course: Course, node: NodeId, held: tuple[HeldSnapshot, ...]) -> None:
    """A member of the world leaves and writes what it holds while it goes; the others may complete it. Rubbish is ignored."""
    rdzv = course.state.rendezvous
    is_sane = len(held) <= MAX_HELD and all(_is_sane(each) for each in held)
    if held and is_sane and rdzv.is_member(node) and course.state.end is None:
        _open(course, rdzv.round).promised[node] = held


def _open(course: Course, round_: Round) -> BreakPoint:
    """The gathering for this round, begun if there is none."""
    state, breaks = course.state, course.state.checkpoints.breaks
    if breaks.open is None or breaks.open.round < round_:
        world = state.rendezvous.world
        members = [] if world is None else [member.node for member in world.members]
        breaks.open = BreakPoint(
            number=state.checkpoints.next_number(),
            round=round_,
            ends_at=Micros(course.now + micros(BREAK_GRACE)),
            missing=[member for member in members if member in state.nodes.live],
        )
    return breaks.open


def lose(course: Course, node: NodeId) -> None:
    """What a dead node held is gone, and nobody waits for its report."""
    open_ = course.state.checkpoints.breaks.open
    if open_ is None:
        return
    open_.held.pop(node, None)
    if node in open_.missing:
        open_.missing.remove(node)
    _decide_if_due(course)


def expire(course: Course, number: int) -> None:
    open_ = course.state.checkpoints.breaks.open
    if open_ is not None and open_.number == number:
        _decide_if_due(course)


def choose(held: dict[NodeId, tuple[HeldSnapshot, ...]]) -> dict[str, tuple[HeldSnapshot, dict[int, list[NodeId]]]]:
    """
    By directory the newest snapshot of which every shard is held, and who holds each.

    Newest by the round in which it was saved, then by step: what was saved before training went back is past.
    """
    holders: dict[tuple[str, str], dict[int, list[NodeId]]] = {}
    samples: dict[tuple[str, str], HeldSnapshot] = {}
    for node, snapshots in held.items():
        for each in snapshots:
            key = (each.directory, each.attempt)
            first = samples.setdefault(key, each)
            if (each.step, each.num_shards, each.round) == (first.step, first.num_shards, first.round):
                nodes = holders.setdefault(key, {}).setdefault(each.shard, [])
                if node not in nodes:
                    nodes.append(node)
    best: dict[str, tuple[HeldSnapshot, dict[int, list[NodeId]]]] = {}
    for key, by_shard in holders.items():
        sample = samples[key]
        if len(by_shard) < sample.num_shards:
            continue
        known = best.get(sample.directory)
        if known is None or (known[0].round, known[0].step) < (sample.round, sample.step):
            best[sample.directory] = (sample, by_shard)
    return best


def _decide_if_due(course: Course) -> None:
    """All have told, or the time is over."""
    state, room = course.state, course.state.checkpoints
    open_ = room.breaks.open
    if open_ is None or (open_.missing and open_.ends_at > course.now):
        return
    room.breaks.open = None
    nodes = list(open_.held)
    decisions = []
    room.breaks.promises = {}
    # Those who have left count only for what nobody else holds.
    for directory, (sample, by_shard) in choose(open_.held | open_.promised).items():
        alone = [shard for shard, holders in by_shard.items() if not any(node in open_.held for node in holders)]
        if len(alone) == len(by_shard):
            continue  # they can only do it by themselves
        newest = room.committed.get(directory)
        if newest is not None and newest.order[:2] >= (sample.round, sample.step):
            continue  # nothing new
        decisions.append(
            BreakPointDecision(
                number=room.next_number(),
                round=open_.round,
                nodes=nodes,
                directory=directory,
                attempt=sample.attempt,
                step=sample.step,
                shards=_share_out(
                    state,
                    {
                        shard: [node for node in holders if node in open_.held]
                        for shard, holders in by_shard.items()
                        if shard not in alone
                    },
                ),
            )
        )
        if alone:
            room.breaks.promises[f"{sample.attempt}@{directory}"] = alone
        # An earlier try of it may have failed. This one is meant.
        room.settled = [each for each in room.settled if (each.directory, each.attempt) != (directory, sample.attempt)]
        course.say(f"Break point: step {sample.step} is written to {directory} from memory.")
    if not decisions:
        decisions = [BreakPointDecision(number=room.next_number(), round=open_.round, nodes=nodes)]
    room.breaks.decisions = decisions
    course.effects.append(LookAgain(tuple(f"save-duties/{node}" for node in nodes)))


def _share_out(state: JobState, by_shard: dict[int, list[NodeId]]) -> dict[NodeId, list[int]]:
    """One holder for each shard, so that all have about as much to write."""
    shares: dict[NodeId, list[int]] = {}
    for shard in sorted(by_shard):
        there = [node for node in by_shard[shard] if state.nodes.is_connected(node)] or by_shard[shard]
        node = min(there, key=lambda each: (len(shares.get(each, ())), each))
        shares.setdefault(node, []).append(shard)
    return shares


def _is_sane(held: HeldSnapshot) -> bool:
    is_named = 0 < len(held.directory) <= MAX_PATH_CHARS and 0 < len(held.attempt) <= MAX_NAME_CHARS
    is_counted = 1 <= held.num_shards <= MAX_SHARDS and 0 <= held.shard < held.num_shards
    return is_named and is_counted and 0 <= held.step <= _LARGEST and 0 <= held.round <= _LARGEST
