"""
Reading a checkpoint's file into memory: each byte once, by several threads, and compared with its manifest on the way.

`torch.load` reads one storage after the other and checks nothing. The files are archives whose entries are stored as they are, so
their storages can be read straight to where they shall be: into tensors of the caller where these fit, into fresh ones otherwise. Every byte
of the file passes through the sum, also those between the storages, so what was read is what was written.

A file of another make (compressed, of the other byte order, or no archive at all) is left to `torch.load`.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import os
import struct
import sys
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from dlrover.snapshot.files.direct_io import combine_sums, run_in_threads
from dlrover.snapshot.memory.checksum import Corrupt, crc32
from dlrover.snapshot.memory.layout import plan_state
from dlrover.snapshot.storage.manifest import FileRecord
from dlrover.trainer.torch.flash_checkpoint.encoding.live import fresh_storage, live_storages
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import rebuild
from dlrover.trainer.torch.flash_checkpoint.encoding.tensors import TorchTensors

NUM_READERS = 4
"""More than there are processors here: most of the time a reader waits for the disk."""
PIECE_BYTES = 8 * 1024 * 1024
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")


def read_file(path: str, record: FileRecord | None = None, *, into: object = None) -> Any:
    """
    The state in a file, on the CPU or in the tensors of `into`. Raises Corrupt if it is not what the manifest says, FileNotFoundError, and
    what `torch.load` raises.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        source = _File(fd)
        with open(fd, "rb", closefd=False) as file:
            return _read(source, file, path, record, into)
    finally:
        os.close(fd)


def read_raw(path: str, record: FileRecord) -> bytes:
    """The bytes of a file that is not one of torch's."""
    with open(path, "rb") as file:
        return check_content(file.read(), path, record)


def check_content(content: bytes, path: str, record: FileRecord) -> bytes:
    """Raises Corrupt if they are not what the manifest says."""
    _fetch(_sized(_Content(content), path, record), path, record, [])
    return content


def read_content(content: bytes, path: str, record: FileRecord | None = None, *, into: object = None) -> Any:
    """The same for a file that came over the network."""
    return _read(_Content(content), io.BytesIO(content), path, record, into)


class _Source(Protocol):
    num_bytes: int

    def read_into(self, buffer: Any, offset: int) -> None:
        """Fill the buffer with what stands in the file from there on."""


class _File:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.num_bytes = os.fstat(fd).st_size

    def read_into(self, buffer: Any, offset: int) -> None:
        view = memoryview(buffer).cast("B")
        while view:
            num_read = os.preadv(self._fd, [view], offset)
            if not num_read:
                raise Corrupt("The file is damaged: it ends too early.")
            view, offset = view[num_read:], offset + num_read


class _Content:
    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self.num_bytes = len(content)

    def read_into(self, buffer: Any, offset: int) -> None:
        view = memoryview(buffer).cast("B")
        view[:] = self._content[offset : offset + len(view)]


class _Archive(NamedTuple):
    pickled: bytes
    places: dict[int, tuple[int, int]]
    """By number of the storage: where it stands in the file, and its length."""


class _Range(NamedTuple):
    """A piece of the file and where it goes; address 0: nowhere, it only counts for the sum."""

    offset: int
    num_bytes: int
    address: int


def _read(source: _Source, file: Any, path: str, record: FileRecord | None, into: object) -> Any:
    _sized(source, path, record)
    archive = _open_archive(source, file)
    if archive is None:
        if record is not None:
            _fetch(source, path, record, [])
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False)
    with torch.no_grad():
        return _fill(source, path, record, archive, into)


def _sized(source: _Source, path: str, record: FileRecord | None) -> _Source:
    if record is not None and source.num_bytes != record.size_bytes:
        raise Corrupt(f"{path} is damaged: it has {source.num_bytes} bytes, but its manifest says {record.size_bytes}.")
    return source


