"""
How a job finds its own size: terms, evidence, offers, and what people are told.

Evidence comes in (`RunMeasured`, `RoomSeen`, `JobFacts`, `PlanOffered`), a decision and a sentence come out. Memory is in MiB, time in
seconds, speed in records per second (or steps per second where records are not counted). In a plan None means "keep"; 0 is never a wish.
"""

from __future__ import annotations

import enum
import math

from msgspec import Struct

from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.identity import Micros, NodeRank, PlatformId

MAX_RUN_NODES = 16
"""Nodes that one run names, those that stand out."""
MAX_MEMORY_POINTS = 16
"""Of one type in one run."""
MAX_CUSTOM_FACTS = 64
MAX_FACT_TEXT = 512
MAX_SENTENCE = 1024
MOST_CANDIDATES_SHOWN = 5
MOST_DECISIONS_SHOWN = 5


class ScaleMode(enum.StrEnum):
    OFF = "off"
    DRY_RUN = "dry-run"
    """The job decides, says and counts, and changes nothing."""
    ON = "on"


class ScaleFor(enum.StrEnum):
    """What the job grows for. `growth_share` of the core says what each demands."""

    SPEED = "speed"
    BALANCED = "balanced"
    COST = "cost"


class Optimizer(enum.StrEnum):
    FITTED = "fitted"
    """Step time as a sum of features, fitted to the runs of this job. Historical name: `nnls`."""
    RULES = "rules"
    """The rules of thumb for parameter servers, without a model. Historical name: `local`."""
    NONE = "none"
    """Nothing is planned; memory after an OOM and a shrinking room still count."""


class Tuner(enum.StrEnum):
    OFF = "off"
    MEMORY = "memory"
    """The micro-batch grows into the memory of the device; the total batch stays."""
    HISTORICAL = "historical"
    """Batch from a model card, learning rate with its square root, as the original does it."""


