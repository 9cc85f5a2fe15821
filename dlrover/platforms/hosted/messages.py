"""
What the local platform and its node host say to each other over the host's unix socket.

One connection per intent or question, which ends with its answer, and one per watch, which stays: so nothing needs to be
matched with anything, and a master that dies leaves nothing behind.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from dlrover.platforms.base import RoomChanged
from dlrover.protocol.codec import Codec
from dlrover.protocol.messages.fleet import LaunchNode, NodeChanged, NodesListed, RemoveNode, Resource


class ListNodes(Struct, tag=True, frozen=True):
    """Answered by one `NodesListed`."""


class WatchNodes(Struct, tag=True, frozen=True):
    """Answered by one `NodesListed` and then by each `NodeChanged` and `RoomChanged`, until one side hangs up."""


class AskRoom(Struct, tag=True, frozen=True):
    """Answered by one `RoomFound`, or `IntentRefused` for a size that makes no sense."""

    resource: Resource


class LimitNodes(Struct, tag=True, frozen=True):
    """A person says how many nodes may run on this host from now on; 0: as many as are asked for. Nodes that run stay until their job lets them go."""

    most: int


class HostRequest(Struct, frozen=True, kw_only=True):
    job_uid: str
    body: LaunchNode | RemoveNode | ListNodes | WatchNodes | AskRoom | LimitNodes


class Taken(Struct, tag=True, frozen=True):
    """The intent was taken, or there was nothing to do."""


class RefusalKind(enum.StrEnum):
    BAD = "bad"
    OLD_MASTER = "old-master"
    NOT_NOW = "not-now"


class IntentRefused(Struct, tag=True, frozen=True, kw_only=True):
    kind: RefusalKind
    message: str
    code: str = ""
    newest_master_epoch: int = 0


class RoomFound(Struct, tag=True, frozen=True):
    free: int | None
    reason: str


HostAnswer = Taken | IntentRefused | RoomFound | NodesListed | NodeChanged | RoomChanged

REQUEST: Codec[HostRequest] = Codec(HostRequest, name="request to the node host")
ANSWER: Codec[HostAnswer] = Codec(HostAnswer, name="answer of the node host")
