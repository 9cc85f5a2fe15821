"""
A DDP training as people write it for the original DLRover: nothing in here knows of this implementation.

Options as in such scripts: where to save, how often to memory and to storage, what to resume from. The only addition is `--crash_at`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from dlrover.python.common.storage import KeepLatestStepStrategy
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_dir", type=str, required=True)
    parser.add_argument("--resume_path", type=str, default="")
    parser.add_argument("--max_iters", type=int, default=20)
    parser.add_argument("--save_memory_interval", type=int, default=1)
    parser.add_argument("--save_storage_interval", type=int, default=5)
    parser.add_argument("--user_path", action="store_true")
    parser.add_argument("--crash_at", type=int, default=-1)
    return parser.parse_args()


def main():
    args = get_args()
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.max_iters)

    os.makedirs(args.save_dir, exist_ok=True)
    checkpointer = DdpCheckpointer(
        args.save_dir,
        comm_backend="gloo",
        deletion_strategy=KeepLatestStepStrategy(max_to_keep=2, checkpoint_dir=args.save_dir),
    )
    iter_num = 0
    checkpoint = checkpointer.load_checkpoint(args.resume_path)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        iter_num = checkpoint["iter_num"]
    if rank == 0:
        print(f"start from iteration {iter_num}", flush=True)

    data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(data, data.sum(1).long() % 4)
    sampler = DistributedSampler(dataset)
    while iter_num < args.max_iters:
        sampler.set_epoch(iter_num)
        x, y = next(iter(DataLoader(dataset, batch_size=8, sampler=sampler)))
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        iter_num += 1
        state_dict = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "iter_num": iter_num,
            "config": vars(args),
        }
        path = os.path.join(args.save_dir, f"checkpoint-{iter_num}.pt") if args.user_path else ""
        if iter_num % args.save_memory_interval == 0:
            checkpointer.save_checkpoint(iter_num, state_dict, path, storage_type=StorageType.MEMORY)
        if iter_num % args.save_storage_interval == 0:
            checkpointer.save_checkpoint(iter_num, state_dict, path, storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint(timeout=60)
        if iter_num == args.crash_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            dist.barrier()  # everybody has saved
            if rank == 1:
                os._exit(1)
    dist.barrier()
    if rank == 0:
        print(f"loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
