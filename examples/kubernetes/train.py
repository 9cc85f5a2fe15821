"""
A small network, trained by the pods of an ElasticJob. Not a line about failures: pods may be deleted, evicted or moved at any step.

    dlrover-run --nnodes=3 --nproc-per-node=1 train.py --dir /data

The job deals out the records: each is used exactly once per epoch, and step 100 has the same records whether pods were lost before it or not.
`--dir` is a volume that all pods share, for checkpoints and for what `demo.py` reads.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from dlrover.trainer.torch.data import StepLoader
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--records", type=int, default=12_000, help="(default %(default)s)")
parser.add_argument("--epochs", type=int, default=1, help="(default %(default)s)")
parser.add_argument("--batch-size", type=int, default=60, help="records of a step, on all pods (default %(default)s)")
parser.add_argument("--checkpoint-every", type=int, default=10, help="steps, to storage (default %(default)s)")
parser.add_argument("--dir", type=Path, default=Path("kubernetes-run"), help="(default %(default)s)")
parser.add_argument(
    "--pace", type=float, default=0.0, help="seconds added to a step until DIR/hurry exists, to watch it"
)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(1)
options.dir.mkdir(parents=True, exist_ok=True)


def record(**fields: object) -> None:
    fields |= {"rank": rank, "world_size": world_size, "pod": os.environ.get("POD_NAME", "")}
    fields |= {"pid": os.getpid(), "at": time.time()}
    with (options.dir / f"events-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


class Points:
    """Points in six dimensions, on one side of a plane or the other. Real jobs read files: see examples/tabular."""

    name = "points"
    fingerprint = "points-1"

    def __len__(self) -> int:
        return options.records

    def read(self, places: Sequence[int], partition: str = "") -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [self._point(place) for place in places]

    def _point(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        chance = torch.Generator().manual_seed(place)
        point = torch.randn(6, generator=chance)
        noise = torch.randn((), generator=chance) * 0.5
        return point, ((point[::2].sum() - point[1::2].sum() + noise) > 0).float()


# Data, model, and what is found of an earlier life.

loader = StepLoader(Points(), batch_size=options.batch_size, num_epochs=options.epochs, shuffle=True)
network = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
checkpointer = DdpCheckpointer(options.dir / "checkpoints")
state = checkpointer.load_checkpoint()
step = 0
if state:
    step = state["step"]
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
record(event="start", step=step)

# Training.

for batch in loader:
    points, labels = batch.data
    loss = binary_cross_entropy_with_logits(model(points).squeeze(1), labels)
    optimizer.zero_grad()
    (loss * batch.weight).backward()
    optimizer.step()
    step += 1
    loader.used(batch, step)
    everywhere = loss.detach() * len(batch) / batch.total
    dist.all_reduce(everywhere)
    record(event="step", step=step, loss=everywhere.item())
    state = {"step": step, "model": network.state_dict(), "optimizer": optimizer.state_dict()}
    where = StorageType.DISK if step % options.checkpoint_every == 0 else StorageType.MEMORY
    checkpointer.save_checkpoint(step, state, storage_type=where)
    if options.pace and not (options.dir / "hurry").exists():
        time.sleep(options.pace)

loader.close()
record(event="end", step=step)
if rank == 0:
    print(f"{step} steps, {options.epochs} epochs of {options.records} records, loss {everywhere.item():.3f}")
dist.barrier()
