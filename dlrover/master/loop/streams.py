"""
Which node is on which stream, and what it has been told.

Pushes are levels: only the newest desired state of a node matters, and it is sent again until the agent has
acknowledged it. A stream that an agent replaced by a newer one no longer speaks for the node, so its end says
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dlrover.protocol.messages.frames import Push
from dlrover.protocol.messages.job import Attached, Desired, Incarnation, NodeDisconnected, NodeId
from dlrover.protocol.rpc.server import AgentStream

RESEND_AFTER = 2_000_000
"""Microseconds without an acknowledgement before the level is sent again, with the agent's next heartbeat."""


@dataclass
class Gate:
    """
    Keeps the order of an agent's commands while some of them are refused for now.

    Once a number was refused, every greater one is too, until the smaller ones have come again: else the core would
    take the late one for an old one.
    """

    held: set[int] = field(default_factory=set)

    def admits(self, sequence: int) -> bool:
        return not self.held or sequence <= min(self.held)

    def hold(self, sequence: int) -> None:
        self.held.add(sequence)

    def passed(self, sequence: int) -> None:
        self.held.discard(sequence)


@dataclass(eq=False)
class AgentLine:
    """One stream, and the node behind it once it has attached."""

    stream: AgentStream
    has_presented: bool = False
    """An attach was taken in: a stream speaks for one node, in one life."""
    node: NodeId | None = None
    incarnation: Incarnation | None = None
    gate: Gate = field(default_factory=Gate)
    is_open: bool = True
    told: Desired | None = None
    """The newest level that was sent. Kept whole, because the job may hold a newer one that is not durable yet."""
    told_at: int = 0
    """By the master's elapsed microseconds, as every `now` here: what is sent again does not wait for the job's time."""
    acknowledged: int = -1
    clock_stood_still: int = 0
    """What `MasterClock.stood_still` was at the attach: the agent knows the job's time as it was then."""


class AgentLines:
    def __init__(self) -> None:
        self._lines: dict[AgentStream, AgentLine] = {}
        self._current: dict[NodeId, AgentLine] = {}

    def line(self, stream: AgentStream) -> AgentLine:
        """Known from its first message on."""
        return self._lines.setdefault(stream, AgentLine(stream))

    def line_of(self, node: NodeId) -> AgentLine | None:
        """The stream that speaks for the node now."""
        return self._current.get(node)

    def attach(self, line: AgentLine, attached: Attached, now: int) -> None:
        """The line now speaks for the node; an older one of the same node no longer does."""
        assert line.node is None, f"a stream of node {line.node} attached again as node {attached.node}"
        older = self._current.get(attached.node)
        line.node, line.incarnation = attached.node, attached.incarnation
        line.told, line.told_at = attached.desired, now
        self._current[attached.node] = line
        if older is not None:
            older.stream.end()

    def close(self, stream: AgentStream) -> NodeDisconnected | None:
        """What the end of the stream means; None if it spoke for no node."""
        line = self._lines.pop(stream, None)
        if line is None:
            return None
        line.is_open = False
        if line.node is None or self._current.get(line.node) is not line:
            return None
        del self._current[line.node]
        assert line.incarnation is not None, "attached without an incarnation"
        return NodeDisconnected(node=line.node, incarnation=line.incarnation)

    def end(self, node: NodeId, incarnation: Incarnation) -> None:
        """Close the stream of this life of the node, if it has one."""
        line = self._current.get(node)
        if line is not None and line.incarnation == incarnation:
            line.stream.end()

    def push(self, nodes: Iterable[NodeId], desired_of: Callable[[NodeId], Desired | None], now: int) -> None:
        """
        State the newest level to those that have a stream; the others hear it when they attach.

        `desired_of` gives None for a node that is none any more: it left, and another took its rank.
        """
        for node in nodes:
            line = self._current.get(node)
            desired = None if line is None else desired_of(node)
            if line is None or desired is None or (line.told is not None and desired.number <= line.told.number):
                continue
            self._tell(line, desired, now)

    def acknowledge(self, line: AgentLine, number: int) -> None:
        line.acknowledged = max(line.acknowledged, number)

    def remind(self, line: AgentLine, now: int) -> None:
        """Again what was not acknowledged. Asked at each heartbeat, so a living agent always gets it in the end."""
        if line.node is None or self._current.get(line.node) is not line or line.told is None:
            return
        if line.acknowledged < line.told.number and now - line.told_at >= RESEND_AFTER:
            self._tell(line, line.told, now)

    def _tell(self, line: AgentLine, desired: Desired, now: int) -> None:
        line.told, line.told_at = desired, now
        line.stream.send(Push(desired))
