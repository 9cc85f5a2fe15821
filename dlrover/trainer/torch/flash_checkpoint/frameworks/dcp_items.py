"""
What a rank has to save, in the words of torch's distributed checkpoint: items with their place in the whole.

The planner of torch says what the items are. Here they get their bytes: of a tensor the storage that it lies in and the little pickle of its
archive, of anything else what `torch.save` makes of it. The latter is padded, so that a counter that grows by a digit changes no
place in any file, and what was serialised before and is still the same is not serialised again.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import marshal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from dlrover.snapshot.files.dcp_file import ELSEWHERE, DcpItem, encode_table
from dlrover.snapshot.memory.contents import DISTCP
from dlrover.snapshot.memory.segment_format import round_up
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import Skeleton, make_skeleton
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import dtype_name

PADDED_TO = 256
SLACK_BYTES = 64
MOST_PADDING = 1024
"""torch looks for the end of an archive in its last 4 KiB."""


class LocalItem(NamedTuple):
    write: WriteItem
    path: tuple[str | int, ...]
    tensor: torch.Tensor | None
    """Contiguous, and a plain view of its storage; None: only `content` can be saved."""
    content: bytes

    @property
    def num_bytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal as long as the item keeps its place in the plan and in the file."""
        data = self.write.tensor_data
        about = () if data is None else (tuple(data.chunk.sizes), tuple(data.size), str(data.properties.dtype))
        offset = None if self.write.index.offset is None else tuple(self.write.index.offset)
        return (self.write.index.fqn, offset, self.write.type.name, len(self.content), *about)

    def described(self, at: int, storage: int) -> DcpItem:
        data = self.write.tensor_data
        name = self.write.index.fqn
        if data is None:
            return DcpItem(name, self.path, self.content, at)
        tensor = self.tensor
        return DcpItem(
            name=name,
            path=self.path,
            prepared=self.content if tensor is None else archive_pickle(tensor.dtype, tuple(tensor.shape)),
            at=at,
            dtype=dtype_name(data.properties.dtype),
            storage=-1 if tensor is None else storage,
            start=0 if tensor is None else tensor.storage_offset() * tensor.element_size(),
            num_bytes=self.num_bytes,
            shape=tuple(data.chunk.sizes),
            offset=tuple(data.chunk.offsets),
            global_shape=tuple(data.size),
        )


class DcpPart(Mapping[str, torch.Tensor]):
    """The items that a rank keeps in memory, as one part of its snapshot and one file of the checkpoint."""

    def __init__(self, items: Sequence[LocalItem], places: Sequence[int]) -> None:
        """`places` says where each item goes in the file; `ELSEWHERE`: another rank writes it."""
        self._items, self._places = items, places
        self._tensors: dict[str, torch.Tensor] = {}
        for item in items:
            if item.tensor is not None:
                name = item.write.index.fqn
                key = name if name not in self._tensors else f"{name}@{tuple(item.write.index.offset or ())}"
                self._tensors[key] = item.tensor

    def skeleton(self) -> Skeleton:
        numbers: dict[int, int] = {}
        storages: list[torch.UntypedStorage] = []
        table = []
        for item, at in zip(self._items, self._places, strict=True):
            number = -1
            if item.tensor is not None:
                storage = item.tensor.untyped_storage()
                number = numbers.setdefault(storage._cdata, len(storages))
                if number == len(storages):
                    storages.append(storage)
            table.append(item.described(at, number))
        return Skeleton(encode_table(table), storages, DISTCP)

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class LocalPlans:
    """The items of a state. torch's planner is asked again only when the state looks different than before: it takes its time."""

    def __init__(self) -> None:
        self._looks: list[tuple[Any, ...]] = []
        self._plan = SavePlan([])

    def plan_for(self, planner: DefaultSavePlanner) -> SavePlan:
        """`planner` has been given the state."""
        looks = [(name, *_looks(value)) for name, value in planner.state_dict.items()]
        if looks != self._looks:
            self._plan = planner.create_local_plan()
            self._looks = looks
        return self._plan


