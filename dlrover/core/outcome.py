"""
One turn of the job, seen from outside: who sent the command, and what came out of it.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import Effect, Incarnation, NodeId, Reply

MICROS_PER_SECOND = 1_000_000

_LONGEST = 1e9
"""Seconds. Users may give infinity for a timeout; integers cannot hold it, thirty years are as good."""


def micros(seconds: float) -> int:
    """A duration in the unit of the master's clock."""
    return round(min(seconds, _LONGEST) * MICROS_PER_SECOND)


class Origin(Struct, frozen=True):
    """Who sent a command, numbered by the sender, so that a command sent twice is applied once."""

    node: NodeId
    incarnation: Incarnation
    sequence: int
    """Grows from 1 within an incarnation; 0 marks a command that may be repeated at will (`Attach`)."""
    answered: int = 0
    """The sender waits for no answer up to this number any more: they need not be stored."""


class NotYet(Struct, frozen=True):
    """A question whose answer does not exist yet."""

    topics: tuple[str, ...]
    """When the state of each of these has changed, it is worth looking again."""
    otherwise: Reply | Rejected
    """The answer if nobody wants to wait for a better one."""


class Outcome(Struct, frozen=True):
    """What a command led to."""

    reply: Reply
    effects: tuple[Effect, ...] = ()
    verdicts: tuple[str, ...] = ()
    """The reasons of the decisions taken, a sentence each."""
