"""
Where restored bytes go: into tensors that the caller has already, or into fresh memory that is cheap to fill.

Filling the caller's own tensors is as fast as memory is. Fresh memory costs more than the copy, because the kernel has to find and clear each
page at its first touch; by huge pages it has 512 times fewer of them to find.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Mapping

import torch

from dlrover.snapshot.memory.layout import Layout, Path, children_of
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import TorchTensors

_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_HUGEPAGE = 14
_NONE = -1
"""In place of a storage's number, or of its identity, which is an address."""


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
    tables: dict[Path, dict[str | int, object]] = {(): dict(children_of(into))}
    partner: dict[int, Hashable] = {}
    back: dict[Hashable, int] = {}
    for tensor in layout.tensors:
        facts = adapter.describe(_value_at(tensor.path, tables))
        fits = (
            facts is not None
            and (facts.dtype, facts.shape, facts.stride) == (tensor.dtype, tensor.shape, tensor.stride)
            and facts.storage_offset == tensor.storage_offset
            and facts.storage_bytes == layout.storages[tensor.storage].num_bytes
        )
        identity: Hashable = facts.storage if fits and facts is not None else _NONE
        if partner.setdefault(tensor.storage, identity) != identity:
            partner[tensor.storage] = _NONE
        if back.setdefault(identity, tensor.storage) != tensor.storage:
            back[identity] = _NONE
    return {
        number: adapter.storages[identity]  # type: ignore[index]
        for number, identity in partner.items()
        if identity != _NONE and back[identity] == number
    }


def _value_at(path: Path, tables: dict[Path, dict[str | int, object]]) -> object:
    """What the caller has by that name, or None. Containers are looked at once: `tables` has what is in them."""
    table = tables.get(path[:-1])
    if table is None:
        table = tables[path[:-1]] = dict(children_of(_value_at(path[:-1], tables)))
    return table.get(path[-1])
