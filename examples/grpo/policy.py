"""
The trainer: two workers, DDP, a snapshot after each step. Not a line about failures: any role may be killed at any moment.

The batch of a step comes from the stream, made with the weights of that step. What it did is part of what it saves, so the record that it
writes at its end has each step once, however often the trainer was started again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover.unified import Stream, Weights
from examples.grpo.model import DIGITS, digest, new_model, weights_of

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=60, help="(default %(default)s)")
parser.add_argument(
    "--dir", type=Path, default=Path("grpo-run"), help="for checkpoints and the record (default %(default)s)"
)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
options.dir.mkdir(parents=True, exist_ok=True)

network = new_model()
model = DistributedDataParallel(network)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
checkpointer = DdpCheckpointer(options.dir / "checkpoints")
stream, weights = Stream("samples"), Weights("policy")


def record() -> None:
    """For those who watch the run."""
    with (options.dir / f"events-{rank}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "at": time.time(), "pid": os.getpid(), "rank": rank}) + "\n")


def await_leave() -> None:
    """The file `limit` holds the run before a step, so that somebody can do something to it in time."""
    limit = options.dir / "limit"
    while limit.exists() and step >= int(limit.read_text() or 0):
        time.sleep(0.02)


step, history = 0, []
if state := checkpointer.load_checkpoint():
    step, history = state["step"], state["history"]
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

record()
while step < options.steps:
    await_leave()
    now = weights_of(network)
    if rank == 0:
        weights.publish(step, now)
    batch = stream.get(step)
    if stale := [key for key, item in batch if item["weights"] != digest(now)]:
        raise ValueError(f"step {step}: samples {stale} were not made with the weights of this step")

    mine = [item for _, item in batch][rank::world_size]
    scores = torch.tensor([item["scores"] for item in mine])
    advantages = scores - scores.mean(1, keepdim=True)
    answers = torch.tensor([item["answers"] for item in mine])
    shown = model(
        torch.nn.functional.one_hot(torch.tensor([item["prompt"] for item in mine]), DIGITS).float().flatten(1)
    )
    chances = shown.view(len(mine), 1, *answers.shape[2:], -1).log_softmax(-1).expand(-1, answers.shape[1], -1, -1)
    loss = -(chances.gather(-1, answers.unsqueeze(-1)).squeeze(-1) * advantages).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

    # Of both workers: half of the batch each.
    total = torch.stack([loss.detach().double(), scores.mean().double()])
    dist.all_reduce(total)
    loss_of_all, reward = (total / world_size).tolist()
    keys = [key for key, _ in batch]
    history.append({"step": step, "loss": loss_of_all.hex(), "reward": reward, "keys": keys, "weights": digest(now)})
    step += 1
    state = {
        "step": step,
        "history": history,
        "model": network.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    kind = StorageType.DISK if step % 10 == 0 or step == options.steps else StorageType.MEMORY
    checkpointer.save_checkpoint(step, state, storage_type=kind)
    record()

if rank == 0:
    (options.dir / "record.json").write_text(json.dumps(history, indent=1))
checkpointer.close()
dist.destroy_process_group()
