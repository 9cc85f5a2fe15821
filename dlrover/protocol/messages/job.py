"""
Every message of the system, as data.

What travels on the wire *is* what the core decides upon: a command that an agent sends is applied to the job and journalled
as it came. So there is one set of classes, decoding is the validation, and nothing here knows how it is transported.

Families:

* commands change the job and are journalled;
* queries read it and never are;
* observations (heartbeats, progress) are volatile and never change the job by themselves;
* `Desired` is what the master wants a node to do now: a level, not an edge, so it may be repeated or skipped at will.

Rooms of the job with a vocabulary of their own have it in a file of their own (`fleet_messages`, ...); the unions of all
families are here.

Rule for evolution: new fields get defaults, old ones keep name and type, so that agent and master may differ by a version.
"""

from __future__ import annotations

import enum

from msgspec import UNSET, Struct, UnsetType

from dlrover.protocol.messages.check import CheckResult, CheckTerms, ReportCheck
from dlrover.protocol.messages.checkpoint import (
    AnyCheckpointCommand,
    AnyCheckpointQuery,
    CheckpointReply,
    CheckpointStatus,
    HeldSnapshot,
    OpenSnapshots,
    RequestSave,
    SnapshotFailed,
    SnapshotSaved,
)
from dlrover.protocol.messages.cluster import (
    AnyClusterCommand,
    AskCluster,
    ClusterTask,
    CutTaken,
    VersionView,
)
from dlrover.protocol.messages.data import AnyDataCommand, AnyDataQuery, DataReply, DatasetState
from dlrover.protocol.messages.fleet import (
    FleetCommand,
    FleetEffect,
    FleetNodeStatus,
    FleetQuery,
    FleetReply,
    MigrateNode,
    NodeType,
    PsReady,
    ReportNodeError,
    RestartJob,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    SizeReplicas,
    Strategy,
    SuspendJob,
    UpdateClusterVersion,
)
from dlrover.protocol.messages.goodput import (
    AccountGoodput,
    AskEvents,
    AskFault,
    AskGoodput,
    Events,
    FaultTold,
    GoodputStatus,
)
from dlrover.protocol.messages.identity import Incarnation as Incarnation
from dlrover.protocol.messages.identity import Micros as Micros
from dlrover.protocol.messages.identity import NodeId as NodeId
from dlrover.protocol.messages.identity import NodeRank as NodeRank
from dlrover.protocol.messages.identity import PlatformId as PlatformId
from dlrover.protocol.messages.identity import Round as Round
from dlrover.protocol.messages.kv import AnyKvCommand, AnyKvQuery, KvReply
from dlrover.protocol.messages.peers import AskPeers, Peers
from dlrover.protocol.messages.precheck import PreCheckCommand, PreCheckStatus
from dlrover.protocol.messages.requests import RestartWorkers, SteeringCommand
from dlrover.protocol.messages.scaling import (
    JobFacts,
    OutsideScalingCommand,
    ScalingCommand,
    ScalingQuery,
    ScalingReply,
)
from dlrover.protocol.messages.sync import AnySyncCommand, AnySyncQuery, SyncReply
from dlrover.protocol.messages.watch import (
    Activity,
    AskActivity,
    AskDiagnosis,
    Diagnosis,
    NodeEvent,
    PastVerdict,
    Reach,
    SampleTaken,
    StepShape,
    WatchCommand,
    WatchTerms,
)

