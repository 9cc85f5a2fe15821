"""
What goes around a command: who sent it, what came out of it, and the scratch paper while it is applied.

The scratch paper (`Turn`) is the one place where effects, verdicts and touched nodes gather, so that no room of the
core needs to know who else is interested, and nothing of it can leak into the state or survive a rejected command.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.messages import Effect, Incarnation, Micros, NodeId, Reply

MICROS_PER_SECOND = 1_000_000

_LONGEST = 1e9
"""Seconds. Users may give infinity for a timeout; integers cannot hold it, thirty years are as good."""


def micros(seconds: float) -> int:
    """A duration in the unit of the master's clock."""
    return round(min(seconds, _LONGEST) * MICROS_PER_SECOND)


class Origin(Struct, frozen=True):
    """Who sent a command, numbered by the sender, so that a command sent twice is applied once [DECISIONS 9]."""

    node: NodeId
    incarnation: Incarnation
    sequence: int
    """Grows from 1 within an incarnation; 0 marks a command that may be repeated at will (`Attach`)."""


class Outcome(Struct, frozen=True):
    """What a command led to."""

    reply: Reply
    effects: tuple[Effect, ...] = ()
    verdicts: tuple[str, ...] = ()
    """The reasons of the decisions taken, a sentence each."""


class Turn:
    """One command being applied."""

    def __init__(self, now: Micros) -> None:
        self.now = now
        self.effects: list[Effect] = []
        self.verdicts: list[str] = []
        self.touched: dict[NodeId, None] = {}
        """Nodes whose wish may have changed; a dict because the order of a set is not reproducible."""
        self.is_all_touched = False

    def touch(self, node: NodeId) -> None:
        self.touched[node] = None

    def touch_all(self) -> None:
        self.is_all_touched = True
