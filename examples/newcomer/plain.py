"""What a newcomer writes for torchrun by its documentation: load the newest file, save with torch.save, let one rank write."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FILE = "checkpoint.pt"

dist.init_process_group("gloo")
rank = dist.get_rank()
with open(f"rank{rank}.pid", "w") as file:
    file.write(str(os.getpid()))

torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first_step = 1
if os.path.exists(FILE):
    state = torch.load(FILE)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first_step = state["step"] + 1
if rank == 0:
    print(f"starts at step {first_step}", flush=True)

goal = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
for step in range(first_step, int(sys.argv[1]) + 1):
    inputs = torch.randn(32, 4)
    loss = nn.functional.mse_loss(model(inputs), inputs @ goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.05)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, FILE + ".new")
        os.replace(FILE + ".new", FILE)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

dist.destroy_process_group()
