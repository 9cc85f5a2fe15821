"""
What a torch tensor is, said in the words of the snapshot package, which does not know torch.

Only tensors that are a strided view of one storage are named: plain tensors, parameters, buffers, and the local part of a
DTensor. Sparse and quantised tensors, and subclasses that we do not know, are left to the pickle: torch's own reduction
of them refers to storages again, so they are saved completely and exactly, but without a name.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from dlrover.snapshot.memory.layout import TensorFacts

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TorchTensors:
    """The `TensorAdapter` of torch. It keeps the storages that it met, so that their addresses stay valid."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def describe(self, value: object) -> TensorFacts | None:
        if not isinstance(value, torch.Tensor):
            return None
        if type(value) in _PLAIN:
            return self._facts(value)
        if is_dtensor(value):
            return self._facts_of_dtensor(value)
        return None

    def _facts(
        self,
        tensor: torch.Tensor,
        global_shape: tuple[int, ...] | None = None,
        global_offset: tuple[int, ...] | None = None,
    ) -> TensorFacts | None:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            return None
        storage = tensor.untyped_storage()
        identity = storage._cdata
        self.storages[identity] = storage
        return TensorFacts(
            identity,
            storage.nbytes(),
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            global_shape,
            global_offset,
        )

    def _facts_of_dtensor(self, tensor: Any) -> TensorFacts | None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local = tensor._local_tensor
        if type(local) not in _PLAIN:
            return None
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return self._facts(local, tuple(tensor.shape), tuple(offset))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16`, `float8_e4m3fn`, ..."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(
            f"The snapshot has a tensor of dtype {name}, which this torch ({torch.__version__}) does not have. "
            "Use the torch version that made the snapshot."
        )
    return found


def is_dtensor(value: torch.Tensor) -> bool:
    """Without importing the module: where it was not imported, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
