"""
The node side of the original's diagnosis, for scripts and plug-ins: `DiagnosisMonitor`, and what a collector derives from.

A collector of your own is found by the entry point group `dlrover.collectors`, whatever it derives from; the agent calls its
`collect_data` (`dlrover.agent.monitor.collectors`).
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping

from dlrover.agent.monitor.old_diagnosis_data import ChipMetrics, CudaLog, DiagnosisData, TrainingLog
from dlrover.compat.tools.files import read_last_n_lines
from dlrover.compat.tools.singleton import Singleton

log = logging.getLogger(__name__)

_LOG_LINES = 5000
_BANNER = "DLRover agent started with:"
"""What stands before it in a log belongs to an earlier life of the node."""


class DiagnosticianType:
    NODE_FAILURE = "node_failure"
    RESOURCE_COLLECT_FAILURE = "resource_collection_failure"
    NODE_INCONSISTENCY = "node_inconsistency"
    TRAINING_HANG = "training_hang"


class DiagnosisErrorConstant:
    GPU_LOST = "GPU is lost"
    PRE_CHECK_FAILED = "Pre-check failed"
    NODE_FAILED = "Node failed"
    REPEATED_NODE = "Repeated node"
    TRAINING_IS_HANG = "Training is hang"


class DiagnosisResult:
    DIAG_INVALID_PARAM = "invalid"
    DIAG_ERROR = "error"
    DIAG_WAITING = "waiting"
    DIAG_CONTINUE = "continue"
    DIAG_HEALTHY = "succeeded"
    DIAG_HANG = "hang"
    DIAG_STRAGGLE = "straggle"
    DIAG_FAILURE = "failure"
    DIAG_ABORT = "abort"


class EnvConfigKey:
    XPU_TIMER_PORT = "XPU_TIMER_PORT"


class CollectorType:
    CUDALOG = "cuda_log"
    TRAININGLOG = "training_log"
    CHIPMETRICS = "chip_metrics"


class DataCollector(abc.ABC):
    @abc.abstractmethod
    def collect_data(self) -> object:
        """Numbers by name, a text, a `DiagnosisData`, or None."""

    @abc.abstractmethod
    def is_enabled(self) -> bool: ...

    def to_collect_data(self) -> bool:
        """As the first releases asked."""
        return self.is_enabled()

    def store_data(self, data: object) -> None:  # noqa: B027  an extension may leave it out
        """Nothing by default: the agent passes on what `collect_data` gives."""


class _Always(DataCollector):
    def is_enabled(self) -> bool:
        return True


class SimpleDataCollector(_Always):
    def collect_data(self) -> object:
        return "data"


class TrainingLogCollector(_Always):
    def __init__(self, log_file: str = "", n_line: int = _LOG_LINES) -> None:
        self._log_file, self._num_lines = log_file, n_line

    def collect_data(self) -> TrainingLog:
        """The last lines of the file, of the node's present life; none without a file."""
        lines = read_last_n_lines(self._log_file, self._num_lines) if self._log_file else []
        texts = [line.decode(errors="replace") for line in lines]
        begun = max((index for index, text in enumerate(texts) if _BANNER in text), default=0)
        return TrainingLog(logs=texts[begun:])


class CudaLogCollector(_Always):
    def collect_data(self) -> CudaLog:
        return CudaLog()


class ChipMetricsCollector(_Always):
    def collect_data(self) -> ChipMetrics:
        return ChipMetrics()


class DiagnosisMonitor(Singleton):
    """Collects on demand and reports through the master client. No thread: the agent has collectors of its own."""

    def __init__(self, training_log_file: str = "") -> None:
        self._collectors: dict[str, DataCollector] = {
            CollectorType.CUDALOG: CudaLogCollector(),
            CollectorType.TRAININGLOG: TrainingLogCollector(training_log_file),
            CollectorType.CHIPMETRICS: ChipMetricsCollector(),
        }

    def start(self) -> None:
        """Starts nothing."""
        log.info("The agent has collectors of its own; DiagnosisMonitor starts no thread.")

    def stop(self) -> None:
        """Nothing was started."""

    def get_collectors(self) -> Mapping[str, DataCollector]:
        return dict(self._collectors)

    def collect_data(self, collector_type: str) -> object:
        """None for a type that is not known, or a collector that is off."""
        collector = self._collectors.get(collector_type)
        return collector.collect_data() if collector is not None and collector.to_collect_data() else None

    def report_diagnosis_data(self, data: DiagnosisData) -> None:
        from dlrover.compat.client.master_client import MasterClient

        if not isinstance(data, DiagnosisData):
            raise TypeError(f"{type(data).__name__} is not a DiagnosisData")
        MasterClient.singleton_instance().report_diagnosis_agent_metrics(data)