class ModelCard(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a transformer, for the historical tuner. The defaults are the original's."""

    block_size: int = 128
    num_layers: int = 20
    num_heads: int = 20
    embedding: int = 1280


class ScaleTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the job may change itself. The historical setting of each field stands in brackets."""

    mode: ScaleMode = ScaleMode.OFF
    scale_for: ScaleFor = ScaleFor.BALANCED
    optimizer: Optimizer = Optimizer.FITTED
    tuner: Tuner = Tuner.OFF
    types: tuple[NodeType, ...] = (NodeType.WORKER, NodeType.PS)
    """Types whose number and size may be changed (`autoScale`)."""
    nodes_start: int = 0
    """Workers that the fleet begins with, if the job is all-reduce and the mode is `on`; 0: as many as the fleet is defined with (the maximum)."""
    ignore_room: bool = False
    """A room that shrinks is no order then."""
    stable_for: float = 60.0
    """Seconds that a configuration is watched before anything is decided about it [seconds_for_stable_worker_count]."""
    stable_steps: int = 20
    """Steps, likewise [global_step_count_to_auto_worker]."""
    longest_probation: float = 600.0
    """Seconds after which a change that could not be judged stays."""
    worker_pause: float = 30.0
    """Seconds between two changes of workers, at least [seconds_interval_to_optimize]."""
    server_pause: float = 300.0
    """Seconds between two changes of servers, at least [seconds_to_change_ps]."""
    manual_hold: float = 600.0
    """Seconds for which the numbers of a person stay as they are."""
    slow_start: float = 1800.0
    """Servers are not changed if training takes longer than this to begin [seconds_huge_training_threshold]."""
    gives_sizes: bool = False
    """In a job with servers, types that name no size get a first one. For platforms on which a node without a size is none."""
    smallest: Resource = Resource(cpu=4.0, memory_mb=6144)
    """No plan gives a node less."""
    largest: Resource = Resource(cpu=32.0, memory_mb=65_536)
    """No plan gives a node more; the memory is also the ceiling after an OOM."""
    most_workers: int = 60
    """Of a job with servers."""
    most_servers: int = 15
    model_card: ModelCard = ModelCard()

    def __post_init__(self) -> None:
        for name in ("stable_for", "longest_probation", "worker_pause", "server_pause", "manual_hold", "slow_start"):
            seconds = getattr(self, name)
            if not 0 <= seconds <= 10**9:
                raise ValueError(f"{name} {seconds:g}: give a finite number of seconds of at least 0")
        if self.nodes_start < 0:
            raise ValueError(f"--nodes-start {self.nodes_start}: give a number of nodes of at least 0")
        if self.stable_steps < 1 or self.most_workers < 1 or self.most_servers < 1:
            raise ValueError("stable_steps, most_workers and most_servers must be at least 1")
        for name in ("cpu", "memory_mb"):
            least, most = getattr(self.smallest, name), getattr(self.largest, name)
            if not 0 <= least <= most or not math.isfinite(most):
                raise ValueError(
                    f"a node has at least {least:g} and at most {most:g} of {name}: give 0 <= least <= most"
                )
        card = self.model_card
        if min(card.block_size, card.num_layers, card.num_heads, card.embedding) < 1:
            raise ValueError("the numbers of model_card must be at least 1")


class GroupSize(Struct, frozen=True, array_like=True):
    """The nodes of one type."""

    node_type: NodeType
    count: int
    cpu: float = 0.0
    """Cores of each; 0: not limited."""
    memory_mb: int = 0
    """MiB of each; 0: not limited."""
    gpus: int = 0


class Configuration(Struct, frozen=True, kw_only=True):
    """What a run ran on. Runs with equal configurations are evidence for the same thing."""

    groups: tuple[GroupSize, ...]
    """One for each type that took part, in the order of `NodeType`. Workers: the members of the world."""
    workers_per_node: int = 1
    micro_batch: int = 0
    """Records of one worker in one forward pass; 0: unknown."""
    accumulation: int = 1
    """Forward passes of one worker in one step."""
    total_batch: int = 0
    """Records of all workers in one step, where the script keeps that number whatever the number of workers is. 0: each worker
    keeps its own batch, and more workers mean a larger total."""

    def group(self, node_type: NodeType) -> GroupSize | None:
        return next((group for group in self.groups if group.node_type is node_type), None)

    def count(self, node_type: NodeType) -> int:
        group = self.group(node_type)
        return 0 if group is None else group.count

    @property
    def num_workers(self) -> int:
        """Nodes that train: workers and chief."""
        return self.count(NodeType.WORKER) + self.count(NodeType.CHIEF)


class MemoryPoint(Struct, frozen=True, array_like=True):
    at: Micros
    step: int
    memory_mb: float


class TypeUse(Struct, frozen=True, kw_only=True):
    """What the nodes of one type used during a run."""

    node_type: NodeType
    cpu: float = 0.0
    """Cores in use by one node, mean over nodes and time."""
    cpu_most: float = 0.0
    """95th percentile of the same."""
    cpu_max: float = 0.0
    """Of the busiest node, its mean."""
    memory_mb: float = 0.0
    """Greatest of any node."""
    memory_slope: float = 0.0
    """MiB per step."""
    memory: tuple[MemoryPoint, ...] = ()
    """The greatest of any node of the type, since the run was last told of; oldest first, at most `MAX_MEMORY_POINTS`."""
    device_memory_mb: float = 0.0
    """Greatest of any device; 0: there is none, or it cannot be read."""
    device_total_mb: float = 0.0
    """Of the smallest device."""
    device_use: float = 0.0
    """Percent, mean."""


class NodeUse(Struct, frozen=True, kw_only=True):
    """A node that stands out. Of parameter servers all are named, as long as there are at most `MAX_RUN_NODES`."""

    platform_node: PlatformId = PlatformId(-1)
    """-1: no platform manages it."""
    node_type: NodeType = NodeType.WORKER
    rank: NodeRank = NodeRank(0)
    cpu: float = 0.0
    """Cores in use, mean over `seconds`."""
    cpu_max: float = 0.0
    """The greatest of the samples in these seconds."""
    memory_mb: float = 0.0
    seconds: float = 0.0
    """Over which it was measured, at most 180."""
    wait_per_step: float = 0.0
    """Seconds that the others wait for it in each step (straggler); 0: they do not."""


class RunMeasured(Struct, tag=True, frozen=True, kw_only=True):
    """
    A stretch in which the configuration did not change. At most 2 KB.

    Told first when it has lasted `stable_for` seconds and `stable_steps` steps, then each 60 s if its estimate or a memory has moved by more than
    2 %, and when it ends. Not told: runs below 20 steps or 20 s. Not counted: the first 20 steps or 10 s of a round, whichever is later, and time in
    checkpoint, restore, evaluation and hang.
    """

    number: int
    """Growing from 1 in the life of the job. The same number again: the same run, longer; it takes the place of what was told."""
    configuration: Configuration
    seconds: float
    """Counted ones."""
    steps: int
    """Counted ones. A job without steps counts finished shards here."""
    step_time: float
    """Median."""
    step_time_low: float = 0.0
    """First quartile; 0: unknown."""
    step_time_high: float = 0.0
    """Third quartile; 0: unknown."""
    records_per_second: float = 0.0
    """0: records are not counted."""
    last_step: int | None = None
    """Of the job; None: it has no steps that mean the same in each life."""
    types: tuple[TypeUse, ...] = ()
    nodes: tuple[NodeUse, ...] = ()
    is_over: bool = False
    """The configuration has changed."""
    is_disturbed: bool = False
    """Faults, hangs or stragglers of this run make its speed a bad estimate of its configuration."""
    data_wait: float = 0.0
    """Share of the workers' time that they wait for data, 0 to 1."""
    loader_workers: int = -1
    """Processes of one data loader; -1: unknown."""


class RoomSeen(Struct, tag=True, frozen=True, kw_only=True):
    """How many nodes of a type the platform lets the job have. Told when it changes."""

    most: int | None
    """Nodes of this type that the job can have in all, those that it has included; None: unknown. Less than the job has: an order to shrink."""
    node_type: NodeType = NodeType.WORKER
    reason: str = ""
    """What limits it: a quota, the machine, an allowance."""


class PlannedGroup(Struct, frozen=True, kw_only=True):
    """Other numbers or sizes of all nodes of one type. None: keep."""

    node_type: NodeType
    count: int | None = None
    cpu: float | None = None
    memory_mb: int | None = None


class PlannedNode(Struct, frozen=True, kw_only=True):
    """One node is exchanged for another of this size. None: keep."""

    platform_node: PlatformId
    cpu: float | None = None
    memory_mb: int | None = None
    is_elsewhere: bool = False
    """On another machine than it is on now."""


class SizePlan(Struct, frozen=True, kw_only=True):
    """What shall change. Everything that is not named stays."""

    groups: tuple[PlannedGroup, ...] = ()
    nodes: tuple[PlannedNode, ...] = ()
    micro_batch: int | None = None
    accumulation: int | None = None
    loader_workers: int | None = None

    def group(self, node_type: NodeType) -> PlannedGroup | None:
        return next((group for group in self.groups if group.node_type is node_type), None)


class PlanOffered(Struct, tag=True, frozen=True, kw_only=True):
    """Another program (Brain) proposes a plan. The brakes judge it as any other."""

    plan: SizePlan
    sentence: str = ""
    """Why, for people."""
    source: str = "brain"
    expected_speed: float = 0.0
    """0: the offer does not say."""


class DefineScaling(Struct, tag=True, frozen=True, kw_only=True):
    """First word of the shell about scaling, before `DefineFleet`. Repeated with the same terms it changes nothing; a person's mode stays."""

    terms: ScaleTerms


class SetScaling(Struct, tag=True, frozen=True, kw_only=True):
    """A client with the token switches scaling on or off (`dlrover scale --auto`)."""

    mode: ScaleMode


class ScaleTo(Struct, tag=True, frozen=True, kw_only=True):
    """
    A person's number (`dlrover scale N`, `kubectl scale`): the target of the world, held for `manual_hold` seconds.

    Minimum and maximum move only if the number lies outside of them.
    """

    nodes: int
    reason: str = ""


class JobFacts(Struct, tag=True, frozen=True, kw_only=True):
    """What is known of the job and does not change with its size. Sent when it becomes known; empty and 0 mean "not known", and keep."""

    job_type: str = ""
    """The distribution strategy."""
    dataset_name: str = ""
    dataset_size: int = 0
    batch_size: int = 0
    num_epochs: int = 0
    max_steps: int = 0
    variable_count: int = 0
    total_variable_size: int = 0
    max_variable_size: int = 0
    op_count: int = 0
    update_op_count: int = 0
    read_op_count: int = 0
    recv_op_count: int = 0
    flops: int = 0
    custom: dict[str, str] = {}
    """Merged by key. Known keys: init_training_time, rdzv_round, error_level, error_content."""
    exit_reason: str = ""


ScalingCommand = DefineScaling | SetScaling | ScaleTo | RunMeasured | RoomSeen | PlanOffered | JobFacts
OutsideScalingCommand = SetScaling | ScaleTo | JobFacts
"""What may come from outside. The rest is the master's own shell."""


# Queries and their answers.


class AskScaling(Struct, tag=True, frozen=True, kw_only=True):
    """How large is the job, why, and what would change it? Answered by `ScalingStatus`."""


class AskTuning(Struct, tag=True, frozen=True, kw_only=True):
    """Which batch and loader settings shall the workers use? Answered by `TuneOffered` as soon as its version differs from `seen`."""

    seen: int = -1
    wait: float = 0.0
    """Seconds to wait for another version."""


ScalingQuery = AskScaling | AskTuning


class TuneOffered(Struct, tag=True, frozen=True, kw_only=True):
    """What the workers shall use, from the next moment on at which all ranks have agreed on this version. 0 and -1: as the script says."""

    version: int = 0
    """0: nothing was ever offered."""
    micro_batch: int = 0
    accumulation: int = 0
    loader_workers: int = -1
    """From the next epoch on."""
    last_batch: int = 0
    """The micro-batch before this version."""
    rate_factor: float = 1.0
    """By which learning rate and weight decay are multiplied; other than 1 for the historical tuner alone."""


class Brake(enum.IntEnum):
    """Which rule holds a plan back, in the order in which they are asked."""

    NONE = 0
    OFF = 1
    UNDER_WAY = 2
    MANUAL_HOLD = 3
    UNSEEN = 4
    COOL_DOWN = 5
    PAUSES = 6
    BOUND = 7
    SMALL_GAIN = 8
    COST = 9
    TAKEN_BACK = 10


class ScaleOutcome(enum.StrEnum):
    PLANNED = "planned"
    """Carried out."""
    DRY = "dry"
    """Would have been carried out."""
    HELD = "held"
    """A brake held the best candidate."""
    RESTED = "rested"
    """Nothing is better than what runs."""
    KEPT = "kept"
    """A change passed its probation."""
    UNJUDGED = "unjudged"
    """A change could not be judged, and stays."""
    TAKEN_BACK = "taken-back"


class ScaleDecision(Struct, frozen=True, kw_only=True):
    """One decision, as people and the page see it."""

    number: int
    at: Micros
    outcome: ScaleOutcome
    sentence: str
    plan: SizePlan = SizePlan()
    brake: Brake = Brake.NONE
    nodes_before: int = 0
    """Nodes that train."""
    nodes_after: int = 0
    speed_before: float = 0.0
    expected_speed: float = 0.0
    """0: no forecast (a try)."""
    speed_after: float = 0.0
    """What came; 0: not known yet."""


class ScaleCandidate(Struct, frozen=True, kw_only=True):
    plan: SizePlan
    text: str
    """`6 nodes`, `8 workers, 2 servers of 4 cores`."""
    nodes: int
    """Nodes that train."""
    speed: float
    """Predicted; 0: no forecast."""
    gain: float
    """Ratio of the predicted to the present speed, minus 1."""
    resources: float
    """Ratio of the resources of the candidate to the present ones."""
    cost: float
    """Seconds that training pauses for the change."""
    brake: Brake = Brake.NONE
    why: str = ""
    """What holds it back, in words; empty: nothing does."""


class ScaleFit(Struct, frozen=True, kw_only=True):
    """The step time as a sum: seconds = theta · features."""

    features: tuple[str, ...]
    thetas: tuple[float, ...]
    error: float
    """Median relative error on its own runs."""
    num_runs: int
    num_counts: int
    """Distinct numbers of nodes (configurations, in a job with servers)."""
    is_used: bool
    why: str = ""
    """Why it is not used; empty: it is."""


class SpeedPoint(Struct, frozen=True, array_like=True):
    """For the plot of speed over nodes: measured (from runs), or predicted."""

    nodes: int
    speed: float
    is_predicted: bool = False


class RefusedSize(Struct, frozen=True, kw_only=True):
    text: str
    until: Micros
    times: int


class ScalingStatus(Struct, tag=True, frozen=True, kw_only=True):
    """The answer to `AskScaling`, and what the page and the metrics show."""

    mode: ScaleMode = ScaleMode.OFF
    scale_for: ScaleFor = ScaleFor.BALANCED
    optimizer: Optimizer = Optimizer.FITTED
    now: Micros = Micros(0)
    sentence: str = ""
    """The newest decision, in words: why the job has this size, or what it waits for."""
    brake: Brake = Brake.NONE
    brake_opens_at: Micros | None = None
    """When time alone opens the brake; None: time alone does not."""
    min_nodes: int = 0
    max_nodes: int = 0
    node_unit: int = 1
    target: int = 0
    """Nodes that the world shall have."""
    configuration: Configuration | None = None
    """Of the newest run; None: there was none."""
    speed: float = 0.0
    """Measured, of the present configuration; 0: not yet."""
    unit: str = "steps/s"
    """Or `records/s`."""
    cost: float = 0.0
    """Seconds that a change pauses training, as measured, or assumed before the first."""
    decisions: tuple[ScaleDecision, ...] = ()
    """The newest last."""
    candidates: tuple[ScaleCandidate, ...] = ()
    """The best first."""
    fit: ScaleFit | None = None
    points: tuple[SpeedPoint, ...] = ()
    refused: tuple[RefusedSize, ...] = ()
    on_probation: str = ""
    """The change that is being watched, in words; empty: none."""
    room: tuple[RoomSeen, ...] = ()
    """Newest of each type."""
    num_outcomes: dict[ScaleOutcome, int] = {}
    """Decisions so far."""
    tuning: TuneOffered = TuneOffered()
    warnings: tuple[str, ...] = ()
    """For example a worker whose memory will not last."""
    facts: JobFacts = JobFacts()


ScalingReply = ScalingStatus | TuneOffered
