"""
What is saved in the checkpoint benchmark: a GPT with its AdamW moments, in as many tensors as a real one of that size has.

Imported by the benchmark itself, which has no use for torch, and by the processes of every system, whose environments differ; so torch is
imported only where a model is built.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BYTES_PER_PARAMETER = 12
"""float32: the parameter and two moments. Gradients are not saved."""
NUM_TOKENS = 32
"""Of a step. Forward and backward then last several times the copy of the state, as in real trainings, without taking minutes."""
CONTEXT = 256
WIDTHS = ((3 << 29, 1280, 32768), (3 << 27, 768, 32768), (3 << 25, 384, 16384), (0, 192, 4096))
"""From so many bytes on: width of the model, and words of its vocabulary."""


@dataclass(frozen=True)
class Shape:
    width: int
    num_words: int
    num_layers: int

    @property
    def num_parameters(self) -> int:
        layer = 12 * self.width**2 + 13 * self.width
        return self.num_layers * layer + (self.num_words + CONTEXT + 2) * self.width

    @property
    def num_bytes(self) -> int:
        return self.num_parameters * BYTES_PER_PARAMETER

    @property
    def num_tensors(self) -> int:
        """Model and both moments; the optimizer's counters of steps are as many again, of four bytes each."""
        return 3 * (12 * self.num_layers + 4)


def shape_for(num_bytes: int) -> Shape:
    """The GPT whose state is nearest to that size, with at least one layer."""
    width, num_words = next((width, words) for least, width, words in WIDTHS if num_bytes >= least)
    empty = Shape(width, num_words, 0)
    per_layer = Shape(width, num_words, 1).num_bytes - empty.num_bytes
    return Shape(width, num_words, max(1, round((num_bytes - empty.num_bytes) / per_layer)))


@dataclass
class Training:
    """A model with its optimizer, and what a step of it is."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    forward_and_backward: Callable[[int], None]

    def state(self, step: int) -> dict[str, Any]:
        """What a user hands to a checkpointer: the live tensors, by name."""
        model = getattr(self.model, "module", self.model)
        return {"model": model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}


def build(shape: Shape, *, seed: int, num_threads: int, is_distributed: bool) -> Training:
    import torch
    from torch import nn

    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
            self.attention = nn.Linear(shape.width, 3 * shape.width)
            self.projection = nn.Linear(shape.width, shape.width)
            self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            heads = self.attention(self.ln_1(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
            x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(nn.functional.gelu(self.up(self.ln_2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(shape.num_words, shape.width)
            self.places = nn.Embedding(CONTEXT, shape.width)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.num_layers))
            self.norm = nn.LayerNorm(shape.width)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.words.weight.T

    model: nn.Module = Gpt()
    if is_distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def forward_and_backward(step: int) -> None:
        tokens = torch.randint(0, shape.num_words, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(step))
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
        # The gradients stay where they are: giving them back to the system each step would measure the kernel's pages.
        optimizer.zero_grad(set_to_none=False)
        loss.backward()

    return Training(model, optimizer, forward_and_backward)


def tensors_of(state: object) -> Iterator[torch.Tensor]:
    """All tensors of a nested state, in an order that depends on the names alone."""
    import torch

    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from tensors_of(state[key])
    elif isinstance(state, list | tuple):
        for each in state:
            yield from tensors_of(each)


def fill(live: object, loaded: object) -> None:
    """Copy a loaded state into live tensors of the same names: for systems that return tensors of their own."""
    import torch

    with torch.no_grad():
        for target, source in zip(tensors_of(live), tensors_of(loaded), strict=True):
            target.copy_(source)


def digest(state: object) -> int:
    """Tells whether a restored state is the saved one, bit for bit."""
    crc = 0
    for tensor in tensors_of(state):
        crc = zlib.crc32(memoryview(tensor.detach().contiguous().view(-1).numpy()).cast("B"), crc)
    return crc
