"""
Is the memory of this node's devices free? Asked once per agent, before its first node check.

A device that is a third full before anything of the job runs is in another job's hands, or held by a process that
cannot die; training there would fail later and less clearly. Runs as a program of its own (`python -m
dlrover.trainer.torch.node_check.device_memory`), because the vendors' libraries have no place in an agent: a JSON line
on stdout, exit code 0 for free or nothing to check, 13 for busy.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from dlrover.host.edges import contained

EXIT_BUSY = 13
DEFAULT_LIMIT = 0.3
DEFAULT_PATIENCE = 30.0
"""Seconds. The driver needs a while to take back the memory of a process that has just been killed."""
_PAUSE = 0.5
_HBM = 1  # ACL_HBM_MEM


class DeviceMemory(Struct, frozen=True):
    index: int
    used_bytes: int
    """By others than this agent's own processes, as far as the library tells."""
    total_bytes: int

    @property
    def used_share(self) -> float:
        return self.used_bytes / self.total_bytes if self.total_bytes > 0 else 0.0


class MemoryFindings(Struct, frozen=True):
    num_devices: int
    busy: list[DeviceMemory]

    def sentence(self, limit: float) -> str:
        if not self.num_devices:
            return "Device memory: nothing to check."
        if not self.busy:
            return f"Device memory: {self.num_devices} devices are free."
        devices = ", ".join(f"{device.index} ({device.used_share:.0%} used)" for device in self.busy)
        return (
            f"Device memory: basic GPU check failed. On device {devices}, {limit:.0%} or more of the memory is "
            "in use before the job starts. Find the process that uses it, or reset the device."
        )


class MemoryReader(Protocol):
    def read(self) -> list[DeviceMemory]:
        """All devices of this node; empty if there are none."""


class NvmlReader:
    """NVIDIA's management library, through nvidia-ml-py. Makes no context on the device."""

    def __init__(self, nvml: Any, is_own: Callable[[int], bool]) -> None:
        self._nvml = nvml
        self._is_own = is_own

    def read(self) -> list[DeviceMemory]:
        nvml = self._nvml
        nvml.nvmlInit()
        try:
            return [self._device(index) for index in range(nvml.nvmlDeviceGetCount())]
        finally:
            nvml.nvmlShutdown()

    def _device(self, index: int) -> DeviceMemory:
        device = self._nvml.nvmlDeviceGetHandleByIndex(index)
        memory = self._nvml.nvmlDeviceGetMemoryInfo(device)
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(device)
        # Some drivers do not tell the memory of each process; then nothing is known to be ours.
        own = sum(process.usedGpuMemory or 0 for process in processes if self._is_own(process.pid))
        return DeviceMemory(index, max(int(memory.used) - own, 0), int(memory.total))


class AclReader:
    """Ascend's computing language library."""

    def __init__(self, acl: Any) -> None:
        self._acl = acl

    def read(self) -> list[DeviceMemory]:
        _succeed(self._acl.init(), "acl.init")
        try:
            count, code = self._acl.rt.get_device_count()
            _succeed(code, "acl.rt.get_device_count")
            return [self._device(index) for index in range(count)]
        finally:
            self._acl.finalize()

    def _device(self, index: int) -> DeviceMemory:
        _succeed(self._acl.rt.set_device(index), "acl.rt.set_device")
        try:
            free, total, code = self._acl.rt.get_mem_info(_HBM)
            _succeed(code, "acl.rt.get_mem_info")
        finally:
            self._acl.rt.reset_device(index)
        return DeviceMemory(index, max(int(total) - int(free), 0), int(total))


class TorchReader:
    """A device that torch knows as CUDA and that has no management library in Python: MetaX."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def read(self) -> list[DeviceMemory]:
        cuda = self._torch.cuda
        if not cuda.is_available():
            return []
        infos = [cuda.mem_get_info(index) for index in range(cuda.device_count())]
        return [DeviceMemory(index, int(total) - int(free), int(total)) for index, (free, total) in enumerate(infos)]


def reader_for(accelerator: str, is_own: Callable[[int], bool]) -> MemoryReader | None:
    """None where nothing can be asked: another kind of device, or its library is not installed."""
    try:
        match accelerator:
            case "nvidia.com/gpu":
                return NvmlReader(importlib.import_module("pynvml"), is_own)
            case "ascend-npu":
                return AclReader(importlib.import_module("acl"))
            case "metax-tech.com/gpu":
                return TorchReader(importlib.import_module("torch"))
            case _:
                return None
    except ImportError:
        return None


def check(
    reader: MemoryReader,
    *,
    limit: float = DEFAULT_LIMIT,
    patience: float = DEFAULT_PATIENCE,
    now: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> MemoryFindings:
    """Looks again until all is free or `patience` is over. No library tells when memory becomes free, so this polls."""
    deadline = now() + patience
    while True:
        devices = reader.read()
        busy = [device for device in devices if device.used_share >= limit]
        left = deadline - now()
        if not busy or left <= 0:
            return MemoryFindings(len(devices), busy)
        pause(min(_PAUSE, left))


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    reader = reader_for(options.accelerator, _descends_from(options.agent_pid))
    findings = MemoryFindings(0, [])
    if reader is not None:
        # The libraries raise classes of their own; without an answer there is nothing to hold against the node.
        with contained(
            lambda error: print(f"Device memory: not checked, {type(error).__name__}: {error}", file=sys.stderr)
        ):
            findings = check(reader, limit=options.limit, patience=options.patience)
    busy = [{"index": d.index, "used_bytes": d.used_bytes, "total_bytes": d.total_bytes} for d in findings.busy]
    print(json.dumps({"num_devices": findings.num_devices, "busy": busy}), flush=True)
    print(findings.sentence(options.limit), file=sys.stderr)
    return EXIT_BUSY if findings.busy else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="device_memory", description="Is the memory of this node's devices free?")
    parser.add_argument("--accelerator", default="nvidia.com/gpu")
    parser.add_argument(
        "--limit", type=float, default=DEFAULT_LIMIT, help="share of used memory from which a device counts as busy"
    )
    parser.add_argument("--patience", type=float, default=DEFAULT_PATIENCE, help="seconds to wait for memory")
    parser.add_argument(
        "--agent-pid", type=int, default=0, help="pid of a process; memory that its descendants use does not count"
    )
    options = parser.parse_args(argv)
    if not 0 < options.limit <= 1:
        parser.error(f"--limit {options.limit}: give a share between 0 and 1, for example 0.3")
    return options


def _descends_from(ancestor: int) -> Callable[[int], bool]:
    def is_own(pid: int) -> bool:
        import psutil

        if not ancestor:
            return False
        try:
            process = psutil.Process(pid)
            return ancestor == pid or any(parent.pid == ancestor for parent in process.parents())
        except psutil.Error:
            return False  # gone, or numbered in another container

    return is_own


def _succeed(code: int, call: str) -> None:
    if code != 0:
        raise OSError(f"{call} answered {code}")


if __name__ == "__main__":
    sys.exit(main())
