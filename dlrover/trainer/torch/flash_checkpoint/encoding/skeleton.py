"""
The pickle of a state, with numbers where its storages were.

It is the `data.pkl` of a file that `torch.load` reads: same reductions, same references to storages as `torch.save` writes. Made
once in the trainer, where the user's classes are, it serves twice: the agent puts it into the file as it is, and a
restore from memory unpickles it in the next trainer.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.serialization import location_tag, normalize_storage_type

from dlrover.snapshot.memory.contents import TORCH

PICKLE_PROTOCOL = 2
"""The one of `torch.save`; `torch.load(weights_only=True)` understands it."""


class Skeleton:
    """A pickled object and the storages it refers to, in the order of their numbers; or what stands for it in another kind of file."""

    def __init__(self, content: bytes, storages: list[torch.UntypedStorage], kind: str = TORCH) -> None:
        self.content, self.storages, self.kind = content, storages, kind


def make_skeleton(state: object) -> Skeleton:
    """Raises what pickling raises: an object that `torch.save` cannot save."""
    buffer = io.BytesIO()
    pickler = _StoragePickler(buffer)
    pickler.dump(state)
    return Skeleton(buffer.getvalue(), pickler.storages)


def rebuild(content: bytes, storage: Callable[[int, int, str], torch.UntypedStorage]) -> Any:
    """
    The object again, with storages from the caller: `storage(number, num_bytes, location)`.

    Runs what the pickle says, so only ever on what a trainer of this job wrote.
    """
    unpickler = _StorageUnpickler(io.BytesIO(content))
    unpickler.storage = storage
    return unpickler.load()


_NOT_A_STORAGE = object


class _StoragePickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=PICKLE_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._families: dict[type, type] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        kind = type(value)
        family = self._families.get(kind) or self._family(
            kind
        )  # called for every string and number: asked once per type
        if family is _NOT_A_STORAGE:
            return None
        if family is torch.storage.TypedStorage:
            storage = value._untyped_storage
            dtype = value.dtype
            storage_type = getattr(torch, value._pickle_storage_type())
            num_elements = value._size()
        else:
            storage, dtype = value, torch.uint8
            storage_type = normalize_storage_type(kind)
            num_elements = storage.nbytes()
        return ("storage", storage_type, self._key(storage, dtype), location_tag(storage), num_elements)

    def _family(self, kind: type) -> type:
        found: type = _NOT_A_STORAGE
        for storage_kind in (torch.storage.TypedStorage, torch.UntypedStorage):
            if issubclass(kind, storage_kind):
                found = storage_kind
        self._families[kind] = found
        return found

    def _key(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> str:
        """The storage's number as text, always the same object, so that the pickle refers back to it."""
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._keys[storage._cdata] = str(len(self.storages))
            self.storages.append(storage)
        address = 0 if storage.device.type == "meta" else storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) != dtype:  # torch.load could not read it
            raise RuntimeError(
                f"Two tensors share memory but have the dtypes {self._dtypes[address]} and {dtype}. Neither "
                "torch.save nor a snapshot can save such tensors as shared. Clone one of them before saving."
            )
        return key


class _StorageUnpickler(pickle.Unpickler):
    storage: Callable[[int, int, str], torch.UntypedStorage]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        return super().find_class(module, name)

    def persistent_load(self, reference: Any) -> torch.storage.TypedStorage:
        kind, storage_type, number, location, num_elements = reference
        assert kind == "storage", f"the pickle refers to a {kind}, which no version of ours writes"
        dtype, element_bytes = _elements_of(storage_type)
        untyped = self.storage(int(number), num_elements * element_bytes, location)
        return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


@functools.cache
def _elements_of(storage_type: Any) -> tuple[torch.dtype, int]:
    """Their type and size. Asked for every tensor, of few types."""
    dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type._dtype
    return dtype, torch._utils._element_size(dtype)


def _rebuild_tensor(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, metadata: Any = None
) -> torch.Tensor:
    """torch's function of the same arguments, but for the search of a fake-tensor mode, for each tensor anew: there is none here."""
    untyped = storage._untyped_storage
    tensor = torch.empty((0,), dtype=storage.dtype, device=untyped.device).set_(untyped, offset, size, stride)
    if requires_grad:
        tensor.requires_grad = True
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)
    if hooks:
        tensor._backward_hooks = hooks
    return tensor
