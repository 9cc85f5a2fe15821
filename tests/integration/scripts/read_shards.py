"""
Reads a dataset on demand with ranks that step together; the model counts how often it has seen each record.

    read_shards.py FOLDER SIZE [--epochs N] [--kill-at STEP]... [--disk-every N] [--pace SECONDS] [--resume STEP] [--stop-at STEP]
                   [--hold-at STEP]

`--kill-at` kills a worker by SIGKILL right after that step was saved, once: the ranks take turns. Rank 0 leaves the model in
FOLDER/model.pt, each life of a rank its first step in FOLDER/lives-RANK and its round in FOLDER/rounds-RANK. `--resume` lets the second life of a rank go back to the checkpoint of that
step by its path, once; checkpoints are waited for then. `--stop-at` leaves the rest of the data unread. After the step of `--hold-at` the
ranks wait for FOLDER/go.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.python.elastic_agent.sharding.client import ShardingClient

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("size", type=int)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--kill-at", type=int, action="append", default=[])
parser.add_argument("--disk-every", type=int, default=0)
parser.add_argument("--pace", type=float, default=0.0)
parser.add_argument("--resume", type=int, default=-1)
parser.add_argument("--stop-at", type=int, default=-1)
parser.add_argument("--hold-at", type=int, default=-1)
parser.add_argument("--on-purpose", action="store_true")
args = parser.parse_args()

BATCH = 4
dist.init_process_group("gloo")
rank = dist.get_rank()
client = ShardingClient("records", BATCH, args.epochs, args.size, shuffle=True, num_minibatches_per_shard=2)
checkpointer = DdpCheckpointer(args.folder / "checkpoints")
lives = args.folder / f"lives-{rank}"
is_second = args.resume >= 0 and lives.exists() and len(lives.read_text().splitlines()) == 1
resume_path = str(args.folder / "checkpoints" / str(args.resume)) if is_second else ""
state = checkpointer.load_checkpoint(resume_path) or {
    "step": 0,
    "model": torch.zeros(args.epochs, args.size, dtype=torch.int64),
}
step, model = state["step"], state["model"]
with lives.open("a") as out:
    out.write(f"{step} {os.getpid()}\n")
with (args.folder / f"rounds-{rank}").open("a") as out:
    out.write(f"{os.environ['DLROVER_ROUND']}\n")

records: list[tuple[int, int]] = []
is_ended = False
while True:
    while len(records) < BATCH and not is_ended:
        try:
            task = client.get_task(timeout=0.05 if dist.get_world_size() > 1 else None)
        except TimeoutError:
            break  # others hold the rest; our step is due
        is_ended = task is None
        if task is not None:
            records += [(task.epoch, index) for index in range(task.shard.start, task.shard.end)]
    batch, records = records[:BATCH], records[BATCH:]
    seen = torch.zeros_like(model)
    for epoch, index in batch:
        seen[epoch, index] += 1
    flags = torch.tensor([int(is_ended and not batch)])
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    if flags.item():
        break
    dist.all_reduce(seen)
    step += 1
    model += seen
    if batch:
        client.report_batch_done(len(batch), step=step)
    where = StorageType.DISK if args.disk_every and step % args.disk_every == 0 else StorageType.MEMORY
    checkpointer.save_checkpoint(step, {"step": step, "model": model}, storage_type=where)
    if args.resume >= 0 and where is StorageType.DISK:
        assert checkpointer.wait_latest_checkpoint(60)
    if step == args.stop_at:
        break
    if step in args.kill_at and args.kill_at.index(step) % dist.get_world_size() == rank:
        mark = args.folder / f"killed-{step}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    while step == args.hold_at and not (args.folder / "go").exists():
        time.sleep(0.01)
    time.sleep(args.pace)

if rank == 0:
    torch.save({"model": model, "step": step}, args.folder / "model.pt")
if args.on_purpose:
    client.stop_early("enough for a test")
client.close()
dist.barrier()
