"""
Node check on NVIDIA devices with NCCL, and on MetaX ones, which speak the same interface:
`python -m dlrover.trainer.torch.node_check.nvidia_gpu`. Without a device: on the CPU with gloo.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

from dlrover.trainer.torch.node_check.accelerator import Accelerator, Cpu, TorchDevice
from dlrover.trainer.torch.node_check.settings import apply_library_settings
from dlrover.trainer.torch.node_check.task import ExitCode, leave, run


def prepare(environ: MutableMapping[str, str]) -> Accelerator:
    apply_library_settings(environ, "NCCL_SETTINGS")
    import torch

    return choose(torch)


def choose(torch: Any) -> Accelerator:
    if not torch.cuda.is_available():
        return Cpu(torch)
    return TorchDevice(torch, "cuda", "nccl", version=f"CUDA {torch.version.cuda}")


def main(argv: Sequence[str] = ()) -> ExitCode:
    return run(prepare, os.environ)


if __name__ == "__main__":
    leave(main())
