"""
Trains until it is stopped, and gives the page something for every panel: `shown.py FOLDER [--pace SECONDS] [--plain]`.

Ranks step together, read a dataset on demand, save each step into memory, report a loss and print; unless `--plain` also what would harm a page.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.python.elastic_agent.sharding.client import ShardingClient

from dlrover.trainer.progress import report
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--pace", type=float, default=0.05)
parser.add_argument("--plain", action="store_true")
args = parser.parse_args()

BATCH = 4
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
records, norm = ("records", "norm") if args.plain else ("records <b>", "<i>norm</i>")
trap = "" if args.plain else " <script>alert('log')</script> \x1b[31mred\x1b[0m"
client = ShardingClient(records, BATCH, 1, 20_000, num_minibatches_per_shard=8)
checkpointer = DdpCheckpointer(args.folder / "checkpoints")
state = checkpointer.load_checkpoint()
step = state.get("step", 0)
if state:
    model.load_state_dict(state["model"])
(args.folder / f"pid-{rank}").write_text(str(os.getpid()))
left = 0
while True:
    while left < BATCH:
        task = client.get_task()
        left += task.shard.end - task.shard.start
    left -= BATCH
    inputs = torch.randn(BATCH, 8)
    loss = (model(inputs).squeeze() - inputs.sum(dim=1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    step += 1
    client.report_batch_done(BATCH, step=step)
    report(step, loss=loss.item(), **{norm: model[0].weight.norm().item()})
    checkpointer.save_checkpoint(step, {"step": step, "model": model.state_dict()}, storage_type=StorageType.MEMORY)
    print(f"step {step} loss {loss.item():.4f}{trap}", flush=True)
    time.sleep(args.pace)
