"""
Trains with the batch of the full world, however many workers there are.

    elastic_batches.py FOLDER [--hold-at STEP]...

Each rank writes after every step of the optimizer what it has read for it into FOLDER/read-ROUND-RANK; rank 0 leaves weights, losses and the learning
rate in FOLDER/result.pt. After a step of `--hold-at` the ranks wait for FOLDER/go-STEP, or for their end.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

SIZE, BATCH, EPOCHS = 96, 2, 2
"""Of a full world of four: 12 steps in each epoch."""


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True) + 0.1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hold-at", type=int, action="append", default=[])
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, round_ = dist.get_rank(), os.environ["DLROVER_ROUND"]
    inputs, wanted = make_data()
    net = make_model()
    model = DistributedDataParallel(net)
    sampler = ElasticDistributedSampler(range(SIZE), seed=5)
    trainer = ElasticTrainer(model)
    trainer.deal(sampler, BATCH)
    plain = torch.optim.AdamW(net.parameters(), lr=0.05)
    optimizer, scheduler = trainer.prepare(plain, torch.optim.lr_scheduler.ExponentialLR(plain, 0.97))
    checkpointer = DdpCheckpointer(args.folder / "checkpoints")
    if state := checkpointer.load_checkpoint():
        net.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        trainer.load_state_dict(state["trainer"])
    out = (args.folder / f"read-{round_}-{rank}").open("a")
    read: list[int] = []
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for indices in DataLoader(range(SIZE), BATCH, sampler=sampler):
            with trainer.step(fix_total_batch_size=True):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs[indices]), wanted[indices]).backward()
                optimizer.step()
                scheduler.step()
            read += indices.tolist()
            if trainer._micro_step:
                continue
            out.write(json.dumps([trainer.num_steps, epoch, read]) + "\n")
            out.flush()
            read = []
            state = {"model": net.state_dict(), "optimizer": plain.state_dict(), "scheduler": scheduler.state_dict()}
            state["trainer"] = trainer.state_dict()
            checkpointer.save_checkpoint(trainer.num_steps, state, storage_type=StorageType.MEMORY)
            if trainer.num_steps in args.hold_at:
                (args.folder / f"holding-{trainer.num_steps}-{rank}").touch()
                while not (args.folder / f"go-{trainer.num_steps}").exists():
                    time.sleep(0.05)
    if rank == 0:
        result = {"model": net.state_dict(), "lr": plain.param_groups[0]["lr"], "steps": trainer.num_steps}
        torch.save(result, args.folder / "result.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