PROTOCOL_VERSION = 1
"""Grows when an old peer would misunderstand a new one. New fields with defaults do not count."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_FAILURE_BYTES = 64 * 1024
"""What a sender may put into the texts of one failure report; the tail is kept."""
MAX_JOURNALLED_FAILURE_BYTES = 4 * 1024
MAX_REQUESTS_IN_WORK = 256


class Limits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many nodes a world may have, and how long a round waits for them."""

    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    """A world has a multiple of this many nodes, for example the nodes under one switch."""
    last_call: float = 30.0
    """Seconds after the newest join during which a startable round still waits for nodes known to be alive."""
    first_call: float = 3.0
    """The same for nodes that were not heard of yet, in the first round only: people start nodes by hand nearly at once."""
    join_timeout: float = 600.0
    """Seconds a round may stay below `min_nodes` before the job gives up."""
    pend_timeout: float | None = None
    """Seconds that a node may wait beside worlds that never contain it before it leaves; None: for ever. Standby nodes
    are there to wait and are exempt."""

    def __post_init__(self) -> None:
        if not 0 < self.min_nodes <= self.max_nodes:
            raise ValueError(f"--nnodes {self.min_nodes}:{self.max_nodes}: give N or MIN:MAX with 0 < MIN <= MAX")
        if self.node_unit < 1:
            raise ValueError(f"--node-unit {self.node_unit}: give a number of at least 1")
        if self.min_nodes % self.node_unit or self.max_nodes % self.node_unit:
            raise ValueError(
                f"--node-unit {self.node_unit} must divide MIN and MAX of --nnodes {self.min_nodes}:{self.max_nodes}"
            )
        for name in ("last_call", "first_call", "join_timeout", "pend_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds >= 0:
                raise ValueError(f"{name} {seconds}: give a number of seconds of at least 0")

    def num_usable(self, num_nodes: int) -> int:
        """How many of so many nodes a world can have."""
        capped = min(num_nodes, self.max_nodes)
        return capped - capped % self.node_unit


class RestartPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often workers are started again after a failure. Membership changes never count."""

    max_restarts: int | None = None
    """torchrun's meaning when given, per node, 0 included. None: as long as the job makes progress."""
    max_without_progress: int = 3
    """With `max_restarts` None: so many restarts in a row without progress (`agreed/reach.py`) in between."""
    max_same_crash: int = 3
    """With `max_restarts` None: so many restarts at the same step with the same traceback."""
    lived_long: float = 60.0
    """A worker that lived so many seconds without ever reporting a step counts as having made progress."""


class Detection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How soon a node that is gone is taken for gone. All in seconds."""

    heartbeat: float = 5.0
    """Between two heartbeats of an agent, roughly."""
    silence: float = 40.0
    """A node that was not heard of for so long is gone. Eight heartbeats: a busy machine may stall for half a minute."""
    suspicion: float = 12.0
    """The same for a node whose neighbours have lost it too: two witnesses need less time than one."""
    lease: float = 30.0
    """An agent that did not run for so long kills its workers before it talks to any other process. Below `silence`, so that
    workers of a frozen node never outlive the moment at which it is replaced."""
    break_grace: float = 5.0
    """A node whose connection its own kernel closed is gone after so long without a new one."""
    break_grace_with_spare: float = 1.0
    """The same where a warm node waits to take its place."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name):g}: give a finite number of seconds above 0")
        if self.silence < 2 * self.heartbeat:
            raise ValueError(
                f"a silence of {self.silence:g} s is less than two heartbeats of {self.heartbeat:g} s, so one "
                "late heartbeat would make a healthy node count as lost. Give a longer silence or more "
                "frequent heartbeats"
            )
        if not self.lease < self.silence:
            raise ValueError(
                f"a lease of {self.lease:g} s must be shorter than the silence of {self.silence:g} s. Otherwise "
                "workers of a frozen node could continue in a world that has been replaced"
            )
        if not 2 * self.heartbeat <= self.suspicion <= self.silence:
            raise ValueError(
                f"a suspicion of {self.suspicion:g} s must be between two heartbeats ({2 * self.heartbeat:g} s) and the "
                f"silence ({self.silence:g} s)"
            )


class JobTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all nodes of a job must agree on. The first node to attach sets it; a node that differs is refused."""

    limits: Limits = Limits()
    restarts: RestartPolicy = RestartPolicy()
    detection: Detection = Detection()
    standby: int = 0
    """So many nodes beyond `max_nodes` wait warm, to take the place of a lost one at once."""
    check: CheckTerms | None = None
    """How nodes are checked before they train; None: they are not."""
    watch: WatchTerms = WatchTerms()
    strategy: Strategy = Strategy.ALLREDUCE
    """How the nodes train together: in one world, or as a cluster with parameter servers."""
    shutdown_timeout: float = 30.0
    """Seconds that workers have for stopping at the end of the job. The one term that may differ: the first node's counts."""

    def __post_init__(self) -> None:
        if not self.shutdown_timeout >= 0:
            raise ValueError(f"--shutdown-timeout {self.shutdown_timeout}: give a number of seconds of at least 0")
        if self.standby < 0:
            raise ValueError(f"--standby {self.standby}: give a number of nodes of at least 0")
        if self.strategy is Strategy.PS and (self.standby or self.check is not None):
            raise ValueError(
                "--strategy ps: a parameter-server job has no standby nodes and no node check; leave them out"
            )


