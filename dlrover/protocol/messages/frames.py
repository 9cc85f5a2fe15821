"""
The envelope of the stream between an agent and its master.

A gRPC message is one frame, a frame is a list of parcels: whatever gathered while the previous write was under way leaves
together, so load batches itself. Requests carry an id (to match the reply) and, when they change something, a sequence
number of the sender, so that a request sent again after a broken stream is applied once.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.messages.job import AgentCommand, Desired, Heartbeat, Query, Reply
from dlrover.protocol.messages.watch import WatchObservation, WatchOrder


class Request(Struct, tag=True, frozen=True, kw_only=True):
    id: int
    body: AgentCommand | Query
    sequence: int = 0
    """Of the sender's incarnation, growing from 1; 0 for queries and for `Attach`, which may be repeated at will."""
    answered: int = 0
    """All commands up to this sequence number are settled for the sender: the master may forget its answers to them."""


class Answer(Struct, tag=True, frozen=True, kw_only=True):
    id: int
    body: Reply


class Refusal(Struct, tag=True, frozen=True, kw_only=True):
    """The request changed nothing. `retry_after` set: try again later, else never."""

    id: int
    code: str
    message: str
    retry_after: float | None = None


class Push(Struct, tag=True, frozen=True):
    desired: Desired


class Ack(Struct, tag=True, frozen=True):
    """The agent has seen this desired state; the master sends it again until then."""

    number: int


class Beat(Struct, tag=True, frozen=True):
    heartbeat: Heartbeat


class Observed(Struct, tag=True, frozen=True):
    """Volatile news of a node, besides its heartbeat."""

    observation: WatchObservation


class Ordered(Struct, tag=True, frozen=True):
    """Volatile, to be done now or never."""

    order: WatchOrder


FromAgent = Request | Ack | Beat | Observed
FromMaster = Answer | Refusal | Push | Ordered

__all__ = [
    "Ack",
    "Answer",
    "Beat",
    "FromAgent",
    "FromMaster",
    "Observed",
    "Ordered",
    "Push",
    "Refusal",
    "Request",
]
