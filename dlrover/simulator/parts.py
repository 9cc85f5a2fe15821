"""
What the parts of a simulation know of each other: the things that pass between them, and of each part what the others use.

Every part imports this module and what is below itself; `simulation.py`, which no part imports, puts them together. So nothing here is imported in a circle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dlrover.agent.decisions.acts import Act
from dlrover.agent.decisions.decisions import AgentDecisions
from dlrover.agent.decisions.departure import Departure
from dlrover.agent.decisions.joining import Membership
from dlrover.core.commit_order import CommitSequence
from dlrover.core.job import Job
from dlrover.core.outcome import Origin
from dlrover.protocol.messages.check import ExitClass
from dlrover.protocol.messages.fleet import (
    FleetSpec,
    LaunchNode,
    NodeExit,
    NodePhase,
    NodeType,
    PlatformNode,
    RemoveNode,
)
from dlrover.protocol.messages.frames import Answer, FromAgent, FromMaster, Refusal, Request
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.job import (
    AgentCommand,
    Attached,
    Command,
    Desired,
    FailureKind,
    Incarnation,
    JobTerms,
    Limits,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeRank,
    NodeSilent,
    Query,
    Reply,
    Round,
    StopCause,
    WorldSpec,
)
from dlrover.simulator.masters.journal import CrashPoint, VirtualJournal
from dlrover.simulator.masters.master_time import MasterTime
from dlrover.simulator.shapes import Shape
from dlrover.simulator.truth.touched import Committed, Touched
from dlrover.simulator.truth.training import Training
from dlrover.simulator.virtual_time import Chance, VirtualTime


class Close:
    """The other end closed the stream."""


class Pulse:
    """The first heartbeat that comes through again."""


CLOSE = Close()
PULSE = Pulse()

Upward = FromAgent | Close | Pulse
Downward = FromMaster | Close
Finding = NodeDisconnected | NodeSilent
NUM_KEPT_CONNECTIONS = 4


class VirtualLink:
    """The way between one node and wherever the master is."""

    __slots__ = ("connections", "duplicates", "is_slow", "num_cuts_down", "num_cuts_up")

    def __init__(self) -> None:
        self.num_cuts_up = 0
        """Faults that hold what the node sends; several may overlap."""
        self.num_cuts_down = 0
        self.is_slow = False
        self.duplicates = 0
        """So many of the next requests arrive twice."""
        self.connections: list[VirtualStream] = []
        """The newest ones, also those that only one end has closed."""

    @property
    def is_cut(self) -> bool:
        return self.num_cuts_up > 0 or self.num_cuts_down > 0

    def keep(self, connection: VirtualStream) -> None:
        self.connections.append(connection)
        if len(self.connections) > NUM_KEPT_CONNECTIONS:
            del self.connections[0]


class VirtualStream:
    """One stream. Each end believes what it has seen of it."""

    __slots__ = (
        "agent",
        "down_at",
        "held_down",
        "held_up",
        "is_lossy",
        "is_open_below",
        "link",
        "master",
        "up_at",
    )

    def __init__(self, agent: AgentPart, link: VirtualLink, master: MasterPart, now: int) -> None:
        self.agent = agent
        self.link = link
        self.master = master
        self.is_open_below = True
        """At the agent. Whether it is at the master, the master knows."""
        self.is_lossy = False
        """It broke in a way that loses what is under way."""
        self.up_at = now
        self.down_at = now
        self.held_up: list[Upward] = []
        self.held_down: list[tuple[Downward, ...]] = []


class VirtualNode:
    """One launch on one machine: agents come and go on it."""

    def __init__(self, number: int, rank: int | None) -> None:
        self.number = number
        self.rank = rank
        """Asked for; None lets the master choose."""
        self.link = VirtualLink()
        self.is_powered = True
        self.is_power_lost = False
        self.is_slow = False
        self.agent: AgentPart | None = None
        self.num_agents = 0
        self.num_ports = 0
        self.platform_id = PlatformId(-1)
        """What the platform knows it by; -1: no platform brought it."""
        self.fleet_rank = -1
        self.node_type = NodeType.WORKER
        self.breakage: ExitClass | None = None
        """How a node check fails on it; None: it does not."""
        self.is_sluggish = False
        """Slow in a node check."""
        self.num_deep_cuts = 0
        """Its processes cannot reach those of others."""
        self.exit_code: int | None = None
        """Of an agent that ended by itself."""
        self.disturbed_at = 0
        """When something last happened to it that could keep it from joining."""

    @property
    def label(self) -> str:
        return f"node {self.number}"


class VirtualGroup:
    """The workers of one round on one node."""

    __slots__ = ("finishes_at", "is_stopping", "is_up", "started_at", "world")

    def __init__(self, world: WorldSpec, now: int) -> None:
        self.world = world
        self.started_at = now
        self.is_up = False
        """All were forked; before they are being started."""
        self.is_stopping = False
        self.finishes_at: int | None = None


class CheckGroup:
    """One small world."""

    __slots__ = ("is_late", "is_over", "members", "seconds", "world")

    def __init__(self, world: WorldSpec) -> None:
        self.world = world
        self.members: list[AgentPart] = []
        self.seconds = 0.0
        self.is_late = False
        """Its agents will not wait for the end of the task."""
        self.is_over = False


class VirtualLine:
    """The master's end of one stream."""

    __slots__ = ("attached_at", "connection", "has_presented", "held", "incarnation", "node", "told")

    def __init__(self, connection: VirtualStream) -> None:
        self.connection = connection
        self.has_presented = False
        self.node: NodeId | None = None
        self.incarnation: Incarnation | None = None
        self.attached_at = 0
        self.told = -1
        self.held: dict[int, None] = {}
        """Refused for now: no greater number may pass before these."""


