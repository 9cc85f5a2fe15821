"""
An FSDP training as people write it for the original DLRover, with a checkpointer that keeps shards or the full state: nothing in here knows of
this implementation. The only addition is `--crash_at`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer, StorageType


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_dir", type=str, required=True)
    parser.add_argument("--flash_full_ckpt", action="store_true")
    parser.add_argument("--max_iters", type=int, default=12)
    parser.add_argument("--save_memory_interval", type=int, default=1)
    parser.add_argument("--save_storage_interval", type=int, default=5)
    parser.add_argument("--crash_at", type=int, default=-1)
    return parser.parse_args()


def main():
    args = get_args()
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(1337)
    model = FSDP(
        torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 4)),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    os.makedirs(args.save_dir, exist_ok=True)
    kind = FsdpFullCheckpointer if args.flash_full_ckpt else FsdpShardCheckpointer
    checkpointer = kind(args.save_dir)
    extra_sd = checkpointer.load_checkpoint(model, optimizer)
    iter_num = extra_sd.get("step", 0)
    if rank == 0:
        print(f"start from iteration {iter_num}", flush=True)

    data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    target = data.sum(1).long() % 4
    while iter_num < args.max_iters:
        chosen = torch.arange(8) * 16 + iter_num + rank
        loss = torch.nn.functional.cross_entropy(model(data[chosen]), target[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        iter_num += 1
        extra_sd = {"step": iter_num, "lr": 1e-3}
        if iter_num % args.save_memory_interval == 0:
            checkpointer.save_checkpoint(iter_num, model, optimizer, extra_sd, storage_type=StorageType.MEMORY)
        if iter_num % args.save_storage_interval == 0:
            checkpointer.save_checkpoint(iter_num, model, optimizer, extra_sd, storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint(timeout=60)
        if iter_num == args.crash_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
    dist.barrier()
    if rank == 0:
        print(f"loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
