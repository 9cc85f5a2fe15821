"""
The state of a job: plain data, nothing else.

Its encoding is the snapshot of a journal, its digest is what a replay is compared with. The rooms below it own their
part and change it through their methods; there is no set in it, because the order of one differs between two runs.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.core.check.state import NodeCheck, PreCheck
from dlrover.core.checkpoints.state import Checkpoints
from dlrover.core.clusters.cluster import Cluster
from dlrover.core.data.books import DataBooks
from dlrover.core.exchange.kv_store import KvStore
from dlrover.core.exchange.sync_points import SyncPoints
from dlrover.core.failures.blame import Hangs, Restarts
from dlrover.core.fleet.fleet import Fleet
from dlrover.core.goodput.accountant import Goodput
from dlrover.core.membership.nodes import Nodes
from dlrover.core.membership.rendezvous import Rendezvous
from dlrover.core.replay_guard import ReplayGuard
from dlrover.core.scaling.state import Scaling
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import Detection, JobEnd, JobTerms, Limits, Micros, Stage

DECISION_VERSION = 22
"""Grows when the same commands would lead to another state: then only the snapshots of a journal can be used."""


class JobState(Struct, kw_only=True):
    """All that is durable. Plain data: its encoding is the snapshot, its digest is compared after a replay."""

    decision_version: int = DECISION_VERSION
    number: int = 0
    """Commands applied so far = number of the last record in the journal."""
    now: Micros = Micros(0)
    """When the last command was applied. Never goes back."""
    master_epoch: int = 0
    job_name: str = ""
    user: str = ""
    """Who started the job; empty: not told."""
    terms: JobTerms | None = None
    """Set by the first node that attaches; the limits are those of the newest scaling."""
    limits_version: int = 0
    """How often the job was scaled. From 1 on the limits that nodes come with do not count any more."""
    stage: Stage = Stage.INIT
    end: JobEnd | None = None
    """Set from stage STOPPING on."""
    end_sentence: str = ""
    """The part of the end's message that stays when a better first failure is found."""
    drains_at: Micros | None = None
    """When nodes that have not left after the end are given up."""
    verdict: str = ""
    """The newest one."""
    nodes: Nodes = msgspec.field(default_factory=Nodes)
    rendezvous: Rendezvous = msgspec.field(default_factory=Rendezvous)
    restarts: Restarts = msgspec.field(default_factory=Restarts)
    replay_guard: ReplayGuard = msgspec.field(default_factory=ReplayGuard, name="senders")
    kv: KvStore = msgspec.field(default_factory=KvStore)
    sync: SyncPoints = msgspec.field(default_factory=SyncPoints)
    check: NodeCheck = msgspec.field(default_factory=NodeCheck)
    checkpoints: Checkpoints = msgspec.field(default_factory=Checkpoints)
    data: DataBooks = msgspec.field(default_factory=DataBooks)
    goodput: Goodput = msgspec.field(default_factory=Goodput)
    hangs: Hangs = msgspec.field(default_factory=Hangs)
    pre_check: PreCheck = msgspec.field(default_factory=PreCheck)
    scaling: Scaling = msgspec.field(default_factory=Scaling)
    cluster: Cluster | None = None
    """None: the workers form a world."""
    fleet: Fleet | None = None
    """None: people start the nodes by hand."""

    @property
    def detection(self) -> Detection:
        """Before the first node has come no node can be lost."""
        return Detection() if self.terms is None else self.terms.detection

    @property
    def limits(self) -> Limits:
        """How many nodes a world may have now: the job's bounds, with the target of scaling in place of the maximum."""
        limits, target = Limits() if self.terms is None else self.terms.limits, self.scaling.target
        if target is None or target == limits.max_nodes:
            return limits
        return replace(limits, max_nodes=target)

    def check_running(self) -> None:
        """Raises `Rejected` when the job has ended."""
        if self.end is not None:
            raise Rejected(f"The job has ended: {self.end.message}", code=ErrorCode.JOB_ENDED)

    def enter_running(self) -> None:
        """A suspended job may train, it only launches nothing: it is running when it is resumed."""
        if self.fleet is not None and self.fleet.is_suspended:
            self.fleet.suspended_from = Stage.RUNNING
        else:
            self.stage = Stage.RUNNING
