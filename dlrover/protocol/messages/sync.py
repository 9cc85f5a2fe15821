"""
Messages of sync points and barriers.

A sync point is reached when every worker that ran at its first join has joined; a barrier is open when a worker says
so. Both can be used again and again under one name: generations tell the uses apart. They belong to a round, because a
new round starts all workers, and with them all their uses, anew.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.messages.identity import Incarnation, NodeId, Round

MAX_NAME_BYTES = 256
MAX_NAMES = 4096
"""Of sync points and of barriers, each: names are kept until their round is over."""


class SyncCommand(Struct, frozen=True, kw_only=True):
    name: str
    round: Round = Round(0)
    """0: of a node outside of any world."""
    node: NodeId = NodeId(-1)
    """Put in by the agent, as is the incarnation."""
    incarnation: Incarnation = Incarnation(0)


class JoinSync(SyncCommand, tag=True, frozen=True, kw_only=True):
    """Answered by `SyncJoined`."""

    local_rank: int = 0


class NotifyBarrier(SyncCommand, tag=True, frozen=True, kw_only=True):
    """Open the next generation of the barrier."""


class SyncQuery(Struct, frozen=True, kw_only=True):
    name: str
    round: Round = Round(0)
    wait: float = 0.0
    """Seconds to wait for a positive answer."""


class SyncFinished(SyncQuery, tag=True, frozen=True, kw_only=True):
    """Did all join? An unknown name is not finished."""

    generation: int = 0
    """As `SyncJoined` said; 0: the newest."""


class BarrierOpen(SyncQuery, tag=True, frozen=True, kw_only=True):
    generation: int = 1
    """Opened so many times at least?"""


class SyncJoined(Struct, tag=True, frozen=True, kw_only=True):
    generation: int
    is_late: bool = False
    """The others went on without the caller: it was not there at the first join, or was waited for in vain."""


class SyncState(Struct, tag=True, frozen=True):
    is_reached: bool


AnySyncCommand = JoinSync | NotifyBarrier
AnySyncQuery = SyncFinished | BarrierOpen
SyncReply = SyncJoined | SyncState