class VirtualWork:
    """One command on its way through a turn."""

    __slots__ = ("body", "id", "line", "origin")

    def __init__(
        self, body: Command | Query, line: VirtualLine | None = None, origin: Origin | None = None, id_: int = 0
    ) -> None:
        self.body = body
        self.line = line
        self.origin = origin
        self.id = id_

    @property
    def is_from_outside(self) -> bool:
        return self.line is not None


class CloudNode:
    """One launch that the cloud took."""

    __slots__ = ("exit_code", "exit_reason", "has_ended", "is_going", "is_ours", "launch", "node", "phase")

    def __init__(self, launch: LaunchNode) -> None:
        self.launch = launch
        self.phase = NodePhase.PENDING
        self.exit_reason = NodeExit.NONE
        self.exit_code: int | None = None
        self.node: VirtualNode | None = None
        self.is_going = False
        """Its removal was asked for, or it is being taken away."""
        self.is_ours = False
        """The job asked for its removal."""
        self.has_ended = False
        """Of one without an agent: its program has ended, whether or not the platform has noticed."""

    @property
    def is_alone(self) -> bool:
        """It runs, without an agent, and is well."""
        is_there = self.phase is NodePhase.RUNNING and not self.is_going and not self.has_ended
        return is_there and self.launch.node_type is not NodeType.WORKER and self.node is None

    def shown(self) -> PlatformNode:
        launch = self.launch
        return PlatformNode(
            id=launch.id,
            node_type=launch.node_type,
            rank=launch.rank,
            phase=self.phase,
            exit_reason=self.exit_reason,
            exit_code=self.exit_code,
            host=f"machine-{launch.id}",
            name=launch.name,
            relaunch_count=launch.relaunch_count,
            group=launch.group,
            service_address=launch.service_address,
        )


class NodeSource:
    """What a simulation needs of where its nodes come from. One that the job knows nothing of hears nothing of it."""

    def __init__(self, simulation: SimulationPart) -> None:
        self.sim = simulation
        self.is_refusing = False
        self.started: dict[PlatformId, None] = {}
        """Every node of a fleet that ever ran."""

    @property
    def num_pending(self) -> int:
        """What is under way and has not happened."""
        raise NotImplementedError

    def begin(self) -> None:
        """The simulation begins."""

    def scale(self, target: int) -> None:
        """The job has other limits now."""

    def serve(self, master: MasterPart) -> None:
        """A master has begun to serve."""

    def take(self, master: MasterPart, intent: LaunchNode | RemoveNode) -> None:
        """A job without a fleet asks for nothing."""
        raise AssertionError(f"no platform can be asked for {intent}")

    def word_lost(self, master: MasterPart, word: Command | Query) -> None:
        """Something that was told to the master was not written."""

    def replace(self, lost: VirtualNode) -> None:
        """A node is gone for good."""
        raise NotImplementedError


