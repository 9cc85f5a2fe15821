"""Steps that are saved to memory, each rank its own shard, until a file `stop` is there: `saving_steps.py FOLDER`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
checkpointer = DdpCheckpointer(folder / "checkpoints", local_shard_num=1, global_shard_num=world_size)
step = checkpointer.load_checkpoint().get("step", -1) + 1
with (folder / f"lives-{rank}").open("a") as lives:
    lives.write(f"{step} {os.getpid()}\n")
is_over = torch.zeros(1)
while not is_over.item():
    checkpointer.save_checkpoint(step, {"step": step, "rank": rank}, storage_type=StorageType.MEMORY)
    (folder / f"step-{rank}.new").write_text(str(step))
    (folder / f"step-{rank}.new").rename(folder / f"step-{rank}")
    is_over.fill_(float((folder / "stop").exists()))
    dist.all_reduce(is_over)  # nobody runs ahead of what the other still has in memory
    step += 1
    time.sleep(0.05)
checkpointer.close()
dist.destroy_process_group()
