"""
Where restored bytes go: into tensors that the caller has already, or into fresh memory that is cheap to fill.

Filling the caller's own tensors is as fast as memory is. Fresh memory costs more than the copy, because the kernel has to find and clear each
page at its first touch; by huge pages it has 512 times fewer of them to find.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from dlrover.snapshot.layout import Layout, plan_state
from dlrover.trainer.torch.flash_checkpoint.tensors import TorchTensors

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_HUGEPAGE = 14


def fresh_storage(num_bytes: int) -> torch.UntypedStorage:
    """On the CPU, not yet touched; in huge pages where that is worth it and the kernel agrees."""
    storage = torch.UntypedStorage(num_bytes)
    if num_bytes >= 2 * _HUGE_PAGE_BYTES:
        start = -(-storage.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = (storage.data_ptr() + num_bytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        # Only a wish: without it the memory is the same, and slower to fill.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return storage


def live_storages(layout: Layout, into: Mapping[str, object] | None) -> dict[int, torch.UntypedStorage]:
    """
    Which storages of the caller can take a storage of the snapshot: where every tensor by that name looks exactly the same.

    A live storage is taken for one number only, and only if all names of that number agree, so ties are neither made nor cut.
    """
    if into is None:
        return {}
    adapter = TorchTensors()
    live = plan_state(into, adapter)
    by_number = {number: adapter.storages[identity] for identity, number in live.numbers.items()}  # type: ignore[index]
    found = {tensor.path: tensor for tensor in live.layout.tensors}
    partner: dict[int, set[int]] = {}
    back: dict[int, set[int]] = {}
    for tensor in layout.tensors:
        other = found.get(tensor.path)
        fits = (
            other is not None
            and (other.dtype, other.shape, other.stride) == (tensor.dtype, tensor.shape, tensor.stride)
            and other.storage_offset == tensor.storage_offset
            and live.layout.storages[other.storage].num_bytes == layout.storages[tensor.storage].num_bytes
        )
        partner.setdefault(tensor.storage, set()).add(other.storage if fits and other is not None else -1)
        if fits and other is not None:
            back.setdefault(other.storage, set()).add(tensor.storage)
    return {
        number: by_number[candidate]
        for number, candidates in partner.items()
        if len(candidates) == 1 and (candidate := next(iter(candidates))) >= 0 and len(back[candidate]) == 1
    }
