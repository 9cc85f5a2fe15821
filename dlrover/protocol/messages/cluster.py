"""
Messages of a parameter-server job: which processes form a version of the cluster, and how they tell how far they are.

A version is a set of fresh processes: parameter servers, a chief and workers. The master counts the versions and the starts of processes; a
message of a process names its start, so that one of an ended process changes nothing. Orders are levels: a process asks for the view of the
cluster and waits until it differs from the one that it knows.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import Incarnation, NodeId, Round

NO_CUT = -1
"""Of a checkpoint that nothing tells which records its model has seen."""
FRESH = -1
"""Restored step of a model that begins."""
MAX_ADDRESS = 256
MAX_REASON = 256


class ClusterPhase(enum.StrEnum):
    GATHERING = "gathering"
    """The parameter servers of the version start and report their addresses."""
    RESTORING = "restoring"
    """The chief builds the model on them and restores the newest checkpoint."""
    TRAINING = "training"
    PARKING = "parking"
    """The set of servers shall change, or the chief wants an exact save: chief and workers stop after their step and keep their sessions."""
    SAVING = "saving"
    """All are parked and the chief writes a checkpoint."""


class ClusterTask(Struct, frozen=True, kw_only=True):
    """What the process of a node is in a version."""

    version: int
    node_type: NodeType
    rank: int


class ClusterCommand(Struct, frozen=True, kw_only=True):
    """What a process of the cluster reports."""

    node: NodeId = NodeId(-1)
    """Put in by the agent, as is the incarnation."""
    incarnation: Incarnation = Incarnation(0)
    round: Round = Round(0)
    """The start of the process."""


class ServerBound(ClusterCommand, tag=True, frozen=True, kw_only=True):
    """The server of the process listens."""

    address: str
    """host:port; empty: the process serves no other (an evaluator)."""
    is_coordinator: bool = False
    """It hands out all work of its version: if it is lost, nothing of the version goes on."""


class ModelRestored(ClusterCommand, tag=True, frozen=True, kw_only=True):
    """The chief has a session with a restored or a fresh model: the others may open theirs. The data books go back with it."""

    step: int
    """-1: a fresh model."""
    cut: int = NO_CUT
    """Of the checkpoint."""
    data_state: str = ""
    """What is stored beside the checkpoint about all datasets."""
    is_data_kept: bool = False
    """The datasets go on where they are: what was read since the checkpoint is lost for the model."""


class ProcessParked(ClusterCommand, tag=True, frozen=True, kw_only=True):
    """The process trains no further step while its version is parked. All that it read is reported."""

    step: int


class ParkForSave(ClusterCommand, tag=True, frozen=True, kw_only=True):
    """The chief wants to save while the others train no step (`exact_saves`): all park, it saves, and they go on in the same version."""


class TakeCut(ClusterCommand, tag=True, frozen=True, kw_only=True):
    """The chief is about to save. What was reported up to now is in the checkpoint. Answered by `CutTaken`."""


class ModelSaved(ClusterCommand, tag=True, frozen=True, kw_only=True):
    """The checkpoint of that cut is complete in storage."""

    step: int
    cut: int = NO_CUT


class RenewVersion(ClusterCommand, tag=True, frozen=True, kw_only=True):
    """
    The chief needs the next version: of a coordinator that is lost nothing can be taken over, and to one that runs no worker can be added. As
    after the loss of a server, the next version goes on from the last checkpoint.
    """

    reason: str


AnyClusterCommand = ServerBound | ModelRestored | ProcessParked | ParkForSave | TakeCut | ModelSaved | RenewVersion


class CutTaken(Struct, tag=True, frozen=True, kw_only=True):
    cut: int
    data_state: str = ""
    """To be stored beside the checkpoint; empty: the job reads no shards for training."""


class AskCluster(Struct, tag=True, frozen=True, kw_only=True):
    """How is the cluster? Answered by `VersionView`, as soon as it has another number than the one that the asker knows."""

    seen: int = 0
    wait: float = 0.0
    """Seconds to wait for a newer view."""


class VersionView(Struct, tag=True, frozen=True, kw_only=True):
    number: int = 0
    """Grows with each change."""
    version: int = 0
    phase: ClusterPhase = ClusterPhase.GATHERING
    servers: tuple[str, ...] = ()
    """Addresses of the parameter servers in rank order; empty while they are gathered."""
    restored_step: int | None = None
    """That this version began with; None: not yet."""
    saved_step: int = FRESH
    """Of the newest complete checkpoint."""
    num_parks: int = 0
    """Counts how often the processes of the job were asked to park: one that is told to park twice in a row parks twice."""
    num_workers: int = 0
    """Workers whose training is not over. The chief saves last when there are none."""
    is_over: bool = False
    """The chief has ended well: there is nothing left to train."""
    workers: dict[int, str] = {}
    """Addresses of the workers of this version by rank. The process of a worker that starts again finds here where its former one listened."""
    num_wanted_workers: int = 0
    """That the platform shall run."""
