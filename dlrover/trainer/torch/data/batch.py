"""A batch that knows which records it is made of: the pieces travel with the data through worker processes, pinning and any order of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from dlrover.trainer.data.shard_reader import ShardPiece, size_of

Collate = Callable[[list[Any]], Any]


class Batch:
    """
    `data`: what `collate_fn` made of the records. `pieces`: which of the dataset they are, for `used`. `size`: records of it that count.
    `total`: records of the step, on all ranks. `weight`: by which to multiply the mean loss of this rank, so that the mean of the ranks' gradients is the
    mean over all records of the step; 1 where all ranks have equally many.
    """

    __slots__ = ("data", "pieces", "size", "total", "weight")

    def __init__(self, data: Any, pieces: Sequence[ShardPiece], *, size: int, total: int, weight: float = 1.0) -> None:
        self.data, self.pieces = data, tuple(pieces)
        self.size, self.total, self.weight = size, total, weight

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Batch(size={self.size}, total={self.total}, weight={self.weight:g})"

    def pin_memory(self, *_: Any) -> Batch:
        """Called by a DataLoader that pins."""
        self.data = _pinned(self.data)
        return self


def make_batch(records: list[Any], pieces: Sequence[ShardPiece], collate: Collate | None) -> Batch:
    size = size_of(pieces)
    return Batch((collate or default_collate)(records), pieces, size=size, total=size)


def _pinned(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.pin_memory()
    if isinstance(data, dict):
        return {name: _pinned(each) for name, each in data.items()}
    if isinstance(data, list):
        return [_pinned(each) for each in data]
    return data
