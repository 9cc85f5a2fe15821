"""
Break points: what is worth keeping of the memory of workers that have ended.

When the workers of a round end, each node tells which complete snapshots it has and keeps them from being overwritten. As soon as all
members of the world have told, or after a short while, the newest snapshot is chosen of which every shard is somewhere, and one holder
of each shard writes it. A node that is dead holds nothing; if no other node has its shard, that snapshot is lost and an older one is taken, or
none. The workers of the next round need not wait for any of it: what they may not overwrite is held by their agents.
"""

from __future__ import annotations

from dlrover.core.checkpoints.state import BreakPoint, BreakPointDecision
from dlrover.core.decision import Decision
from dlrover.core.membership.nodes import Node
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.checkpoint import (
    MAX_NAME_CHARS,
    MAX_PATH_CHARS,
    MAX_SHARDS,
    HeldSnapshot,
    SnapshotsHeld,
)
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Done, LookAgain, Micros, NodeId, Reply, Round

BREAK_GRACE = 10.0
"""Seconds from the first report to the decision, if a node's is missing."""
MAX_HELD = 4096
"""Snapshots of one node: its workers times their slots."""
_LARGEST = 2**53


def hear(command: SnapshotsHeld, decision: Decision) -> Reply:
    state, breaks = decision.state, decision.state.checkpoints.breaks
    node = state.nodes.current(command.node, command.incarnation)
    rdzv = state.rendezvous
    if not rdzv.round - 1 <= command.round <= rdzv.round or command.round < 1:
        raise Rejected(
            f"Workers of round {command.round} have ended; the newest round is {rdzv.round}.",
            code=ErrorCode.STALE_ROUND,
        )
    if breaks.open is not None and command.round < breaks.open.round:
        raise Rejected(f"Snapshots of round {command.round} come too late.", code=ErrorCode.STALE_ROUND)
    if len(command.held) > MAX_HELD or not all(_is_sane(each) for each in command.held):
        raise malformed(f"What a node holds must be at most {MAX_HELD} valid shards, steps and directories.")
    if breaks.open is None and any(each.round >= command.round for each in breaks.decisions):
        raise Rejected(f"What is kept of round {command.round} was decided without this node.", code=ErrorCode.TOO_LATE)

    open_ = _open(decision, command.round)
    open_.held[node.id] = command.held
    if node.id in open_.missing:
        open_.missing.remove(node.id)
    _decide_if_due(decision)
    return Done()


def on_node_leaves(decision: Decision, node: Node, held: tuple[HeldSnapshot, ...]) -> None:
    """A member of the world leaves and writes what it holds while it goes; the others may complete it. Rubbish is ignored."""
    rdzv = decision.state.rendezvous
    is_sane = len(held) <= MAX_HELD and all(_is_sane(each) for each in held)
    if held and is_sane and rdzv.is_member(node.id) and decision.state.end is None:
        _open(decision, rdzv.round).promised[node.id] = held


def _open(decision: Decision, round_: Round) -> BreakPoint:
    """The gathering for this round, begun if there is none."""
    state, breaks = decision.state, decision.state.checkpoints.breaks
    if breaks.open is None or breaks.open.round < round_:
        world = state.rendezvous.world
        members = [] if world is None else [member.node for member in world.members]
        breaks.open = BreakPoint(
            number=state.checkpoints.next_number(),
            round=round_,
            ends_at=Micros(decision.now + micros(BREAK_GRACE)),
            missing=[member for member in members if member in state.nodes.live],
        )
    return breaks.open


def lose(decision: Decision, node: NodeId) -> None:
    """What a dead node held is gone, and no node waits for its report."""
    open_ = decision.state.checkpoints.breaks.open
    if open_ is None:
        return
    open_.held.pop(node, None)
    if node in open_.missing:
        open_.missing.remove(node)
    _decide_if_due(decision)


def expire(decision: Decision, number: int) -> None:
    open_ = decision.state.checkpoints.breaks.open
    if open_ is not None and open_.number == number:
        _decide_if_due(decision)


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


def _decide_if_due(decision: Decision) -> None:
    """All have told, or the time is over."""
    state, room = decision.state, decision.state.checkpoints
    open_ = room.breaks.open
    if open_ is None or (open_.missing and open_.ends_at > decision.now):
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
        decision.say(f"Break point: step {sample.step} is written to {directory} from memory.")
    if not decisions:
        decisions = [BreakPointDecision(number=room.next_number(), round=open_.round, nodes=nodes)]
    room.breaks.decisions = decisions
    decision.effects.append(LookAgain(tuple(f"save-duties/{node}" for node in nodes)))


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
