"""What people with the token may ask of a running job, besides scaling and stopping it."""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.messages.identity import NodeId, PlatformId

MAX_REASON = 1024
"""Characters of the reason that a person gives: it is said, and some of it is kept. More is cut off."""


class RestartWorkers(Struct, tag=True, frozen=True, kw_only=True):
    """All workers stop and start again in the next round, on the same nodes. Costs nothing of the restart budget."""

    reason: str = ""


class RelaunchNode(Struct, tag=True, frozen=True, kw_only=True):
    """Exchange a node for a new one of its platform, at once. Costs nothing of the relaunch budget."""

    node: NodeId
    """-1: `platform_node` says which."""
    reason: str = ""
    platform_node: PlatformId = PlatformId(-1)
    """What the platform knows it by, for a node from which no agent has come."""
    is_cordoned: bool = False
    """Its machine gets no node of this job any more, as far as the platform follows such wishes."""


SteeringCommand = RestartWorkers | RelaunchNode
