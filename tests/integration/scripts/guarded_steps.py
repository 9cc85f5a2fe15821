"""
DDP with a guard, snapshots to memory every few steps. Each rank appends a line per step, with its time; the last one names the bits of the parameters.

    guarded_steps.py DIRECTORY NUM_STEPS SAVE_EVERY [unused] [loop] [elastic] [plain] [fault=POINT,SIGNAL,RANK]
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
from torch.nn.parallel import DistributedDataParallel

import dlrover
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType


class Net(nn.Module):
    def __init__(self, *, has_unused: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64)
        self.other = nn.Linear(128, 64) if has_unused else None

    def forward(self, batch: torch.Tensor, step: int) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(batch)))
        return (self.other if self.other is not None and step % 3 == 0 else self.last)(hidden)


def main() -> None:
    folder, num_steps, save_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    has_unused = "unused" in sys.argv
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for words in (word.removeprefix("fault=") for word in sys.argv if word.startswith("fault=")):
        second_fault.install(words, rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(has_unused=has_unused), find_unused_parameters=has_unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.9)
    checkpointer = DdpCheckpointer(folder / "checkpoints")
    done = 0
    if state := checkpointer.load_checkpoint():
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        done = state["step"]
    lines = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(lines, f"life {os.getpid()} {done} {time.monotonic()}\n".encode())

    def work(step: int) -> None:
        generator = torch.Generator().manual_seed(step * world_size + rank)
        batch = torch.randn(16, 64, generator=generator)
        loss = nn.functional.mse_loss(model(batch, step), batch)
        loss.backward()
        time.sleep(0.002)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    def after(step: int) -> None:
        os.write(lines, f"step {step} {time.monotonic()}\n".encode())
        if step % save_every == 0:
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "step": step,
                "name": "guarded",
            }
            checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)

    numbers = range(done + 1, num_steps + 1)
    if "loop" in sys.argv:
        for guarded in dlrover.steps(numbers, model, optimizer, also=[scheduler]):
            with guarded as step:
                work(step)
            after(step)
    elif "elastic" in sys.argv:
        trainer = ElasticTrainer(model)
        optimizer, scheduler = trainer.prepare(optimizer, scheduler)
        for step in numbers:
            with trainer.step(fix_total_batch_size=True):
                work(step)
            after(step)
    else:
        train_step = work if "plain" in sys.argv else dlrover.resilient(model, optimizer, also=[scheduler])(work)
        for step in numbers:
            train_step(step)
            after(step)
    total = hashlib.blake2b()
    for parameter in model.module.parameters():
        total.update(parameter.detach().numpy().tobytes())
    os.write(lines, f"end {total.hexdigest()}\n".encode())
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
