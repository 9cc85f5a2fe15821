"""
A small network on a table (CSV or Parquet), trained by workers that may come, go and die. Not a line about failures.

    dlrover-run --standalone --nproc-per-node=3 examples/tabular/train.py clicks.csv --dir /tmp/clicks-run

The job deals out the records: each is used exactly once per epoch, and step 100 has the same records whether workers died before it or not. So
does the loss, but for the order in which floating point numbers are added by more or fewer workers.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from dlrover.trainer.data_sources import CsvSource, ParquetSource
from dlrover.trainer.torch.data import StepLoader
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data", type=Path, help="a table with numbers and a column `label`")
parser.add_argument("--epochs", type=int, default=2, help="(default %(default)s)")
parser.add_argument(
    "--batch-size", type=int, default=60, help="records of a step, on all workers (default %(default)s)"
)
parser.add_argument("--num-workers", type=int, default=0, help="processes that read, per worker (default %(default)s)")
parser.add_argument("--learning-rate", type=float, default=0.01, help="(default %(default)s)")
parser.add_argument("--checkpoint-every", type=int, default=20, help="steps, to storage (default %(default)s)")
parser.add_argument("--dir", type=Path, default=Path("tabular-run"), help="for checkpoints (default %(default)s)")
parser.add_argument("--metrics", type=Path, help="append one JSON line per start and step to this file")
parser.add_argument(
    "--pace", type=float, default=0.0, help="seconds added to a step until DIR/hurry exists, to watch it"
)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(1)


def record(**fields: object) -> None:
    if options.metrics:
        with options.metrics.open("a") as file:
            file.write(json.dumps({"rank": rank, "world_size": world_size, "pid": os.getpid(), **fields}) + "\n")


# Data, model, and what is found of an earlier life.

source = ParquetSource(options.data) if options.data.suffix == ".parquet" else CsvSource(options.data)
features = [name for name in source.columns if name != "label"]
loader = StepLoader(
    source,
    batch_size=options.batch_size,
    num_epochs=options.epochs,
    shuffle=True,
    num_workers=options.num_workers,
)
network = nn.Sequential(nn.Linear(len(features), 32), nn.ReLU(), nn.Linear(32, 1))
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
checkpointer = DdpCheckpointer(options.dir)
state = checkpointer.load_checkpoint()
step = 0
if state:
    step = state["step"]
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
record(event="start", step=step)

# Training.

for batch in loader:
    inputs = torch.stack([batch.data[name] for name in features], dim=1).float()
    outputs = model(inputs).squeeze(1)
    loss = binary_cross_entropy_with_logits(outputs, batch.data["label"].float())
    optimizer.zero_grad()
    (loss * batch.weight).backward()
    optimizer.step()
    step += 1
    loader.used(batch, step)
    everywhere = loss.detach() * len(batch) / batch.total
    dist.all_reduce(everywhere)
    if rank == 0:
        # Before it is saved: whoever is stopped in between does the step again and no line is missing.
        record(event="step", step=step, loss=everywhere.item(), size=batch.total)
    state = {"step": step, "model": network.state_dict(), "optimizer": optimizer.state_dict()}
    where = StorageType.DISK if step % options.checkpoint_every == 0 else StorageType.MEMORY
    checkpointer.save_checkpoint(step, state, storage_type=where)
    if options.pace and not (options.dir / "hurry").exists():
        time.sleep(options.pace)

loader.close()
if rank == 0:
    print(f"{step} steps, {options.epochs} epochs of {len(source)} records")
dist.barrier()
