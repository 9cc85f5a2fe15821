"""
Node check on Ascend devices with HCCL: `python -m dlrover.trainer.torch.node_check.ascend_npu`.

Needs torch_npu, which adds `torch.npu` and gives the device back in an exit handler of its own. Without it, or where
the device is no Ascend: on the CPU with gloo.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import MutableMapping, Sequence
from typing import Any

from msgspec.structs import replace

from dlrover.trainer.torch.node_check.accelerator import DEVICE_WORKLOAD, Accelerator, CollectiveKind, Cpu, TorchDevice
from dlrover.trainer.torch.node_check.task import ExitCode, leave, run

TIMEOUTS = {"HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "180"}
"""Seconds. HCCL reads them once, when the process group is made; its own defaults outlast the check."""


def prepare(environ: MutableMapping[str, str]) -> Accelerator:
    for name, seconds in TIMEOUTS.items():
        environ.setdefault(name, seconds)
    import torch

    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("torch_npu")
    accelerator = choose(torch)
    if isinstance(accelerator, TorchDevice) and environ.get("LOCAL_RANK", "0") == "0":
        settings = {name: value for name, value in sorted(environ.items()) if name.startswith("HCCL_")}
        print(f"Node check: {settings}", flush=True)
    return accelerator


def choose(torch: Any) -> Accelerator:
    if not hasattr(torch, "npu") or not torch.npu.is_available() or "Ascend" not in torch.npu.get_device_name(0):
        return Cpu(torch)
    version = getattr(torch.version, "cann", None)
    workload = replace(DEVICE_WORKLOAD, collective=CollectiveKind.ALL_GATHER)
    return TorchDevice(torch, "npu", "hccl", version=f"CANN {version}" if version else "", workload=workload)


def main(argv: Sequence[str] = ()) -> ExitCode:
    return run(prepare, os.environ)


if __name__ == "__main__":
    leave(main())
