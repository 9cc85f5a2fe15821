"""A page over a job that exists only as messages, of any size and in any trouble, served by the real server on a real port."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from dlrover.core.outcome import Outcome
from dlrover.master.view.gatherer import Gatherer
from dlrover.master.view.metrics import CONTENT_TYPE, JobMetrics
from dlrover.master.view.sources import gather_data, gather_diagnosis, gather_events, gather_goodput, gather_scaling
from dlrover.master.web.access import Access
from dlrover.master.web.app import Web
from dlrover.master.web.hosts import Hosts
from dlrover.master.web.logs import LogReader
from dlrover.master.web.server import PageServer
from dlrover.master.web.stream import STUCK
from dlrover.protocol.codec import Question
from dlrover.protocol.messages.checkpoint import CheckpointStatus, CommittedCheckpoint
from dlrover.protocol.messages.data import DatasetSpec, DatasetState
from dlrover.protocol.messages.goodput import AskEvents, AskGoodput, Events, GoodputStatus, JobEvent
from dlrover.protocol.messages.job import (
    AskStatus,
    Done,
    FailureKind,
    Incarnation,
    JobStatus,
    Micros,
    NodeId,
    NodeRank,
    NodeStatus,
    Reply,
    ReportFailure,
    Round,
    Stage,
    WorkerFailure,
)
from dlrover.protocol.messages.scaling import AskScaling, ScalingStatus
from dlrover.protocol.messages.watch import (
    AskDiagnosis,
    DeviceSample,
    Diagnosis,
    Phase,
    ProgressReport,
    ResourceReport,
    WatchOrder,
    WorkerProgress,
)

TOKEN = "token-of-the-page"
NOW = Micros(1_700_000_000_000_000)
NO_GOODPUT = GoodputStatus(now=NOW, wall=0.0, seconds={}, beginning={}, goodput=0.0, goodput_since_start=0.0)


def a_status(num_nodes: int = 4, *, name: str = "job", host: str = "host", now: Micros = NOW) -> JobStatus:
    return JobStatus(
        job_name=name,
        stage=Stage.RUNNING,
        master_epoch=1,
        round=Round(3),
        world_size=num_nodes,
        num_restarts=2,
        verdict="All nodes train.",
        min_nodes=1,
        max_nodes=num_nodes,
        nodes=tuple(
            NodeStatus(
                node=NodeId(rank),
                node_rank=NodeRank(rank),
                incarnation=Incarnation(1),
                host=f"{host}-{rank}",
                status="disconnected" if rank % 97 == 13 else "alive",
                wish="run",
                step=1000 + rank % 3,
            )
            for rank in range(num_nodes)
        ),
        checkpoints=CheckpointStatus(
            snapshot_step=1000, committed=(CommittedCheckpoint(directory="/data/checkpoints", step=900, at=now),)
        ),
        datasets=(
            DatasetState(
                spec=DatasetSpec(name="train", size=1000, shard_size=10),
                epoch=0,
                num_shards=100,
                num_todo=400,
                num_doing=100,
                num_consumed=500,
                num_committed=450,
                num_total=1000,
            ),
        ),
        now=now,
    )


def a_progress(node: int, *, step: int = 1000, loss: float = 1.5, is_stalled: bool = False) -> ProgressReport:
    phase = Phase.DATA if node % 11 == 3 else Phase.FORWARD
    worker = WorkerProgress(
        local_rank=0, global_rank=node, step=step, phase=phase, metrics={"loss": loss}, is_stalled=is_stalled
    )
    return ProgressReport(node=NodeId(node), incarnation=Incarnation(1), round=Round(3), workers=(worker,))


def a_usage(node: int, *, troubles: tuple[str, ...] = ()) -> ResourceReport:
    return ResourceReport(
        node=NodeId(node),
        incarnation=Incarnation(1),
        cpu=1.0 + node % 7,
        cores=8.0,
        memory_bytes=2_000_000_000 + node * 2**20,
        memory_limit_bytes=16_000_000_000,
        shm_bytes=1_000_000_000,
        disk_free_bytes=50_000_000_000,
        network_in_bytes_per_second=3_000_000.0,
        network_out_bytes_per_second=1_000_000.0,
        devices=(
            DeviceSample(
                index=0, utilization=80.0, used_memory_bytes=30_000_000_000, total_memory_bytes=80_000_000_000
            ),
        ),
        troubles=troubles,
    )


def a_failure(rank: int = 0, *, message: str = "killed", traceback: str = "", at: Micros = NOW) -> ReportFailure:
    failure = WorkerFailure(
        global_rank=rank,
        local_rank=0,
        pid=1,
        kind=FailureKind.SIGNAL,
        exited_at=at,
        signal=9,
        message=message,
        traceback=traceback,
    )
    return ReportFailure(node=NodeId(rank), incarnation=Incarnation(1), round=Round(3), failures=(failure,))


@dataclass
class StandInJob:
    """Answers as the loop does, from what the test put here."""

    status: JobStatus = field(default_factory=a_status)
    heartbeat: float = 5.0
    asked: list[Question] = field(default_factory=list)
    refusal: Exception | None = None
    order: Callable[[NodeId, WatchOrder], bool] = lambda node, order: False
    goodput: GoodputStatus = field(default_factory=lambda: NO_GOODPUT)
    events: list[JobEvent] = field(default_factory=list)
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    scaling: ScalingStatus = field(default_factory=ScalingStatus)

    def last_heard(self) -> dict[NodeId, Micros]:
        return {node.node: Micros(self.status.now - 2_000_000) for node in self.status.nodes}

    async def ask(self, question: Question) -> Reply:
        match question:
            case AskStatus():
                return self.status
            case AskDiagnosis():
                return self.diagnosis
            case AskGoodput():
                return self.goodput
            case AskScaling():
                return self.scaling
            case AskEvents(after=after, limit=limit):
                newer = [event for event in self.events if event.number > after]
                return Events(events=tuple(newer[:limit] if after else newer[-limit:]), newest=len(self.events))
        self.asked.append(question)
        if self.refusal is not None:
            raise self.refusal
        return Done()


@dataclass
class Page:
    url: str
    job: StandInJob
    gatherer: Gatherer
    job_metrics: JobMetrics
    access: Access
    logs: LogReader

    async def update(self) -> None:
        await self.gatherer.look()

    def fail(self, report: ReportFailure) -> None:
        self.gatherer.hear(report, Outcome(Done()), self.job.status.now)


@contextlib.asynccontextmanager
async def serve_page(
    job: StandInJob | None = None, *, master_log: str = "", token: str = TOKEN, urls: str = "", stuck: float = STUCK
) -> AsyncIterator[Page]:
    job = StandInJob() if job is None else job
    gatherer = Gatherer(job)
    gatherer.sources += [gather_data, gather_events, gather_goodput, gather_scaling, gather_diagnosis]
    job_metrics = JobMetrics(gatherer, last_heard=job.last_heard, num_in_work=lambda: 0)
    access = Access(token)
    workers = lambda: {each.global_rank: node for node, report in gatherer.progress.items() for each in report.workers}  # noqa: E731
    logs = LogReader(master_log, order=lambda node, order: job.order(node, order), workers=workers)
    web = Web(
        gatherer,
        access=access,
        ask=job.ask,
        logs=logs,
        metrics=job_metrics.render,
        metrics_type=CONTENT_TYPE,
        hosts=Hosts("127.0.0.1", urls),
        stuck=stuck,
    )
    server = PageServer(web.app(), None, is_known=web.is_known)
    port = server.start("127.0.0.1", 0)
    try:
        yield Page(f"http://127.0.0.1:{port}", job, gatherer, job_metrics, access, logs)
    finally:
        gatherer.board.close()
        await server.stop()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def fetch(
    page: Page, path: str, *, method: str = "GET", body: bytes = b"", headers: dict[str, str] | None = None
) -> Answer:
    """As a program asks, without any help of a browser."""

    def ask() -> Answer:
        connection = http.client.HTTPConnection(page.url.removeprefix("http://"), timeout=30)
        try:
            connection.request(method, path, body or None, headers or {})
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def populate(page: Page, num_nodes: int) -> None:
    """All nodes train and tell of it."""
    page.job.status = a_status(num_nodes)
    for node in range(num_nodes):
        page.gatherer.observe(a_progress(node, is_stalled=node % 101 == 7), NOW)
        page.gatherer.observe(a_usage(node), NOW)