class Stage(enum.StrEnum):
    INIT = "init"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUSPENDED = "suspended"
    """What runs, runs on; nothing is launched."""
    RESTARTING = "restarting"
    """Only while a restart of all workers is being decided: no node is replaced on its own then."""


class ExitReason(enum.StrEnum):
    """Why a job ended."""

    COMPLETED = "Completed"
    CODE_ERROR = "CodeError"
    """User code fails in the same way each time: syntax error, missing module, crash loop at one step."""
    WORKER_ERROR = "WorkerError"
    WORKER_OOM = "WorkerOOM"
    RESTART_OVER_LIMIT = "RestartOverLimit"
    RENDEZVOUS_TIMEOUT = "RdzvTimeout"
    NOT_ENOUGH_NODES = "UncompletedTimeout"
    STOPPED_BY_USER = "StoppedByUser"
    PS_OOM = "PSOOM"
    PS_ERROR = "PSError"
    EVALUATOR_OOM = "EvaluatorOOM"
    EVALUATOR_ERROR = "EvaluatorError"
    PENDING_TIMEOUT = "PendingTimeout"
    NODE_CHECK_FAILED = "NodeCheckFailed"
    UNKNOWN_ERROR = "UnknownError"
    HANG_ERROR = "HangError"
    PRE_CHECK_FAILED = "PreCheckFailed"
    DATA_UNFINISHED = "DataUnfinished"
    """The workers ended well and left training data unread, or some of it could not be read."""


class FailureKind(enum.StrEnum):
    """What ended a worker, as far as the agent can tell from the kernel, the error file and the traceback."""

    EXCEPTION = "exception"
    EXIT_CODE = "exit-code"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out-of-memory"
    """SIGKILL together with a grown oom_kill counter of the cgroup."""
    MEMORY_ERROR = "memory-error"
    """A MemoryError (or the allocator's out-of-memory error) in the traceback."""
    PEER_LOST = "peer-lost"
    """Looks like the consequence of another worker's death: connection closed, reset, timed out."""
    PORT_TAKEN = "port-taken"
    """The coordinator's port was taken by another process between the offer and its use."""
    BAD_SCRIPT = "bad-script"
    """SyntaxError or a missing module before the first step: no restart can help."""
    STOPPED_BY_US = "stopped-by-us"
    DIAGNOSED = "diagnosed"
    """It did not end by itself: the master found that it stands still, or harms the job."""
    START_FAILED = "start-failed"
    """The process could not be started at all (interpreter or program missing, fork refused)."""


class WorkerFailure(Struct, frozen=True, kw_only=True):
    """How one worker ended."""

    global_rank: int
    local_rank: int
    pid: int
    kind: FailureKind
    exited_at: Micros
    """On the master's clock: the agent adds its measured offset to the instant the pidfd fired."""
    exit_code: int | None = None
    """Of a normal exit; None when a signal ended it."""
    signal: int | None = None
    message: str = ""
    """One line: the exception, or what the kernel said."""
    traceback: str = ""
    log_tail: str = ""
    log_file: str = ""
    error_file: str = ""
    node_error: str = ""
    """The line of its log that says the node is broken; empty: none does."""
    stop_line: str = ""
    """The line of its log after which, as the user says, no restart makes sense; empty: there is none."""
    exceptions: tuple[str, ...] = ()
    """Names of the types of the uncaught exception, of those that led to it, and of all their bases; empty: not known."""
    is_before_step: bool = False
    """The worker is known not to have made a step."""


class WorldSpec(Struct, frozen=True, kw_only=True):
    """One node's place in the world of a round. Its size does not grow with the world."""

    round: Round
    group_rank: int
    group_world_size: int
    first_global_rank: int
    local_world_size: int
    world_size: int
    coordinator: str
    """host:port that becomes MASTER_ADDR and MASTER_PORT of the workers."""
    restart_count: int
    """How often workers were started again so far, for whatever reason: TORCHELASTIC_RESTART_COUNT."""
    job_age: float = 0.0
    """Seconds from the first round of the job to this one; with the restarts it says how often training is interrupted."""
    task: ClusterTask | None = None
    """What its one process is in the cluster of a parameter-server job; None: the workers form a world."""
    turns: tuple[tuple[Round, int], ...] = ()
    """Which step the ranks of earlier rounds went on with, of jobs that read shards: see `data_messages.last_shared`."""