def _fill(source: _Source, path: str, record: FileRecord | None, archive: _Archive, into: object) -> Any:
    storages = {number: fresh_storage(num_bytes) for number, (_, num_bytes) in archive.places.items()}
    state = rebuild(archive.pickled, lambda number, num_bytes, location: storages[number])
    staged = {}
    if into is not None and (live := _live(state, storages, into)):
        for number, storage in live.items():
            if storage.device.type != "cpu":
                staged[number] = storages[number]  # a file cannot be read into a device
        storages |= live
        state = rebuild(archive.pickled, lambda number, num_bytes, location: storages[number])
    ranges = [
        _Range(offset, num_bytes, staged.get(number, storages[number]).data_ptr())
        for number, (offset, num_bytes) in archive.places.items()
    ]
    _fetch(source, path, record, ranges)
    for number, staging in staged.items():
        _as_bytes(storages[number]).copy_(_as_bytes(staging))
    return state


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _live(state: object, storages: Mapping[int, torch.UntypedStorage], into: object) -> dict[int, torch.UntypedStorage]:
    """Which storages of the file have a partner among the caller's."""
    adapter = TorchTensors()
    plan = plan_state({"": state}, adapter)
    found = live_storages(plan.layout, {"": into})
    number_of = {storage._cdata: number for number, storage in storages.items()}
    return {
        number_of[identity]: found[planned]
        for identity, planned in plan.numbers.items()
        if planned in found and identity in number_of
    }


def _open_archive(source: _Source, file: Any) -> _Archive | None:
    """None: not a file that could be read piece by piece."""
    try:
        with zipfile.ZipFile(file) as archive:
            by_name = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
            if "data.pkl" not in by_name:
                return None
            order = archive.read(by_name["byteorder"]).decode() if "byteorder" in by_name else "little"
            places = {}
            for name, info in by_name.items():
                number = name.removeprefix("data/")
                if number == name:
                    continue
                if info.compress_type != zipfile.ZIP_STORED or not number.isdecimal():
                    return None
                places[int(number)] = (_data_place(source, info), info.file_size)
            if order != sys.byteorder:
                return None
            return _Archive(archive.read(by_name["data.pkl"]), places)
    except (zipfile.BadZipFile, struct.error, OverflowError) as error:
        if zipfile.is_zipfile(file):
            raise Corrupt(f"The archive cannot be read: {error}.") from error
        return None


def _data_place(source: _Source, info: zipfile.ZipInfo) -> int:
    """Behind the entry's own header, whose filler the archive's directory does not mention."""
    header = bytearray(_LOCAL_HEADER.size)
    source.read_into(header, info.header_offset)
    *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    place: int = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if place + info.file_size > source.num_bytes:
        raise Corrupt(f"The archive is damaged: its entry {info.filename} reaches beyond the end of the file.")
    return place


def _fetch(source: _Source, path: str, record: FileRecord | None, ranges: list[_Range]) -> None:
    """Read the ranges, and all the rest if there is a sum to compare with."""
    pieces = _pieces(ranges, source.num_bytes if record is not None else 0)
    ticket = itertools.count()
    sums: dict[int, tuple[int, int]] = {}

    def read() -> None:
        scratch = bytearray()
        while (index := next(ticket)) < len(pieces):
            offset, num_bytes, address = pieces[index]
            buffer: Any
            if address:
                buffer = (ctypes.c_char * num_bytes).from_address(address)
            else:
                scratch = scratch if len(scratch) == num_bytes else bytearray(num_bytes)
                buffer = scratch
            source.read_into(buffer, offset)
            if record is not None:
                sums[offset] = (crc32(memoryview(buffer)), num_bytes)

    run_in_threads(read, min(NUM_READERS, len(pieces)))
    if record is not None and (found := combine_sums(sums)) != record.crc32:
        raise Corrupt(f"{path} is damaged: its CRC is {found:08x}, but its manifest says {record.crc32:08x}.")


def _pieces(ranges: list[_Range], total_bytes: int) -> list[_Range]:
    """In the order of the file, cut small enough to be shared, with the gaps up to `total_bytes`."""
    pieces = []
    at = 0
    for each in sorted(ranges):
        if total_bytes and each.offset > at:
            pieces.append(_Range(at, each.offset - at, 0))
        pieces.append(each)
        at = each.offset + each.num_bytes
    if total_bytes > at:
        pieces.append(_Range(at, total_bytes - at, 0))
    return [
        _Range(offset + start, min(PIECE_BYTES, num_bytes - start), address and address + start)
        for offset, num_bytes, address in pieces
        for start in range(0, num_bytes, PIECE_BYTES)
    ]
