"""Data-parallel training in its shortest form: every worker sees other data, all end with the same weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

goal = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(1, 51):
    inputs = torch.randn(32, 4, generator=generator)
    loss = nn.functional.mse_loss(model(inputs), inputs @ goal)
    optimizer.zero_grad()
    loss.backward()  # gradients are averaged over the workers in here
    optimizer.step()
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss.item():.6f}", flush=True)

weights = [torch.empty(1, 4) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
assert all(torch.equal(weights[0], other) for other in weights), "the workers disagree about the weights"
if dist.get_rank() == 0:
    print(f"{len(weights)} workers agree: {[round(value, 3) for value in weights[0].flatten().tolist()]}", flush=True)
dist.destroy_process_group()