class StopCause(enum.StrEnum):
    """Why workers are stopped; it decides how long they may take."""

    FAILURE = "failure"
    MEMBERSHIP = "membership"
    END_OF_JOB = "end-of-job"
    PREEMPTION = "preemption"


class FirstFailure(Struct, frozen=True, kw_only=True):
    """The failure that began it all, for the final report."""

    failure: WorkerFailure
    node_rank: NodeRank
    host: str
    round: Round
    step: int | None = None


class DistinctFailure(Struct, frozen=True, kw_only=True):
    """One way in which workers failed in a round, and how many did. Small: it is told to every node."""

    kind: FailureKind
    message: str
    node_rank: NodeRank
    """Of who told of it first, like the next two."""
    host: str
    global_rank: int
    count: int = 1
    traceback_digest: str = ""
    """The same for tracebacks of the same bug; empty where there was none."""


class JobEnd(Struct, frozen=True, kw_only=True):
    """How the job ended: the content of the final report."""

    reason: ExitReason
    exit_code: int
    message: str
    """One paragraph for people: what happened and what to do."""
    first_failure: FirstFailure | None = None
    num_restarts: int = 0
    num_rounds: int = 0
    distinct_failures: tuple[DistinctFailure, ...] = ()
    """Of the last round that failed."""


# What the master wants a node to do now.


class Join(Struct, tag=True, frozen=True):
    """A round is open: stop the workers of older rounds and join it."""

    round: Round
    """The round that the join shall lead to."""
    cause: StopCause
    reason: str
    note: str = ""
    """What people at that node should see, though it changes nothing: the verdict on a slow node that trains all the same."""


class Wait(Struct, tag=True, frozen=True):
    """You have joined; keep waiting. Or: you are not needed now (a spare)."""

    reason: str


class Run(Struct, tag=True, frozen=True):
    """Run the workers of this world. Already running them: nothing to do."""

    world: WorldSpec


class Idle(Struct, tag=True, frozen=True):
    """Your workers finished; wait at the exit barrier for the others."""

    reason: str


class End(Struct, tag=True, frozen=True):
    """The job is over: stop the workers, report the end, leave."""

    end: JobEnd


class Leave(Struct, tag=True, frozen=True):
    """The job goes on without you: stop the workers, say farewell, exit with this code."""

    reason: str
    exit_code: int = 0
    is_pause: bool = False
    """The whole job pauses: workers have their time to end, and what they hold in memory is saved."""


class JoinCheck(Struct, tag=True, frozen=True):
    """You are to be checked before you train: stop the workers of older rounds and join this round of the node check."""

    round: Round
    cause: StopCause
    reason: str


class Check(Struct, tag=True, frozen=True):
    """Run the task of the node check in this small world, and report. Already running or reported: nothing to do."""

    world: WorldSpec
    phase: str
    """Its name, for the log."""


Wish = Join | Wait | Run | Idle | End | Leave | JoinCheck | Check


class Desired(Struct, frozen=True):
    """The whole of what a node should be doing, numbered so that an older one never overrides a newer."""

    number: int
    master_epoch: int
    wish: Wish


# Commands: change the job, are journalled.


class MasterStarted(Struct, tag=True, frozen=True):
    """First command of each master life. Leases and deadlines shift by the outage."""

    master_epoch: int
    job_name: str = ""
    user: str = ""
    """Who started the job; empty: not told."""


