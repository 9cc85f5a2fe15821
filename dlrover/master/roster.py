"""
Which node is on which stream, and what it has been told.

Pushes are levels: only the newest desired state of a node matters, and it is sent again until the agent has
acknowledged it. A stream that an agent replaced by a newer one no longer speaks for the node, so its end says
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dlrover.protocol.frames import Push
from dlrover.protocol.messages import Attached, Desired, Incarnation, Micros, NodeDisconnected, NodeId
from dlrover.protocol.serving import AgentStream

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
class Line:
    """One stream, and the node behind it once it has attached."""

    stream: AgentStream
    has_presented: bool = False
    """An attach was taken in: a stream speaks for one node, in one life."""
    node: NodeId | None = None
    incarnation: Incarnation | None = None
    gate: Gate = field(default_factory=Gate)
    is_open: bool = True
    told: int = -1
    told_at: int = 0
    acknowledged: int = -1


class Roster:
    def __init__(self) -> None:
        self._lines: dict[AgentStream, Line] = {}
        self._current: dict[NodeId, Line] = {}

    def line(self, stream: AgentStream) -> Line:
        """Known from its first message on."""
        return self._lines.setdefault(stream, Line(stream))

    def attach(self, line: Line, attached: Attached, now: Micros) -> None:
        """The line now speaks for the node; an older one of the same node no longer does."""
        assert line.node is None, f"a stream of node {line.node} attached again as node {attached.node}"
        older = self._current.get(attached.node)
        line.node, line.incarnation = attached.node, attached.incarnation
        line.told, line.told_at = attached.desired.number, now
        self._current[attached.node] = line
        if older is not None:
            older.stream.end()

    def close(self, stream: AgentStream) -> NodeDisconnected | None:
        """What the end of the stream means; None if it spoke for nobody."""
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

    def push(self, nodes: Iterable[NodeId], desired_of: Callable[[NodeId], Desired], now: Micros) -> None:
        """State the newest level to those that have a stream; the others hear it when they attach."""
        for node in nodes:
            line = self._current.get(node)
            if line is not None:
                self._tell(line, desired_of(node), now)

    def acknowledge(self, line: Line, number: int) -> None:
        line.acknowledged = max(line.acknowledged, number)

    def remind(self, line: Line, desired_of: Callable[[NodeId], Desired], now: Micros) -> None:
        """Again what was not acknowledged. Asked at each heartbeat, so a living agent always gets it in the end."""
        if line.node is None or self._current.get(line.node) is not line or line.acknowledged >= line.told:
            return
        if now - line.told_at >= RESEND_AFTER:
            line.told = -1
            self._tell(line, desired_of(line.node), now)

    def _tell(self, line: Line, desired: Desired, now: Micros) -> None:
        if desired.number <= line.told:
            return
        line.told, line.told_at = desired.number, now
        line.stream.send(Push(desired))
