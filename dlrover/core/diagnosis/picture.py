"""
The picture of a job that diagnosticians look at: who trains where, how far each worker is, and what nodes told of themselves.

Volatile and bounded. It holds what was heard, nothing that was concluded; a new master begins with an empty one and has it whole again after
one heartbeat of every node.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator

from msgspec import Struct

from dlrover.core.diagnosis.samples import Samples
from dlrover.core.state import JobState
from dlrover.protocol.messages.identity import MICROS_PER_SECOND
from dlrover.protocol.messages.job import FirstFailure, Micros, NodeId, NodeRank, Round, WorkerFailure
from dlrover.protocol.messages.watch import NodeEvent, Phase, ProgressReport, ResourceReport, WorkerProgress

WINDOWS = 24
"""Reports of one rank that are compared: two minutes of heartbeats."""
SAMPLES = 120
"""Reports of one node's resources."""
LOSSES = 200
MAX_DIGESTS = 8
MAX_EVENTS = 64
MAX_FAILURES = 32


class NodePlace(Struct, frozen=True, kw_only=True):
    """A node of the world."""

    node: NodeId
    node_rank: NodeRank
    host: str
    first_rank: int
    num_ranks: int


class Scene(Struct, frozen=True, kw_only=True):
    """Who trains now, as the job says."""

    round: Round = Round(0)
    is_active: bool = False
    """The world runs. Not while a round is open, nor after the end of the job."""
    began_at: Micros = Micros(0)
    places: tuple[NodePlace, ...] = ()

    @property
    def world_size(self) -> int:
        return sum(place.num_ranks for place in self.places)


def scene_of(state: JobState) -> Scene:
    rdzv = state.rendezvous
    if rdzv.world is None:
        return Scene(round=rdzv.round)
    live = state.nodes.live
    return Scene(
        round=rdzv.round,
        is_active=rdzv.is_active and state.end is None,
        began_at=rdzv.completed_at,
        places=tuple(
            NodePlace(
                node=member.node,
                node_rank=member.node_rank,
                host=live[member.node].host if member.node in live else "",
                first_rank=member.first_global_rank,
                num_ranks=member.local_world_size,
            )
            for member in rdzv.world.members
            if member.node not in rdzv.finished
        ),
    )


class Window(Struct, frozen=True, kw_only=True):
    """What a rank did between two reports."""

    steps: int
    own: float
    """Seconds in which it computed for itself: forward and optimizer. Not saves, evaluation or batches: one rank may do these for all."""
    waiting: float
    """Seconds in backward and in collectives, where ranks wait for each other."""


class RankRecord:
    """What is known of one rank in this round."""

    def __init__(self, place: NodePlace, global_rank: int) -> None:
        self.place = place
        self.global_rank = global_rank
        self.progress = WorkerProgress(local_rank=0, global_rank=global_rank)
        self.heard_at = Micros(0)
        self.windows: deque[Window] = deque(maxlen=WINDOWS)
        self.losses: deque[float] = deque(maxlen=LOSSES)
        self.digests: dict[int, str] = {}
        self.bad_metric: tuple[str, int | None] | None = None
        """The first number of this round that was none, and the step it came with."""
        self.memory: deque[tuple[Micros, float]] = deque(maxlen=SAMPLES)

    def hear(self, progress: WorkerProgress, now: Micros) -> None:
        before, self.progress, self.heard_at = self.progress, progress, now
        self._compare(before, progress)
        self._hear_metrics(before, progress)
        if progress.digest and progress.digest_step is not None:
            self.digests[progress.digest_step] = progress.digest
            while len(self.digests) > MAX_DIGESTS:
                del self.digests[min(self.digests)]

    @property
    def entered_at(self) -> Micros:
        """When it entered the phase that it was last heard in."""
        return Micros(self.heard_at - round(min(self.progress.phase_seconds, 1e9) * MICROS_PER_SECOND))

    def _compare(self, before: WorkerProgress, now: WorkerProgress) -> None:
        if before.step is None or now.step is None or now.step <= before.step or before.pid != now.pid:
            return
        spent = {phase: now.seconds.get(phase, 0.0) - before.seconds.get(phase, 0.0) for phase in Phase}
        steps = now.step - before.step
        own = sum(max(0.0, spent[phase]) for phase in (Phase.FORWARD, Phase.OPTIMIZER))
        plain = now.num_plain_steps - before.num_plain_steps
        if plain > 0:  # else it saves in each step, or its agent is too old to tell them apart
            own = steps * max(0.0, now.plain_seconds - before.plain_seconds) / plain
        waiting = sum(max(0.0, spent[phase]) for phase in (Phase.BACKWARD, Phase.COLLECTIVE))
        self.windows.append(Window(steps=steps, own=own, waiting=waiting))

    def _hear_metrics(self, before: WorkerProgress, now: WorkerProgress) -> None:
        if before.step == now.step and before.metrics == now.metrics:
            return
        for name, value in now.metrics.items():
            if not math.isfinite(value) and self.bad_metric is None:
                self.bad_metric = (name, now.step)
        loss = now.metrics.get("loss")
        if loss is not None and math.isfinite(loss):
            self.losses.append(loss)


