"""
The parameters of the historical algorithms under their old keys (spec 07 §13.6), as `dlrover brain settings` sets them.

Memory under old keys is in bytes, as it always was; here it becomes MiB. A key that no algorithm knows is named in a warning, with the one that was probably meant.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping

from msgspec import Struct

from dlrover.protocol.units import GIB, MIB, in_mib

WINDOW = 3
"""Newest records that make a mean."""
HARD_SERVER_CPU = 32.0
"""Cores of one server, at most."""
MOST_SERVER_MEMORY = 65_536.0
"""MiB of one server: beyond, there are more of them."""
FIRST_WORKERS = 10
SHORT_STEPS = 1800.0
"""Seconds of a job with a single worker: it is short, and gets `FIRST_WORKERS`."""
LEAST_LEFT = 3600.0
"""Seconds that a job must last for servers to be made smaller."""
MOST_WORKER_MARGIN = 8192.0
"""MiB."""
START_RECORDS = 6
"""A job with fewer records begins."""
LEAST_WORKER_MEMORY = 16_384.0
"""MiB of the first worker."""


class HistoryParameters(Struct, frozen=True, kw_only=True):
    """Memory in MiB. The key of each field stands in `KEYS`."""

    node_memory_margin: float = 0.5
    node_cpu_margin: float = 4.0
    worker_create_cpu: float = 12.0
    worker_oom_margin: float = 0.2
    worker_oom_increase: float = in_mib(4e9)
    worker_memory_margin: float = 0.2
    worker_cpu_margin: float = 1.0
    most_workers: int = 60
    worker_decrease: int = 4
    first_workers_most: int = 32
    workers_per_step: int = 4
    compared: int = 2
    """Neighbours on each side with which a record is compared."""
    outlier_share: float = 0.15
    step_count: int = 5
    slower_share: float = 0.1
    server_memory_margin: float = 0.2
    server_cpu_margin_share: float = 0.5
    server_cpu_margin: float = 4.0
    server_least_cpu: float = 12.0
    most_servers: int = 15
    cold_servers: int = 4
    cold_cpu: float = 12.0
    cold_memory: float = in_mib(16 * GIB)
    init_target_workers: int = 20
    overload: float = 0.8
    hot: float = 0.8
    hot_target_workers: int = 32
    hot_memory: float = 0.9
    hot_memory_more: float = in_mib(8 * GIB)
    low_cpu: float = 0.4
    exhausted: float = 0.95
    memory_imbalance: float = 0.2
    backward_hours: float = 168.0


KEYS = {
    "job.node.memory.margin.percent": "node_memory_margin",
    "job-node.cpu.margin": "node_cpu_margin",
    "optimizer.worker.create.cpu.min": "worker_create_cpu",
    "optimizer.worker.oom.memory.margin-percent": "worker_oom_margin",
    "optimizer.worker.oom.memory.min-increase": "worker_oom_increase",
    "optimizer.worker.memory.margin-percent": "worker_memory_margin",
    "optimizer.worker.cpu.margin-core": "worker_cpu_margin",
    "optimizer.worker.max.replica-count": "most_workers",
    "optimizer.worker.replica.decrease-count": "worker_decrease",
    "optimizer.worker.max.init-count-per-step": "first_workers_most",
    "optimizer.worker.max.count-per-step": "workers_per_step",
    "optimizer.worker.cpu-util.comp-count": "compared",
    "optimizer.worker.cpu-util.less-percent": "outlier_share",
    "optimizer.step.count.threshold": "step_count",
    "optimizer.training-speed.less-percent": "slower_share",
    "optimizer.ps.memory.margin.percent": "server_memory_margin",
    "optimizer.ps.cpu.margin.percent": "server_cpu_margin_share",
    "optimizer.ps.cpu.margin": "server_cpu_margin",
    "optimizer.ps.min.cpu": "server_least_cpu",
    "optimizer.ps.count.maximum": "most_servers",
    "optimizer.ps.cold.replica": "cold_servers",
    "optimizer.ps.cold.cpu": "cold_cpu",
    "optimizer.ps.cold.memory": "cold_memory",
    "optimizer.ps.init-adjust.target-worker-count": "init_target_workers",
    "optimizer.ps.cpu.overload": "overload",
    "optimizer.ps.cpu.hot-threshold": "hot",
    "optimizer.ps.cpu.hot-target-worker-count": "hot_target_workers",
    "optimizer.ps.memory.hot-threshold": "hot_memory",
    "optimizer.ps.memory.hot-adjust": "hot_memory_more",
    "optimizer.ps.cpu.low-threshold": "low_cpu",
    "optimizer.ps.cpu.exhausted-threshold": "exhausted",
    "optimizer.ps.memory.workload-balance-percent": "memory_imbalance",
    "query.backward.time-period.hour": "backward_hours",
}
IN_BYTES = ("optimizer.worker.oom.memory.min-increase", "optimizer.ps.cold.memory", "optimizer.ps.memory.hot-adjust")
MISSPELT = {
    "optimizer.ps.initial.target-worker-count": "optimizer.ps.init-adjust.target-worker-count",
    "optimizer.ps.cpu.hot-adjust": "optimizer.ps.memory.hot-adjust",
    "optimizer.worker.cpu.min": "optimizer.worker.create.cpu.min",
}
"""Keys of published sample settings that no algorithm ever read, and what they were meant for (spec 07 §19, 31)."""
PREFIXES = ("optimizer.", "job.node.", "job-node.", "query.backward.")
PHASE_KEY = "optimizer.worker.optimize-phase"
"""Part of a question, not of the settings."""
_LARGEST = 2.0**53


def parameters_of(settings: Mapping[str, str]) -> tuple[HistoryParameters, tuple[str, ...]]:
    """The parameters, and a sentence for each setting that has no effect. Other settings than those of the algorithms are not looked at."""
    values: dict[str, float] = {}
    warnings: list[str] = []
    for key, text in settings.items():
        if not key.startswith(PREFIXES) or key == PHASE_KEY:
            continue
        name = KEYS.get(key)
        if name is None:
            warnings.append(f"The setting {key!r} has no effect.{_meant(key)}")
            continue
        number = _number(text)
        if number is None:
            default = default_of(key)
            warnings.append(f"The setting {key!r} is {text!r}. Give a number of at least 0; {default:g} is used.")
            continue
        values[name] = in_mib(number) if key in IN_BYTES else number
    whole = {name: int(value) for name, value in values.items() if isinstance(getattr(HistoryParameters(), name), int)}
    return HistoryParameters(**{**values, **whole}), tuple(warnings)  # type: ignore[arg-type]


def default_of(key: str) -> float:
    """In the unit of the key."""
    default: float = getattr(HistoryParameters(), KEYS[key])
    return round(default * MIB) if key in IN_BYTES else default


def _meant(key: str) -> str:
    close = [MISSPELT[key]] if key in MISSPELT else difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)
    return f" Did you mean {close[0]!r}?" if close else ""


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0 <= number <= _LARGEST else None
