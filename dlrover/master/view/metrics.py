"""
The job in numbers, for Prometheus. `docs/reference/metrics.md` describes each of them; a test holds that page, the Grafana dashboard and this table together.

Labels are bounded: nodes are labelled by their rank, which a replacement inherits, and beyond a thousand nodes only sums are told. Counters count from
the start of this master; Prometheus knows what to do with one that begins anew.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from dlrover.core.outcome import Outcome
from dlrover.master.view.gatherer import Gatherer
from dlrover.protocol.messages.checkpoint import CheckpointCommitted, CheckpointFailed, ShardWritten
from dlrover.protocol.messages.job import Command, JobStatus, Micros, NodeId, NodeRank, Stage
from dlrover.protocol.messages.scaling import ScaleOutcome, ScalingStatus
from dlrover.protocol.messages.watch import Phase, ResourceReport

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_NODES = 1024
"""That are told one by one."""
MAX_DEVICES = 16
MAX_NAMES = 64
"""Distinct values of a label that users choose: datasets, directories."""
MAX_SAVES = 256
"""Under way whose time is measured."""
MAX_LABEL = 200


class Described(NamedTuple):
    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS = (
    Described(
        "dlrover_job_info", "gauge", "Always 1; the job's name and the epoch of its master.", ("job", "master_epoch")
    ),
    Described("dlrover_job_stage", "gauge", "1 for the stage that the job is in, 0 for the others.", ("stage",)),
    Described("dlrover_nodes", "gauge", "Nodes with an agent, by status.", ("status",)),
    Described(
        "dlrover_platform_nodes", "gauge", "Nodes of the platform, wanted ones included, by phase.", ("type", "phase")
    ),
    Described("dlrover_nodes_wanted", "gauge", "Least and greatest number of nodes of a world.", ("bound",)),
    Described("dlrover_round", "gauge", "Number of the newest completed rendezvous."),
    Described("dlrover_world_size", "gauge", "Workers of the newest world."),
    Described("dlrover_worker_restarts", "gauge", "Restarts of the workers after failures, over the life of the job."),
    Described(
        "dlrover_worker_failures_total", "counter", "Failures of workers that were reported, by kind.", ("kind",)
    ),
    Described("dlrover_workers", "gauge", "Workers by phase.", ("phase",)),
    Described("dlrover_workers_stalled", "gauge", "Workers that are in their phase for longer than usual."),
    Described("dlrover_step", "gauge", "Greatest step that was reported."),
    Described("dlrover_steps_per_second", "gauge", "Speed of the training, over the last seconds."),
    Described("dlrover_goodput_ratio", "gauge", "Share of new steps in all time but idle time, from 0 to 1."),
    Described(
        "dlrover_goodput_node_seconds_total",
        "counter",
        "Node-seconds by class of time.",
        ("class",),
    ),
    Described(
        "dlrover_scale_decisions_total", "counter", "Decisions of the job about its own size, by outcome.", ("outcome",)
    ),
    Described(
        "dlrover_scale_predicted_ratio",
        "gauge",
        "Speed after the newest judged change over the speed that was predicted.",
    ),
    Described(
        "dlrover_scale_fit_error_ratio", "gauge", "Median relative error of the fitted step time on its own runs."
    ),
    Described("dlrover_room_nodes", "gauge", "Nodes that the platform lets the job have in all, by type.", ("type",)),
    Described(
        "dlrover_training_metric", "gauge", "What the script reports with its steps, such as the loss.", ("metric",)
    ),
    Described(
        "dlrover_node_heartbeat_age_seconds", "gauge", "Seconds since the newest heartbeat of a node.", ("node_rank",)
    ),
    Described(
        "dlrover_heartbeat_age_seconds_max",
        "gauge",
        "Greatest number of seconds since the newest heartbeat of any node.",
    ),
    Described("dlrover_snapshot_step", "gauge", "Newest step that every node has in memory."),
    Described("dlrover_checkpoint_step", "gauge", "Newest committed step, by directory.", ("directory",)),
    Described("dlrover_checkpoint_age_seconds", "gauge", "Since that commit.", ("directory",)),
    Described("dlrover_checkpoints_under_way", "gauge", "Saves to storage that are not committed yet."),
    Described("dlrover_checkpoints_total", "counter", "Saves to storage that ended, by how.", ("result",)),
    Described(
        "dlrover_checkpoint_commit_seconds",
        "histogram",
        "From the first written shard of a save to storage to its commit.",
    ),
    Described("dlrover_dataset_records", "gauge", "Records of a dataset by what became of them.", ("dataset", "state")),
    Described("dlrover_dataset_epoch", "gauge", "Running epoch of a dataset, from 0.", ("dataset",)),
    Described("dlrover_verdicts", "gauge", "Remembered verdicts of the diagnosis, by fault.", ("fault",)),
    Described("dlrover_node_cpu_cores", "gauge", "Cores in use by a node's processes.", ("node_rank",)),
    Described("dlrover_node_cpu_cores_allowed", "gauge", "Cores that a node may use.", ("node_rank",)),
    Described("dlrover_node_memory_bytes", "gauge", "Memory in use on a node.", ("node_rank",)),
    Described("dlrover_node_memory_limit_bytes", "gauge", "Memory that a node may use.", ("node_rank",)),
    Described("dlrover_node_shared_memory_bytes", "gauge", "Shared memory in use on a node.", ("node_rank",)),
    Described("dlrover_node_disk_free_bytes", "gauge", "Free disk of a node.", ("node_rank",)),
    Described(
        "dlrover_node_network_bytes_per_second", "gauge", "Network traffic of a node.", ("node_rank", "direction")
    ),
    Described("dlrover_node_troubles", "gauge", "Problems of a node's devices or measurements.", ("node_rank",)),
    Described(
        "dlrover_device_utilization_ratio", "gauge", "Use of an accelerator, from 0 to 1.", ("node_rank", "device")
    ),
    Described("dlrover_device_memory_bytes", "gauge", "Memory in use of an accelerator.", ("node_rank", "device")),
    Described("dlrover_device_temperature_celsius", "gauge", "Of an accelerator.", ("node_rank", "device")),
    Described("dlrover_commands_total", "counter", "Commands that were decided and are durable.", ("command",)),
    Described("dlrover_journal_commit_seconds", "histogram", "Seconds of one commit to the journal."),
    Described("dlrover_requests_in_work", "gauge", "Requests that the master has received and not answered."),
    Described("dlrover_dashboard_viewers", "gauge", "Open pages."),
)


class Histogram:
    """Counts by upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        total, found = 0, []
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            found.append(("+Inf" if math.isinf(bound) else repr(bound), float(total)))
        return found


