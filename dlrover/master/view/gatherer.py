"""
The gatherer: gathers what the page and the metrics show, from the job, from what nodes tell of themselves, and from those who judge it.

It only asks and listens. While no browser looks it asks now and then, so that plots have a past; while one does, as soon as something was
decided or heard, but at most twice a second, and less often where asking costs much: a job of ten thousand nodes is not slowed by its
audience. All it keeps is bounded, and nothing depends on it: a new master begins with an empty one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from dlrover.core.outcome import Outcome
from dlrover.master.view.board import Board
from dlrover.master.view.node_views import Health, node_view
from dlrover.protocol.codec import Question
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.fleet import FleetNodeStatus
from dlrover.protocol.messages.goodput import GoodputStatus
from dlrover.protocol.messages.job import (
    AskStatus,
    Command,
    FailureKind,
    JobStatus,
    Micros,
    NodeId,
    Reply,
    ReportFailure,
    WorkerFailure,
)
from dlrover.protocol.messages.precheck import PreCheckStage
from dlrover.protocol.messages.scaling import ScalingStatus
from dlrover.protocol.messages.watch import PastVerdict, ProgressReport, ResourceReport, WatchObservation

log = logging.getLogger(__name__)

QUICK = 0.5
"""Seconds between two looks while a browser watches."""
SLOW = 5.0
"""The same while none does; and the longest time between two looks."""
LARGEST_SHARE = 0.05
"""Of the time that asking may take."""
RESTING = 4.0
"""Times the usual time between two steps that are told, or the heartbeat: then training stands still, and its last speed is none."""
NUM_FAILURES = 25
MAX_TRACEBACK = 8_000
MAX_TAIL = 4_000
MAX_MESSAGE = 500
MAX_METRICS = 6
"""Numbers besides the step that are plotted: those that came first."""


class FailureView(Struct, frozen=True, omit_defaults=True, kw_only=True):
    at: Micros
    round: int
    node: NodeId
    rank: int
    host: str = ""
    kind: str
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    traceback: str = ""
    log_tail: str = ""
    step: int | None = None


class JobSource(Protocol):
    """What the gatherer needs of the loop."""

    @property
    def heartbeat(self) -> float: ...

    def last_heard(self) -> dict[NodeId, Micros]: ...

    async def ask(self, question: Question) -> Reply: ...


class Gatherer:
    def __init__(self, source: JobSource, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.board = Board()
        self.status: JobStatus | None = None
        """The newest; None before the first look."""
        self.progress: dict[NodeId, ProgressReport] = {}
        self.resources: dict[NodeId, ResourceReport] = {}
        self.num_failures: dict[FailureKind, int] = {}
        self.num_viewers = 0
        self.step: int | None = None
        self.steps_per_second: float | None = None
        """0: no step has come for long. None: unknown, or the job is over."""
        self.metrics: dict[str, float] = {}
        """What the script reports with its steps, as of its smallest rank."""
        self.verdicts: tuple[PastVerdict, ...] = ()
        """Of the diagnosis, oldest first."""
        self.goodput: GoodputStatus | None = None
        self.scaling: ScalingStatus | None = None
        """None: no platform gives the job its nodes, or it was not asked yet."""
        self.newest_event = 0
        self.sources: list[Callable[[Gatherer], Awaitable[None]]] = []
        """Ask others than the job, at each look."""
        self._source = source
        self._clock = clock
        self._is_news = asyncio.Event()
        self._looking = asyncio.Lock()  # two looks at once would only do the same twice
        self._looked_at = float("-inf")
        self._cost = 0.0  # seconds of the newest look
        self._failures: deque[FailureView] = deque(maxlen=NUM_FAILURES)
        self._mark: tuple[int, Micros] | None = None  # step and time that the speed is counted from
        self._usual = 0.0  # seconds between the newest two steps that were told
        self._teller: int | None = None
        """Rank whose metrics are shown, the smallest that tells any: in most trainings all ranks report the same."""
        self._somebody_came = asyncio.Event()

    # What comes by itself.

    def observe(self, observation: WatchObservation, now: Micros) -> None:
        match observation:
            case ProgressReport():
                self.progress[observation.node] = observation
                self._note_progress(observation, now)
            case ResourceReport():
                self.resources[observation.node] = observation
            case _:
                return
        self._is_news.set()

    def hear(self, command: Command, outcome: Outcome, now: Micros) -> None:
        """Something was decided."""
        if isinstance(command, ReportFailure):
            for failure in command.failures:
                self.num_failures[failure.kind] = self.num_failures.get(failure.kind, 0) + 1
                self._failures.append(self._failure_view(command, failure))
        self._is_news.set()

    def _failure_view(self, report: ReportFailure, failure: WorkerFailure) -> FailureView:
        return FailureView(
            at=failure.exited_at,
            round=report.round,
            node=report.node,
            rank=failure.global_rank,
            kind=failure.kind.value,
            exit_code=failure.exit_code,
            signal=failure.signal,
            message=failure.message[:MAX_MESSAGE],
            traceback=failure.traceback[-MAX_TRACEBACK:],
            log_tail=failure.log_tail[-MAX_TAIL:],
            step=report.step,
        )

    def _note_progress(self, report: ProgressReport, now: Micros) -> None:
        steps = [worker.step for worker in report.workers if worker.step is not None]
        if steps:
            self._note_step(max(steps), now)
        told = [worker for worker in report.workers if worker.metrics]
        if not told:
            return
        teller = min(told, key=lambda worker: worker.global_rank)
        if self._teller is not None and teller.global_rank > self._teller:
            return
        self._teller = teller.global_rank
        for name, value in teller.metrics.items():
            if name in self.metrics or len(self.metrics) < MAX_METRICS:
                self.metrics[name] = value
                self.board.point(f"metric {name}", now / 1e6, value)

    def _note_step(self, step: int, now: Micros) -> None:
        self.step = step if self.step is None else max(step, self.step)
        if self._mark is None or step < self._mark[0]:
            if (
                self._mark is None or now - self._mark[1] > 5_000_000
            ):  # the others are behind; or all went back, restored
                self._mark, self.step = (step, now), step
            return
        seconds = (now - self._mark[1]) / 1e6
        if step > self._mark[0] and seconds >= 1.0:
            if self.steps_per_second != 0.0:  # else the time in which it stood still would count
                self.steps_per_second, self._usual = (step - self._mark[0]) / seconds, seconds
                self.board.point("steps per second", now / 1e6, self.steps_per_second)
            else:
                self.steps_per_second = None
            self._mark = (step, now)

    def _note_rest(self, status: JobStatus) -> None:
        if status.end is not None:
            self.steps_per_second = None
        elif self.steps_per_second and self._mark is not None:
            longest = RESTING * max(self._usual, self._source.heartbeat)
            if status.now - self._mark[1] > longest * 1e6:
                self.steps_per_second = 0.0
                self.board.point("steps per second", status.now / 1e6, 0.0)

    # What is asked for.

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            pause = max(QUICK if self.num_viewers else SLOW, self._cost / LARGEST_SHARE)
            # Decisions and reports come in bursts: they are shown together. And heartbeats age without any news.
            await _first_of(self._somebody_came, pause)
            await _first_of(self._is_news, SLOW)

    def came(self) -> None:
        """A browser begins to watch; `went` must follow."""
        self.num_viewers += 1
        self._somebody_came.set()

    def went(self) -> None:
        self.num_viewers -= 1

    async def fresh(self, max_age: float = 1.0) -> None:
        """Look, unless a look was just taken."""
        if self._clock() - self._looked_at > max_age:
            await self.look()

    async def ask(self, question: Question) -> Reply:
        return await self._source.ask(question)

    async def look(self) -> None:
        async with self._looking:
            self._is_news.clear()
            self._somebody_came.clear()
            began_at = self._clock()
            try:
                status = await self._source.ask(AskStatus())
                assert isinstance(status, JobStatus), f"asked for its status the job answered {type(status).__name__}"
                self._take(status)
                for gather in self.sources:
                    await gather(self)
            except (Rejected, Unavailable) as error:
                log.debug("look put off reason=%s", error)  # too much to do, or no disk: the page stays as it was
            self._looked_at = self._clock()
            self._cost = self._looked_at - began_at
            self.board.publish()

    def _take(self, status: JobStatus) -> None:
        self.status = status
        present = {node.node for node in status.nodes}
        for reports in (self.progress, self.resources):
            for gone in [node for node in reports if node not in present]:
                del reports[gone]
        tellers = (each for report in self.progress.values() for each in report.workers if each.metrics)
        self._teller = min((each.global_rank for each in tellers), default=None)
        steps = [node.step for node in status.nodes if node.step is not None]
        if steps and not self.progress:
            self._note_step(max(steps), status.now)
        self._note_rest(status)
        self._put_nodes(status)
        self._put_job(status)
        self._put_failures({node.node: node.host for node in status.nodes})
        self._put_checkpoints(status)

    def _put_failures(self, hosts: dict[NodeId, str]) -> None:
        keys = []
        for index, failure in enumerate(self._failures):
            if not failure.host and failure.node in hosts:
                failure = self._failures[index] = replace(failure, host=hosts[failure.node])
            keys.append(f"{failure.at} {failure.rank} {failure.round}")
            self.board.put("failures", keys[-1], failure)
        self.board.keep("failures", keys)

    def _put_nodes(self, status: JobStatus) -> None:
        heard = self._source.last_heard()
        fleet = {node.rank: node for node in status.fleet if not node.is_released and node.node_type == "worker"}
        counts = dict.fromkeys(Health, 0)
        for node in status.nodes:
            view = node_view(
                node,
                progress=self.progress.get(node.node),
                resources=self.resources.get(node.node),
                heard_at=heard.get(node.node),
                now=status.now,
                heartbeat=self._source.heartbeat,
                fleet=fleet.get(node.node_rank),
            )
            counts[view.health] += 1
            self.board.put("nodes", str(node.node), view)
        self.board.keep("nodes", {str(node.node) for node in status.nodes})
        waited = [node for node in status.fleet if not node.is_released and node.phase in ("Initial", "Pending")]
        self.board.put("health", "", {health.value: count for health, count in counts.items()})
        self.board.put("waited", "", [_waited(node) for node in waited[:100]])

    def _put_job(self, status: JobStatus) -> None:
        self.board.put(
            "job",
            "",
            {
                "name": status.job_name,
                "stage": status.stage.value,
                "round": status.round,
                "world_size": status.world_size,
                "num_nodes": len(status.nodes),
                "min_nodes": status.min_nodes,
                "max_nodes": status.max_nodes,
                "num_standby": status.num_standby,
                "num_restarts": status.num_restarts,
                "verdict": status.verdict,
                "blocked": status.blocked,
                "shortage": status.shortage,
                "master_epoch": status.master_epoch,
                "step": self.step,
                "steps_per_second": None if self.steps_per_second is None else round(self.steps_per_second, 3),
                "has_platform": bool(status.fleet),
                "end": None
                if status.end is None
                else {
                    "reason": status.end.reason.value,
                    "exit_code": status.end.exit_code,
                    "message": status.end.message,
                },
            },
        )
        self.board.put("clock", "", {"now": status.now})
        if status.pre_check.stage is not PreCheckStage.DISABLED:
            self.board.put("pre_check", "", to_builtins(status.pre_check))

    def _put_checkpoints(self, status: JobStatus) -> None:
        checkpoints = status.checkpoints
        self.board.put(
            "checkpoints",
            "",
            {
                "memory_step": checkpoints.snapshot_step,
                "num_under_way": checkpoints.num_under_way,
                "committed": [
                    {"directory": each.directory, "step": each.step, "at": each.at}
                    for each in checkpoints.committed[:50]
                ],
                "trouble": None
                if checkpoints.trouble is None
                else {
                    "reason": checkpoints.trouble.reason,
                    "step": checkpoints.trouble.step,
                    "at": checkpoints.trouble.at,
                    "host": checkpoints.trouble.host,
                    "count": checkpoints.trouble.count,
                },
            },
        )


async def _first_of(event: asyncio.Event, timeout: float) -> None:
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        pass


def _waited(node: FleetNodeStatus) -> dict[str, object]:
    return {"name": node.name, "rank": node.rank, "phase": node.phase.value, "message": node.message[:MAX_MESSAGE]}
