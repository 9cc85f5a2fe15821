"""
Reading pieces for torch's load planners, the same way from memory and from files.

The planner of torch works out which parts of which pieces a rank needs, whatever the pieces were cut for. Here those pieces are found, checked and
copied into the tensors that the training has already; large blocks by several threads, without the interpreter lock.
"""

from __future__ import annotations

import io
import itertools
import mmap
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dlrover.protocol.errors import ConfigError, DLRoverError
from dlrover.snapshot.copy.copying import Copier, CopySpan
from dlrover.snapshot.files.dcp_file import DcpItem
from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.storage.storage import LocalStorage, Storage, join
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import dtype_of
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_plan import METADATA_FILE
from dlrover.trainer.torch.flash_checkpoint.restoring.reshard import SavedState, ShardSource, ShareHolding

OPTIMIZER = "optim"
"""Where the optimizer is in a state, as in the original."""
_ITS_STATE = (OPTIMIZER, "state")


class Incomplete(DLRoverError):
    """Some piece that is needed is not there."""


class Pieces(Protocol):
    """Where the pieces of one state come from."""

    def open(self, wanted: Iterable[MetadataIndex]) -> None:
        """These will be read. Raises DLRoverError or OSError when one cannot be, or is damaged."""

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        """A piece, on the CPU; perhaps a view of memory that is not ours, to be copied."""

    def content(self, index: MetadataIndex) -> bytes: ...
    def close(self) -> None: ...


class PieceReader(StorageReader):  # type: ignore[misc]  # torch does not type it
    """A reader for `torch.distributed.checkpoint.load`, and for our own."""

    def __init__(self, metadata: Metadata, pieces: Pieces, copier: Copier) -> None:
        super().__init__()
        self._metadata, self._pieces, self._copier = metadata, pieces, copier

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The pieces know where they are; what another rank says about it is not needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: Any = None) -> None:
        """It reads the state that it was made for."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with torch.no_grad():
            self._pieces.open({item.storage_index for item in plan.items})
            spans: list[CopySpan] = []
            filled: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []  # sources too: alive until they are copied
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(self._pieces.content(item.storage_index)))
                else:
                    filled.append((item, *self._fill(item, planner, spans)))
            self._copier.copy(spans)
            for item, target, _source in filled:
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        self._pieces.close()

    def _fill(self, item: ReadItem, planner: LoadPlanner, spans: list[CopySpan]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy one region, or note the copy if it is one block. Returns target and source."""
        source = self._pieces.tensor(item.storage_index)
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != source.size():
            raise Incomplete(
                f"{item.storage_index.fqn} was saved with the shape {tuple(source.size())}, but the model needs "
                f"{tuple(target.size())}."
            )
        is_block = source.is_contiguous() and target.is_contiguous() and target.device.type == "cpu"
        if is_block and source.dtype == target.dtype and not target.is_conj() and not target.is_neg():
            spans.append(CopySpan(target.data_ptr(), source.data_ptr(), target.nbytes))
        else:
            target.copy_(source)
        return target, source


def load_into(state: dict[str, Any], reader: PieceReader) -> None:
    """Fill a nested state with what was saved; all tensors in place. Raises Incomplete when it cannot all be had."""
    metadata = reader.read_metadata()
    planner, plan = plan_load(state, metadata)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.finish_plan(plan), planner).wait()


def plan_load(state: dict[str, Any], metadata: Metadata) -> tuple[DefaultLoadPlanner, LoadPlan]:
    """What has to be read, after making sure that it is all there."""
    planner = DefaultLoadPlanner()
    try:
        planner.set_up_planner(state, metadata, True)
        if planner.state_dict.keys() <= metadata.state_dict_metadata.keys():
            # Not the planner's own: it takes a checkpoint with more than is asked for for one of torch 2.3, and then misses what it asks for.
            # A rank without a piece of a small tensor asks for less.
            plan = create_default_local_load_plan(planner.state_dict, metadata)
        else:
            plan = planner.create_local_plan()
    except (RuntimeError, ValueError) as error:  # a key that was not saved, or another shape
        raise Incomplete(str(error)) from error
    found: dict[MetadataIndex, int] = {}
    for item in plan.items:
        if item.type is LoadItemType.TENSOR:
            found[item.dest_index] = found.get(item.dest_index, 0) + item.lengths.numel()
    for name, value in planner.state_dict.items():
        if isinstance(value, torch.Tensor):
            for index, wanted in _chunks(name, value):
                if found.get(index, 0) < wanted:
                    raise Incomplete(
                        f"The checkpoint has only {found.get(index, 0)} of the {wanted} elements of {name}."
                    )
    return planner, plan


