"""
What a job and Brain say to each other.

Brain keeps what the jobs of a tenant measured, proposes a start to a new job, and divides a cluster's room between jobs. Each message has one answer. A
message that brings facts may be sent again: Brain stores a run, a decision and the end of a node once, by their numbers. A job never waits for Brain.

The reader of the token is one tenant, and sees and changes the jobs of that tenant alone. Instants are told as an age in seconds, so no two clocks need to agree.
Nothing here carries a path, an environment or code: scripts and datasets are told as hashes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from dlrover.protocol.messages.fleet import NodeType, Resource, Strategy
from dlrover.protocol.messages.frames import Refusal
from dlrover.protocol.messages.identity import PlatformId
from dlrover.protocol.messages.job import ExitReason
from dlrover.protocol.messages.scaling import JobFacts, RunMeasured, ScaleDecision, SizePlan, SpeedPoint

MAX_NAME = 128
MAX_SENTENCE_LENGTH = 1024
MAX_RUNS_TOLD = 256
"""Of one message. A run has at most 2 KB."""
MAX_DECISIONS_TOLD = 64
MAX_CURVE_POINTS = 256
MAX_PODS_TOLD = 1024
MAX_ROWS = 500
"""Jobs or plans of one answer."""
MAX_SETTINGS = 128

Name = Annotated[str, Meta(max_length=MAX_NAME)]
Uid = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
Sentence = Annotated[str, Meta(max_length=MAX_SENTENCE_LENGTH)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Row = Annotated[int, Meta(ge=0, le=2**31)]


class JobRef(Struct, frozen=True, kw_only=True):
    """Which job speaks."""

    uid: Uid
    """One journal, one uid: a job that begins again with an empty journal is another job, because its runs are numbered from 1 again."""
    secret: Name = ""
    """Known to the masters of this job alone and the same in each of their lives, for example derived from the job's token. Brain keeps its hash
    at the first message and refuses every other, so one job cannot write under the uid of another."""


class JobRecipe(Struct, frozen=True, kw_only=True):
    """By what jobs are recognised as alike. Empty and 0: unknown."""

    name: Name = ""
    """`--recipe NAME`: the user says which jobs are alike."""
    script_hash: Name = ""
    script_name: Name = ""
    """The last part of the path."""
    dataset_hash: Name = ""
    model_size: Count = 0
    """Parameters, or bytes: what the script tells. Two digits of it count."""


class JobBounds(Struct, frozen=True, kw_only=True):
    """What a start plan has to keep."""

    min_nodes: Annotated[int, Meta(ge=1, le=2**20)] = 1
    max_nodes: Annotated[int, Meta(ge=1, le=2**20)] = 1
    node_unit: Annotated[int, Meta(ge=1, le=2**20)] = 1
    limits: Resource = Resource()
    """Of all nodes together; a part that is 0 has no limit."""
    smallest: Resource = Resource(cpu=4.0, memory_mb=6144)
    largest: Resource = Resource(cpu=32.0, memory_mb=65_536)
    most_workers: Annotated[int, Meta(ge=1, le=2**20)] = 60
    """Of a job with parameter servers."""
    most_servers: Annotated[int, Meta(ge=1, le=2**20)] = 15
    types: Annotated[tuple[NodeType, ...], Meta(max_length=4)] = (NodeType.WORKER, NodeType.PS)
    """Types whose number and size may be changed."""


class AskedGroup(Struct, frozen=True, kw_only=True):
    """The nodes of one type, as the user asked for them."""

    node_type: NodeType
    count: Annotated[int, Meta(ge=0, le=2**20)]
    resource: Resource = Resource()


class JobBegan(Struct, tag=True, frozen=True, kw_only=True):
    """
    A job begins, or its master speaks with Brain for the first time in its life. Answered by `StartPlan`.

    May be repeated; the newest words count. A job that has run for a while asks for no plan, and wants the number of the newest run that Brain has.
    """

    job: JobRef
    name: Name = ""
    user: Name = ""
    cluster: Name = ""
    namespace: Name = ""
    app: Name = ""
    strategy: Strategy = Strategy.ALLREDUCE
    recipe: JobRecipe = JobRecipe()
    bounds: JobBounds = JobBounds()
    asked: Annotated[tuple[AskedGroup, ...], Meta(max_length=4)] = ()
    age: Seconds = 0.0
    """Seconds since the job began."""
    wants_plan: bool = True


class RunsTold(Struct, tag=True, frozen=True, kw_only=True):
    """
    Runs of the journal, in the order of their numbers. Answered by `BrainStored`.

    The same number again takes the place of what was told, if it lasted at least as long. `kept_of` says which part of a run is kept.
    """

    job: JobRef
    runs: Annotated[tuple[RunMeasured, ...], Meta(max_length=MAX_RUNS_TOLD)]


class FactsTold(Struct, tag=True, frozen=True, kw_only=True):
    """What became known of the job since it began. Answered by `BrainStored`. Of `custom`, texts and `exit_reason` nothing is kept; of names of datasets a hash."""

    job: JobRef
    facts: JobFacts
    recipe: JobRecipe | None = None
    """If that became known, too; None: keep."""


class DecisionsTold(Struct, tag=True, frozen=True, kw_only=True):
    """
    What the job decided about its size, in the order of the numbers: what a plan promised, and what came. Answered by `BrainStored`.

    The same number again takes the place of what was told.
    """

    job: JobRef
    decisions: Annotated[tuple[ScaleDecision, ...], Meta(max_length=MAX_DECISIONS_TOLD)]


class NodeEndKind(enum.StrEnum):
    OOM = "oom"
    FAILED = "failed"
    EVICTED = "evicted"
    SLOW = "slow"
    """Exchanged because the others waited for it."""


class NodeEnded(Struct, tag=True, frozen=True, kw_only=True):
    """A node ended before the job did. Answered by `BrainStored`; stored once for each node and kind."""

    job: JobRef
    node: PlatformId
    """Its number within the job, never used again. Without a platform: a number that grows."""
    node_type: NodeType
    kind: NodeEndKind
    resource: Resource = Resource()
    """What it was given."""
    memory_mb: Amount = 0.0
    """The most that it used; 0: unknown."""
    age: Seconds = 0.0
    """Seconds since then."""


class JobTotals(Struct, frozen=True, kw_only=True):
    seconds: Seconds = 0.0
    steps: Count = 0
    core_hours: Amount = 0.0
    num_node_ends: Count = 0


class JobEnded(Struct, tag=True, frozen=True, kw_only=True):
    """Answered by `BrainStored`. Sent after all runs."""

    job: JobRef
    reason: ExitReason
    totals: JobTotals = JobTotals()
    age: Seconds = 0.0
    """Seconds since then."""


class PlanStage(enum.StrEnum):
    """What a plan is asked for. `stage_of` takes all historical spellings."""

    CREATE = "job_stage_create"
    SERVERS_INITIAL = "job_stage_ps_initial"
    WORKERS_INITIAL = "job_stage_worker_initial"
    RUNNING = "job_stage_running"


_STAGES = {
    "job_stage_ps_running": PlanStage.RUNNING,
    "job_stage_worker_running": PlanStage.RUNNING,
}


def stage_of(text: str) -> PlanStage | None:
    """None: no stage that there is or was."""
    told = text.strip().lower()
    return _STAGES.get(told) or next((stage for stage in PlanStage if stage == told), None)


class PlanAsked(Struct, tag=True, frozen=True, kw_only=True):
    """Is there a better size for a job that runs? Answered by `BrainPlan`, from the runs that Brain has been told."""

    job: JobRef
    stage: PlanStage = PlanStage.RUNNING
    algorithm: Name = ""
    """A historical name (`optimize_job_hot_ps_resource`), `start_like` or `percentile`; empty: what the stage and the settings say."""
    is_oom: bool = False
    """A node of the job has just ended without memory."""
    options: Annotated[dict[Name, Name], Meta(max_length=MAX_SETTINGS)] = {}
    """Parameters of the algorithms under their historical keys; they win over the settings."""


class SettingsAsked(Struct, tag=True, frozen=True, kw_only=True):
    """Which settings hold for this job? Answered by `JobSettings`: the first entry whose scopes fit."""

    job: JobRef


class AllowanceAsked(Struct, tag=True, frozen=True, kw_only=True):
    """How much of the cluster's room is for this job? Answered by `Allowance`."""

    job: JobRef
    min_nodes: Annotated[int, Meta(ge=1, le=2**20)]
    max_nodes: Annotated[int, Meta(ge=1, le=2**20)]
    node_unit: Annotated[int, Meta(ge=1, le=2**20)] = 1
    nodes: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """That it has now."""
    points: Annotated[tuple[SpeedPoint, ...], Meta(max_length=MAX_CURVE_POINTS)] = ()
    """Speed by nodes, the fewest nodes first. Empty: unknown; the job then gets its minimum and what others leave."""
    remaining: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    """Records (or steps) that are still to be done, in the unit of the speed; 0: unknown."""
    change_cost: Annotated[float, Meta(ge=0, le=1e6)] = 2.0
    """Seconds that training pauses for a change."""