def _looks(value: Any) -> tuple[Any, ...]:
    """What decides about the items of a value; unlike any other where we do not know."""
    if isinstance(value, DTensor):
        return DTensor, value.dtype, tuple(value.shape), value.placements, value.device_mesh
    if type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return torch.Tensor, value.dtype, tuple(value.shape)
    return (object(),) if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__") else (None,)


class Serialiser:
    """Bytes of what is not a tensor. It remembers the last ones of every name."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, bytes]] = {}
        """By name: what tells the value from others, and its bytes."""

    def content_of(self, name: str, value: object) -> bytes:
        mark = _mark(value)
        before = self._known.get(name)
        if before is not None and mark and before[0] == mark:
            return before[1]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        content = padded(buffer.getvalue(), 0 if before is None else len(before[1]))
        self._known[name] = (mark, content)
        return content


def collect_items(planner: Any, plan: SavePlan, mappings: Mapping[str, Any], serialise: Serialiser) -> list[LocalItem]:
    """The items of a plan that torch's default planner made, with their bytes."""
    return [_local_item(write, planner.lookup_object(write.index), mappings, serialise) for write in plan.items]


def resolve_items(planner: SavePlanner, plan: SavePlan, mappings: Mapping[str, Any]) -> list[LocalItem]:
    """The same for any planner: what it says goes into the files as it is."""
    found = []
    for write in plan.items:
        data = planner.resolve_data(write)
        if isinstance(data, io.BytesIO):
            path = tuple(mappings.get(write.index.fqn, (write.index.fqn,)))
            found.append(LocalItem(write, path, None, data.getvalue()))
        else:
            found.append(_local_item(write, data, mappings, Serialiser()))
    return found


def _local_item(write: WriteItem, value: Any, mappings: Mapping[str, Any], serialise: Serialiser) -> LocalItem:
    path = tuple(mappings.get(write.index.fqn, (write.index.fqn,)))
    if write.type is WriteItemType.BYTE_IO:
        return LocalItem(write, path, None, serialise.content_of(write.index.fqn, value))
    write = _without_gradient(write)
    tensor = value.detach()
    if type(tensor) is torch.nn.Parameter or type(tensor) is torch.nn.Buffer:
        tensor = tensor.data
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not is_plain:
        buffer = io.BytesIO()
        torch.save(tensor.cpu(), buffer)
        return LocalItem(write, path, None, buffer.getvalue())
    return LocalItem(write, path, tensor.resolve_conj().resolve_neg().contiguous(), b"")


def _without_gradient(write: WriteItem) -> WriteItem:
    """The file holds bare tensors, and says so."""
    data = write.tensor_data
    if data is None or not data.properties.requires_grad:
        return write
    properties = dataclasses.replace(data.properties, requires_grad=False)
    return dataclasses.replace(write, tensor_data=dataclasses.replace(data, properties=properties))


@functools.lru_cache(maxsize=65536)
def archive_pickle(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """What `torch.save` writes about a contiguous tensor on the CPU; the memory for it is never touched."""
    return make_skeleton(torch.empty(shape, dtype=dtype)).content


def padded(content: bytes, length_before: int) -> bytes:
    """
    The archive, made longer by a comment at its end, which every reader skips: to the length it had before, if it
    still fits, or else to a round one.
    """
    length = length_before
    if not len(content) <= length <= len(content) + MOST_PADDING:
        length = round_up(len(content) + SLACK_BYTES, PADDED_TO)
    missing = length - len(content)
    if not missing or content[-2:] != b"\0\0":  # no archive, or one that has a comment already
        return content
    return content[:-2] + missing.to_bytes(2, "little") + bytes(missing)


def _mark(value: object) -> bytes:
    """Tells plain values apart; empty for everything else, which has to be serialised to be compared."""
    try:
        return marshal.dumps(value)  # type: ignore[arg-type]  # what it cannot do it says
    except ValueError:
        return b""


__all__ = ["ELSEWHERE", "DcpPart", "LocalItem", "LocalPlans", "Serialiser", "collect_items", "padded", "resolve_items"]
