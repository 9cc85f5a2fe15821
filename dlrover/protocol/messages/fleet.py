"""
Messages between the job and the platform its nodes come from.

The job decides which nodes shall exist and asks the platform for them by effects; the platform tells what exists by
lists and events, which are commands. Neither side believes the other blindly: the platform is right about what exists,
the job about what was counted (relaunches, evictions, targets).
"""

from __future__ import annotations

import enum

from msgspec import Struct

from dlrover.protocol.messages.identity import Incarnation, NodeId, PlatformId, Round


class NodeType(enum.StrEnum):
    WORKER = "worker"
    CHIEF = "chief"
    EVALUATOR = "evaluator"
    PS = "ps"


class NodePhase(enum.StrEnum):
    """How far a node of the platform is. Historical names, because people and tools read them."""

    INITIAL = "Initial"
    """The job wants it; the platform has not shown it yet."""
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETED = "Deleted"
    UNKNOWN = "Unknown"


class NodeExit(enum.StrEnum):
    """Why a node of the platform ended."""

    NONE = ""
    SUCCEEDED = "Succeeded"
    KILLED = "Deleted"
    """Evicted, preempted or deleted from outside."""
    OOM = "OOMKilled"
    FATAL = "Error"
    """User code failed."""
    HARDWARE = "HardwareError"
    UNKNOWN = "UnknownError"
    NO_HEARTBEAT = "NoHeartBeat"
    DIAGNOSED = "DiagnosticFailure"
    RELAUNCHED = "Relaunched"
    """A newer node of the same rank exists."""
    CHECK_FAILED = "CheckFailure"


_REASONS_TOLD = dict.fromkeys(("Network is breakdown", "Breakdown", "Node Failure"), NodeExit.CHECK_FAILED)
"""What scripts and agents of former versions say of a node that did not pass its check."""


def exit_reason_told(text: str) -> NodeExit:
    """The reason that is meant by a message about a node; NONE: the message is for people only."""
    told = text.strip()
    return _REASONS_TOLD.get(told, NodeExit(told) if told in tuple(NodeExit) else NodeExit.NONE)


_HARDWARE_CODES = (14, 128, 201, 202)
"""
What accelerator runtimes exit with: damaged memory of a device, an unknown device, its driver lost, left-overs of another process.
"""
_OOM_CODE = 247
_FATAL_CODES = (1, 134)
_KILLED_CODES = (137, 143)
_FIRST_SIGNAL_CODE = 128


def exit_reason_of(exit_code: int | None, *, signal: int | None = None, is_out_of_memory: bool = False) -> NodeExit:
    """Why a node ended, from what the kernel says. A signal may be given as such, or as 128 + n, or as -n in the code."""
    if exit_code is not None and exit_code < 0:
        signal = -exit_code
    code = _FIRST_SIGNAL_CODE + signal if signal is not None else exit_code
    if is_out_of_memory or code == _OOM_CODE:
        return NodeExit.OOM
    if code is None:
        return NodeExit.NONE
    if code == 0:
        return NodeExit.SUCCEEDED
    if code in _KILLED_CODES:
        return NodeExit.KILLED
    if code in _FATAL_CODES:
        return NodeExit.FATAL
    return NodeExit.HARDWARE if code in _HARDWARE_CODES else NodeExit.UNKNOWN


class Strategy(enum.StrEnum):
    LOCAL = "Local"
    ALLREDUCE = "AllreduceStrategy"
    PS = "ParameterServerStrategy"
    CUSTOM = "CustomStrategy"


