"""
Every kind of file that a snapshot can become, in one place: from a slot to the bytes of the file.

A file is an image: pieces of memory and where they go, and what can only be known after their sums are (headers of
archives). Nothing is copied for it. A new kind needs one function here and nothing elsewhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from dlrover.snapshot.files.dcp_file import dcp_image
from dlrover.snapshot.files.direct_io import FilePiece, Late, WriteOptions, WrittenFile, image_chunks, write_file
from dlrover.snapshot.files.safetensors_file import safetensors_image
from dlrover.snapshot.files.torch_file import file_storages, torch_image
from dlrover.snapshot.memory.contents import DISTCP, RAW, SAFETENSORS, TORCH, Contents, FileEntry
from dlrover.snapshot.memory.segment_format import SegmentInvalid
from dlrover.snapshot.storage.storage import LocalStorage, Storage


class FileImage(NamedTuple):
    pieces: list[FilePiece]
    late: Late
    total_bytes: int


def file_image(contents: Contents, entry: FileEntry, data: memoryview) -> FileImage:
    """What the file will consist of; `data` is the slot's."""
    make = _KINDS.get(entry.kind)
    if make is None:
        raise SegmentInvalid(
            f"The part {entry.name!r} of the snapshot has the kind {entry.kind!r}, and this agent can write "
            f"only {', '.join(_KINDS)}. Install the same version of dlrover for the agent and the trainer."
        )
    return make(contents, entry, data)


def write_kind(
    storage: Storage,
    path: str,
    contents: Contents,
    entry: FileEntry,
    data: memoryview,
    *,
    options: WriteOptions | None = None,
    stop: threading.Event | None = None,
) -> WrittenFile:
    """Write one file of a snapshot, and sync it unless the options say otherwise; its directory exists."""
    image = file_image(contents, entry, data)
    if isinstance(storage, LocalStorage):
        return write_file(path, *image, options=options, stop=stop)
    written, chunks = image_chunks(*image)
    storage.write(path, chunks)
    return written


def _torch(contents: Contents, entry: FileEntry, data: memoryview) -> FileImage:
    return FileImage(*torch_image(contents.pickles[entry.name], file_storages(contents, entry.name, data)))


def _raw(contents: Contents, entry: FileEntry, data: memoryview) -> FileImage:
    """What was prepared, and behind it the storages: there a large file's bytes are."""
    pieces = []
    at = 0
    contents_in_order: list[memoryview | bytes] = [
        contents.pickles[entry.name],
        *file_storages(contents, entry.name, data),
    ]
    for content in contents_in_order:
        pieces.append(FilePiece(at, content))
        at += len(content)
    return FileImage(pieces, lambda sums: [], at)


def _distcp(contents: Contents, entry: FileEntry, data: memoryview) -> FileImage:
    return FileImage(*dcp_image(contents.pickles[entry.name], file_storages(contents, entry.name, data)))


def _safetensors(contents: Contents, entry: FileEntry, data: memoryview) -> FileImage:
    return FileImage(*safetensors_image(contents.pickles[entry.name], file_storages(contents, entry.name, data)))


_KINDS: dict[str, Callable[[Contents, FileEntry, memoryview], FileImage]] = {
    TORCH: _torch,
    RAW: _raw,
    DISTCP: _distcp,
    SAFETENSORS: _safetensors,
}
