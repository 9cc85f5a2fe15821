"""
What rooms tell each other when something happens, where one word is not enough.

Fields that are marked as an answer are set by a room that reacts, for the room that announced (`Decision.announce`).
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from dlrover.agreed.reach import NOTHING_TOLD
from dlrover.core.membership.nodes import Node
from dlrover.protocol.messages.fleet import FleetSpec, NodeExit, NodeType, ReplicaSpec
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.job import (
    Attach,
    DistinctFailure,
    ExitReason,
    FirstFailure,
    Micros,
    NodeId,
    NodeRank,
    WorkerFailure,
)
from dlrover.protocol.messages.scaling import SizePlan
from dlrover.protocol.messages.watch import Reach, StepShape

STOPPED = "stopped"
"""Fault of a node that was told to stop: it was requested."""


class AgentComes(Struct):
    command: Attach
    """Answer: with the node rank that its node has."""


class RankContested(Struct):
    holder: Node
    """Is alive."""
    command: Attach
    is_taken_over: bool = False
    """Answer: the new agent is there to take that place."""


class AllFinished(Struct):
    is_work_left: bool = False
    """Answer: other nodes still work, beside the world."""
    is_reading: bool = False
    """Answer: workers have something that they have not told the end of."""


class NodeLost(Struct, kw_only=True):
    node: Node
    why: str
    is_given_up: bool
    """It did not say goodbye."""
    was_running: bool
    was_member: bool
    was_claiming: bool
    exit_reason: NodeExit = NodeExit.KILLED
    """NONE: on our wish."""
    is_presumed: bool = False
    """Only its connection closed: that says nothing about the node."""
    ended_at: Micros | None = None
    """When it was last known to be there."""
    fault: str = "node"
    """What the accountant calls it."""
    successor: PlatformId = PlatformId(-1)
    """On this node of the platform another agent takes its rank; -1: none does."""


class ClusterLooks(Struct):
    """A cluster compares what it has with what its platform wants it to have."""

    servers: tuple[PlatformId, ...] = ()
    """Answer: parameter servers of the next version, in rank order."""
    is_complete: bool = False
    """Answer: the platform has brought all of them."""
    num_workers: int = 0
    """Answer: workers that the platform has or shall bring."""


class CutTaking(Struct):
    cut: int
    data_state: str = ""
    """Answer: what a model of this cut has still to read."""


class ModelReturns(NamedTuple):
    """The chief of a cluster goes on with this model."""

    step: int
    cut: int
    data_state: str
    is_data_kept: bool


class AnotherNode(Struct):
    node_rank: NodeRank
    exit_reason: NodeExit
    why: str = ""
    """Empty: nothing is done yet, it is only asked whether."""
    is_given: bool = False
    """Answer: a platform gives another node, or would."""


class RoundOpened(NamedTuple):
    reason: str
    members: list[NodeId]
    """Of the newest world, who are called back."""
    fault: str
    node_rank: NodeRank | None
    first: FirstFailure | None


class WorkersFailed(Struct):
    first: FirstFailure
    lived: float
    failures: tuple[WorkerFailure, ...]
    reach: Reach = NOTHING_TOLD
    has_whole_state: bool = False
    shape: StepShape | None = None
    """Of a step of the worker that ran out of memory; None: it did not tell, or none did."""
    is_node_suspect: bool = False
    reason: str = ""
    """Answer: why the next round opens; empty: the round's failure is known already."""
    fault: str = ""
    """Answer: what the accountant calls it."""
    is_hopeless: bool = False
    """Answer: too few nodes are left for that round, so nothing has to be decided."""


class FleetDefined(Struct):
    spec: FleetSpec
    """As people gave it."""
    replicas: dict[NodeType, ReplicaSpec]
    """Answer: with the numbers and sizes to begin with."""
    first_workers: int = 0
    """Answer: so many workers of a world are wanted at first; 0: all."""


class TargetMoved(NamedTuple):
    """The world shall have another number of nodes, within the same bounds."""

    former: int
    target: int
    why: str
    """As a part of a sentence."""


class PlanMade(NamedTuple):
    """The job wants other numbers or sizes of nodes than its world's."""

    plan: SizePlan
    why: str
    """As a part of a sentence."""


class JobEnds(Struct):
    reason: ExitReason
    sentence: str
    first: FirstFailure | None = None
    exit_code: int | None = None
    message: str = ""
    """Answer: the sentence with the failure that led to it."""
    distinct_failures: tuple[DistinctFailure, ...] = ()
    """Answer."""
