"""
Trains a tiny model deterministically and saves every step into memory; some steps to storage.

    flash.py FOLDER NUM_STEPS [--disk-every N] [--kill-at STEP]... [--hold-at STEP] [--pace SECONDS] [--checkpoints URL]

Each life writes which step it restored. `--kill-at` kills a worker by SIGKILL after that step was
saved, once: the ranks take turns.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("num_steps", type=int)
parser.add_argument("--disk-every", type=int, default=0)
parser.add_argument("--kill-at", type=int, action="append", default=[])
parser.add_argument("--hold-at", type=int, default=-1)
parser.add_argument("--pace", type=float, default=0.0)
parser.add_argument("--spoil", action="store_true", help="put a file where the checkpoints should go")
parser.add_argument("--sharded", action="store_true", help="every rank saves something of its own")
parser.add_argument("--lazy", action="store_true", help="copy while training goes on")
parser.add_argument("--checkpoints", default="", help="where they go, if not into the folder")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
shards = {"local_shard_num": dist.get_world_size(), "global_shard_num": dist.get_world_size()} if args.sharded else {}
checkpointer = DdpCheckpointer(args.checkpoints or args.folder / "checkpoints", **shards, lazy=args.lazy)

state = checkpointer.load_checkpoint()
first = 0
if state:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
    assert not args.sharded or state["rank"] == rank, state["rank"]
with (args.folder / f"lives-{rank}").open("a") as out:
    out.write(f"{first} {os.getpid()}\n")

if args.spoil:
    (args.folder / "checkpoints").write_text("in the way")

for step in range(first, args.num_steps):
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(8, 64, generator=generator)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    is_disk = args.disk_every and step % args.disk_every == 0
    kind = StorageType.DISK if is_disk else StorageType.MEMORY
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "rank": rank}
    result = checkpointer.save_checkpoint(step, state, storage_type=kind, on_busy="block")
    assert bool(result) == (args.sharded or int(os.environ["LOCAL_RANK"]) == 0), result
    assert not args.lazy or result.is_lazy == bool(result), result
    dist.barrier()
    mark = args.folder / f"killed-{step}"
    if step in args.kill_at and rank == step % dist.get_world_size() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if step == args.hold_at:
        (args.folder / f"holding-{rank}").touch()
        while not (args.folder / "go").exists():
            time.sleep(0.01)
    time.sleep(args.pace)

torch.save({name: value.clone() for name, value in model.state_dict().items()}, args.folder / f"weights-{rank}.pt")
dist.barrier()
dist.destroy_process_group()
