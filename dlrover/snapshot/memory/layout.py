"""
Where each tensor of a state lies in a slot.

The unit of storage is what tensors are views of (torch calls it a storage): tensors that share one are tied, and stay tied after a restore;
it is stored once, whatever number of names it has. Above it stands a table of named tensors, so that a reader can find
`model / layer.0.weight` and its place in the global tensor without unpickling anything.

Everything of a state that is not a named tensor goes into pickles made by the trainer. They are opaque here and in the agent: only
a process that runs the user's code unpickles them.

No tensor library is imported: what a tensor is, an adapter says (`TensorFacts`).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Protocol

import msgspec
from msgspec import Struct

from dlrover.snapshot.memory.segment_format import SegmentInvalid, round_up

LINE_ALIGNMENT = 64
PAGE_ALIGNMENT = 4096
PAGE_ALIGNED_FROM_BYTES = 1024 * 1024
"""Storages from here on begin at a page, so that they can be written by direct I/O from where they lie."""

Path = tuple[str | int, ...]
"""Way to a tensor through mappings, sequences and fields. Keys of other types appear as text."""


class TensorFacts(Struct, frozen=True):
    """What an adapter tells about one tensor."""

    storage: Hashable
    """Equal for tensors that share memory, as long as they live."""
    storage_bytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    """In elements."""
    global_shape: tuple[int, ...] | None = None
    """Of the tensor that this one is a piece of; None: it is the whole."""
    global_offset: tuple[int, ...] | None = None


class TensorAdapter(Protocol):
    def describe(self, value: object) -> TensorFacts | None:
        """None for what is not a tensor, and for tensors that only a pickle can describe (sparse, quantised, unknown subclasses)."""


class StorageEntry(Struct, frozen=True, array_like=True):
    """A block of bytes in the slot's data."""

    offset: int
    num_bytes: int


class TensorEntry(Struct, frozen=True, array_like=True):
    """A named view of a storage."""

    path: Path
    storage: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    global_shape: tuple[int, ...] | None = None
    global_offset: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return ".".join(map(str, self.path))


class Layout(Struct, frozen=True):
    storages: tuple[StorageEntry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()

    @property
    def data_length(self) -> int:
        return max((entry.offset + entry.num_bytes for entry in self.storages), default=0)

    def extended(self, sizes: Iterable[int]) -> Layout:
        """With more storages behind the others: those that only a pickle refers to."""
        return Layout((*self.storages, *_place(sizes, self.data_length)), self.tensors)


class LayoutPlan(Struct, frozen=True):
    """A layout, and which storage is which."""

    layout: Layout
    numbers: dict[Hashable, int]
    """The adapter's identity of a storage to its number in the layout."""


def plan_state(state: object, adapter: TensorAdapter) -> LayoutPlan:
    """Lay out the named tensors of a state. The same structure always gives the same layout."""
    numbers: dict[Hashable, int] = {}
    sizes: list[int] = []
    tensors = []
    for path, facts in walk(state, adapter):
        number = numbers.setdefault(facts.storage, len(sizes))
        if number == len(sizes):
            sizes.append(facts.storage_bytes)
        tensors.append(
            TensorEntry(
                path,
                number,
                facts.dtype,
                facts.shape,
                facts.stride,
                facts.storage_offset,
                facts.global_shape,
                facts.global_offset,
            )
        )
    return LayoutPlan(Layout(tuple(_place(sizes, 0)), tuple(tensors)), numbers)


_DECODER = msgspec.msgpack.Decoder(Layout)


def encode_layout(layout: Layout) -> bytes:
    return msgspec.msgpack.encode(layout)


def decode_layout(content: bytes) -> Layout:
    try:
        return _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise SegmentInvalid(f"The snapshot is damaged: its tensor table cannot be read: {error}") from error


def layout_hash(encoded: bytes) -> bytes:
    """Equal for equal layouts; a changed structure shows as a changed hash."""
    return hashlib.blake2b(encoded, digest_size=16).digest()


def walk(state: object, adapter: TensorAdapter) -> Iterator[tuple[Path, TensorFacts]]:
    """
    Every tensor that can be reached by name, in the order of the containers.

    Not by recursion: a state may be nested deeper than Python's stack. A container that contains itself is entered once. Sets have
    no names to offer, so their tensors are left to the pickle.
    """
    pending: list[tuple[Path, object, frozenset[int]]] = [((), state, frozenset())]
    while pending:
        path, value, above = pending.pop()
        facts = adapter.describe(value)
        if facts is not None:
            yield path, facts
            continue
        children = children_of(value)
        if children and id(value) not in above:
            inside = above | {id(value)}
            pending.extend(((*path, key), child, inside) for key, child in reversed(children))


def children_of(value: object) -> list[tuple[str | int, object]]:
    """What a container holds, by the names that paths are made of."""
    if isinstance(value, (str, bytes, int, float)) or value is None:
        return []
    if isinstance(value, Mapping):
        return [(_key(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def _key(key: object) -> str | int:
    if isinstance(key, bool):
        return repr(key)
    if isinstance(key, int) and -(1 << 63) <= key < 1 << 63:
        return int(key)
    return str(key) if isinstance(key, str) else repr(key)


def _place(sizes: Iterable[int], start: int) -> Iterator[StorageEntry]:
    for num_bytes in sizes:
        alignment = PAGE_ALIGNMENT if num_bytes >= PAGE_ALIGNED_FROM_BYTES else LINE_ALIGNMENT
        start = round_up(start, alignment)
        yield StorageEntry(start, num_bytes)
        start += num_bytes
