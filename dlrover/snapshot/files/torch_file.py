"""
Files that `torch.load` reads, written without torch.

Such a file is a zip archive whose entries are stored, not compressed: `data.pkl` (the object, with numbers for its storages), `data/0`,
`data/1`, ... (the storages' bytes), `byteorder` and `version`. The pickle was made in the trainer; here it is only copied.

Entries are moved to their place by a filler in their header, as torch does it: storages begin at 64 bytes so that a mapped
file can be used as it is, and large ones at a page so that they can be written by direct I/O. The file has no `.format_version`, because that would
promise torch's own computation of places; readers then look into the archive's directory, which they all can.

The header of an entry contains its CRC-32. `torch.load` does not look at it, `unzip` and Python's zipfile do.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dlrover.snapshot.files.direct_io import FilePiece, Late, WriteOptions, WrittenFile, image_chunks, write_file
from dlrover.snapshot.memory.contents import Contents
from dlrover.snapshot.memory.layout import LINE_ALIGNMENT, PAGE_ALIGNED_FROM_BYTES, PAGE_ALIGNMENT
from dlrover.snapshot.memory.segment_format import round_up

ARCHIVE = "archive"
_VERSION = b"3\n"

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_EXTRA = struct.Struct("<2sH")
_ZIP64 = b"\x01\x00"
_FILLER = b"FB"
_LIMIT = 0xFFFFFFFF
_NEW_YEAR_1980 = 0x21
"""The date of every entry: equal states give equal files."""


class _Entry(NamedTuple):
    name: bytes
    length: int
    header_at: int
    data_at: int


def write_torch_file(
    path: str | os.PathLike[str],
    pickled: bytes,
    storages: Sequence[memoryview],
    *,
    options: WriteOptions | None = None,
    on_progress: Callable[[int], None] | None = None,
    stop: threading.Event | None = None,
) -> WrittenFile:
    """Write and sync one file; the storages are read where they lie."""
    pieces, late, total = torch_image(pickled, storages)
    return write_file(path, pieces, late, total, options=options, on_progress=on_progress, stop=stop)


def torch_file_chunks(pickled: bytes, storages: Sequence[memoryview]) -> tuple[WrittenFile, list[memoryview]]:
    """The same file as a stream."""
    return image_chunks(*torch_image(pickled, storages))


def file_storages(contents: Contents, name: str, data: memoryview) -> list[memoryview]:
    """The storages of one file of a snapshot, as views of the slot's data."""
    entries = [contents.layout.storages[number] for number in contents.file(name).storages]
    return [data[entry.offset : entry.offset + entry.num_bytes] for entry in entries]


def torch_image(pickled: bytes, storages: Sequence[memoryview]) -> tuple[list[FilePiece], Late, int]:
    """Where everything goes, what is only known after the sums are, and how long the file is."""
    contents: list[memoryview | bytes] = [
        pickled,
        sys.byteorder.encode(),
        *(storage.cast("B") for storage in storages),
        _VERSION,
    ]
    entries, directory_at = _lay_out(len(pickled), [storage.nbytes for storage in storages])

    def late(sums: list[int]) -> list[FilePiece]:
        headers = [
            FilePiece(entry.header_at, _local_header(entry, crc)) for entry, crc in zip(entries, sums, strict=True)
        ]
        return [*headers, FilePiece(directory_at, _directory(entries, sums, directory_at))]

    pieces = [FilePiece(entry.data_at, content) for entry, content in zip(entries, contents, strict=True)]
    return pieces, late, _total_bytes(entries, directory_at)


def torch_file_bytes(pickle_bytes: int, storage_bytes: Sequence[int]) -> int:
    """How long a file will be, from the lengths alone."""
    return _total_bytes(*_lay_out(pickle_bytes, storage_bytes))


def _lay_out(pickle_bytes: int, storage_bytes: Sequence[int]) -> tuple[list[_Entry], int]:
    """The entries, and where the archive's directory begins."""
    named = [
        ("data.pkl", pickle_bytes),
        ("byteorder", len(sys.byteorder)),
        *((f"data/{number}", length) for number, length in enumerate(storage_bytes)),
        ("version", len(_VERSION)),
    ]
    entries = []
    at = 0
    for name, length in named:
        full_name = f"{ARCHIVE}/{name}".encode()
        data_at = _data_place(at, full_name, length)
        entries.append(_Entry(full_name, length, at, data_at))
        at = data_at + length
    return entries, at


def _total_bytes(entries: Sequence[_Entry], directory_at: int) -> int:
    return directory_at + len(_directory(entries, [0] * len(entries), directory_at))


def _data_place(header_at: int, name: bytes, length: int) -> int:
    """Behind the header, its extra fields and as much filler as the alignment asks for."""
    alignment = PAGE_ALIGNMENT if length >= PAGE_ALIGNED_FROM_BYTES else LINE_ALIGNMENT
    return round_up(header_at + _LOCAL.size + len(name) + len(_sizes_extra(length)) + _EXTRA.size, alignment)


def _sizes_extra(length: int) -> bytes:
    if length < _LIMIT:
        return b""
    return _EXTRA.pack(_ZIP64, 16) + struct.pack("<QQ", length, length)


def _local_header(entry: _Entry, crc: int) -> bytes:
    length = entry.length
    sizes = _sizes_extra(length)
    filler = entry.data_at - entry.header_at - _LOCAL.size - len(entry.name) - len(sizes) - _EXTRA.size
    extra = sizes + _EXTRA.pack(_FILLER, filler) + b"Z" * filler
    short = min(length, _LIMIT)
    version = 45 if sizes else 20
    head = _LOCAL.pack(b"PK\x03\x04", version, 0, 0, 0, _NEW_YEAR_1980, crc, short, short, len(entry.name), len(extra))
    return head + entry.name + extra


def _directory(entries: Sequence[_Entry], sums: Sequence[int], directory_at: int) -> bytes:
    central = b"".join(_central_header(entry, crc) for entry, crc in zip(entries, sums, strict=True))
    count = len(entries)
    end = b""
    if count > 0xFFFE or directory_at + len(central) >= _LIMIT:
        end += _END64.pack(
            b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, len(central), directory_at
        ) + _LOCATOR.pack(b"PK\x06\x07", 0, directory_at + len(central), 1)
    short_count = min(count, 0xFFFF)
    end += _END.pack(
        b"PK\x05\x06", 0, 0, short_count, short_count, min(len(central), _LIMIT), min(directory_at, _LIMIT), 0
    )
    return central + end


def _central_header(entry: _Entry, crc: int) -> bytes:
    length = entry.length
    large = []
    if length >= _LIMIT:
        large += [length, length]
    if entry.header_at >= _LIMIT:
        large.append(entry.header_at)
    extra = _EXTRA.pack(_ZIP64, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large) if large else b""
    version = 45 if large else 20
    short = min(length, _LIMIT)
    return (
        _CENTRAL.pack(
            b"PK\x01\x02",
            version,
            version,
            0,
            0,
            0,
            _NEW_YEAR_1980,
            crc,
            short,
            short,
            len(entry.name),
            len(extra),
            0,
            0,
            0,
            0,
            min(entry.header_at, _LIMIT),
        )
        + entry.name
        + extra
    )
