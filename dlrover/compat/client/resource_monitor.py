"""
`ResourceMonitor` and the measuring functions beside it.

Here the agent measures its node by itself and reports that. What a script measures with these functions is for the script.
"""

from __future__ import annotations

import logging
from typing import Any

import psutil

from dlrover.compat.client.comm import GPUStats
from dlrover.compat.names.constants import Accelerators
from dlrover.compat.tools.singleton import Singleton
from dlrover.protocol.units import GIB, in_mib

log = logging.getLogger(__name__)


def get_process_cpu_percent() -> float:
    """Part of all processors that all visible processes used since the last call; 0.0 at the first."""
    percents: list[float] = []
    for process in psutil.process_iter():
        try:
            percents.append(process.cpu_percent())
        except psutil.Error:
            continue  # it has ended
    return round(sum(percents) / (psutil.cpu_count() or 1), 2) / 100


def get_used_cpu() -> float:
    """Percent of all processors, over one second."""
    return float(psutil.cpu_percent(interval=1))


def get_used_memory() -> int:
    """MiB."""
    return int(in_mib(psutil.virtual_memory().used))


def get_used_disk() -> int:
    """GiB of the file system of `/`."""
    return int(psutil.disk_usage("/").used / GIB)


def get_gpu_stats(gpus: list[int] | None = None) -> list[GPUStats]:
    """Of all NVIDIA devices or of those given; empty where NVML (the extra `nv`) or the devices are missing."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        log.warning("GPUs are not measured: pynvml is not installed (`pip install 'dlrover[nv]'`).")
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.warning("GPUs are not measured: %s", error)
        return []
    try:
        return [_gpu(pynvml, index) for index in gpus or range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        log.warning("GPUs are not measured: %s", error)
        return []
    finally:
        pynvml.nvmlShutdown()


class ResourceMonitor(Singleton):
    """Made and started by scripts of the original; the agent reports the resources of its node without it."""

    def __init__(self, gpu_type: str = Accelerators.NVIDIA_GPU) -> None:
        self._gpu_type = gpu_type
        self._is_told = False

    def start(self) -> None:
        """Starts nothing."""
        if not self._is_told:
            self._is_told = True
            log.info("The agent reports the resources of this node; ResourceMonitor starts no thread.")

    def stop(self) -> None:
        """Nothing was started."""

    def report_resource(self) -> None:
        """Hands one measurement to `MasterClient.report_used_resource`, which says what becomes of it."""
        from dlrover.compat.client.master_client import MasterClient

        cores = round(get_process_cpu_percent() * (psutil.cpu_count() or 1), 2)
        gpus = get_gpu_stats() if self._gpu_type == Accelerators.NVIDIA_GPU else []
        MasterClient.singleton_instance().report_used_resource(get_used_memory(), cores, gpus)


def _gpu(nvml: Any, index: int) -> GPUStats:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(device)
    return GPUStats(
        index=index,
        total_memory_mb=int(in_mib(memory.total)),
        used_memory_mb=int(in_mib(memory.used)),
        gpu_utilization=nvml.nvmlDeviceGetUtilizationRates(device).gpu,
    )
