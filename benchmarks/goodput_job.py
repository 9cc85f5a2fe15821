"""
The reference job for goodput: the network of reference_job.py, saved after every step in the quickest way that its launcher offers.

Each rank appends one JSON line per event to `events/rank<R>.jsonl`, with what a step spent in computing, in saving and in waiting for data, as
the script itself measures it: the truth that any accountant has to match. Writing that line is work of the next step, as a script's logging always is: a
step has no time that is in none of the three. Times are CLOCK_MONOTONIC.
"""

import argparse
import inspect
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reference_job import BATCH_SIZE, NUM_LAYERS, WIDTH, EventFile, process_began_ns, save, step_reporter
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Torch:
    """What every launcher's users have: rank 0 writes a file beside the old one and renames it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "checkpoint.pt"

    def load(self) -> dict[str, Any]:
        return torch.load(self._path) if self._path.exists() else {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            save(self._path, state)


class Flash:
    """Ours and dlrover 0.6.1's: the same import, into memory. Ours lazily, while the next step computes; theirs cannot."""

    def __init__(self, folder: Path) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self._memory = StorageType.MEMORY
        options = {"lazy": True} if "lazy" in inspect.signature(DdpCheckpointer.__init__).parameters else {}
        self._checkpointer: Any = DdpCheckpointer(str(folder / "checkpoints"), **options)

    def load(self) -> dict[str, Any]:
        return self._checkpointer.load_checkpoint() or {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._checkpointer.save_checkpoint(step, state, storage_type=self._memory)


class Batches(Dataset[torch.Tensor]):
    """A batch depends on step and rank only, so a redone step does exactly the same work. `wait`: what reading it costs."""

    def __init__(self, first: int, wait: float) -> None:
        self._first, self._wait = first, wait

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._wait:
            time.sleep(self._wait)
        step = self._first + index
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        return torch.randn(BATCH_SIZE, WIDTH, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="for the checkpoint and the event files")
    parser.add_argument("--save", choices=("torch", "flash"), default="torch")
    parser.add_argument("--save-every", type=int, default=1)
    parser.add_argument("--guard", action="store_true", help="a lost worker's last step is kept by the others")
    parser.add_argument("--data-wait", type=float, default=0.0, help="seconds that each batch costs")
    args = parser.parse_args()

    events = EventFile(args.dir / "events", int(os.environ["RANK"]))
    events.write("process", process_began_ns())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = Flash(args.dir) if args.save == "flash" else Torch(args.dir)
    state = checkpoint.load()
    step = 0
    if state:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    report = step_reporter()

    def train_step(batch: torch.Tensor) -> None:
        loss = nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if args.guard:
        import dlrover

        train_step = dlrover.resilient(model, optimizer)(train_step)
    events.write("restored", step=step)

    # Making a batch is work of the step, as in the reference job; only where waiting is asked for does a loader stand between.
    first = step + 1
    batches = Batches(first, args.data_wait)
    loader = iter(DataLoader(batches, batch_size=None)) if args.data_wait else None
    saved_ns = time.monotonic_ns()
    while True:
        began_ns = time.monotonic_ns()
        written_in_ns = began_ns - saved_ns
        batch = None if loader is None else next(loader)
        fed_ns = time.monotonic_ns()
        step += 1
        if batch is None:
            batch = batches[step - first]
        train_step(batch)
        report(step)
        computed_ns = time.monotonic_ns()
        if step % args.save_every == 0:
            state = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoint.save(step, state)
        saved_ns = time.monotonic_ns()
        events.write(
            "step",
            step=step,
            data_ns=fed_ns - began_ns,
            compute_ns=computed_ns - fed_ns + written_in_ns,
            save_ns=saved_ns - computed_ns,
        )


if __name__ == "__main__":
    main()