class Families:
    """One metric family for each described name; values are added as they are found."""

    def __init__(self, described: Iterable[Described] = METRICS) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily] = {}
        for each in described:
            match each.kind:
                case "counter":
                    self._families[each.name] = CounterMetricFamily(each.name, each.help, labels=each.labels)
                case "histogram":
                    self._families[each.name] = HistogramMetricFamily(each.name, each.help)
                case _:
                    self._families[each.name] = GaugeMetricFamily(each.name, each.help, labels=each.labels)

    def add(self, name: str, value: float | None, *labels: object) -> None:
        """None: unknown, so nothing is told."""
        family = self._families[name]
        assert not isinstance(family, HistogramMetricFamily), f"{name} is a histogram"
        if value is not None:
            family.add_metric([str(label)[:MAX_LABEL] for label in labels], value)

    def add_histogram(self, name: str, histogram: Histogram) -> None:
        family = self._families[name]
        assert isinstance(family, HistogramMetricFamily), f"{name} is no histogram"
        family.add_metric([], histogram.buckets(), histogram.sum)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())


class JobMetrics:
    """Counts what passes, and tells it with what the gatherer knows."""

    def __init__(
        self, gatherer: Gatherer, *, last_heard: Callable[[], dict[NodeId, Micros]], num_in_work: Callable[[], int]
    ) -> None:
        self._gatherer = gatherer
        self._last_heard = last_heard
        self._num_in_work = num_in_work
        self._commands: Counter[str] = Counter()
        self._saves: Counter[str] = Counter({"committed": 0, "failed": 0})
        self._saving: dict[str, Micros] = {}  # attempt -> its first shard
        self._save_seconds = Histogram((0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0))
        self._journal_seconds = Histogram((0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0))
        self.tellers: list[Callable[[Families], None]] = []
        """Others that have numbers to tell."""

    def hear(self, command: Command, outcome: Outcome, now: Micros) -> None:
        self._commands[type(command).__name__] += 1
        match command:
            case ShardWritten(attempt=attempt):
                self._saving.setdefault(attempt, now)
                while len(self._saving) > MAX_SAVES:
                    del self._saving[next(iter(self._saving))]
            case CheckpointCommitted(attempt=attempt):
                self._saves["committed"] += 1
                began_at = self._saving.pop(attempt, None)
                if began_at is not None:
                    self._save_seconds.observe((now - began_at) / 1e6)
            case CheckpointFailed(attempt=attempt):
                self._saves["failed"] += 1
                self._saving.pop(attempt, None)

    def committed(self, seconds: float) -> None:
        """The journal has taken a batch."""
        self._journal_seconds.observe(seconds)

    async def render(self) -> bytes:
        await self._gatherer.fresh()
        # Numbers are taken in the event loop, which owns them; writing out 10,000 lines is left to a thread.
        return await asyncio.to_thread(generate_latest, _Collected(list(self.collect())))

    def collect(self) -> Iterable[Metric]:
        families = Families()
        status = self._gatherer.status
        if status is not None:
            self._tell_job(families, status)
            self._tell_checkpoints(families, status)
            self._tell_nodes(families, status)
            _tell_data(families, status)
        for fault, number in Counter(past.verdict.fault for past in self._gatherer.verdicts).items():
            families.add("dlrover_verdicts", number, fault)
        if self._gatherer.goodput is not None:
            families.add("dlrover_goodput_ratio", self._gatherer.goodput.goodput)
            for name, seconds in self._gatherer.goodput.booked.items():
                families.add("dlrover_goodput_node_seconds_total", seconds, name)
        if self._gatherer.scaling is not None:
            _tell_scaling(families, self._gatherer.scaling)
        self._tell_training(families)
        for command, number in sorted(self._commands.items()):
            families.add("dlrover_commands_total", number, command)
        for kind, number in sorted(self._gatherer.num_failures.items()):
            families.add("dlrover_worker_failures_total", number, kind)
        for result, number in sorted(self._saves.items()):
            families.add("dlrover_checkpoints_total", number, result)
        families.add_histogram("dlrover_checkpoint_commit_seconds", self._save_seconds)
        families.add_histogram("dlrover_journal_commit_seconds", self._journal_seconds)
        families.add("dlrover_requests_in_work", self._num_in_work())
        families.add("dlrover_dashboard_viewers", self._gatherer.num_viewers)
        for tell in self.tellers:
            tell(families)
        return families

    def _tell_job(self, families: Families, status: JobStatus) -> None:
        families.add("dlrover_job_info", 1, status.job_name, status.master_epoch)
        for stage in Stage:
            families.add("dlrover_job_stage", float(stage is status.stage), stage)
        for name, number in Counter(node.status for node in status.nodes).items():
            families.add("dlrover_nodes", number, name)
        platform = Counter((node.node_type.value, node.phase.value) for node in status.fleet if not node.is_released)
        for labels, number in platform.items():
            families.add("dlrover_platform_nodes", number, *labels)
        families.add("dlrover_nodes_wanted", status.min_nodes, "min")
        families.add("dlrover_nodes_wanted", status.max_nodes, "max")
        families.add("dlrover_round", status.round)
        families.add("dlrover_world_size", status.world_size)
        families.add("dlrover_worker_restarts", status.num_restarts)

    def _tell_training(self, families: Families) -> None:
        families.add("dlrover_step", self._gatherer.step)
        families.add("dlrover_steps_per_second", self._gatherer.steps_per_second)
        for name, value in self._gatherer.metrics.items():
            families.add("dlrover_training_metric", value, name)
        workers = [worker for report in self._gatherer.progress.values() for worker in report.workers]
        if workers:
            phases = Counter(worker.phase for worker in workers)
            for phase in Phase:
                families.add("dlrover_workers", phases[phase], phase)
            families.add("dlrover_workers_stalled", sum(worker.is_stalled for worker in workers))

    def _tell_checkpoints(self, families: Families, status: JobStatus) -> None:
        families.add("dlrover_snapshot_step", status.checkpoints.snapshot_step)
        families.add("dlrover_checkpoints_under_way", status.checkpoints.num_under_way)
        for each in {each.directory[:MAX_LABEL]: each for each in status.checkpoints.committed[:MAX_NAMES]}.values():
            families.add("dlrover_checkpoint_step", each.step, each.directory)
            if each.at:
                families.add("dlrover_checkpoint_age_seconds", (status.now - each.at) / 1e6, each.directory)

    def _tell_nodes(self, families: Families, status: JobStatus) -> None:
        heard = self._last_heard()
        ages = {
            node.node_rank: max(0.0, (status.now - heard[node.node]) / 1e6)
            for node in status.nodes
            if node.node in heard
        }
        families.add("dlrover_heartbeat_age_seconds_max", max(ages.values(), default=None))
        if len(status.nodes) > MAX_NODES:
            return
        ranks = {node.node: node.node_rank for node in {node.node_rank: node for node in status.nodes}.values()}
        for rank, age in ages.items():
            families.add("dlrover_node_heartbeat_age_seconds", age, rank)
        for node_id, usage in self._gatherer.resources.items():
            if node_id in ranks:
                _tell_usage(families, ranks[node_id], usage)