class Attach(Struct, tag=True, frozen=True, kw_only=True):
    """An agent presents itself, at its start and after each broken stream or master restart."""

    launch: str
    """Unique per launcher start; a restarted agent of the same launcher has the same one and keeps its node id and rank."""
    host: str
    terms: JobTerms
    local_world_size: int
    node_rank: NodeRank | None = None
    """Explicitly asked for; None lets the master choose and stick to it."""
    incarnation: Incarnation = Incarnation(0)
    """0 for a fresh agent; else the life it continues."""
    running_round: Round = Round(0)
    """Round whose workers run right now; 0 for none."""
    is_finished: bool = False
    """Its workers of `running_round` have all ended well (exit barrier)."""
    life: str = ""
    """Drawn at random by each agent process: tells a repeated attach whose answer was lost from a former process."""
    master_epoch: int = 0
    """Newest the agent has seen. A master that never got so far (its journal was lost) counts on from there."""
    world: WorldSpec | None = None
    """Place in the world of `running_round`, so that a master whose journal was lost can take the world up again."""
    place: tuple[str, ...] = ()
    """Where the node is in the network, outermost switch first; nodes of one place get neighbouring ranks."""
    platform_node: PlatformId = PlatformId(-1)
    """What the platform knows this node by; -1: started by hand."""
    node_type: NodeType = NodeType.WORKER
    group: int = -1
    """Scheduling group (rack) of the node; -1: none."""
    former_rank: NodeRank | None = None
    """Had under an earlier master of the job; a master that lost its journal gives it again if it is free."""
    peer: str = ""
    """host:port at which other agents reach this one for snapshots; empty: it gives and keeps none."""
    name: str = ""
    """What the platform calls the node, for example its pod; empty: it has no name."""
    node_ip: str = ""
    """Of the machine that the node runs on, if it is not `host`: plug-ins of the network are asked about this one."""
    foreign_node: int = -1
    """Its number on a platform that is none of ours, where each relaunch of a rank gets a greater one; -1: it has none."""


TRAINING_RENDEZVOUS = "elastic-training"
NODE_CHECK_RENDEZVOUS = "network-check"


class JoinRendezvous(Struct, tag=True, frozen=True, kw_only=True):
    node: NodeId
    incarnation: Incarnation
    round: Round
    local_world_size: int
    offer: str
    """host:port bound by the agent; becomes the coordinator if this node gets group rank 0."""
    is_offer_reused: bool = False
    """The node has no other port left (HOST_PORTS) and offers one of an earlier round. Otherwise that is refused."""
    name: str = TRAINING_RENDEZVOUS
    """Which of the two meetings. The names are those that tools know from the original."""


class BlockRendezvous(Struct, tag=True, frozen=True, kw_only=True):
    """No round shall complete until the node says so, is gone, or its lease ends. Repeated: the lease begins anew."""

    node: NodeId
    incarnation: Incarnation
    reason: str
    lease: float = 600.0
    """Seconds."""


class UnblockRendezvous(Struct, tag=True, frozen=True, kw_only=True):
    """The end of the node's block; harmless if there is none."""

    node: NodeId
    incarnation: Incarnation


class AwaitOrder(Struct, tag=True, frozen=True, kw_only=True):
    """The shell has asked the sorter for the order of the nodes: no round completes before its answer, or so soon."""

    limit: float = 2.0
    """Seconds."""


class NodesOrdered(Struct, tag=True, frozen=True, kw_only=True):
    """The sorter's answer, used by the next world. Empty: none came, the order is our own."""

    ranks: tuple[NodeRank, ...]
    """Node ranks in the order in which they shall stand in a world; who is not named comes after them."""


class ReportFailure(Struct, tag=True, frozen=True, kw_only=True):
    node: NodeId
    incarnation: Incarnation
    round: Round
    failures: tuple[WorkerFailure, ...]
    """Of this node in this round, earliest first; never empty."""
    step: int | None = None
    """Greatest step any local worker reported in this round; None if none did."""
    lived: float = 0.0
    """Seconds the workers of this round lived on this node."""
    reach: Reach = Reach()
    has_whole_state: bool = False
    """The memory of no other node is needed to go on: this node has all pieces of the newest snapshot, others keep copies, or there is none."""
    shape: StepShape | UnsetType = UNSET
    """What a step consisted of for the worker whose device or machine ran out of memory, if one did and had told it."""


class ReportFinished(Struct, tag=True, frozen=True, kw_only=True):
    """All workers of the node ended with exit code 0."""

    node: NodeId
    incarnation: Incarnation
    round: Round
    step: int | None = None