def _chunks(name: str, tensor: Any) -> list[tuple[MetadataIndex, int]]:
    """The parts of a tensor that this rank holds, and how many elements each has."""
    if hasattr(tensor, "__create_chunk_list__"):
        if hasattr(tensor, "device_mesh") and tensor.device_mesh.get_coordinate() is None:
            return []
        chunks = tensor.__create_chunk_list__()
    elif hasattr(tensor, "local_shards"):
        return [
            (MetadataIndex(name, shard.metadata.shard_offsets), shard.tensor.numel()) for shard in tensor.local_shards()
        ]
    else:
        return [(MetadataIndex(name, [0] * tensor.dim()), tensor.numel())]
    return [(MetadataIndex(name, chunk.offsets), chunk.sizes.numel()) for chunk in chunks]


def fit_to(state: dict[str, Any], metadata: Metadata) -> None:
    """
    Make a state ask for what was saved. There is room added for everything beside it: whole tensors, and nothing yet for the rest. An optimizer
    that had not made a step when it was saved has no state there, and is not asked for it.
    """
    paths = [tuple((metadata.planner_data or {}).get(name, (name,))) for name in metadata.state_dict_metadata]
    optimizer = state.get(OPTIMIZER)
    if isinstance(optimizer, dict) and "state" in optimizer and not any(path[:2] == _ITS_STATE for path in paths):
        state[OPTIMIZER] = {key: value for key, value in optimizer.items() if key != "state"}
    known = set(state)
    for name, about in metadata.state_dict_metadata.items():
        path = tuple((metadata.planner_data or {}).get(name, (name,)))
        if path[0] in known:
            continue
        is_tensor = isinstance(about, TensorStorageMetadata)
        value = torch.empty(about.size, dtype=about.properties.dtype) if is_tensor else None
        _put(state, path, value)


def _put(state: Any, path: Sequence[str | int], value: object) -> None:
    for key, following in itertools.pairwise(path):
        inner: Any = [] if isinstance(following, int) else {}
        _make_room(state, key)
        if isinstance(state, dict):
            state.setdefault(key, inner)
        elif state[key] is None:
            state[key] = inner
        state = state[key]
    _make_room(state, path[-1])
    state[path[-1]] = value


def _make_room(state: Any, key: str | int) -> None:
    if isinstance(state, list):
        state.extend([None] * (int(key) + 1 - len(state)))


# From memory.


class MemoryPieces:
    """The pieces of one save in the memory of this node, or of others."""

    def __init__(
        self,
        state: SavedState,
        on_close: Callable[[], None] | None = None,
        brought: Mapping[MetadataIndex, tuple[DcpItem, memoryview]] | None = None,
    ) -> None:
        """`brought` came from other nodes."""
        self._where: dict[MetadataIndex, tuple[DcpItem, ShareHolding, ShardSource]] = {}
        self._on_close = on_close
        for holding, source in state.shards.values():
            for item in holding.items:
                self._where.setdefault(index_of(item), (item, holding, source))
        self._items = {index: item for index, (item, _holding, _source) in self._where.items()}
        self._items.update({index: item for index, (item, _bytes) in (brought or {}).items()})
        self._bytes = {index: content for index, (_item, content) in (brought or {}).items()}

    def open(self, wanted: Iterable[MetadataIndex]) -> None:
        by_shard: dict[int, list[MetadataIndex]] = {}
        for index in wanted:
            if index in self._bytes:
                continue
            if index not in self._where:
                raise Incomplete(
                    f"The snapshots in memory do not contain the piece of {index.fqn} at {tuple(index.offset or ())}."
                )
            item, holding, _source = self._where[index]
            if item.is_in_storage:
                by_shard.setdefault(holding.shard, []).append(index)
        for indices in by_shard.values():
            _item, holding, source = self._where[indices[0]]
            found = source.fetch(holding, [self._where[index][0] for index in indices])
            self._bytes.update(zip(indices, found, strict=True))

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        item = self._items[index]
        if not item.is_in_storage:
            archive: torch.Tensor = torch.load(io.BytesIO(item.prepared), map_location="cpu", weights_only=False)
            return archive
        dtype = dtype_of(item.dtype)
        if not item.num_bytes:
            return torch.empty(item.shape, dtype=dtype)
        return torch.frombuffer(self._bytes[index], dtype=dtype).reshape(item.shape)

    def content(self, index: MetadataIndex) -> bytes:
        return self._items[index].prepared

    def close(self) -> None:
        self._bytes = {}
        if self._on_close is not None:
            self._on_close()


def index_of(item: DcpItem) -> MetadataIndex:
    return MetadataIndex(item.name, item.offset) if item.is_tensor else MetadataIndex(item.name)


def metadata_of_items(items: Iterable[DcpItem]) -> Metadata:
    """What torch's planner wants to know, from the tables in memory."""
    about: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    seen: set[MetadataIndex] = set()
    for item in items:
        index = index_of(item)
        if index in seen:
            continue
        seen.add(index)
        paths[item.name] = item.path
        if not item.is_tensor:
            about[item.name] = BytesStorageMetadata()
            continue
        whole = about.get(item.name)
        if not isinstance(whole, TensorStorageMetadata):
            properties = TensorProperties(dtype=dtype_of(item.dtype))
            whole = TensorStorageMetadata(properties, torch.Size(item.global_shape), [])
            about[item.name] = whole
        whole.chunks.append(ChunkStorageMetadata(torch.Size(item.offset), torch.Size(item.shape)))
    return Metadata(about, planner_data=paths, storage_data={})


