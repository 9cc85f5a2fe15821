"""What Prometheus reads: documented, bounded, and true."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from dlrover.agent.monitor.limits import ResourceLimits
from dlrover.agent.monitor.resources import ResourceMonitor
from dlrover.core.outcome import Outcome
from dlrover.master.view.gatherer import Gatherer
from dlrover.master.view.metrics import MAX_NODES, METRICS, JobMetrics
from dlrover.master.view.metrics_server import MAX_HEAD, MAX_SCRAPES, MetricsServer
from dlrover.protocol.codec import decode_from_agent, encode_frame
from dlrover.protocol.messages.checkpoint import CheckpointCommitted, ShardWritten
from dlrover.protocol.messages.frames import Observed
from dlrover.protocol.messages.goodput import TimeClass
from dlrover.protocol.messages.job import Done, ExitReason, Incarnation, JobEnd, Micros, NodeId, Round
from dlrover.protocol.messages.watch import WatchObservation
from tests.master.web.page_lab import NO_GOODPUT, NOW, StandInJob, a_failure, a_progress, a_status, a_usage

ROOT = Path(__file__).parents[3]
NAMES = {metric.name for metric in METRICS}


def watched(num_nodes: int = 4) -> tuple[Gatherer, JobMetrics]:
    job = StandInJob(a_status(num_nodes))
    gatherer = Gatherer(job)
    for node in range(num_nodes):
        gatherer.observe(a_progress(node), NOW)
        gatherer.observe(a_usage(node), NOW)
    return gatherer, JobMetrics(gatherer, last_heard=job.last_heard, num_in_work=lambda: 3)


def samples(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_the_numbers_are_those_of_the_job() -> None:
    gatherer, job_metrics = watched()
    gatherer.hear(a_failure(), Outcome(Done()), NOW)
    saved = {"directory": "/d", "step": 7, "attempt": "a"}
    shard = ShardWritten(**saved, target="/d/7", shard=0, num_shards=1, round=Round(1), digest="")
    job_metrics.hear(shard, Outcome(Done()), NOW)
    job_metrics.hear(CheckpointCommitted(**saved), Outcome(Done()), Micros(NOW + 2_000_000))
    job_metrics.committed(0.002)
    found = samples(await job_metrics.render())
    assert found["dlrover_job_stage", ("running",)] == 1
    assert found["dlrover_job_stage", ("stopped",)] == 0
    assert found["dlrover_nodes", ("alive",)] == 4
    assert found["dlrover_round", ()] == 3
    assert found["dlrover_worker_failures_total", ("signal",)] == 1
    assert found["dlrover_step", ()] == 1000
    assert found["dlrover_training_metric", ("loss",)] == 1.5
    assert found["dlrover_node_heartbeat_age_seconds", ("2",)] == 2
    assert found["dlrover_node_cpu_cores", ("3",)] == 4
    assert found["dlrover_device_utilization_ratio", ("0", "0")] == 0.8
    assert found["dlrover_node_memory_bytes", ("0",)] == 2_000_000_000
    assert found["dlrover_node_memory_limit_bytes", ("0",)] == 16_000_000_000
    assert found["dlrover_node_shared_memory_bytes", ("0",)] == 1_000_000_000
    assert found["dlrover_node_disk_free_bytes", ("0",)] == 50_000_000_000
    assert found["dlrover_node_network_bytes_per_second", ("in", "0")] == 3_000_000
    assert found["dlrover_node_network_bytes_per_second", ("out", "0")] == 1_000_000
    assert found["dlrover_device_memory_bytes", ("0", "0")] == 30_000_000_000
    assert found["dlrover_dataset_records", ("train", "consumed")] == 500
    assert found["dlrover_checkpoint_step", ("/data/checkpoints",)] == 900
    assert found["dlrover_checkpoint_commit_seconds_sum", ()] == 2
    assert found["dlrover_checkpoints_total", ("committed",)] == 1
    assert found["dlrover_journal_commit_seconds_bucket", ("0.0025",)] == 1
    assert found["dlrover_requests_in_work", ()] == 3
    assert found["dlrover_workers", ("forward",)] == 3


async def test_what_an_agent_measures_is_told_to_the_byte(tmp_path: Path) -> None:
    gatherer, job_metrics = watched(1)
    told: list[WatchObservation] = []
    agent = ResourceMonitor(
        workers=dict, paths=[str(tmp_path)], observe=told.append, who=lambda: (NodeId(0), Incarnation(1))
    )
    await agent.sample()
    report = await agent.sample()
    assert report is not None
    (parcel,) = decode_from_agent(encode_frame([Observed(report)]))
    assert isinstance(parcel, Observed)
    gatherer.observe(parcel.observation, NOW)
    found = samples(await job_metrics.render())
    assert found["dlrover_node_memory_limit_bytes", ("0",)] == ResourceLimits().memory().limit_bytes


async def test_the_counter_of_seconds_tells_what_is_booked_because_a_counter_never_falls() -> None:
    gatherer, job_metrics = watched()
    seconds, booked = {TimeClass.COMPUTE: 10.0, TimeClass.START_UP: 5.0}, {TimeClass.START_UP: 5.0}
    gatherer.goodput = replace(NO_GOODPUT, wall=15.0, seconds=seconds, booked=booked)
    found = samples(await job_metrics.render())
    told = {labels: value for (name, labels), value in found.items() if name == "dlrover_goodput_node_seconds_total"}
    assert told == {("start-up",): 5.0}


async def test_a_job_that_stands_still_or_is_over_has_no_speed_of_before() -> None:
    job = StandInJob()
    gatherer = Gatherer(job)

    async def speed_at(second: int, *, step: int) -> float | None:
        now = Micros(NOW + second * 1_000_000)
        gatherer.observe(a_progress(0, step=step), now)
        job.status = replace(job.status, now=now)
        await gatherer.look()
        return gatherer.steps_per_second

    assert await speed_at(0, step=100) is None
    assert await speed_at(5, step=110) == 2.0
    assert await speed_at(20, step=110) == 2.0, "four heartbeats have not passed"
    assert await speed_at(30, step=110) == 0.0
    assert gatherer.board.last_point("steps per second") == 0.0
    assert await speed_at(100, step=110) == 0.0
    assert await speed_at(105, step=112) is None, "the hang is no part of its speed"
    assert await speed_at(110, step=122) == 2.0
    job.status = replace(job.status, end=JobEnd(reason=ExitReason.COMPLETED, exit_code=0, message="done"))
    assert await speed_at(111, step=122) is None


async def test_a_job_of_long_steps_has_a_speed_between_them() -> None:
    job = StandInJob()
    gatherer = Gatherer(job)
    for second, step in ((0, 1), (60, 2), (200, 2)):
        now = Micros(NOW + second * 1_000_000)
        gatherer.observe(a_progress(0, step=step), now)
        job.status = replace(job.status, now=now)
        await gatherer.look()
    assert gatherer.steps_per_second == pytest.approx(1 / 60)


async def test_beyond_a_thousand_nodes_only_sums_are_told() -> None:
    few = len(samples(await watched(8)[1].render()))
    _, job_metrics = watched(MAX_NODES + 1)
    found = samples(await job_metrics.render())
    assert len(found) < few
    assert found["dlrover_heartbeat_age_seconds_max", ()] == 2


async def test_strange_names_are_quoted_and_cut() -> None:
    gatherer, job_metrics = watched()
    report = a_progress(0)
    worker = report.workers[0].__class__(local_rank=0, global_rank=0, metrics={'a"b\nc\\' * 100: float("nan")})
    gatherer.metrics.clear()
    gatherer.observe(
        report.__class__(node=report.node, incarnation=report.incarnation, round=report.round, workers=(worker,)), NOW
    )
    found = [labels for name, labels in samples(await job_metrics.render()) if name == "dlrover_training_metric"]
    assert found == [(('a"b\nc\\' * 100)[:200],)]


def test_the_docs_and_the_grafana_dashboard_name_what_exists() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    assert set(re.findall(r"`(dlrover_\w+)`", page)) == NAMES
    for metric in METRICS:
        row = next(line for line in page.splitlines() if line.startswith(f"| `{metric.name}`"))
        assert all(f"`{label}`" in row for label in metric.labels), row
    board = (ROOT / "deploy/grafana-dashboard.json").read_text()
    json.loads(board)
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bdlrover_\w+", board)}
    assert used <= NAMES
    assert len(used) > 20


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer yes\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer no\r\n\r\n", b"401"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"401"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"\xff\xfe\x00rubbish\r\n\r\n", b"404"),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 2 * MAX_HEAD + b"\r\n\r\n", b"431"),
    ],
)
async def test_a_scrape_needs_the_token_and_rubbish_gets_an_answer(sent: bytes, status: bytes) -> None:
    async def render() -> bytes:
        return b"numbers\n"

    metrics_server = MetricsServer(render, lambda token: token == "yes")
    port = await metrics_server.start("127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    finally:
        metrics_server.stop()
    assert answer.split(b" ")[1] == status
    assert (b"numbers" in answer) == (status == b"200")


async def test_half_scrapes_do_not_keep_others_out() -> None:
    async def render() -> bytes:
        return b"numbers\n"

    metrics_server = MetricsServer(render, lambda token: token == "yes")
    port = await metrics_server.start("127.0.0.1", 0)
    halves = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MAX_SCRAPES)]
    try:
        for _, writer in halves:
            writer.write(b"GET /metrics HTTP/1.1\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer yes\r\n\r\n")
        assert b"numbers" in await asyncio.wait_for(reader.read(), 30)
        writer.close()
        for reader, _ in halves:
            assert await asyncio.wait_for(reader.read(), 60) == b""
    finally:
        for _, writer in halves:
            writer.transport.abort()
        metrics_server.stop()
