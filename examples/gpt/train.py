"""
A small GPT on characters, trained with DDP on CPU. One file, from top to bottom, and not a line about failures.

    torchrun    --standalone --nproc-per-node=2 examples/gpt/train.py
    dlrover-run --standalone --nproc-per-node=2 examples/gpt/train.py

It checkpoints with Flash Checkpoint: every step into memory, every few to storage; after a crash it goes on from the
newest state that is found in either. `--checkpoint torch` does it with plain `torch.save` instead, every few steps.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# Options.

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200, help="train until this step (default %(default)s)")
parser.add_argument("--batch-size", type=int, default=8, help="sequences per worker and step (default %(default)s)")
parser.add_argument("--context", type=int, default=64, help="characters in a sequence (default %(default)s)")
parser.add_argument("--width", type=int, default=128, help="size of the embedding (default %(default)s)")
parser.add_argument("--layers", type=int, default=3, help="number of blocks (default %(default)s)")
parser.add_argument("--heads", type=int, default=4, help="attention heads per block (default %(default)s)")
parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its highest (default %(default)s)")
parser.add_argument("--checkpoint", default="flash", choices=["flash", "torch"], help="how (default %(default)s)")
parser.add_argument("--checkpoint-every", type=int, default=20, help="steps, to storage (default %(default)s)")
parser.add_argument("--dir", type=Path, default=Path("gpt-run"), help="for checkpoints (default %(default)s)")
parser.add_argument("--compare", type=int, default=0, help="measure torch.save so many times at the end")
parser.add_argument("--metrics", type=Path, help="append one JSON line per start and step to this file")
parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[2] / "LICENSE", help="any text file")
options = parser.parse_args()

# The launcher tells each worker who it is; without a launcher this is a job of one.

rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ.get("WORLD_SIZE", 1))
restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
if world_size > 1:
    dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(1)

# Telling the launcher how far we are lets it recognise a crash loop. It is optional, and other launchers do not ask.


def find_reporter() -> Callable[[int], object] | None:
    if "DLROVER_AGENT_SOCKET" not in os.environ:
        return None
    try:
        from dlrover.trainer import report
    except ImportError:
        return None
    return report


report_step = find_reporter()


def write_metrics(**fields: object) -> None:
    """Whole lines in one write each, so that several ranks and lives may append to the same file."""
    if options.metrics is None:
        return
    line = json.dumps({"rank": rank, "pid": os.getpid(), "restart": restart, "at": time.monotonic(), **fields})
    with options.metrics.open("ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


write_metrics(event="start")

# Data: every character is a token; a batch is drawn anew from step and rank, so it is the same after a restart.

text = options.data.read_text()
alphabet = sorted(set(text))
tokens = torch.tensor([alphabet.index(character) for character in text])


def draw_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * world_size + rank)
    starts = torch.randint(len(tokens) - options.context - 1, (options.batch_size,), generator=generator)
    windows = torch.stack([tokens[start : start + options.context + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


# Model: a pre-norm transformer decoder with learnt positions and tied embeddings.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = options.width
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix_heads = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, options.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix_heads(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(alphabet), options.width)
        self.positions = nn.Embedding(options.context, options.width)
        self.blocks = nn.Sequential(*(Block() for _ in range(options.layers)))
        self.norm = nn.LayerNorm(options.width)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)  # the default of 1 drowns the characters and the first losses

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.characters(inputs) + self.positions.weight[: inputs.shape[1]]
        logits = self.norm(self.blocks(x)) @ self.characters.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


bare_model = GPT()
model = DistributedDataParallel(bare_model) if world_size > 1 else bare_model
optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)


def learning_rate(step: int) -> float:
    """Rises over 10 steps, then falls along a cosine to a tenth."""
    highest: float = options.learning_rate
    if step < 10:
        return highest * step / 10
    done = min(1.0, (step - 10) / max(1, options.steps - 10))
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


# Checkpoint, with Flash Checkpoint: a save copies the state into shared memory, and the agent writes it to storage afterwards. All ranks
# restore the newest state that all can have.


def current_state(step: int) -> dict[str, object]:
    return {"step": step, "model": bare_model.state_dict(), "optimizer": optimizer.state_dict()}


class FlashCheckpoint:
    def __init__(self) -> None:
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self._kinds = StorageType
        # Three states in memory: while one is being written to storage the other two take turns, and no step is skipped.
        self._checkpointer = DdpCheckpointer(options.dir, num_slots=3)

    def load(self) -> dict[str, object]:
        return self._checkpointer.load_checkpoint()

    def save(self, step: int) -> None:
        is_last = step == options.steps
        is_stored = is_last or step % options.checkpoint_every == 0
        kind = self._kinds.DISK if is_stored else self._kinds.MEMORY
        on_busy = "block" if is_last else "skip"
        self._checkpointer.save_checkpoint(step, current_state(step), storage_type=kind, on_busy=on_busy)


# The same with nothing but torch: rank 0 writes beside and renames, so a reader sees the old one or the new one, never half of one.


class TorchCheckpoint:
    def __init__(self, name: str = "checkpoint.pt") -> None:
        self.path = options.dir / name

    def load(self) -> dict[str, object]:
        return torch.load(self.path) if self.path.exists() else {}

    def save(self, step: int) -> None:
        if rank == 0 and (step % options.checkpoint_every == 0 or step == options.steps):
            self.write(step)

    def write(self, step: int) -> None:
        temporary = self.path.with_suffix(".tmp")
        torch.save(current_state(step), temporary)
        os.replace(temporary, self.path)


options.dir.mkdir(parents=True, exist_ok=True)
checkpoint = FlashCheckpoint() if options.checkpoint == "flash" else TorchCheckpoint()
first_step = 1
if state := checkpoint.load():
    bare_model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first_step = state["step"] + 1
    if rank == 0:
        print(f"resumed from step {state['step']}", flush=True)

# Train.

for step in range(first_step, options.steps + 1):
    began_at = time.monotonic()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    loss = model(*draw_batch(step))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    seconds = time.monotonic() - began_at
    checkpoint.save(step)
    saving = time.monotonic() - began_at - seconds
    if rank == 0:
        write_metrics(event="step", step=step, loss=loss.item(), seconds=seconds, saving=saving)
    if rank == 0 and (step % 10 == 0 or step == options.steps):
        print(f"step {step}/{options.steps}: loss {loss.item():.4f}, {seconds * 1000:.0f} ms", flush=True)
    if report_step is not None:
        report_step(step)

# What torch.save would have taken for the same state on the same disk: measured when nothing else is going on.

if rank == 0 and options.compare:
    plain = TorchCheckpoint("comparison.pt")
    times = []
    for _ in range(options.compare):
        began_at = time.monotonic()
        plain.write(options.steps)
        times.append(time.monotonic() - began_at)
    plain.path.unlink()
    write_metrics(event="torch.save", seconds=times)

if world_size > 1:
    dist.destroy_process_group()
