"""
A training in epochs as people write it for the original DLRover: elastic sampler, loader, trainer and a checkpointer.

The loader's own sampler is told the epoch, saved and restored; the trainer is reset in each epoch; the state is saved inside of the trainer's step. Nothing
in here knows of this implementation. The additions are `--kill_at`, which ends rank 1 by SIGKILL once at each of these steps, and a file
`used-RANK` in `--save_dir` with the records of every step.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import Dataset

from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer


class Numbers(Dataset):
    def __init__(self, size):
        self.inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return index, self.inputs[index], self.inputs[index].sum(0, keepdim=True)


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_dir", type=Path, required=True)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--num_records", type=int, default=96)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--kill_at", type=int, nargs="*", default=[])
    return parser.parse_args()


def make_checkpointer(args, model, optimizer):
    """Functions to load and to save: the two checkpointers are called differently."""
    if args.fsdp:
        checkpointer = FsdpShardCheckpointer(args.save_dir)

        def load():
            return checkpointer.load_checkpoint(model, optimizer)

        def save(step, rest, storage_type):
            checkpointer.save_checkpoint(step, model, optimizer, rest, storage_type=storage_type)

    else:
        checkpointer = DdpCheckpointer(args.save_dir)

        def load():
            state_dict = checkpointer.load_checkpoint()
            if "model" in state_dict:
                model.load_state_dict(state_dict["model"])
                optimizer.load_state_dict(state_dict["optimizer"])
            return state_dict

        def save(step, rest, storage_type):
            state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **rest}
            path = args.save_dir / str(step) / "state.pt"
            checkpointer.save_checkpoint(step, state_dict, path, storage_type=storage_type)

    return checkpointer, load, save


def train(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train_dataset = Numbers(args.num_records)
    train_loader = ElasticDataLoader(
        dataset=train_dataset,
        batch_size=args.batch_size,
        sampler=ElasticDistributedSampler(dataset=train_dataset),
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
    )
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = FSDP(model, device_id=torch.device("cpu")) if args.fsdp else DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.8)

    checkpointer, load, save = make_checkpointer(args, model, optimizer)
    state_dict = load()
    if "scheduler" in state_dict:
        scheduler.load_state_dict(state_dict["scheduler"])
    train_loader.sampler.load_state_dict(state_dict.get("sampler", {}))
    step = state_dict.get("step", 0)
    elastic_trainer = ElasticTrainer(model, dataloader=train_loader)
    optimizer, scheduler = elastic_trainer.prepare(optimizer, scheduler)

    start_epoch = train_loader.sampler.epoch
    if rank == 0:
        checkpointer.storage.safe_makedirs(checkpointer.checkpoint_dir)
        print(f"start at step {step} in epoch {start_epoch}", flush=True)
    dist.barrier()
    used = (args.save_dir / f"used-{rank}").open("a")
    for epoch in range(start_epoch, args.num_epochs):
        elastic_trainer.reset()
        train_loader.sampler.set_epoch(epoch)
        for indices, data, target in train_loader:
            with elastic_trainer.step(fix_total_batch_size=True):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(data), target)
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                used.write(json.dumps([step, epoch, indices.tolist()]) + "\n")
                used.flush()
                if rank == 1 and step in args.kill_at and not (killed := args.save_dir / f"killed-{step}").exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if step % 5 == 0:
                    rest = {
                        "step": step,
                        "scheduler": scheduler.state_dict(),
                        "sampler": train_loader.sampler.state_dict(step, train_loader.batch_size),
                    }
                    save(step, rest, StorageType.MEMORY)
                    if step % 10 == 0:
                        save(step, rest, StorageType.DISK)
        assert elastic_trainer.num_steps <= len(train_dataset) // (args.batch_size * dist.get_world_size())
    checkpointer.wait_latest_checkpoint(timeout=60)
    dist.barrier()
    if rank == 0:
        print(f"loss {loss.item():.9f} lr {scheduler.get_last_lr()[0]:.9f} step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(get_args())
