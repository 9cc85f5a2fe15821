"""
A DeepSpeed training as people write it for the original DLRover: nothing in here knows of this implementation. The only addition is `--crash_at`.
"""

import argparse
import os
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # noqa: E402

from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer, StorageType  # noqa: E402

# Its collectives in shared memory would be compiled first, for a minute; gloo does.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_dir", type=str, required=True)
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--max_iters", type=int, default=12)
    parser.add_argument("--save_memory_interval", type=int, default=1)
    parser.add_argument("--save_storage_interval", type=int, default=5)
    parser.add_argument("--crash_at", type=int, default=-1)
    return parser.parse_args()


def main():
    args = get_args()
    torch.manual_seed(1337)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": args.zero_stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rank = dist.get_rank()

    os.makedirs(args.save_dir, exist_ok=True)
    checkpointer = DeepSpeedCheckpointer(model, args.save_dir)
    _, client_sd = checkpointer.load_checkpoint(args.save_dir)
    iter_num = client_sd["iter_num"] if client_sd else 0
    if rank == 0:
        print(f"start from iteration {iter_num}", flush=True)

    data = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    target = data.sum(1).long() % 4
    while iter_num < args.max_iters:
        chosen = torch.arange(8) * 16 + iter_num + rank
        loss = torch.nn.functional.cross_entropy(model(data[chosen]), target[chosen])
        model.backward(loss)
        model.step()
        iter_num += 1
        client_sd = {"iter_num": iter_num}
        if iter_num % args.save_memory_interval == 0:
            checkpointer.save_checkpoint(args.save_dir, iter_num, client_sd, storage_type=StorageType.MEMORY)
        if iter_num % args.save_storage_interval == 0:
            checkpointer.save_checkpoint(args.save_dir, iter_num, client_sd, storage_type=StorageType.DISK)
            checkpointer.wait_latest_checkpoint(timeout=60)
        if iter_num == args.crash_at and rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(1)
    dist.barrier()
    if rank == 0:
        print(f"loss {loss.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