class SimulationPart(Protocol):
    """The whole, as its parts see it."""

    bound: int
    chance: Chance
    check_began_at: int
    digest_every: int
    ended_at: int | None
    events: VirtualTime
    has_timeline: bool
    is_over: bool
    limits: Limits
    platform: NodeSource
    shape: Shape
    snapshot_every: int
    terms: JobTerms
    training: Training

    @property
    def agentless(self) -> AgentlessProgramsPart: ...
    @property
    def breaths(self) -> LastBreathsPart: ...
    @property
    def checks(self) -> CheckRunsPart: ...
    @property
    def data(self) -> TasksPart | DataTrafficPart | None: ...
    @property
    def ledger(self) -> LedgerPart: ...
    @property
    def machines(self) -> MachinesPart: ...
    @property
    def masters(self) -> MastersPart: ...
    @property
    def network(self) -> NetworkPart: ...
    @property
    def people(self) -> PeoplePart: ...
    @property
    def plan(self) -> SeedPlanPart: ...
    @property
    def reading(self) -> DataTrafficPart | None: ...
    @property
    def restarts(self) -> RestartTruthPart: ...
    @property
    def saves(self) -> SaveTrafficPart: ...
    @property
    def scaling(self) -> ScalingTruthPart: ...
    @property
    def store(self) -> StoreTrafficPart: ...
    @property
    def syncs(self) -> SyncTrafficPart: ...
    @property
    def tasks(self) -> TasksPart | None: ...
    @property
    def troubles(self) -> TroublesPart: ...

    def job_over(self) -> None: ...
    def note(self, text: str) -> None: ...


class AgentPart(Protocol):
    """One agent process, as its parts, the faults and the checks of the simulation see it."""

    check: CheckGroup | None
    clock_offset: int
    decisions: AgentDecisions
    is_alive: bool
    is_warm: bool
    life: str
    me: Membership
    node: VirtualNode
    sim: SimulationPart

    @property
    def can_speak(self) -> bool: ...
    @property
    def channel(self) -> ChannelPart: ...
    @property
    def id(self) -> NodeId: ...
    @property
    def incarnation(self) -> Incarnation: ...
    @property
    def leaving(self) -> LeavingPart: ...
    @property
    def outbox(self) -> OutboxPart: ...
    @property
    def rank(self) -> NodeRank: ...
    @property
    def sleep(self) -> SleepPart: ...
    @property
    def workers(self) -> WorkersPart: ...

    def attached(self, attached: Attached) -> None: ...
    def die(self, *, is_seen: bool) -> None: ...
    def do(self, acts: list[Act]) -> None: ...
    def exit(self) -> None: ...
    def follow(self) -> None: ...
    def leave(self, departure: Departure) -> None: ...
    def mend(self, command: AgentCommand, code: str) -> None: ...
    def presentation(self) -> Request: ...
    def refused(self, code: str) -> None: ...
    def take(self, desired: Desired) -> None: ...
    def workers_stopped(self) -> None: ...


class MasterPart(Protocol):
    """One life of the master, as its parts and the streams see it."""

    applied: dict[tuple[NodeId, Incarnation], int]
    crash_point: CrashPoint | None
    downtime: int
    is_alive: bool
    is_stalled: bool
    journal: VirtualJournal
    master_epoch: int
    sequence: CommitSequence
    time: MasterTime

    @property
    def inbox(self) -> InboxPart: ...
    @property
    def is_awake(self) -> bool: ...
    @property
    def job(self) -> Job: ...
    @property
    def lines(self) -> LinesPart: ...
    @property
    def sim(self) -> SimulationPart: ...

    def adopt(self, job: Job) -> None: ...
    def die(self, *, is_seen: bool) -> None: ...
    def follow_job(self) -> None: ...
    def hear(self, word: Command | Query) -> None: ...
    def look_at_the_fence(self) -> None: ...
    def plan_turn(self) -> None: ...
    def plan_wake(self) -> None: ...
    def receive(self, connection: VirtualStream, parcel: Upward) -> None: ...
    def resume(self) -> None: ...
    def send(self, line: VirtualLine, parcel: Downward) -> None: ...
    def stall(self) -> bool: ...


