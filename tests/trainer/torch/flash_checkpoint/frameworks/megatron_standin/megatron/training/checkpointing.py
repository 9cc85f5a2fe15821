"""Stand-in: saves and loads files of the names and contents that Megatron-LM's format `torch` has, by the same ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from megatron.training.global_vars import get_args

try:
    from megatron.core import parallel_state as mpu
except ImportError:
    from megatron import mpu

TRACKER = "latest_checkpointed_iteration.txt"


def get_checkpoint_name(checkpoints_path, iteration, release=False):
    directory = "release" if release else f"iter_{iteration:07d}"
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    return os.path.join(checkpoints_path, directory, name, "model_optim_rng.pt")


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far):
    args = get_args()
    if args.fail_in_save:
        raise RuntimeError("out of memory")
    if mpu.get_data_parallel_rank() == 0:
        name = get_checkpoint_name(args.save, iteration)
        os.makedirs(os.path.dirname(name), exist_ok=True)
        state = {
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
            "model": model[0].state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        if args.write_by_itself:
            with open(name, "wb") as file:
                torch.save(state, file)
        else:
            torch.save(state, name)
    dist.barrier()
    if dist.get_rank() == 0:
        with open(os.path.join(args.save, TRACKER), "w") as file:
            file.write(str(iteration))
    dist.barrier()


def load_checkpoint(model, optimizer, opt_param_scheduler, load_arg="load", strict=True):
    args = get_args()
    directory = getattr(args, load_arg)
    if directory is None or not os.path.isfile(os.path.join(directory, TRACKER)):
        return 0, 0
    with open(os.path.join(directory, TRACKER)) as file:
        iteration = int(file.read())
    found = os.listdir(os.path.join(directory, f"iter_{iteration:07d}"))
    assert any(name.startswith("mp_rank_0") for name in found), found
    name = get_checkpoint_name(directory, iteration)
    state = torch.load(name, map_location="cpu", weights_only=False)
    model[0].load_state_dict(state["model"], strict=strict)
    optimizer.load_state_dict(state["optimizer"])
    return state["iteration"], state["num_floating_point_operations_so_far"]
