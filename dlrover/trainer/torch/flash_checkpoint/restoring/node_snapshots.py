"""
The snapshots of this node as what frameworks know: files of a checkpoint, by their path in it.

A framework's checkpoint is many files, each saved by one rank and read by several: of a model that all ranks share one rank writes the
file. So a rank looks into its own snapshot first and then into those of its neighbours, which belong to the same save. Two ways of reading:
one file as the object that was saved, or all of them written out to a directory, for frameworks that open files themselves.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.files.direct_io import WriteOptions
from dlrover.snapshot.memory.contents import Contents, decode_contents
from dlrover.snapshot.memory.segment import PinnedSlot, Segment, SlotName, segment_paths
from dlrover.snapshot.memory.segment_format import SegmentInvalid
from dlrover.snapshot.storage.file_kinds import write_kind
from dlrover.snapshot.storage.persist import SaveRequest, of_present_history, read_request
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import load_state
from dlrover.trainer.torch.flash_checkpoint.restoring.early_look import check

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

_PIECE_BYTES = 32 * 1024 * 1024
_IN_MEMORY = WriteOptions(num_threads=1, direct=False)


class Snapshot(Struct, frozen=True):
    """One rank's part of one save."""

    name: SlotName
    request: SaveRequest
    files: frozenset[str]
    """Paths in the checkpoint `request.target`, those included that are kept for the restore alone."""


class NodeSnapshots:
    """What lies in a node's memory now, of one directory of checkpoints and cut into so many shards."""

    def __init__(self, home: Path, directory: str, num_shards: int) -> None:
        self._saves: dict[str, dict[int, Snapshot]] = {}
        """By the save's id and the shard."""
        by_shard: dict[int, list[Snapshot]] = {}
        for path in segment_paths(home):
            for snapshot in _snapshots_of(path):
                request = snapshot.request
                if (request.directory, request.num_shards) == (directory, num_shards):
                    by_shard.setdefault(request.shard, []).append(snapshot)
        for shard, snapshots in by_shard.items():
            present = set(of_present_history(each.name for each in snapshots))
            for snapshot in snapshots:
                if snapshot.name in present:
                    self._saves.setdefault(snapshot.request.attempt, {})[shard] = snapshot

    def of_shard(self, shard: int) -> list[Snapshot]:
        """The newest first. A step that was saved twice may be there twice."""
        own = [shards[shard] for shards in self._saves.values() if shard in shards]
        return sorted(own, key=lambda each: (each.name.step, each.name), reverse=True)

    def holder_of(self, file: str, own: Snapshot) -> Snapshot | None:
        """Who has this file of the same save: we ourselves, or a neighbour."""
        for snapshot in (own, *self.of_save(own)):
            if file in snapshot.files:
                return snapshot
        return None

    def of_save(self, own: Snapshot) -> list[Snapshot]:
        shards = self._saves.get(own.request.attempt, {})
        return [shards[shard] for shard in sorted(shards)]


def read_files(snapshot: Snapshot, files: Iterable[str], copier: Copier) -> dict[str, Any]:
    """The saved objects; nothing in them shares memory with the segment. Raises OSError, or our own errors when it is damaged."""
    with _pinned(snapshot) as pinned:
        return load_state(pinned, copier, names=list(files))


def write_out(snapshot: Snapshot, directory: str | os.PathLike[str]) -> None:
    """All files of the snapshot below this directory, as they would be in storage. Raises as `read_files`."""
    storage = LocalStorage()
    with _pinned(snapshot) as pinned:
        contents = decode_contents(pinned.sections())
        for entry in contents.files:
            path = os.path.join(directory, entry.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_kind(storage, path, contents, entry, pinned.data, options=_IN_MEMORY)


def broadcast_files(directory: Path, group: Any) -> None:
    """What the group's first rank has below the directory, for all the others; a piece at a time. All of them call this."""
    is_source = dist.get_rank(group) == 0
    source = dist.get_global_rank(group, 0)
    found: list[Any] = []
    if is_source:
        found = [
            (path.relative_to(directory).as_posix(), path.stat().st_size)
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        ]
    told = [found]
    dist.broadcast_object_list(told, src=source, group=group)
    for name, size in told[0]:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb" if is_source else "wb") as file:
            for start in range(0, size, _PIECE_BYTES):
                piece = torch.empty(min(_PIECE_BYTES, size - start), dtype=torch.uint8)
                if is_source:
                    file.readinto(memoryview(piece.numpy()))
                dist.broadcast(piece, src=source, group=group)
                if not is_source:
                    file.write(memoryview(piece.numpy()))


@contextlib.contextmanager
def _pinned(snapshot: Snapshot) -> Iterator[PinnedSlot]:
    """Its slot, held and compared with its sums."""
    name = snapshot.name
    with Segment(name.path, private=True) as segment:
        pinned = segment.pin(name.slot, name.generation)
        if pinned is None:
            raise SegmentInvalid(f"A newer save has overwritten the snapshot of step {name.step}.")
        with pinned:
            check(pinned)
            yield pinned


def _snapshots_of(path: Path) -> list[Snapshot]:
    found = []
    try:
        with Segment(path) as segment:
            for name in segment.complete_slots():
                pinned = segment.pin(name.slot, name.generation)
                if pinned is None:
                    continue
                with pinned:
                    contents = decode_contents(pinned.sections())
                    request = read_request(contents)
                if request is not None:
                    found.append(Snapshot(name, request, _names(contents)))
    except FileNotFoundError:
        return []
    except DLRoverError as error:
        log.warning("The snapshots in %s are not used for restoring: %s", path, error)
    return found


def _names(contents: Contents) -> frozenset[str]:
    return frozenset(entry.name for entry in contents.files)