class LeaveReason(enum.StrEnum):
    JOB_ENDED = "job-ended"
    STOPPED_BY_USER = "stopped-by-user"
    """Ctrl-C or SIGTERM at the launcher."""
    PREEMPTED = "preempted"
    FAILED = "failed"
    DISMISSED = "dismissed"
    """The master wished it (`Leave`)."""


class LeaveJob(Struct, tag=True, frozen=True, kw_only=True):
    """The agent goes and will not come back: no node needs to wait for it."""

    node: NodeId
    incarnation: Incarnation
    reason: LeaveReason
    message: str = ""
    held: tuple[HeldSnapshot, ...] = ()
    """Snapshots in its memory that it will write to storage by itself before it is gone."""


class NodeDisconnected(Struct, tag=True, frozen=True, kw_only=True):
    """Finding of the shell: the stream of this incarnation broke."""

    node: NodeId
    incarnation: Incarnation
    step: int | None = None
    """Greatest step its heartbeats told of: if the agent died, no other report says whether there was progress."""
    is_our_fault: bool = False
    """The master had stood still for so long that agents closed their streams: that says nothing about the node."""


class NodeSilent(Struct, tag=True, frozen=True, kw_only=True):
    """Finding: nothing was heard of the node for longer than the silence limit."""

    node: NodeId
    incarnation: Incarnation
    last_seen_at: Micros


class DeadlineKind(enum.StrEnum):
    LAST_CALL = "last-call"
    JOIN_TIMEOUT = "join-timeout"
    NODE_GONE = "node-gone"
    DRAIN = "drain"
    """The job has ended and some nodes did not leave in time."""
    PEND_TIMEOUT = "pend-timeout"
    BLOCK_LEASE = "block-lease"
    GROWTH = "growth"
    """A node that came and went too often may enlarge the world again."""
    SYNC_TIMEOUT = "sync-timeout"
    """A sync point waits for a worker that does not come."""
    CHECK_CALL = "check-call"
    """A node check begins with those who have joined it."""
    CHECK_PHASE = "check-phase"
    """Who has not reported the task of the node check has failed it."""
    SAVE_TIMEOUT = "save-timeout"
    """A storage save waits for shards that do not come, or for its committer."""
    DATA_LEASE = "data-lease"
    """Shards of a worker that was not heard of may go to another."""
    CLUSTER_PHASE = "cluster-phase"
    """The phase of a version of the cluster lasts too long."""
    BREAK_POINT = "break-point"
    """What is kept of workers that have ended is decided without the nodes that have not told what they hold."""
    TAKE_UP = "take-up"
    """Members of a world that runs since before our journal was lost had their time for coming back."""

    NODE_PENDING = "node-pending"
    """A node of the platform that the job cannot do without has waited too long for its resources."""
    SMALLER_NODE = "smaller-node"
    """One that waits may come sooner if it asks for less."""
    GROUP_PENDING = "group-pending"
    TOO_FEW_ALIVE = "too-few-alive"
    PS_WAIT = "ps-wait"
    SCALING = "scaling"
    """A brake opens, a probation is over: the size of the job is looked at again."""


class DeadlinePassed(Struct, tag=True, frozen=True, kw_only=True):
    """A deadline that `Job.due(now)` named has passed."""

    kind: DeadlineKind
    id: int
    """What the deadline belongs to: a round, a node id; tells a stale one from a current one."""


class StopJob(Struct, tag=True, frozen=True, kw_only=True):
    """A client with the token wants the job to end."""

    message: str = ""


Command = (
    MasterStarted
    | Attach
    | JoinRendezvous
    | ReportFailure
    | ReportFinished
    | LeaveJob
    | NodeDisconnected
    | NodeSilent
    | DeadlinePassed
    | StopJob
    | FleetCommand
    | BlockRendezvous
    | UnblockRendezvous
    | AwaitOrder
    | NodesOrdered
    | AnyKvCommand
    | AnySyncCommand
    | AnyDataCommand
    | ReportCheck
    | AnyCheckpointCommand
    | RequestSave
    | WatchCommand
    | AccountGoodput
    | SteeringCommand
    | PreCheckCommand
    | AnyClusterCommand
    | ScalingCommand
)
AgentCommand = (
    Attach
    | JoinRendezvous
    | ReportFailure
    | ReportFinished
    | LeaveJob
    | StopJob
    | ScaleJob
    | ScaleReplicas
    | SizeReplicas
    | MigrateNode
    | SuspendJob
    | ResumeJob
    | RestartJob
    | ReportNodeError
    | UpdateClusterVersion
    | PsReady
    | BlockRendezvous
    | UnblockRendezvous
    | AnyKvCommand
    | AnySyncCommand
    | AnyDataCommand
    | ReportCheck
    | AnyCheckpointCommand
    | RequestSave
    | SteeringCommand
    | AnyClusterCommand
    | OutsideScalingCommand
)
"""What may come from outside. The rest is injected by the master's own shell."""


