"""
Acts: what an agent decided to do. Its host carries them out in their order, at once, and waits for none of them.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.agent.decisions.departure import Departure
from dlrover.protocol.messages.job import (
    AgentCommand,
    Check,
    Join,
    JoinCheck,
    ReportFailure,
    Round,
    StopCause,
    WorldSpec,
)


class StartWorkers(Struct, frozen=True):
    """Those of this world. The offered port is theirs."""

    world: WorldSpec


class StopWorkers(Struct, frozen=True):
    cause: StopCause
    is_patient: bool = False
    """First find out whether the script has a mistake."""


class KillWorkers(Struct, frozen=True):
    """At once; their end is reported like any other failure."""


class StartCheck(Struct, frozen=True):
    """Run this task of the node check. The offered port is its own."""

    check: Check


class StopCheck(Struct, frozen=True):
    pass


class OfferPort(Struct, frozen=True):
    """What stood before it in the list of acts is begun: call `offer`."""

    join: Join | JoinCheck


class BindPort(Struct, frozen=True):
    """Bind this port or (0) any, and call `offered` or `not_offered`."""

    join: Join | JoinCheck
    port: int


class DropOffer(Struct, frozen=True):
    """The offered port is not needed."""


class WarmUp(Struct, frozen=True):
    """Import what workers need, once, and then call `warmed_up`."""


class EnterWhenStopped(Struct, frozen=True):
    """Call `enter` when neither workers nor a node check run."""

    join: Join | JoinCheck


class Interrupted(Struct, frozen=True):
    """For people: the workers of this round have to stop."""

    round: Round
    reason: str


class Waiting(Struct, frozen=True):
    """For people: this node has no place in a world."""

    reason: str


class Note(Struct, frozen=True):
    """For people: what the master says of this node."""

    text: str


class TellMaster(Struct, frozen=True):
    """The master, until it has answered. A refusal goes to `mend`."""

    command: AgentCommand


class AskFailover(Struct, frozen=True):
    """Ask the extension what shall follow this report, and call `decided`."""

    report: ReportFailure


class Reattach(Struct, frozen=True):
    """Present this agent on a new stream."""


class Depart(Struct, frozen=True):
    """The last act: see `Departure`."""

    departure: Departure


Act = (
    StartWorkers
    | StopWorkers
    | KillWorkers
    | StartCheck
    | StopCheck
    | OfferPort
    | BindPort
    | DropOffer
    | WarmUp
    | EnterWhenStopped
    | Interrupted
    | Waiting
    | Note
    | TellMaster
    | AskFailover
    | Reattach
    | Depart
)
