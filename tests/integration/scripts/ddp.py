"""A plain DDP script as people write it for torchrun."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8) * (dist.get_rank() + 1)).pow(2).mean()
    loss.backward()
    optimizer.step()
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
with open(f"{sys.argv[1]}/ddp-{os.environ['RANK']}", "w") as out:
    out.write(f"{total.item()} {model.module.weight.sum().item():.6f}")
dist.destroy_process_group()