class AgentlessProgramsPart(Protocol):
    """The programs on nodes without an agent."""

    def answered(self, question: Command | Query, reply: Reply) -> None: ...
    def begin(self, cloud: CloudPart) -> None: ...
    def check_calm(self, job: Job) -> str | None: ...
    def check_removal(self, node: CloudNode | None) -> None: ...
    def explain_completion(self) -> str | None: ...


class LastBreathsPart(Protocol):
    """What survivors of a loss leave in memory."""

    def failed(self, group: VirtualGroup, *, is_local: bool) -> None: ...


class CheckRunsPart(Protocol):
    """The node checks that run."""

    def enter(self, agent: AgentPart, world: WorldSpec) -> None: ...
    def leave(self, agent: AgentPart) -> None: ...


class TasksPart(Protocol):
    """The tasks of a job with parameter servers whose nodes have agents."""

    def agreed(self, job: Job, command: Command) -> None: ...
    def answered(self, agent: AgentPart, number: int, command: AgentCommand, reply: Reply) -> None: ...
    def check_patience(self, job: Job) -> str | None: ...
    def check_removal(self, intent: RemoveNode) -> None: ...
    def read(self, query: Query, reply: Reply) -> None: ...
    def refused(self, agent: AgentPart, number: int) -> None: ...
    def released(self, job: Job) -> None: ...
    def started(self, agent: AgentPart, group: VirtualGroup) -> None: ...
    def stir(self) -> None: ...
    def was_refused(self, job: Job, command: Command, code: str) -> None: ...


class DataTrafficPart(Protocol):
    """The readers of a dataset, in a job whose workers meet in worlds."""

    def agreed(self, job: Job, command: Command) -> None: ...
    def answered(self, agent: AgentPart, number: int, command: AgentCommand, reply: Reply) -> None: ...
    def persisted(self, attempt: str, text: str) -> None: ...
    def refused(self, agent: AgentPart, number: int) -> None: ...
    def stir(self) -> None: ...
    def was_refused(self, job: Job, command: Command, code: str) -> None: ...
    def world_began(self, coordinator: str) -> None: ...


class LedgerPart(Protocol):
    """What happened, for the invariants."""

    answered: dict[tuple[NodeId, Incarnation], int]
    applied: dict[tuple[NodeId, Incarnation], int]
    chargeable: dict[NodeRank, int]
    coordinators: dict[str, Round]
    has_lost_journal: bool
    lives: dict[tuple[NodeRank, Incarnation], str]
    node_failures: dict[tuple[NodeType, int], int]
    num_aborted: int
    num_alarms: int
    num_commands: int
    num_lost_nodes: int
    num_ports_taken: int
    passed: dict[tuple[str, Incarnation], int]
    worlds: dict[tuple[Round, str], dict[NodeId, int]]

    def charge(self, agent: AgentPart) -> None: ...
    def fail_node(self, rank: int, node_type: NodeType = NodeType.WORKER) -> None: ...
    def gave_up(self, notice: str) -> None: ...
    def heard_answer(self, agent: AgentPart, sequence: int) -> None: ...
    def journal_lost(self) -> None: ...
    def names_who_gave_up(self, message: str) -> bool: ...
    def rename(self, agent: AgentPart) -> None: ...


class MachinesPart(Protocol):
    """The machines, and the agents on them."""

    nodes: list[VirtualNode]
    num_launches: int

    def add(self, node: VirtualNode) -> None: ...
    def agent_of(self, node: NodeId) -> AgentPart | None: ...
    def attached(self, agent: AgentPart) -> None: ...
    def count(self) -> None: ...
    def cut_off(self, node: VirtualNode, *, up: bool, down: bool, duration: int, is_deep: bool) -> None: ...
    def exited(self, agent: AgentPart) -> None: ...
    def has_bad(self) -> bool: ...
    def has_enough(self) -> bool: ...
    def journal_lost(self) -> None: ...
    def kill_agent(self, agent: AgentPart) -> None: ...
    def lose(self, node: VirtualNode, *, is_seen: bool) -> None: ...
    def num_steady(self) -> int: ...


