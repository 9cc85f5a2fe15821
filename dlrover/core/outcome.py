"""
One turn of the job, seen from outside: who sent the command, and what came out of it.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.identity import MICROS_PER_SECOND as MICROS_PER_SECOND
from dlrover.protocol.messages.identity import micros as micros
from dlrover.protocol.messages.job import DeadlineKind, Effect, Incarnation, Micros, NodeId, Reply


class Origin(Struct, frozen=True):
    """Who sent a command, numbered by the sender, so that a command sent twice is applied once."""

    node: NodeId
    incarnation: Incarnation
    sequence: int
    """Grows from 1 within an incarnation; 0 marks a command that may be repeated at will (`Attach`)."""
    answered: int = 0
    """The sender waits for no answer up to this number any more: they need not be stored."""


class Deadline(NamedTuple):
    """When time alone changes something. Computed anew at each question, so there is nothing to cancel."""

    at: Micros
    kind: DeadlineKind
    id: int
    """What it belongs to: a round, a node id."""


class NotYet(Struct, frozen=True):
    """A question whose answer does not exist yet."""

    topics: tuple[str, ...]
    """When the state of each of these has changed, it is worth looking again."""
    otherwise: Reply | Rejected
    """The answer if the caller does not want to wait for a better one."""


class Outcome(Struct, frozen=True):
    """What a command led to."""

    reply: Reply
    effects: tuple[Effect, ...] = ()
    verdicts: tuple[str, ...] = ()
    """The reasons of the decisions taken, a sentence each."""
