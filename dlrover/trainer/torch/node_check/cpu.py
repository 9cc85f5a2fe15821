"""
Node check on the CPU with gloo: `python -m dlrover.trainer.torch.node_check.cpu`.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence

from dlrover.trainer.torch.node_check.accelerator import Accelerator, Cpu
from dlrover.trainer.torch.node_check.task import ExitCode, leave, run


def prepare(environ: MutableMapping[str, str]) -> Accelerator:
    import torch

    return Cpu(torch)


def main(argv: Sequence[str] = ()) -> ExitCode:
    return run(prepare, os.environ)


if __name__ == "__main__":
    leave(main())
