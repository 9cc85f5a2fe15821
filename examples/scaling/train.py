"""
A data-parallel job whose speed follows a law: each step sleeps as long as the law says for the present number of workers.

    seconds = CONSTANT + NETWORK [workers > 1] + EACH (workers - 2) [workers > 1],  times KNEE_FACTOR beyond KNEE workers,  times noise

So it shows on any machine how a job finds its own size: what is best is known beforehand (`best_size`). Everything else is a usual
script: gloo, DistributedDataParallel, an optimizer, checkpoints in memory.
"""

from __future__ import annotations

import os
import random
import time

from law import build_parser, step_seconds


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

    options = build_parser().parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    directory = os.path.join(os.environ.get("SCALING_CHECKPOINTS", "/tmp"), "scaling-checkpoints")
    checkpointer = DdpCheckpointer(directory)
    state = checkpointer.load_checkpoint()
    first = 1
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    workers, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0:
        print(f"{workers} workers go on with step {first}", flush=True)
    wants_end = torch.zeros(1)
    for step in range(first, options.steps + 1):
        noise = random.Random(step).gauss(0.0, options.noise)  # the same on all ranks: they wait for each other anyway
        time.sleep(max(0.001, step_seconds(options, workers) * (1.0 + noise)))
        inputs = torch.randn(8, 4)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.save_checkpoint(
            step,
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            storage_type=StorageType.MEMORY,
        )
        wants_end.fill_(float(bool(options.end_file) and os.path.exists(options.end_file)))
        dist.broadcast(wants_end, 0)
        if wants_end.item():
            break
    if rank == 0:
        print(f"ended well after step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
