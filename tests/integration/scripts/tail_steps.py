"""
Reads a directory that grows, with ranks that step together; the model counts how often it has seen each line, which is a number.

    tail_steps.py FOLDER SIZE [--kill-at STEP]...

Reads FOLDER/in until FOLDER/in/_END appears. `--kill-at` kills the last rank by SIGKILL right after that step was saved, once. Rank 0 leaves the
model in FOLDER/model.pt, and the number of lines that it has seen in FOLDER/seen after each step.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover.trainer.data_sources import DirectoryTail
from dlrover.trainer.torch.data import StepLoader
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("size", type=int)
parser.add_argument("--kill-at", type=int, action="append", default=[])
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
loader = StepLoader(DirectoryTail(args.folder / "in"), batch_size=8, batches_per_shard=2)
checkpointer = DdpCheckpointer(args.folder / "checkpoints")
state = checkpointer.load_checkpoint() or {"step": 0, "model": torch.zeros(args.size, dtype=torch.int64)}
step, model = state["step"], state["model"]
for batch in loader:
    seen = torch.zeros_like(model)
    for line in batch.data[: len(batch)]:
        seen[int(line)] += 1
    dist.all_reduce(seen)
    step += 1
    model += seen
    loader.used(batch, step)
    checkpointer.save_checkpoint(step, {"step": step, "model": model}, storage_type=StorageType.MEMORY)
    mark = args.folder / f"killed-{step}"
    if step in args.kill_at and rank == dist.get_world_size() - 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        (args.folder / "seen").write_text(str(int(model.sum())))

if rank == 0:
    torch.save({"model": model}, args.folder / "model.pt")
loader.close()
dist.barrier()
