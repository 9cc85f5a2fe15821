"""
The node check under its oldest name, one module for all devices: `python -m dlrover.trainer.torch.run_network_check`.

Chooses by the device package that is installed beside torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from dlrover.trainer.torch.node_check import ascend_npu, mthreads_gpu, nvidia_gpu
from dlrover.trainer.torch.node_check.task import ExitCode, leave


def main(argv: Sequence[str] = ()) -> ExitCode:
    if importlib.util.find_spec("torch_npu") is not None:
        return ascend_npu.main(argv)
    if importlib.util.find_spec("torch_musa") is not None:
        return mthreads_gpu.main(argv)
    return nvidia_gpu.main(argv)


if __name__ == "__main__":
    leave(main())
