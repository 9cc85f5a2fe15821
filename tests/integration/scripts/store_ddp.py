"""DDP whose ranks meet in the master's store instead of a TCPStore. In its first life, rank 1 may die in the middle."""

import gc
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from dlrover.python.elastic_agent.sychronization.sync_client import SyncClient
from dlrover.python.elastic_agent.torch.master_kv_store import MasterKVStore
from torch.nn.parallel import DistributedDataParallel

folder, how = sys.argv[1:]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

dist.init_process_group("gloo", store=MasterKVStore("group", timedelta(seconds=60)), rank=rank, world_size=world_size)
gc.collect()  # torch holds the C++ half of the store only
half = dist.new_group(list(range(world_size)))
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(4, 8) * (rank + 1)).pow(2).mean().backward()
    optimizer.step()
    if how == "die" and life == 0 and rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
total = torch.tensor([float(rank)])
dist.all_reduce(total, group=half)

ours = MasterKVStore("numbers")  # of this life
of_job = MasterKVStore("numbers", round=0)
count = ours.add("arrived", 1), of_job.add("arrived", 1)
client = SyncClient()
is_synced = [client.join_sync("end") and client.wait_sync_finished("end", timeout=60) for _ in range(3)]
if rank == 0:
    client.notify_barrier("go")
is_open = client.barrier("go", timeout=60)
arrived = f"{ours.get('arrived').decode()} {of_job.get('arrived').decode()}"
with open(f"{folder}/done-{rank}", "w") as out:
    out.write(f"{total.item():g} {arrived} {all(is_synced)} {is_open}")
dist.destroy_process_group()