# Replies to commands.


class Done(Struct, tag=True, frozen=True):
    """Applied and durable."""


class Attached(Struct, tag=True, frozen=True, kw_only=True):
    node: NodeId
    node_rank: NodeRank
    incarnation: Incarnation
    master_epoch: int
    job_name: str
    now: Micros
    """The master's clock when it answered: the agent learns its offset from it."""
    desired: Desired


# Queries.


class AskStatus(Struct, tag=True, frozen=True):
    """Everything a person wants to know at a glance."""


class Ping(Struct, tag=True, frozen=True):
    """Is this a master, of which job, and does it serve?"""


Query = (
    AskStatus
    | Ping
    | AnyKvQuery
    | AnySyncQuery
    | AnyDataQuery
    | FleetQuery
    | AnyCheckpointQuery
    | AskPeers
    | AskDiagnosis
    | AskGoodput
    | AskFault
    | AskEvents
    | AskActivity
    | AskCluster
    | ScalingQuery
)


class Pong(Struct, tag=True, frozen=True, kw_only=True):
    job_name: str
    master_epoch: int
    protocol_version: int = PROTOCOL_VERSION


STANDBY = "standby"
"""Status of a node that waits warm to take the place of a lost one."""


class NodeStatus(Struct, frozen=True, kw_only=True):
    node: NodeId
    node_rank: NodeRank
    incarnation: Incarnation
    name: str = ""
    """What the platform calls it; empty: it has no name."""
    host: str
    status: str
    wish: str
    step: int | None = None
    check: CheckResult | None = None
    """What the newest check found out about it; None: it was not checked."""
    group_rank: int = -1
    """In the newest world; -1: it is not a member."""
    local_world_size: int = 0
    """Workers that it runs in the newest world."""
    slot: str = ""
    """Type and rank in a parameter-server job, for example ps-1; empty: a worker or a standby, by its node rank."""

    @property
    def label(self) -> str:
        """By which people name it."""
        return self.slot or f"{self.status if self.status == STANDBY else 'worker'}-{self.node_rank}"


class LeftOut(Struct, frozen=True, kw_only=True):
    """Nodes of a status that one message has no room for: how many, by what is said of them."""

    nodes: dict[str, int] = {}
    fleet: dict[str, int] = {}


class JobStatus(Struct, tag=True, frozen=True, kw_only=True):
    job_name: str
    stage: Stage
    master_epoch: int
    round: Round
    world_size: int
    num_restarts: int
    verdict: str
    nodes: tuple[NodeStatus, ...]
    end: JobEnd | None = None
    min_nodes: int = 0
    max_nodes: int = 0
    limits_version: int = 0
    """How often the job was scaled."""
    num_standby: int = 0
    """Nodes that wait warm, as wished."""
    num_pending: int = 0
    """Nodes that wait although fewer were asked for."""
    distinct_failures: tuple[DistinctFailure, ...] = ()
    """Of the newest round that failed."""
    fleet: tuple[FleetNodeStatus, ...] = ()
    """What the platform has or shall have for the job; empty: nodes are started by hand."""
    shortage: str = ""
    """Why the job waits for the platform; empty: it does not."""
    digest: str = ""
    """Hex of the job's state digest, for comparing a replay with the original."""
    user: str = ""
    """Who started it; empty: not told."""
    checkpoints: CheckpointStatus = CheckpointStatus()
    newest_verdict: PastVerdict | None = None
    """Of the diagnosis; None: nothing was ever wrong."""
    dashboard: str = ""
    """Address of the job's page; empty: there is none."""
    now: Micros = Micros(0)
    """The master's clock when it answered: what the instants in here are to be compared with; 0: not told."""
    pre_check: PreCheckStatus = PreCheckStatus()
    datasets: tuple[DatasetState, ...] = ()
    """Of dynamic sharding, in the order of their registration; without the partitions of streams."""
    cluster: VersionView | None = None
    """Of a parameter-server job."""
    left_out: LeftOut = LeftOut()
    """Nodes that are not in here, because the job has more of them than one message can carry."""
    blocked: str = ""
    """Why the master can decide nothing now, and what to do about it; empty: it can. The rest is as it was then."""

    @property
    def stage_text(self) -> str:
        return f"blocked ({self.stage})" if self.blocked else str(self.stage)

    @property
    def reason(self) -> str:
        """For what the job does, or does not."""
        return self.blocked or self.verdict