class MastersPart(Protocol):
    """All lives of the master."""

    is_disk_slow: bool
    is_serving: bool
    journal: VirtualJournal
    num_journals_lost: int

    @property
    def newest(self) -> MasterPart | None: ...
    @property
    def seekers(self) -> dict[AgentPart, None]: ...

    def crash(self, point: CrashPoint | None, *, downtime: int, is_seen: bool = True) -> bool: ...
    def died(self, master: MasterPart, *, durable: bytes | None, why: str, is_seen: bool = True) -> None: ...
    def fenced(self, master: MasterPart) -> None: ...
    def free_disk(self) -> None: ...
    def listening(self) -> MasterPart | None: ...
    def lose_journal(self, *, downtime: int) -> bool: ...
    def replace(self, *, sleep: int) -> bool: ...
    def serve(self) -> None: ...
    def stall(self, duration: int) -> bool: ...
    def wait_for_one(self, agent: AgentPart) -> None: ...
    def were_disturbed_since(self, when: int) -> bool: ...


class NetworkPart(Protocol):
    """Carries frames, as planned events."""

    def healed(self, connection: VirtualStream) -> None: ...
    def mute(self, connection: VirtualStream) -> None: ...
    def send_down(self, connection: VirtualStream, parcels: tuple[Downward, ...]) -> None: ...
    def send_up(self, connection: VirtualStream, parcel: Upward) -> None: ...


class PeoplePart(Protocol):
    """What people want of the job."""

    is_paused: bool
    scaled_types: dict[NodeType, None]
    want_pause: bool

    def answered(self, command: Command | Query, code: str | None = None) -> None: ...
    def check_launch(self, launch: LaunchNode) -> None: ...
    def exchange(self, pick: int) -> bool: ...
    def has_just_resumed(self) -> bool: ...
    def journal_lost(self) -> None: ...
    def scale(self, min_nodes: int, max_nodes: int) -> bool: ...
    def scale_replicas(self, node_type: NodeType, pick: int) -> bool: ...
    def suspend(self, duration: int, *, is_releasing: bool) -> bool: ...


class SeedPlanPart(Protocol):
    """All that a seed decides beforehand."""

    @property
    def hours(self) -> float: ...
    @property
    def is_cut_off(self) -> bool: ...
    @property
    def is_thorough(self) -> bool: ...
    @property
    def seed(self) -> int: ...


class RestartTruthPart(Protocol):
    """How many restarts the job may have counted."""

    def explain_count(self, job: Job, touched: Touched) -> str | None: ...
    def journal_lost(self) -> None: ...


class SaveTrafficPart(Protocol):
    """The checkpoints of the workers."""

    def answered(self, command: AgentCommand, reply: Reply) -> None: ...
    def begin(self, *, step: int, round_: Round) -> str: ...
    def check(self, job: Job) -> None: ...
    def explain_step_back(self, job: Job, former: Committed) -> str | None: ...
    def journal_lost(self) -> None: ...
    def read(self, agent: AgentPart, query: Query, reply: Reply) -> None: ...
    def stir(self) -> None: ...


class ScalingTruthPart(Protocol):
    """What a decision on the size of the job may be."""

    def before(self, job: Job) -> None: ...
    def check(self, job: Job, command: object) -> tuple[str, str] | None: ...
    def journal_lost(self) -> None: ...


class StoreTrafficPart(Protocol):
    """What agents put into the store, and read."""

    def answered(self, command: AgentCommand, reply: Reply) -> None: ...
    def check(self, job: Job) -> None: ...
    def journal_lost(self) -> None: ...
    def read(self, query: Query, reply: Reply) -> None: ...
    def stir(self) -> None: ...


