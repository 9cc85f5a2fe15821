"""
What the job knows about its own size: terms, evidence, the change that is being watched, and what was decided.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import Micros, PlatformId
from dlrover.protocol.messages.scaling import (
    Configuration,
    JobFacts,
    MemoryPoint,
    RoomSeen,
    RunMeasured,
    ScaleDecision,
    ScaleMode,
    ScaleOutcome,
    ScaleTerms,
    SizePlan,
    TuneOffered,
)

MAX_RUNS = 64
RUNS_PER_CONFIGURATION = 3
MAX_DECISIONS = 8
MAX_REFUSED = 32
MAX_MEMORY_POINTS = 48
"""Of one type: three quarters of an hour at one a minute."""


class MeasuredRun(Struct, frozen=True, kw_only=True):
    """What is kept of a run: enough for a fit. Runs of one configuration beyond the newest three are merged."""

    number: int
    configuration: Configuration
    seconds: float
    steps: int
    step_time: float
    records_per_second: float = 0.0
    cpu: tuple[tuple[NodeType, float, float], ...] = ()
    """Mean and greatest cores in use by one node, of each type."""
    told_at: Micros = Micros(0)
    speed: float = 0.0
    """Records per second, or what stands for them."""


class RefusedPlan(Struct, frozen=True, kw_only=True):
    """A configuration that did not pay, and until when it is not entered again."""

    plan: SizePlan
    nodes: int
    until: Micros
    times: int


class OwnChange(Struct, frozen=True, kw_only=True):
    """A change that the job made by itself; people's and the room's are not here."""

    at: Micros
    kind: str
    """`workers`, `servers` or `tuning`."""
    direction: int
    """1 for more, -1 for less, 0 for neither."""


class Probation(Struct, kw_only=True):
    """A change that is being watched."""

    number: int
    """Of its decision."""
    at: Micros
    kind: str
    plan: SizePlan
    back: SizePlan
    """What takes it back."""
    nodes_before: int
    nodes_after: int
    speed_before: float
    expected_speed: float
    least_ratio: float
    """Speed after over speed before, below which it is taken back."""
    cores_before: dict[NodeType, dict[int, float]] = {}
    """Of servers and workers to which the plan gives other cores, by rank."""


class Scaling(Struct, kw_only=True):
    terms: ScaleTerms = ScaleTerms()
    """As the shell defined them."""
    mode: ScaleMode = ScaleMode.OFF
    """Now: a person's word counts more than the terms."""
    target: int | None = None
    """Nodes that the world shall have, between the job's minimum and maximum; None: the maximum."""
    start: SizePlan | None = None
    """With what former jobs propose to begin; None: nothing was proposed."""
    runs: list[MeasuredRun] = []
    """The least recent first."""
    newest: RunMeasured | None = None
    room: dict[NodeType, RoomSeen] = {}
    refusals: int = 0
    """How often in a row the platform refused a node that a plan asked for."""
    no_room_until: Micros | None = None
    """A platform that does not tell its room has refused a launch: so long it is not asked for more."""
    no_room_beyond: int = 0
    """Nodes that it did give."""
    held_until: Micros | None = None
    """A person's numbers stay until then."""
    changed_at: Micros | None = None
    """The newest change of any kind, by a person or by the job."""
    number_at_change: int = 0
    """The newest run then: those up to it say nothing about what the change led to."""
    changed_kinds: dict[str, Micros] = {}
    num_changes: dict[str, int] = {}
    """Of each kind, by the job itself, in all its life."""
    own_changes: list[OwnChange] = []
    """Of the last hour."""
    probation: Probation | None = None
    refused: list[RefusedPlan] = []
    decisions: list[ScaleDecision] = []
    num_decisions: int = 0
    num_outcomes: dict[ScaleOutcome, int] = {}
    look_at: Micros | None = None
    """When time alone may change the decision."""
    facts: JobFacts = JobFacts()
    tuning: TuneOffered = TuneOffered()
    batch_memory: dict[int, float] = {}
    """Micro-batch to the greatest device memory it was seen with, MiB."""
    refused_batch: int = 0
    """Micro-batches from here on did not fit into a device; 0: all did."""
    memory: dict[NodeType, list[MemoryPoint]] = {}
    warnings: dict[str, str] = {}
    """By what they are about."""
    memory_grown: bool = False
    """All workers were started again with more memory after an OOM: that happens once."""
    memory_before: int = 0
    """MiB that each of them had until then."""
    exchanged: dict[str, Micros] = {}
    """Stragglers that were exchanged, by rank."""
    exchanges: dict[PlatformId, Micros] = {}
    """Old nodes of exchanges that the job began by itself, and until when their successors may be pending."""
