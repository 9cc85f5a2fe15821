"""
Noticing that the same bytes are saved again and again.

A script that builds the state once (`state = copy.deepcopy(...)` before the loop) saves step after step what was true at the first. Every
checkpoint is then complete, verified and worthless. So some bytes of each snapshot are compared with the one before. Equal bytes alone mean nothing: a
training without a step in between, or of which only frozen parts are saved, looks the same.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Collection, Sequence

import torch

from dlrover.snapshot.memory.layout import Layout
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import dtype_name

NUM_SAMPLES = 128
SAMPLE_BYTES = 64


def sample_digest(address: int, layout: Layout) -> bytes:
    """Of some bytes of a slot's data, at places that only depend on the layout."""
    total = hashlib.blake2b(digest_size=16)
    storages = [entry for entry in layout.storages if entry.num_bytes]
    per_storage = max(1, NUM_SAMPLES // max(1, len(storages)))
    for entry in storages[:: max(1, len(storages) // NUM_SAMPLES)]:
        length = min(SAMPLE_BYTES, entry.num_bytes)
        for index in range(per_storage):
            at = (entry.num_bytes - length) * index // per_storage
            total.update(ctypes.string_at(address + entry.offset + at, length))
    total.update(repr(len(storages)).encode())
    return total.digest()


class StalenessWatch:
    """Compares each save with the one before."""

    def __init__(self) -> None:
        self._last: tuple[int, bytes] | None = None
        self._is_told = False

    def is_stale(
        self,
        step: int,
        digest: bytes,
        layout: Layout,
        storages: Collection[int],
        stepped: Sequence[torch.optim.Optimizer],
    ) -> bool:
        """`storages` of the state, by identity; optimizers that `stepped` since the save before."""
        last, self._last = self._last, (step, digest)
        is_same = last is not None and last[1] == digest and step > last[0]
        if not is_same or not stepped or not _should_have_changed(layout, storages, stepped):
            self._is_told = False
            return False
        return True

    def is_to_be_told(self) -> bool:
        """Once, until a save differs again."""
        was_told, self._is_told = self._is_told, True
        return not was_told


def _should_have_changed(layout: Layout, storages: Collection[int], stepped: Sequence[torch.optim.Optimizer]) -> bool:
    """
    The state has a tensor like each that was trained, and none of them is the one that was trained: so it is a copy of another time.

    A state that shares memory with an optimizer is the live one, whatever its bytes (the learning rate may be 0). One that lacks what
    was trained holds frozen parts.
    """
    saved = {(tensor.dtype, tensor.shape) for tensor in layout.tensors}
    for optimizer in stepped:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if (dtype_name(param.dtype), tuple(param.shape)) not in saved:
                    return False
                if param.layout is torch.strided and param.untyped_storage()._cdata in storages:
                    return False
    return True
