"""
A collective in each step and a checkpoint on the shared disk, until told to end (a file).

Each line of `steps-PID` is `round life global_rank world_size step time`, written after the step's collective: it says that
all ranks of that round were there. The checkpoint holds the newest step; every life goes on from it.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover.trainer import report

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
life, round_number = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["DLROVER_ROUND"]
checkpoint = folder / "checkpoint"
newest = torch.tensor([int(checkpoint.read_text()) if rank == 0 and checkpoint.exists() else 0])
dist.broadcast(newest, src=0)
step = int(newest)
with (folder / f"steps-{os.getpid()}").open("a", buffering=1) as out:
    while True:
        votes = torch.tensor([1, int((folder / "stop").exists())])
        dist.all_reduce(votes)
        assert int(votes[0]) == size, f"{int(votes[0])} ranks took part in a step of {size}"
        if votes[1]:
            break
        step += 1
        out.write(f"{round_number} {life} {rank} {size} {step} {time.monotonic()}\n")
        if rank == 0:
            (folder / "checkpoint.new").write_text(f"{step}")
            (folder / "checkpoint.new").rename(checkpoint)
        report(step)
        time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