Reply = (
    Done
    | Attached
    | Pong
    | JobStatus
    | KvReply
    | SyncReply
    | DataReply
    | FleetReply
    | CheckpointReply
    | Peers
    | Diagnosis
    | GoodputStatus
    | FaultTold
    | Events
    | Activity
    | CutTaken
    | VersionView
    | ScalingReply
)


# Observations: volatile, never journalled.


class Heartbeat(Struct, tag=True, frozen=True, kw_only=True):
    node: NodeId
    incarnation: Incarnation
    step: int | None = None
    snapshot_step: int | None = None
    """The newest step of which all local shards are in memory."""
    copied_step: int | None = None
    """The newest of which other nodes keep copies or parity of all local shards; None also where no node is to keep any."""


# Effects: what the core asks of the shell.


class TellNode(Struct, tag=True, frozen=True):
    """The node's desired state changed: push the newest."""

    node: NodeId


class EndStream(Struct, tag=True, frozen=True):
    """The job goes on without this node, whose agent may be well: on another stream it hears that it shall end."""

    node: NodeId
    incarnation: Incarnation


class FinishJob(Struct, tag=True, frozen=True):
    """The job is over and every node has left (or was given up): the master may exit."""

    end: JobEnd


class LookAgain(Struct, tag=True, frozen=True):
    """Questions that wait for one of these topics may have an answer now."""

    topics: tuple[str, ...]


Effect = TellNode | EndStream | FinishJob | LookAgain | FleetEffect


# Worker to agent, over the node's unix socket.


class Hello(Struct, tag=True, frozen=True, kw_only=True):
    """First message of a worker: who it is."""

    local_rank: int
    round: Round
    pid: int


class ReportStep(Struct, tag=True, frozen=True, kw_only=True):
    """The worker finished this step of the optimizer."""

    step: int


WorkerOrder = (
    BlockRendezvous
    | UnblockRendezvous
    | ReportNodeError
    | UpdateClusterVersion
    | PsReady
    | RestartJob
    | RestartWorkers
    | StopJob
    | JobFacts
)
"""Commands about the whole job, of scripts that direct it."""
WorkerNews = NodeEvent | SampleTaken
"""Observations that the agent passes on in the name of its node."""
WorkerRequest = (
    AnyKvCommand
    | AnyKvQuery
    | AnySyncCommand
    | AnySyncQuery
    | AnyDataCommand
    | AnyDataQuery
    | WorkerOrder
    | WorkerNews
    | AskStatus
    | FleetQuery
    | AnyClusterCommand
    | AskCluster
)
"""What workers may ask of the master, through their agent."""


class AskMaster(Struct, tag=True, frozen=True, kw_only=True):
    """To be passed on to the master. Many may be under way at a time."""

    id: int
    """Of the connection; the answer has the same."""
    body: WorkerRequest
    timeout: float
    """Seconds for which the worker waits for the answer."""


WorkerMessage = Hello | ReportStep | AskMaster | OpenSnapshots | SnapshotSaved | SnapshotFailed


# Agent to worker, the answers.


class MasterAnswer(Struct, tag=True, frozen=True, kw_only=True):
    id: int
    reply: Done | KvReply | SyncReply | DataReply | JobStatus | FleetReply | CutTaken | VersionView


class MasterRefusal(Struct, tag=True, frozen=True, kw_only=True):
    """Nothing changed; or, with the code "unavailable", it is unknown whether it did."""

    id: int
    code: str
    message: str


AgentMessage = MasterAnswer | MasterRefusal