class SyncTrafficPart(Protocol):
    """The sync points of the workers."""

    def answered(self, agent: AgentPart, command: AgentCommand, reply: Reply) -> None: ...
    def journal_lost(self) -> None: ...
    def read(self, agent: AgentPart, query: Query, reply: Reply) -> None: ...
    def refused(self, agent: AgentPart, command: AgentCommand) -> None: ...
    def stir(self) -> None: ...


class TroublesPart(Protocol):
    """What goes wrong, and since when all is calm."""

    num_ports_taken: int

    def add(self) -> None: ...
    def calm_for(self) -> int: ...
    def is_port_taken(self) -> bool: ...
    def pass_by(self, duration: int, heal: Callable[[], Any], *, is_trouble: bool = True) -> None: ...
    def progress_since(self) -> int: ...
    def was_calm_since(self, when: int) -> bool: ...
    def world_began(self) -> None: ...


class ChannelPart(Protocol):
    """The stream of one agent, when there is one."""

    connection: VirtualStream | None
    is_attached: bool
    outage_since: int | None

    def attempt(self, _: None = None) -> None: ...
    def drop(self, *, is_lossy: bool = False) -> None: ...
    def is_beating(self, connection: VirtualStream) -> bool: ...
    def is_overdue(self) -> bool: ...
    def keepalive_soon(self) -> None: ...
    def plan_outage_check(self) -> None: ...
    def pulse(self) -> None: ...
    def read_late(self) -> None: ...
    def receive(self, connection: VirtualStream, parcels: tuple[Downward, ...]) -> None: ...


class LeavingPart(Protocol):
    """How one agent goes."""

    is_closed: bool

    @property
    def exit_code(self) -> int: ...

    def go_when_stopped(self) -> None: ...
    def heard(self, sequence: int) -> bool: ...


class OutboxPart(Protocol):
    """What one agent has told and asked."""

    def answered(self, connection: VirtualStream, answer: Answer) -> None: ...
    def ask(self, query: Query) -> None: ...
    def detached(self) -> None: ...
    def refused(self, refusal: Refusal) -> None: ...
    def send_all(self) -> None: ...
    def tell(self, command: AgentCommand) -> int: ...
    def tell_soon(self, command: AgentCommand) -> None: ...


class SleepPart(Protocol):
    """Whether one agent stands still."""

    since: int | None

    def begin(self) -> bool: ...
    def end(self) -> None: ...
    def puts_off(self, act: Callable[..., None], argument: Any) -> bool: ...


class WorkersPart(Protocol):
    """The workers of one agent."""

    group: VirtualGroup | None

    @property
    def is_training(self) -> bool: ...

    def fail(self, kind: FailureKind, traceback: str = "") -> bool: ...
    def finish(self, coordinator: str) -> None: ...
    def lose_peer(self, coordinator: str) -> None: ...
    def runs(self, coordinator: str) -> bool: ...
    def told_step(self) -> int | None: ...
    def want_none(self, cause: StopCause, *, is_patient: bool = False) -> None: ...


class InboxPart(Protocol):
    """What waits for the next turn of one master."""

    def __len__(self) -> int: ...
    def end_turn(self) -> None: ...
    def leave(self, work: VirtualWork) -> None: ...
    def take(self) -> list[VirtualWork]: ...
    def turn_away(self, works: list[VirtualWork]) -> None: ...


class LinesPart(Protocol):
    """The master's ends of all streams."""

    current: dict[NodeId, VirtualLine]
    findings: dict[NodeId, NodeDisconnected | NodeSilent]

    def attach(self, line: VirtualLine, attached: Attached) -> None: ...
    def end(self, node: NodeId, incarnation: Incarnation) -> None: ...
    def get(self, connection: VirtualStream) -> VirtualLine | None: ...
    def look(self, now: Micros, stalled: int) -> None: ...
    def settle(self, finding: Finding) -> None: ...
    def watch(self, connection: VirtualStream, silent_for: int) -> None: ...


class CloudPart(Protocol):
    """A platform that brings and removes nodes as the job asks for it."""

    asked_to_remove: dict[PlatformId, None]
    nodes: dict[PlatformId, CloudNode]
    spec: FleetSpec

    def succeed(self, node: CloudNode) -> None: ...