class FailedWorkers(Struct, frozen=True, kw_only=True):
    """Workers that ended, as their agent told it."""

    at: Micros
    round: Round
    node: NodeId
    node_rank: NodeRank
    step: int | None
    failures: tuple[WorkerFailure, ...]
    first: FirstFailure | None = None
    """What the job takes for the cause."""


class Picture:
    """All of it. `hear_*` are called by the watch; diagnosticians only look."""

    def __init__(self) -> None:
        self.scene = Scene()
        self.ranks: dict[int, RankRecord] = {}
        """Of this round, in the order of the ranks."""
        self._stalled: dict[int, RankRecord] = {}
        self._nodes: dict[NodeId, None] = {}
        self.resources: dict[NodeId, ResourceReport] = {}
        self.events: deque[NodeEvent] = deque(maxlen=MAX_EVENTS)
        self.failures: deque[FailedWorkers] = deque(maxlen=MAX_FAILURES)
        """Of all rounds, oldest first."""
        self.samples = Samples()
        self.duplicates: dict[str, int] = {}
        """Nodes of the platform that hold a rank together, by what they hold."""

    def enter(self, scene: Scene) -> None:
        is_new = scene.round != self.scene.round or len(scene.places) > len(self.scene.places)
        self.scene = scene
        if is_new:
            self.ranks = {
                rank: RankRecord(place, rank)
                for place in scene.places
                for rank in range(place.first_rank, place.first_rank + place.num_ranks)
            }
        self._nodes = here = {place.node: None for place in scene.places}
        self.resources = {node: report for node, report in self.resources.items() if node in here}
        if not is_new:
            self.ranks = {rank: record for rank, record in self.ranks.items() if record.place.node in here}
        self._stalled = {rank: record for rank, record in self.ranks.items() if record.progress.is_stalled}

    def hear_progress(self, report: ProgressReport, now: Micros) -> bool:
        """Whether it is about the workers of now."""
        if report.round != self.scene.round or not self.scene.is_active:
            return False
        for worker in report.workers:
            record = self.ranks.get(worker.global_rank)
            if record is not None and record.place.node == report.node:
                record.hear(worker, now)
                if worker.is_stalled:
                    self._stalled[worker.global_rank] = record
                else:
                    self._stalled.pop(worker.global_rank, None)
        return True

    def hear_resources(self, report: ResourceReport, now: Micros) -> None:
        if report.node in self._nodes:
            self.resources[report.node] = report
        for sample in report.workers:
            record = self.ranks.get(sample.global_rank)
            if record is not None and record.place.node == report.node:
                record.memory.append((now, sample.memory_bytes))

    @property
    def stalled(self) -> Collection[RankRecord]:
        """Kept while the ranks are heard: it is asked for at every report, and a world may have a hundred thousand of them."""
        return self._stalled.values()

    def heard(self) -> Iterator[RankRecord]:
        """Ranks that have told anything in this round."""
        return (record for record in self.ranks.values() if record.heard_at)

    def newest_progress_at(self) -> Micros:
        """When any worker last entered another phase, as far as is known."""
        return Micros(max((record.entered_at for record in self.heard()), default=self.scene.began_at))

    def newest_step(self) -> int | None:
        return max((record.progress.step for record in self.heard() if record.progress.step is not None), default=None)

    def place_of(self, global_rank: int) -> NodePlace | None:
        record = self.ranks.get(global_rank)
        return None if record is None else record.place
