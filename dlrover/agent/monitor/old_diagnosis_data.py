"""
The data classes of the original's diagnosis, for collectors that were written for it.

A collector may answer with one of these: their content goes to the master as the text of a sample.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from typing import Any


class DiagnosisDataType:
    GENERIC = "GENERIC"
    TRAINING_LOG = "TRAINING_LOG"
    XPU_TIMER_METRIC = "XPU_TIMER_METRIC"
    # As they were called at first.
    CUDALOG = "cuda_log"
    TRAININGLOG = "training_log"
    CHIPMETRICES = "chip_metrics"


@dataclass
class DiagnosisData:
    timestamp: int = 0
    """Seconds since the epoch; 0: now."""
    data_type: str = DiagnosisDataType.GENERIC
    data_content: str = ""
    node_id: int = -1
    node_type: str = ""
    node_rank: int = -1

    def __post_init__(self) -> None:
        self.timestamp = self.timestamp or round(time.time())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Any:
        """Unknown keys are ignored. Raises ValueError for what is no object."""
        said = json.loads(text)
        if not isinstance(said, dict):
            raise ValueError(f"data must be a JSON object (got {type(said).__name__})")
        made = cls()
        for each in fields(cls):
            setattr(made, each.name, said.get(each.name, getattr(made, each.name)))
        return made


@dataclass
class WorkerTrainingMetric(DiagnosisData):
    is_final_result: bool = False
    need_report: bool = False


class TrainingLog(DiagnosisData):
    def __init__(self, timestamp: int = 0, logs: list[str] | None = None, **details: Any) -> None:
        super().__init__(timestamp, DiagnosisDataType.TRAINING_LOG, "\n".join(logs or []), **details)

    @property
    def logs(self) -> list[str]:
        return self.data_content.splitlines()


class CudaLog(DiagnosisData):
    def __init__(self, timestamp: int = 0, **details: Any) -> None:
        super().__init__(timestamp, DiagnosisDataType.CUDALOG, **details)


class ChipMetrics(DiagnosisData):
    def __init__(self, timestamp: int = 0, **details: Any) -> None:
        super().__init__(timestamp, DiagnosisDataType.CHIPMETRICES, **details)
