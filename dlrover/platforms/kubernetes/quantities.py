"""
A container's resources in Kubernetes' quantities (`500m`, `2Gi`) and in ours (cores, whole MiB, accelerators).

A `Resource` that is read from a template and written back changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import Resource

MIB = 1024 * 1024
ACCELERATORS = ("nvidia.com", "amd.com", "ascend", "mthreads.com", "metax-tech.com", "gpu.intel.com", "habana.ai")
"""A resource whose name contains one of these counts as an accelerator."""
_SUFFIXES = {
    **{unit: 1024.0**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
}


def quantity(value: object) -> float:
    """Raises `ConfigError` for a value that is no quantity."""
    text = str(value).strip()
    suffix = next((each for each in _SUFFIXES if text.endswith(each)), "")
    try:
        number = float(text.removesuffix(suffix)) * _SUFFIXES.get(suffix, 1.0)
    except ValueError:
        number = math.nan
    if not (0 <= number < math.inf):
        raise ConfigError(f"{value!r} is not a resource quantity. Give for example 500m, 2 or 4Gi.")
    return number


def cpu_of(value: object) -> float:
    """Cores, to one decimal."""
    return round(quantity(value), 1)


def memory_mb_of(value: object) -> int:
    """Whole MiB."""
    return int(quantity(value) / MIB)


def accelerator_in(requests: Mapping[str, object]) -> str:
    """Name of the first accelerator; empty: there is none."""
    return next((name for name in requests if any(mark in name for mark in ACCELERATORS)), "")


def limits_of(given: Mapping[str, object]) -> Resource:
    """`resourceLimits` of a job: `gpu` is the original's name for accelerators of any kind. Absent: no limit of ours. Raises `ConfigError`."""
    limits = resource_of(given)
    return replace(limits, gpus=int(quantity(given["gpu"]))) if "gpu" in given else limits


def resource_of(requests: Mapping[str, object]) -> Resource:
    """What a container asks for. Raises `ConfigError`."""
    accelerator = accelerator_in(requests)
    return Resource(
        cpu=cpu_of(requests.get("cpu", 0)),
        memory_mb=memory_mb_of(requests.get("memory", 0)),
        gpus=int(quantity(requests[accelerator])) if accelerator else 0,
        gpu_type=accelerator,
    )
