"""
HSDP over a mesh of 2 replicas with 2 shards each, with a guard, snapshots to memory every few steps. Lines as those of guarded_steps.py.

    guarded_hsdp.py DIRECTORY NUM_STEPS SAVE_EVERY [fault=POINT,SIGNAL,RANK]
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import second_fault
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dlrover
from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer, StorageType


def main() -> None:
    folder, num_steps, save_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for words in (word.removeprefix("fault=") for word in sys.argv if word.startswith("fault=")):
        second_fault.install(words, rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer = FsdpShardCheckpointer(folder / "checkpoints")
    done = checkpointer.load_checkpoint(model, optimizer).get("step", 0)
    lines = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(lines, f"life {os.getpid()} {done} {time.monotonic()}\n".encode())

    @dlrover.resilient(model, optimizer)
    def train_step(step: int) -> None:
        generator = torch.Generator().manual_seed(step * world_size + rank)
        batch = torch.randn(16, 64, generator=generator)
        nn.functional.mse_loss(model(batch), batch).backward()
        time.sleep(0.002)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(done + 1, num_steps + 1):
        train_step(step)
        os.write(lines, f"step {step} {time.monotonic()}\n".encode())
        if step % save_every == 0:
            checkpointer.save_checkpoint(step, model, optimizer, {"step": step}, storage_type=StorageType.MEMORY)
    total = hashlib.blake2b()
    for parameter in model.parameters():
        total.update(parameter.full_tensor().detach().numpy().tobytes())
    os.write(lines, f"end {total.hexdigest()}\n".encode())
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