class _Collected(CollectorRegistry):
    """What was collected before, in the form that the client library writes out."""

    def __init__(self, metrics: list[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _tell_data(families: Families, status: JobStatus) -> None:
    for each in {each.spec.name[:MAX_LABEL]: each for each in status.datasets[:MAX_NAMES]}.values():
        states = {
            "todo": each.num_todo,
            "doing": each.num_doing,
            "consumed": each.num_consumed,
            "committed": each.num_committed,
            "set-aside": each.num_set_aside,
        }
        for state, number in states.items():
            families.add("dlrover_dataset_records", number, each.spec.name, state)
        families.add("dlrover_dataset_epoch", each.epoch, each.spec.name)


def _tell_scaling(families: Families, scaling: ScalingStatus) -> None:
    for outcome in ScaleOutcome:
        families.add("dlrover_scale_decisions_total", scaling.num_outcomes.get(outcome, 0), outcome.value)
    judged = [each for each in scaling.decisions if each.expected_speed and each.speed_after]
    if judged:
        families.add("dlrover_scale_predicted_ratio", judged[-1].speed_after / judged[-1].expected_speed)
    families.add("dlrover_scale_fit_error_ratio", None if scaling.fit is None else scaling.fit.error)
    for room in scaling.room:
        families.add("dlrover_room_nodes", room.most, room.node_type.value)


def _tell_usage(families: Families, rank: NodeRank, usage: ResourceReport) -> None:
    families.add("dlrover_node_cpu_cores", usage.cpu, rank)
    families.add("dlrover_node_cpu_cores_allowed", usage.cores, rank)
    families.add("dlrover_node_memory_bytes", usage.memory_bytes, rank)
    families.add("dlrover_node_memory_limit_bytes", usage.memory_limit_bytes, rank)
    families.add("dlrover_node_shared_memory_bytes", usage.shm_bytes, rank)
    families.add("dlrover_node_disk_free_bytes", usage.disk_free_bytes, rank)
    families.add("dlrover_node_network_bytes_per_second", usage.network_in_bytes_per_second, rank, "in")
    families.add("dlrover_node_network_bytes_per_second", usage.network_out_bytes_per_second, rank, "out")
    families.add("dlrover_node_troubles", len(usage.troubles), rank)
    for device in {device.index: device for device in usage.devices[:MAX_DEVICES]}.values():
        families.add("dlrover_device_utilization_ratio", device.utilization / 100, rank, device.index)
        families.add("dlrover_device_memory_bytes", device.used_memory_bytes, rank, device.index)
        families.add("dlrover_device_temperature_celsius", device.temperature, rank, device.index)
