"""
Trains on a "device" of limited memory with the batches that the tuner wants, until each rank has done 40 steps.

    device_memory.py FOLDER LARGEST FROM_STEP

From that step on a forward pass of more than LARGEST records raises what torch raises when a device is full. Each rank appends to FOLDER/steps-RANK what every
step consisted of, and to FOLDER/full-RANK when its device was full.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer

STEPS, BATCH, SIZE = 40, 8, 4096
folder, largest, from_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
model = DistributedDataParallel(net)
loader = ElasticDataLoader(list(range(SIZE)), batch_size=BATCH)
trainer = ElasticTrainer(model, loader)
optimizer = trainer.prepare(torch.optim.SGD(net.parameters(), lr=0.01))
kept = folder / "kept.pt"
if kept.exists():
    state = torch.load(kept)
    net.load_state_dict(state["model"])
    trainer.load_state_dict(state["trainer"])
dist.barrier()


def tell(name: str, **told: float) -> None:
    with (folder / f"{name}-{rank}").open("a") as file:
        file.write(json.dumps({"at": time.monotonic(), "life": os.getpid(), "step": trainer.num_steps, **told}) + "\n")


sizes: list[int] = []
for batch in loader:
    with trainer.step(fix_total_batch_size=True):
        if trainer.num_steps >= from_step and len(batch) > largest:
            tell("full", records=len(batch))
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(batch)} GiB.")
        optimizer.zero_grad()
        model(torch.ones(len(batch), 3)).square().mean().backward()
        optimizer.step()
    sizes.append(len(batch))
    if not trainer.is_last_micro_batch:
        continue
    tell("steps", passes=len(sizes), records=sum(sizes), largest=max(sizes))
    sizes = []
    if rank == 0:
        torch.save({"model": net.state_dict(), "trainer": trainer.state_dict()}, folder / "new.pt")
        os.replace(folder / "new.pt", kept)
    if trainer.num_steps >= STEPS:
        break
dist.barrier()
dist.destroy_process_group()
