"""The reference job under Ray Train v2: its workers are actors, and each runs the script as it is, byte for byte."""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import sys
from pathlib import Path

REFERENCE_JOB = str(Path(__file__).with_name("reference_job.py"))


def train(config: dict[str, str]) -> None:
    """Ray Train has made a process group by now. The script makes its own, so a free port is agreed on and the first one goes."""
    import torch.distributed as dist
    from ray import train as ray_train

    context = ray_train.get_context()
    port = [0]
    if context.get_world_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    os.environ.update(
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        MASTER_PORT=str(port[0]),
    )
    sys.argv = [REFERENCE_JOB, "--dir", config["dir"]]
    runpy.run_path(REFERENCE_JOB, run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--dir", required=True)
    args = parser.parse_args()
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(address=args.address, log_to_driver=False, configure_logging=False)
    TorchTrainer(
        train,
        train_loop_config={"dir": args.dir},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=f"{args.dir}/train", failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    main()