# What is asked by people and by the historical client.


class JobsAsked(Struct, tag=True, frozen=True, kw_only=True):
    """Which jobs does Brain know, the newest first? Answered by `JobList`."""

    name: Name = ""
    """Only jobs of this name."""
    most: Annotated[int, Meta(ge=1, le=MAX_ROWS)] = 50
    tenant: Name = ""
    """Of another tenant: only the role `admin` may ask for it. `*`: of all."""


class JobAsked(Struct, tag=True, frozen=True, kw_only=True):
    """What does Brain know of this job? Answered by `JobRecord`."""

    uid: Uid
    most: Annotated[int, Meta(ge=1, le=MAX_ROWS)] = 100
    """Runs, and plans: the newest."""
    tenant: Name = ""


class PlansAsked(Struct, tag=True, frozen=True, kw_only=True):
    """Which plans were made, the newest first, and what came of them? Answered by `PlanList`."""

    most: Annotated[int, Meta(ge=1, le=MAX_ROWS)] = 50
    tenant: Name = ""


# The cluster monitor. It needs the role `monitor`.


class PodPhase(enum.StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class PodSeen(Struct, frozen=True, kw_only=True):
    """A pod of a job, as the cluster shows it."""

    uid: Uid
    name: Name = ""
    job_uid: Name = ""
    job_name: Name = ""
    node_type: NodeType | None = None
    """None: no role of a training job."""
    phase: PodPhase = PodPhase.UNKNOWN
    is_oom: bool = False
    is_gone: bool = False
    """It was deleted since it was told last."""
    resource: Resource = Resource()
    age: Seconds = 0.0
    """Seconds since it was made."""


class MachinesSeen(Struct, frozen=True, kw_only=True):
    """What the machines of the cluster that take pods have, and what requests have claimed of it."""

    count: Count = 0
    cpu: Amount = 0.0
    memory_mb: Amount = 0.0
    gpus: Count = 0
    claimed_cpu: Amount = 0.0
    claimed_memory_mb: Amount = 0.0
    claimed_gpus: Count = 0
    largest: Resource = Resource()
    """What the machine with the most free cores could still take."""


class ClusterSeen(Struct, tag=True, frozen=True, kw_only=True):
    """Pods that have changed, and the machines if they have. Answered by `BrainStored`. A restarted monitor tells all pods again."""

    cluster: Name
    machines: MachinesSeen | None = None
    """None: as told before."""
    pods: Annotated[tuple[PodSeen, ...], Meta(max_length=MAX_PODS_TOLD)] = ()


BrainQuestion = (
    JobBegan
    | RunsTold
    | FactsTold
    | DecisionsTold
    | NodeEnded
    | JobEnded
    | PlanAsked
    | SettingsAsked
    | AllowanceAsked
    | JobsAsked
    | JobAsked
    | PlansAsked
    | ClusterSeen
)
"""What Brain is asked. The tag is the class name."""


# Answers.


class StartPlan(Struct, tag=True, frozen=True, kw_only=True):
    """What the job should begin with, within its bounds."""

    plan: SizePlan | None = None
    """None: there is nothing to go by, or no plan was wanted."""
    sentence: Sentence = ""
    """Why, for people."""
    level: Annotated[int, Meta(ge=0, le=3)] = 0
    """How alike the jobs are that the plan is taken from: 1 same recipe, 2 same script name, user and strategy, 3 same strategy and size of model. 0: none."""
    similar: Count = 0
    """Jobs that it is taken from."""
    confidence: Annotated[float, Meta(ge=0, le=1)] = 0.0
    algorithm: Name = ""
    expected_speed: Amount = 0.0
    """Records per second; 0: no forecast."""
    newest_run: Row = 0
    """Of this job: Brain has it and all before it. What is newer should be told."""


class BrainStored(Struct, tag=True, frozen=True, kw_only=True):
    """It is stored, durably."""

    newest_run: Row = 0
    """Of this job: Brain has it and all that was told before it. 0: none."""
    newest_decision: Row = 0


class BrainPlan(Struct, tag=True, frozen=True, kw_only=True):
    plan: SizePlan | None = None
    """None: nothing to propose; the sentence says why."""
    sentence: Sentence = ""
    algorithm: Name = ""
    expected_speed: Amount = 0.0
    """0: no forecast."""


class JobSettings(Struct, tag=True, frozen=True, kw_only=True):
    values: Annotated[dict[Name, Name], Meta(max_length=MAX_SETTINGS)] = {}
    entry: Row = 0
    """Order number of the entry that fits; 0: none does."""


class Allowance(Struct, tag=True, frozen=True, kw_only=True):
    """Advice: the job takes it as its room."""

    nodes: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    """None: Brain knows no room to divide, so nothing limits the job."""
    lasts: Seconds = 300.0
    """Seconds; after that, and without another answer, nothing limits the job any more."""
    sentence: Sentence = ""


class JobRow(Struct, frozen=True, kw_only=True):
    uid: str
    tenant: str
    name: str = ""
    user: str = ""
    cluster: str = ""
    namespace: str = ""
    app: str = ""
    strategy: str = ""
    recipe: JobRecipe = JobRecipe()
    began_at: float = 0.0
    """Seconds since 1970, by Brain's clock."""
    ended_at: float | None = None
    """None: not yet, as far as Brain knows."""
    end_reason: str = ""
    steps: int = 0
    core_hours: float = 0.0
    num_runs: int = 0
    facts: dict[str, int] = {}


class PlanRow(Struct, frozen=True, kw_only=True):
    """A proposal of Brain, or a decision of the job."""

    job: str
    at: float
    number: int = 0
    """Of the job's decision; 0: Brain proposed it."""
    algorithm: str = ""
    """`job`: the job decided it."""
    outcome: str = ""
    """Of a decision: planned, held, kept, taken-back ...; `proposed` for a proposal."""
    plan: SizePlan = SizePlan()
    sentence: str = ""
    expected_speed: float = 0.0
    """0: no forecast."""
    speed_after: float = 0.0
    """What came; 0: not known."""
    is_taken_back: bool = False


class NodeEndRow(Struct, frozen=True, kw_only=True):
    node: int
    node_type: str
    kind: str
    at: float
    resource: Resource = Resource()
    memory_mb: float = 0.0


class JobList(Struct, tag=True, frozen=True, kw_only=True):
    jobs: tuple[JobRow, ...] = ()


class JobRecord(Struct, tag=True, frozen=True, kw_only=True):
    job: JobRow
    runs: tuple[RunMeasured, ...] = ()
    """The newest, in the order of their numbers."""
    plans: tuple[PlanRow, ...] = ()
    """Likewise, the oldest first."""
    node_ends: tuple[NodeEndRow, ...] = ()


class PlanList(Struct, tag=True, frozen=True, kw_only=True):
    plans: tuple[PlanRow, ...] = ()


BrainReply = StartPlan | BrainStored | BrainPlan | JobSettings | Allowance | JobList | JobRecord | PlanList
BrainVerdict = BrainReply | Refusal
"""What comes back. The id of a refusal is 0: each call carries one question."""


# What both sides must agree on.


def kept_of(run: RunMeasured) -> RunMeasured:
    """The part of a run that Brain stores: all but the single points of memory, which are only good for a forecast within the job."""
    if not any(use.memory for use in run.types):
        return run
    return replace(run, types=tuple(replace(use, memory=()) for use in run.types))


def digest_of(runs: Iterable[RunMeasured]) -> str:
    """Of what is stored of these runs, in the order of their numbers: equal on both sides if nothing is lost and nothing is there twice."""
    import hashlib  # late: the launcher reads the terms of Brain and starts light

    digest = hashlib.sha256()
    for run in sorted(runs, key=lambda each: each.number):
        digest.update(_ENCODER.encode(kept_of(run)))
    return digest.hexdigest()


_ENCODER = msgspec.msgpack.Encoder()