# From files.


class FilePieces:
    """The pieces of a checkpoint directory that torch, we, or the original DLRover wrote."""

    def __init__(self, storage: Storage, directory: str, metadata: Metadata, *, is_checked: bool) -> None:
        """`is_checked`: the archives have right sums, because we wrote them."""
        self._storage, self._directory, self._is_checked = storage, directory, is_checked
        self._metadata = metadata
        self._files: dict[str, memoryview] = {}
        self._maps: list[mmap.mmap] = []

    def open(self, wanted: Iterable[MetadataIndex]) -> None:
        for index in wanted:
            info = self._metadata.storage_data.get(index)
            if info is None:
                raise Incomplete(f"The checkpoint in {self._directory} does not contain {index.fqn}.")
            if getattr(info, "transform_descriptors", None):
                raise ConfigError(
                    f"The checkpoint in {self._directory} was written with stream transforms "
                    f"({', '.join(info.transform_descriptors)}). Load it with torch's own reader."
                )
            if info.relative_path not in self._files:
                self._files[info.relative_path] = self._read(join(self._directory, info.relative_path))

    def tensor(self, index: MetadataIndex) -> torch.Tensor:
        content = self._slice(index)
        if not self._is_bare(index):
            tensor: torch.Tensor = torch.load(self._checked(index, content), map_location="cpu", weights_only=True)
            return tensor
        whole = self._metadata.state_dict_metadata[index.fqn]
        [chunk] = [chunk for chunk in whole.chunks if chunk.offsets == index.offset]
        if not content.nbytes:
            return torch.empty(chunk.sizes, dtype=whole.properties.dtype)
        return torch.frombuffer(bytearray(content), dtype=whole.properties.dtype).reshape(chunk.sizes)

    def content(self, index: MetadataIndex) -> bytes:
        return self._checked(index, self._slice(index)).getvalue()

    def close(self) -> None:
        self._files = {}
        for mapping in self._maps:
            try:
                mapping.close()
            except BufferError:
                continue  # a view is still alive, and the mapping goes with it
        self._maps = []

    def _read(self, path: str) -> memoryview:
        if not isinstance(self._storage, LocalStorage):
            return memoryview(self._storage.read(path))
        with open(path, "rb") as file:
            if not file.seek(0, io.SEEK_END):
                return memoryview(b"")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps.append(mapping)
        return memoryview(mapping)

    def _slice(self, index: MetadataIndex) -> memoryview:
        info = self._metadata.storage_data[index]
        content = self._files[info.relative_path][info.offset : info.offset + info.length]
        if content.nbytes != info.length:
            raise Corrupt(
                f"{join(self._directory, info.relative_path)} is damaged: it ends before the end of {index.fqn}."
            )
        return content

    def _is_bare(self, index: MetadataIndex) -> bool:
        """The original DLRover writes the tensors' bytes without anything around them, and says so by its own class."""
        return getattr(self._metadata.storage_data[index], "is_bare", False)

    def _checked(self, index: MetadataIndex, content: memoryview) -> io.BytesIO:
        stream = io.BytesIO(content)
        if self._is_checked:
            try:
                bad = zipfile.ZipFile(stream).testzip()
            except zipfile.BadZipFile as error:
                bad = str(error)
            if bad is not None:
                raise Corrupt(
                    f"{index.fqn} in {self._directory} is damaged: its bytes changed after they were written ({bad})."
                )
            stream.seek(0)
        return stream


def read_directory(storage: Storage, directory: str, *, is_checked: bool) -> tuple[Metadata, FilePieces]:
    """Raises FileNotFoundError when it is no DCP checkpoint."""
    content = storage.read(join(directory, METADATA_FILE))
    try:
        metadata = pickle.loads(content)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise Corrupt(f"{join(directory, METADATA_FILE)} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise Corrupt(f"{join(directory, METADATA_FILE)} contains a {type(metadata).__name__} and not DCP metadata.")
    return metadata, FilePieces(storage, directory, metadata, is_checked=is_checked)


def merged(found: Iterable[Metadata]) -> Metadata:
    """One metadata from those of several nodes: what any of them knows."""
    items: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for metadata in found:
        paths.update(metadata.planner_data or {})
        for name, about in metadata.state_dict_metadata.items():
            known = items.setdefault(name, about)
            if isinstance(known, TensorStorageMetadata) and known is not about:
                have = {tuple(chunk.offsets) for chunk in known.chunks}
                known.chunks.extend(chunk for chunk in about.chunks if tuple(chunk.offsets) not in have)
    return Metadata(items, planner_data=paths, storage_data={})


__all__ = [
    "FilePieces",
    "Incomplete",
    "MemoryPieces",
    "PieceReader",
    "fit_to",
    "load_into",
    "merged",
    "metadata_of_items",
    "plan_load",
    "read_directory",
]
