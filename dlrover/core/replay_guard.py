"""
The replay guard: a command that arrives twice is applied once.

After a broken stream an agent sends again whatever was not answered, and cannot know whether it was applied. Each
sender numbers its commands; the job remembers per sender how far it got and what it answered last, as part of its own
state, so that the memory survives the master together with what it is about.

Answers of the key-value store may be a megabyte each, and the state's digest is computed at each commit: like the store's
values they are hashed once, into a digest of all that was ever remembered.
"""

from __future__ import annotations

import hashlib
from typing import Any, get_args

import msgspec
from msgspec import Struct

from dlrover.core.outcome import Origin
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import Command, Incarnation, NodeDisconnected, NodeId, NodeSilent, Reply
from dlrover.protocol.messages.kv import MAX_VALUE_BYTES, KvCompareSet, KvPop, KvValues

NUM_STORED_REPLIES = 64
"""Per sender: more than a sender has unanswered."""
MAX_UNHEARD_BYTES = 8 * MAX_VALUE_BYTES
"""Of values in the answers that one sender has not confirmed yet: they are part of every snapshot of the journal."""


class Sender(Struct):
    """One life of an agent."""

    incarnation: Incarnation
    highest: int = 0
    """Greatest sequence number applied."""
    replies: dict[int, Reply] = {}
    """The newest ones, by sequence number."""


class ReplayGuard(Struct):
    by_node: dict[NodeId, Sender] = {}
    history: bytes = b""
    """Digest of all changes so far."""

    def outline(self) -> ReplayGuard:
        """What stands for the senders in the digest of the job."""
        return ReplayGuard(history=self.history)

    def begin(self, node: NodeId, incarnation: Incarnation) -> None:
        """A new life counts from 1 again."""
        self.by_node[node] = Sender(incarnation)
        self._note(("begin", node, incarnation))

    def forget(self, node: NodeId) -> None:
        if self.by_node.pop(node, None) is not None:
            self._note(("forget", node))

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
                code=ErrorCode.STALE_INCARNATION,
            )
        if origin.sequence > sender.highest:
            return None
        reply = sender.replies.get(origin.sequence)
        if reply is None:
            raise Rejected(
                f"Command {origin.sequence} of node {origin.node} comes after command {sender.highest} was applied, "
                f"and is not among the last {NUM_STORED_REPLIES} answered ones.",
                code=ErrorCode.TOO_OLD,
            )
        return reply

    def check_room(self, command: Command, origin: Origin | None) -> None:
        """Raises `Rejected` for a command that is answered by a value while too much was answered that was not confirmed."""
        if not isinstance(command, KvPop | KvCompareSet) or origin is None or origin.sequence == 0:
            return
        unheard = (reply for number, reply in self.by_node[origin.node].replies.items() if number > origin.answered)
        size_bytes = sum(len(value) for reply in unheard if isinstance(reply, KvValues) for value in reply.values)
        if size_bytes >= MAX_UNHEARD_BYTES:
            raise Rejected(
                f"Node {origin.node} has {size_bytes} bytes of answers under way, and {MAX_UNHEARD_BYTES} may be. Nothing "
                "changed; try again when they have come.",
                code=ErrorCode.KV_BUSY,
            )

    def store(self, origin: Origin | None, reply: Reply) -> None:
        if origin is None or origin.sequence == 0:
            return
        self._note(("store", origin, reply))
        sender = self.by_node[origin.node]
        sender.highest = origin.sequence
        sender.replies[origin.sequence] = reply
        for sequence in [number for number in sender.replies if number <= origin.answered]:
            del sender.replies[sequence]
        if len(sender.replies) > NUM_STORED_REPLIES:
            del sender.replies[min(sender.replies)]

    def _note(self, change: tuple[object, ...]) -> None:
        self.history = hashlib.blake2b(self.history + _ENCODER.encode(change), digest_size=16).digest()


def check_sender(command: Any, origin: Origin | None) -> None:
    """What a command says of its node must be what the stream says of its sender."""
    if origin is None or type(command) not in _FROM_A_NODE:
        return
    if (command.node, command.incarnation) != (origin.node, origin.incarnation):
        raise Rejected(
            f"Node {origin.node} in incarnation {origin.incarnation} may not speak for node {command.node} in "
            f"incarnation {command.incarnation}.",
            code=ErrorCode.WRONG_SENDER,
        )


_ENCODER = msgspec.msgpack.Encoder()
_TOLD_BY_THE_SHELL = (NodeDisconnected, NodeSilent)
_FROM_A_NODE = {
    kind: None
    for kind in get_args(Command)
    if kind not in _TOLD_BY_THE_SHELL and {"node", "incarnation"}.issubset(kind.__struct_fields__)
}
"""Commands that name the node which sends them."""
