"""
What is known of jobs: those that ended, and the one that asks. Plain values, no matter what stored them.

Memory is in MiB throughout, speed in batches per second of all workers together. In a plan None means "keep".
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.scaling import Configuration, JobFacts, NodeUse, RunMeasured, TypeUse

COMPLETED = "Completed"
"""The one exit reason that says that the sizes of a job were right (spec 07 §17)."""
OUT_OF_MEMORY = ("WorkerOOM", "PSOOM")


class Recipe(Struct, frozen=True, kw_only=True):
    """What makes jobs alike (`alike.py`). An empty text and 0 are not known, and equal to nothing."""

    name: str = ""
    """`--recipe`; the scenario of historical jobs."""
    script_hash: str = ""
    script: str = ""
    """Name of the script, without its folder."""
    user: str = ""
    tenant: str = ""
    dataset: str = ""
    model_size: int = 0
    """Bytes of all variables."""
    strategy: str = ""


class FormerRun(Struct, frozen=True, kw_only=True):
    """A stretch of a job in which its configuration did not change."""

    number: int
    configuration: Configuration
    seconds: float
    steps: int
    step_time: float
    """Of one worker: with n workers and servers there are n such steps in this time."""
    records_per_second: float = 0.0
    last_step: int | None = None
    uses: tuple[TypeUse, ...] = ()
    servers: tuple[NodeUse, ...] = ()
    """Each of them, where they are few enough to be named."""
    has_paid: bool = True
    """False: the change that led to this configuration was taken back."""
    ended_at: float = 0.0
    """Seconds since 1970."""


class NodeUsed(Struct, frozen=True, array_like=True):
    """One node in one record."""

    id: int
    cpu: float
    """Cores in use."""
    memory_mb: float = 0.0


class UseRecord(Struct, frozen=True, kw_only=True):
    """What a job used at one moment, or in the mean of one run."""

    step: int = 0
    speed: float = 0.0
    """0: not known."""
    workers: tuple[NodeUsed, ...] = ()
    """Chief included."""
    servers: tuple[NodeUsed, ...] = ()


class NodeSeen(Struct, frozen=True, kw_only=True):
    """A node and what it was given. `id` is the same as in the records."""

    id: int
    node_type: NodeType
    cpu: float = 0.0
    """Cores that it has; 0: not limited."""
    memory_mb: float = 0.0
    """MiB that it has; 0: not limited."""
    used_memory_mb: float = 0.0
    """The last that was seen; 0: never."""
    is_oom: bool = False
    is_running: bool = True


class JobSeen(Struct, frozen=True, kw_only=True):
    """A job that ended, or the one that asks."""

    uid: str
    recipe: Recipe = Recipe()
    began_at: float = 0.0
    """Seconds since 1970."""
    exit_reason: str = ""
    """Empty: it runs."""
    facts: JobFacts = JobFacts()
    runs: tuple[FormerRun, ...] = ()
    """Oldest first."""
    records: tuple[UseRecord, ...] = ()
    """Oldest first, at most `MOST_RECORDS`; `records_of` makes them of runs."""
    nodes: tuple[NodeSeen, ...] = ()
    limits: Resource = Resource()
    planned_worker_memory_mb: float = 0.0
    """Of the newest plan that this job got; 0: none."""

    @property
    def is_oom(self) -> bool:
        """It ended for want of memory, or a node of it did."""
        return self.exit_reason in OUT_OF_MEMORY or any(node.is_oom for node in self.nodes)

    @property
    def is_completed(self) -> bool:
        return self.exit_reason == COMPLETED


class GroupWish(Struct, frozen=True, kw_only=True):
    """What the nodes of one type should be. None: keep. The chief counts among the workers."""

    node_type: NodeType
    count: int | None = None
    cpu: float | None = None
    memory_mb: float | None = None


class NodeWish(Struct, frozen=True, kw_only=True):
    """What one node should be. None: keep."""

    id: int
    """As in the records; the platform's number of the node."""
    node_type: NodeType
    cpu: float | None = None
    memory_mb: float | None = None


class HistoryPlan(Struct, frozen=True, kw_only=True):
    algorithm: str
    sentence: str
    """Why, for people."""
    groups: tuple[GroupWish, ...] = ()
    nodes: tuple[NodeWish, ...] = ()

    def group(self, node_type: NodeType) -> GroupWish | None:
        return next((group for group in self.groups if group.node_type is node_type), None)


MOST_RECORDS = 60
"""Of a job, the newest (spec 07 §13.4)."""


def former_run(run: RunMeasured, *, has_paid: bool = True, ended_at: float = 0.0) -> FormerRun:
    return FormerRun(
        number=run.number,
        configuration=run.configuration,
        seconds=run.seconds,
        steps=run.steps,
        step_time=run.step_time,
        records_per_second=run.records_per_second,
        last_step=run.last_step,
        uses=run.types,
        servers=tuple(node for node in run.nodes if node.node_type is NodeType.PS),
        has_paid=has_paid,
        ended_at=ended_at,
    )


def records_of(runs: Sequence[FormerRun]) -> tuple[UseRecord, ...]:
    """As the historical algorithms read them: a record for each run. Chiefs are workers."""
    return tuple(_record_of(run) for run in runs[-MOST_RECORDS:])


def _record_of(run: FormerRun) -> UseRecord:
    workers = [
        node
        for kind in (NodeType.CHIEF, NodeType.WORKER)
        for node in _nodes_of(run, kind, run.configuration.count(kind))
    ]
    servers = [NodeUsed(int(node.platform_node), node.cpu, node.memory_mb) for node in run.servers]
    if len(servers) != run.configuration.count(NodeType.PS):
        servers = _nodes_of(run, NodeType.PS, run.configuration.count(NodeType.PS))
    has_servers = run.configuration.count(NodeType.PS) > 0
    speed = (run.configuration.num_workers if has_servers else 1) / run.step_time if run.step_time > 0 else 0.0
    return UseRecord(step=run.last_step or 0, speed=speed, workers=tuple(workers), servers=tuple(servers))


def _nodes_of(run: FormerRun, kind: NodeType, count: int) -> list[NodeUsed]:
    """A run tells mean and maximum of a type: the first node has the maximum, the others what remains."""
    use = next((each for each in run.uses if each.node_type is kind), None)
    if use is None or count < 1:
        return [NodeUsed(_id_of(kind, each), 0.0) for each in range(count)]
    busiest = max(use.cpu, use.cpu_max)
    rest = max(0.0, use.cpu * count - busiest) / (count - 1) if count > 1 else 0.0
    return [NodeUsed(_id_of(kind, each), rest if each else busiest, use.memory_mb) for each in range(count)]


def _id_of(kind: NodeType, index: int) -> int:
    """Negative, because it is no number of a platform's node; types apart."""
    return -1 - index - (1_000_000 if kind is NodeType.CHIEF else 0)
