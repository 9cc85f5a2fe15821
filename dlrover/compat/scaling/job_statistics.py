"""
`JobMetricCollector` and `LocalStatsReporter` of the original, for scripts and tests that use them by themselves.

The master of this project keeps what is known of a job as facts (`JobFacts`) and measures runs; it uses neither. History is bounded, and runs are told apart by
the set of running nodes, not by their number alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dlrover.compat.scaling.speed_monitor import SpeedMonitor

log = logging.getLogger(__name__)

SAMPLES_KEPT = 5
"""Of the newest run; older runs stay."""
MAX_SAMPLES = 1000


@dataclass
class RuntimeMetric:
    running_nodes: list[Any] = field(default_factory=list)
    global_step: int = 0
    speed: float = 0.0
    timestamp: float = 0.0


@dataclass
class DatasetMetric:
    name: str = ""
    size: int = 0
    storage_type: str = ""


@dataclass
class TrainingHyperParams:
    batch_size: int = 0
    epoch: int = 0
    max_steps: int = 0


class LocalStatsReporter:
    """Keeps everything in memory, one for each job."""

    def __init__(self, job_meta: Any = None) -> None:
        self.job_meta = job_meta
        self.job_type = ""
        self.dataset_metric: DatasetMetric | None = None
        self.training_hyper_params: TrainingHyperParams | None = None
        self.model_info: Any = None
        self.custom_data: dict[str, str] = {}
        self.exit_reason = ""
        self._samples: list[RuntimeMetric] = []

    def report_job_type(self, job_type: str) -> None:
        self.job_type = job_type

    def report_dataset_metric(self, metric: DatasetMetric) -> None:
        self.dataset_metric = metric

    def report_training_hyper_params(self, params: TrainingHyperParams) -> None:
        self.training_hyper_params = params

    def report_model_info(self, model_info: Any) -> None:
        self.model_info = model_info

    def report_customized_data(self, data: dict[str, str]) -> None:
        self.custom_data = dict(data)

    def report_job_exit_reason(self, reason: str) -> None:
        self.exit_reason = reason

    def report_runtime_stats(self, stats: RuntimeMetric) -> None:
        """Of the newest run of samples with the same nodes only the last five stay."""
        self._samples.append(stats)
        nodes = _nodes(stats)
        first = len(self._samples)
        while first > 0 and _nodes(self._samples[first - 1]) == nodes:
            first -= 1
        del self._samples[first : max(first, len(self._samples) - SAMPLES_KEPT)]
        del self._samples[:-MAX_SAMPLES]

    def get_runtime_stats(self) -> list[RuntimeMetric]:
        return list(self._samples)


class JobMetricCollector:
    """No exception leaves it: statistics never break training."""

    def __init__(self, job_uuid: str = "", namespace: str = "", cluster: str = "", user: str = "") -> None:
        self.job_uuid, self.namespace, self.cluster, self.user = job_uuid, namespace, cluster, user
        self._reporter = LocalStatsReporter(self)
        self._dataset: DatasetMetric | None = None
        self._custom: dict[str, str] = {}
        self._flops = 0
        self.runtime_metric = RuntimeMetric()

    @property
    def reporter(self) -> LocalStatsReporter:
        return self._reporter

    @property
    def flops(self) -> int:
        """Of the first model that told any."""
        return self._flops

    def collect_job_type(self, job_type: str) -> None:
        self._reporter.report_job_type(job_type)

    def collect_dataset_metric(self, name: str, size: int, storage_type: str = "") -> None:
        """Later calls fill in what is missing."""
        known = self._dataset or DatasetMetric()
        self._dataset = DatasetMetric(known.name or name, known.size or size, known.storage_type or storage_type)
        self._reporter.report_dataset_metric(self._dataset)

    def collect_training_hyper_params(self, epoch: int, batch_size: int, max_steps: int = 0) -> None:
        self._reporter.report_training_hyper_params(TrainingHyperParams(batch_size, epoch, max_steps))

    def collect_model_metric(self, model_info: Any) -> None:
        flops = getattr(getattr(model_info, "op_stats", None), "flops", 0)
        self._flops = self._flops or int(flops or 0)
        self._reporter.report_model_info(model_info)

    def collect_custom_data(self, data: dict[str, str]) -> None:
        if any(self._custom.get(key) != value for key, value in data.items()):
            self._custom.update(data)
            self._reporter.report_customized_data(self._custom)

    def collect_runtime_stats(self, speed_monitor: SpeedMonitor, running_nodes: Sequence[Any]) -> None:
        """Ignored before there is a speed, and while not all workers have joined."""
        speed = speed_monitor.running_speed
        if speed == 0 or not speed_monitor.all_worker_joined():
            return
        step = speed_monitor.completed_global_step
        self.runtime_metric = RuntimeMetric(list(running_nodes), step, speed, time.time())
        if speed_monitor.init_training_time:
            self.collect_custom_data({"init_training_time": str(speed_monitor.init_training_time)})
        self._reporter.report_runtime_stats(self.runtime_metric)

    def collect_job_exit_reason(self, reason: str) -> None:
        self._reporter.report_job_exit_reason(reason)


def _nodes(stats: RuntimeMetric) -> tuple[tuple[str, Any], ...]:
    return tuple(
        sorted(
            (str(getattr(node, "type", "")), getattr(node, "id", index))
            for index, node in enumerate(stats.running_nodes)
        )
    )
