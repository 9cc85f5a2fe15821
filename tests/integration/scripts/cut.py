"""
Trains a model that is cut over the ranks (FSDP2), deterministically, and saves every step into memory; some steps to storage.

    cut.py FOLDER NUM_STEPS [--disk-every N] [--kills N] [--hold-at STEP]...

With `--kills` the first life notes what comes out of each step without any disturbance; then a rank of every life kills itself by SIGKILL, at an instant that has nothing to do with what it is doing, until that happened
so many times. Each life writes which step it goes on with. After a step of `--hold-at` the ranks wait for a file.
"""

import argparse
import os
import random
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("num_steps", type=int)
parser.add_argument("--disk-every", type=int, default=0)
parser.add_argument("--kills", type=int, default=0)
parser.add_argument("--hold-at", type=int, action="append", default=[])
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 255), torch.nn.Tanh(), torch.nn.Linear(255, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step * world_size + rank)
    optimizer.zero_grad()
    model(torch.randn(8, 64, generator=generator)).square().mean().backward()
    optimizer.step()


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


if args.kills and not (args.folder / f"expected-{rank}.pt").exists():
    undisturbed = build()
    expected = []
    for step in range(args.num_steps):
        train_step(*undisturbed, step)
        expected.append(whole(undisturbed[0]))
    torch.save(expected, args.folder / f"expected-{rank}.new")
    os.rename(args.folder / f"expected-{rank}.new", args.folder / f"expected-{rank}.pt")

model, optimizer = build()
checkpointer = FsdpShardCheckpointer(args.folder / "checkpoints", save_timeout=10)  # a killed rank's shard never comes

extra = checkpointer.load_checkpoint(model, optimizer)
first = extra["step"] + 1 if extra else 0
assert first == 0 or checkpointer.restored_step == extra["step"], extra
with (args.folder / f"lives-{rank}").open("a") as out:
    out.write(f"{first} {world_size}\n")
dist.barrier()

num_killed = len(list(args.folder.glob("killed-*")))
is_victim = num_killed < args.kills and rank == num_killed % world_size


def die() -> None:
    (args.folder / f"killed-{num_killed}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


if is_victim:
    threading.Timer(random.Random(num_killed).uniform(0.0, 0.25), die).start()

for step in range(first, args.num_steps):
    train_step(model, optimizer, step)
    kind = StorageType.DISK if args.disk_every and step % args.disk_every == 0 else StorageType.MEMORY
    saved = checkpointer.save_checkpoint(step, model, optimizer, {"step": step}, storage_type=kind, on_busy="block")
    assert saved, saved
    if step in args.hold_at:
        (args.folder / f"holding-{step}-{rank}").touch()
        while not (args.folder / f"go-{step}").exists():
            threading.Event().wait(0.01)
    if step == args.num_steps - 1 and num_killed < args.kills:
        threading.Event().wait(10)  # the one of this life is still to come

torch.save(whole(model), args.folder / f"weights-{rank}.pt")
assert checkpointer.wait_latest_checkpoint(100)
dist.barrier()
dist.destroy_process_group()
