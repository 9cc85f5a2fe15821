"""
Node check on Moore Threads devices with MCCL: `python -m dlrover.trainer.torch.node_check.mthreads_gpu`.

Needs torch_musa, which adds `torch.musa`. Without it, or without a device: on the CPU with gloo.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import MutableMapping, Sequence
from typing import Any

from dlrover.trainer.torch.node_check.accelerator import Accelerator, Cpu, TorchDevice
from dlrover.trainer.torch.node_check.settings import apply_library_settings
from dlrover.trainer.torch.node_check.task import ExitCode, leave, run


def prepare(environ: MutableMapping[str, str]) -> Accelerator:
    apply_library_settings(environ, "MCCL_SETTINGS")
    import torch

    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("torch_musa")
    return choose(torch)


def choose(torch: Any) -> Accelerator:
    if not hasattr(torch, "musa") or not torch.musa.is_available():
        return Cpu(torch)
    version = getattr(torch.version, "musa", None)
    return TorchDevice(torch, "musa", "mccl", version=f"MUSA {version}" if version else "")


def main(argv: Sequence[str] = ()) -> ExitCode:
    return run(prepare, os.environ)


if __name__ == "__main__":
    leave(main())
