"""
What a node check needs from a device: one interface, one class for the CPU, one for all devices of torch's kind.

CUDA, Ascend and Moore Threads devices look alike to a program: a namespace of torch with the same functions, and a
backend for collectives. They differ in names and in what must be loaded first. Torch is a constructor argument, so the
paths of devices that this machine does not have are tested with a stand-in.
"""

from __future__ import annotations

import enum
import time
from typing import Any, Protocol

from msgspec import Struct


class CollectiveKind(enum.StrEnum):
    ALL_REDUCE = "allreduce"
    ALL_GATHER = "allgather"


class Workload(Struct, frozen=True, kw_only=True):
    """How much is computed and sent."""

    matrix_size: int
    num_matmuls: int
    num_warmup_matmuls: int = 3
    num_floats: int
    num_collectives: int
    num_warmup_collectives: int
    collective: CollectiveKind = CollectiveKind.ALL_REDUCE


CPU_WORKLOAD = Workload(
    matrix_size=128, num_matmuls=100, num_floats=2**16, num_collectives=10, num_warmup_collectives=2
)
"""A fraction of a second with several workers on a small machine: before each start of training it costs nothing."""
DEVICE_WORKLOAD = Workload(
    matrix_size=16384, num_matmuls=100, num_floats=2**24, num_collectives=40, num_warmup_collectives=20
)
"""Matrices that fill every present device, for a few seconds: shorter, and a device that throttles when hot looks good."""


class Accelerator(Protocol):
    """One device, for one task."""

    backend: str
    """Of torch.distributed."""
    workload: Workload

    def use(self, local_rank: int) -> None:
        """Choose the device of this rank. Raises if there is none."""

    def describe(self) -> str:
        """Device and versions, one line for the log."""

    def device(self) -> Any:
        """Where tensors go."""

    def dtype(self) -> Any:
        """Of the matrices."""

    def mark(self) -> Any:
        """A point in the device's own time."""

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        """Between two of them; waits until the device has reached the second."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""


class Cpu:
    """Host memory and gloo."""

    backend = "gloo"

    def __init__(self, torch: Any, workload: Workload = CPU_WORKLOAD) -> None:
        self.workload = workload
        self._torch = torch

    def use(self, local_rank: int) -> None:
        """Every rank has the same CPU."""

    def describe(self) -> str:
        return f"cpu with {self._torch.get_num_threads()} threads, torch {self._torch.__version__}"

    def device(self) -> Any:
        return self._torch.device("cpu")

    def dtype(self) -> Any:
        return self._torch.float32

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_ms(self, start: float, stop: float) -> float:
        return (stop - start) * 1000

    def synchronize(self) -> None:
        """The CPU has always done what it was asked."""


class TorchDevice:
    """A device behind a namespace of torch such as `torch.cuda`."""

    def __init__(
        self, torch: Any, kind: str, backend: str, *, version: str = "", workload: Workload = DEVICE_WORKLOAD
    ) -> None:
        """`kind` is torch's name of the device and of its namespace; `version` that of the vendor's software."""
        self.backend = backend
        self.workload = workload
        self._torch = torch
        self._kind = kind
        self._version = version
        self._namespace: Any = getattr(torch, kind)
        self._index = 0

    def use(self, local_rank: int) -> None:
        count = self._namespace.device_count()
        if local_rank >= count:
            raise ValueError(
                f"LOCAL_RANK is {local_rank}, but this node has {count} {self._kind} devices. Start at most that many "
                "workers with --nproc-per-node."
            )
        self._index = local_rank
        self._namespace.set_device(local_rank)

    def describe(self) -> str:
        name = self._namespace.get_device_name(self._index)
        software = f", {self._version}" if self._version else ""
        return f"{self._kind}:{self._index} {name}, torch {self._torch.__version__}{software}"

    def device(self) -> Any:
        return self._torch.device(f"{self._kind}:{self._index}")

    def dtype(self) -> Any:
        is_supported = getattr(self._namespace, "is_bf16_supported", None)
        has_bfloat16 = is_supported is not None and is_supported()
        return self._torch.bfloat16 if has_bfloat16 else self._torch.float32

    def mark(self) -> Any:
        event = self._namespace.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        stop.synchronize()
        return float(start.elapsed_time(stop))

    def synchronize(self) -> None:
        self._namespace.synchronize()
