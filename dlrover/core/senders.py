"""
Senders: a command that arrives twice is applied once.

After a broken stream an agent sends again whatever was not answered, and cannot know whether it was applied. Each
sender numbers its commands; the job remembers per sender how far it got and what it answered last, as part of its own
state, so that the memory survives the master together with what it is about.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.core.turn import Origin
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages import Incarnation, NodeId, Reply

NUM_STORED_REPLIES = 64
"""Per sender: more than a sender has unanswered."""


class Sender(Struct):
    """One life of an agent."""

    incarnation: Incarnation
    highest: int = 0
    """Greatest sequence number applied."""
    replies: dict[int, Reply] = {}
    """The newest ones, by sequence number."""


class Senders(Struct):
    by_node: dict[NodeId, Sender] = {}

    def begin(self, node: NodeId, incarnation: Incarnation) -> None:
        """A new life counts from 1 again."""
        self.by_node[node] = Sender(incarnation)

    def forget(self, node: NodeId) -> None:
        self.by_node.pop(node, None)

    def answered(self, origin: Origin | None) -> Reply | None:
        """The reply of a command that was applied before; None for a new one.

        Raises `Rejected` for a sender whose life is over, and for a command too old to be known.
        """
        if origin is None or origin.sequence == 0:
            return None
        sender = self.by_node.get(origin.node)
        if sender is None or origin.incarnation != sender.incarnation:
            raise Rejected(
                f"Incarnation {origin.incarnation} of node {origin.node} is over; its commands count no more.",
                code="stale-incarnation",
            )
        if origin.sequence > sender.highest:
            return None
        reply = sender.replies.get(origin.sequence)
        if reply is None:
            raise Rejected(
                f"Command {origin.sequence} of node {origin.node} comes after command {sender.highest} was applied, "
                f"and is not among the last {NUM_STORED_REPLIES} answered ones.",
                code="too-old",
            )
        return reply

    def store(self, origin: Origin | None, reply: Reply) -> None:
        if origin is None or origin.sequence == 0:
            return
        sender = self.by_node[origin.node]
        sender.highest = origin.sequence
        sender.replies[origin.sequence] = reply
        for sequence in [number for number in sender.replies if number <= origin.answered]:
            del sender.replies[sequence]
        if len(sender.replies) > NUM_STORED_REPLIES:
            del sender.replies[min(sender.replies)]
