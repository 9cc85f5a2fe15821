"""A part of a state that becomes a safetensors file, made by the agent from the bytes in the segment."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dlrover.snapshot.files.safetensors_file import DTYPES, SafetensorsTable, TensorPlace, encode_table
from dlrover.snapshot.memory.contents import SAFETENSORS
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import Skeleton
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import dtype_name

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class SafetensorsPart(dict[str, torch.Tensor]):
    """
    Tensors by name, each whole and contiguous.

    The format knows no ties. Names of the very same tensor are written once, under the first of them in alphabetical order, and the metadata
    says for each of the others which one that is, as safetensors' own `save_model` does. Views that only overlap are
    written out each.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Raises ValueError for what such a file cannot hold."""
        super().__init__()
        self.metadata = dict(metadata or {})
        kept: dict[tuple[object, ...], str] = {}
        for name in sorted(tensors):
            tensor = _checked(name, tensors[name])
            if tensor.numel():
                identity = (
                    tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
                )  # fmt: skip
                first = kept.setdefault(identity, name)
                if first != name:
                    self.metadata[name] = first
                    continue
            self[name] = tensor.contiguous()

    def skeleton(self) -> Skeleton:
        numbers: dict[int, int] = {}
        storages: list[torch.UntypedStorage] = []
        places = []
        for name, tensor in self.items():
            storage = tensor.untyped_storage()
            number = numbers.setdefault(storage._cdata, len(storages))
            if number == len(storages):
                storages.append(storage)
            size = tensor.element_size()
            places.append(
                TensorPlace(
                    name=name,
                    dtype=dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    storage=number,
                    offset_bytes=tensor.storage_offset() * size,
                    num_bytes=tensor.numel() * size,
                )
            )
        return Skeleton(encode_table(SafetensorsTable(tuple(places), self.metadata)), storages, SAFETENSORS)


def _checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise ValueError(
            f"A safetensors file holds only plain dense tensors, but {name} is a {type(tensor).__name__} of "
            f"layout {getattr(tensor, 'layout', None)} on {getattr(tensor, 'device', None)}. Convert it, or "
            "save this part with torch."
        )
    if dtype_name(tensor.dtype) not in DTYPES:
        raise ValueError(
            f"{name} has the dtype {tensor.dtype}, but a safetensors file cannot hold this dtype. Convert it, "
            "or save this part with torch."
        )
    return tensor.detach()