class Resource(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one node gets. 0: whatever the platform gives by default."""

    cpu: float = 0.0
    """Cores."""
    memory_mb: int = 0
    """MiB."""
    gpus: int = 0
    """Accelerators."""
    gpu_type: str = ""
    """Their kind, as the platform names it."""


class ReplicaSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The nodes of one type."""

    count: int
    """How many of them."""
    resource: Resource = Resource()
    """What each of them gets."""
    max_relaunches: int = 3
    """Per rank, for failures only: evictions and scaling do not count."""
    critical: str = ""
    """Whose final failure ends the job: "" (worker 0 of a PS job, else none), "all", "none", or "0:3,2:1" (rank:relaunches)."""
    priority: str = ""
    """"high", "low", or a fraction f such as "0.5": the first round(count * f) nodes are high, the others low."""


class FleetSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the job wants of its platform."""

    replicas: dict[NodeType, ReplicaSpec]
    """By type: worker, ps, chief, evaluator."""
    strategy: Strategy = Strategy.ALLREDUCE
    """How nodes train together: one world, or a TensorFlow cluster with parameter servers (ParameterServerStrategy)."""
    standby: int = 0
    """Workers beyond those of the world, warm, to take the place of a lost one."""
    relaunch_always: bool = True
    """Relaunch nodes that ended by an error of user code, too (within the budget)."""
    remove_exited: bool = True
    """Ask the platform to remove what has ended and was replaced."""
    cordon_faulty: bool = False
    """Ask the platform to put no more nodes on the machine of a node that failed by its hardware."""
    pending_timeout: float = 900.0
    """Seconds a node may stay Pending; 0 or less: for ever."""
    pending_strategy: int = 1
    """Who has to run for the job to go on: -1 and 0 no node is judged, 1 the necessary nodes, 2 all."""
    group_affinity: dict[int, int] = {}
    """Scheduling group to number of workers; groups in ascending order take consecutive ranks. Empty: no groups."""
    max_job_restarts: int = 3
    """How often all nodes may be replaced at once."""
    group_pending_timeout: float = 300.0
    """Seconds a relaunched node of a group may wait before the whole group moves elsewhere; at least 300."""
    max_group_relaunches: int = 3
    """Over all groups."""
    limits: Resource = Resource()
    """What all nodes together may ask for. A part that is 0 has no limit."""
    failure_window: float = 3600.0
    """Seconds in which more failed nodes than the job has workers end it: then something else is wrong than a node."""


class PlatformNode(Struct, frozen=True, kw_only=True):
    """A node as the platform sees it now."""

    id: PlatformId
    node_type: NodeType
    rank: int
    phase: NodePhase
    exit_reason: NodeExit = NodeExit.NONE
    """NONE for one that was stopped because the job asked for it: KILLED says that others took it away."""
    exit_code: int | None = None
    host: str = ""
    """Machine that it runs on, for avoiding a faulty one."""
    name: str = ""
    message: str = ""
    """What the platform says about it: why it is pending, what ended it."""
    relaunch_count: int = 0
    """As the platform remembers it, for a master that lost its journal."""
    group: int = -1
    service_address: str = ""
    """Under which a parameter server is reached, as its launch said, for a master that lost its journal. Empty: the
    platform does not tell."""


# Commands.


class DefineFleet(Struct, tag=True, frozen=True, kw_only=True):
    """First word of the shell about the platform. Repeated after a restart with the same spec it changes nothing."""

    spec: FleetSpec


class NodesListed(Struct, tag=True, frozen=True, kw_only=True):
    """Everything of this job that the platform has, at the beginning of each watch."""

    nodes: tuple[PlatformNode, ...]
    master_epoch: int = 0
    """Newest that the platform has obeyed, as far as it tells. A master that never got so far (its journal was lost)
    counts on from there, or everything it asks for would be refused as outdated."""
    next_id: PlatformId = PlatformId(0)
    """Ids from here on were never used, as far as the platform tells; it would launch none of the others again."""


class NodeEventKind(enum.StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


class NodeChanged(Struct, tag=True, frozen=True, kw_only=True):
    kind: NodeEventKind
    node: PlatformNode


class LaunchRefused(Struct, tag=True, frozen=True, kw_only=True):
    """The platform does not take the launch now (quota, unknown resource); the shell goes on trying."""

    node: PlatformId
    reason: str


class ScaleJob(Struct, tag=True, frozen=True, kw_only=True):
    """A client with the token changes how many nodes the job shall have."""

    min_nodes: int
    max_nodes: int


class ScaleReplicas(Struct, tag=True, frozen=True, kw_only=True):
    """The same for the other types of a parameter-server job."""

    node_type: NodeType
    count: int


class SizeReplicas(Struct, tag=True, frozen=True, kw_only=True):
    """Nodes of this type that are added from now on have this size. A part that is 0 stays; nodes that are there keep theirs."""

    node_type: NodeType
    resource: Resource


class MigrateNode(Struct, tag=True, frozen=True, kw_only=True):
    """Give a node other resources: a new one is started, the old one goes when it is ready."""

    node: PlatformId
    resource: Resource


class SuspendJob(Struct, tag=True, frozen=True, kw_only=True):
    """No node is launched any more until the job is resumed. Running nodes keep running, unless they are released."""

    reason: str = ""
    is_releasing: bool = False
    """The running nodes save and leave, too. A resumed job goes on from its checkpoint, on new nodes."""


class ResumeJob(Struct, tag=True, frozen=True, kw_only=True):
    """End of a suspension."""


class RestartJob(Struct, tag=True, frozen=True, kw_only=True):
    """Replace all workers by new ones, once."""

    reason: str = ""
    round: Round = Round(0)
    """Only while the world of this round is the newest: all its agents ask, and one restart answers them all. 0: in any case."""


class ErrorLevel(enum.StrEnum):
    PROCESS = "process_error"
    NODE = "node_error"
    RENDEZVOUS = "rdzv_error"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class ReportNodeError(Struct, tag=True, frozen=True, kw_only=True):
    """An agent (or a diagnosis) says something about a whole node. Level NODE: replace it."""

    node: NodeId
    incarnation: Incarnation
    level: ErrorLevel
    message: str
    exit_reason: NodeExit = NodeExit.NONE


class VersionType(enum.StrEnum):
    """Which version of the cluster of parameter servers."""

    GLOBAL = "GLOBAL"
    """How often a parameter server was lost; or what a person set it to."""
    LOCAL = "LOCAL"
    """What a node works with."""
    RESTORED = "RESTORED"
    """What a worker has restored its model for."""


class UpdateClusterVersion(Struct, tag=True, frozen=True, kw_only=True):
    """A node of a parameter-server job tells which version of the cluster it has come to."""

    version_type: VersionType
    version: int
    node_type: NodeType = NodeType.WORKER
    rank: int = 0


class PsReady(Struct, tag=True, frozen=True, kw_only=True):
    """The workers have switched to the next cluster of parameter servers: what it does not contain may go."""

    addresses: tuple[str, ...] = ()
    """The cluster that they switched to, in rank order. It may have changed again meanwhile. Empty: as last told."""


FleetCommand = (
    DefineFleet
    | NodesListed
    | NodeChanged
    | LaunchRefused
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
)


# Queries and their answers.


class AskClusterVersion(Struct, tag=True, frozen=True, kw_only=True):
    version_type: VersionType
    node_type: NodeType = NodeType.WORKER
    rank: int = 0


class AskPsNodes(Struct, tag=True, frozen=True):
    """With which parameter servers shall the workers go on?"""


FleetQuery = AskClusterVersion | AskPsNodes


class ClusterVersion(Struct, tag=True, frozen=True, kw_only=True):
    version: int = 0


class PsNode(Struct, frozen=True, kw_only=True):
    id: PlatformId
    rank: int
    service_address: str
    resource: Resource = Resource()


class PsNodes(Struct, tag=True, frozen=True, kw_only=True):
    nodes: tuple[PsNode, ...] = ()
    """In rank order."""
    is_ready: bool = False
    """The workers have switched to these: nothing changed since."""
    has_failure: bool = False
    """Some parameter server did not come in time: go on with the smaller cluster."""


FleetReply = ClusterVersion | PsNodes


class FleetNodeStatus(Struct, frozen=True, kw_only=True):
    """A node of the platform at a glance."""

    id: PlatformId
    node_type: NodeType
    rank: int
    name: str
    phase: NodePhase
    host: str = ""
    exit_reason: NodeExit = NodeExit.NONE
    message: str = ""
    num_relaunches: int = 0
    """Of its rank, after failures: what the budget allows `max_relaunches` of."""
    num_evictions: int = 0
    """Of its rank, at no cost."""
    max_relaunches: int = 0
    is_critical: bool = False
    is_released: bool = False
    """The job does not want it any more."""
    group: int = -1

    @property
    def label(self) -> str:
        """By which people name it."""
        return f"{self.node_type.value}-{self.rank}"


# Effects.


class LaunchNode(Struct, tag=True, frozen=True, kw_only=True):
    """There shall be this node. Idempotent by id: a platform that has it, or had it, does nothing."""

    id: PlatformId
    node_type: NodeType
    rank: int
    name: str
    resource: Resource = Resource()
    relaunch_count: int = 0
    """Of its rank, after failures: what its budget has paid."""
    num_former: int = 0
    """How often its rank got another node, also after evictions. For people."""
    group: int = -1
    priority: str = ""
    avoid_hosts: tuple[str, ...] = ()
    service_address: str = ""
    """Stable address of a parameter server; its replacement gets the same."""
    environ: dict[str, str] = {}
    """Variables that the node's processes get besides those of its platform."""
    master_epoch: int = 0
    """A platform refuses an effect of an older master."""


class RemoveNode(Struct, tag=True, frozen=True, kw_only=True):
    """There shall not be this node any more. Idempotent: one that is gone already is no error."""

    id: PlatformId
    name: str
    reason: str
    grace: float = 30.0
    """Seconds that its processes have for ending."""
    cordon_host: str = ""
    """Keep new nodes away from this machine."""
    master_epoch: int = 0


FleetEffect = LaunchNode | RemoveNode
