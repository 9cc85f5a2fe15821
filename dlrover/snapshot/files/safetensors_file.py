"""
Files in the safetensors format, written without the safetensors package and without torch.

Such a file is a length (8 bytes), a JSON header (name to dtype, shape and place), and the tensors' bytes one after the other with nothing between
them. The trainer prepares a table that says where in the slot each tensor lies; here the header is made and the bytes are streamed from
where they are.

The format leaves two things free, and both are used for direct I/O: the header may end in blanks, so the data begins at a page, and tensors may
come in any order, so those of whole pages come first. The others follow by the size of their elements, which keeps every
tensor aligned to its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from dlrover.snapshot.files.direct_io import BLOCK_BYTES, DIRECT_FROM_BYTES, FilePiece, Late
from dlrover.snapshot.memory.segment_format import SegmentInvalid, round_up

DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
}
"""Torch's name of a dtype to the format's, and the bytes of an element. What is not here cannot be in such a file."""
METADATA = "__metadata__"
_LENGTH_BYTES = 8


class TensorPlace(Struct, frozen=True, array_like=True):
    """A contiguous tensor: what it is, and where its bytes are among the storages of the file."""

    name: str
    dtype: str
    """Torch's name."""
    shape: tuple[int, ...]
    storage: int
    offset_bytes: int
    num_bytes: int


class SafetensorsTable(Struct, frozen=True):
    """What a trainer prepares for one file."""

    tensors: tuple[TensorPlace, ...]
    metadata: dict[str, str] = {}


_DECODER = msgspec.msgpack.Decoder(SafetensorsTable)


def encode_table(table: SafetensorsTable) -> bytes:
    return msgspec.msgpack.encode(table)


def decode_table(prepared: bytes) -> SafetensorsTable:
    try:
        return _DECODER.decode(prepared)
    except msgspec.MsgspecError as error:
        raise SegmentInvalid(
            f"A safetensors file in the snapshot is damaged: its table cannot be read: {error}"
        ) from error


def safetensors_image(prepared: bytes, storages: Sequence[memoryview]) -> tuple[list[FilePiece], Late, int]:
    """The pieces of the file, as `write_file` wants them. Nothing of it depends on sums."""
    table = decode_table(prepared)
    ordered = sorted(table.tensors, key=_order)
    header = _header(table.metadata, ordered)
    at = len(header)
    pieces = [FilePiece(0, header)]
    for place in ordered:
        if place.num_bytes:
            pieces.append(FilePiece(at, _bytes_of(place, storages)))
        at += place.num_bytes
    return pieces, lambda sums: [], at


def _order(place: TensorPlace) -> tuple[bool, int, str]:
    is_paged = place.num_bytes >= DIRECT_FROM_BYTES and place.num_bytes % BLOCK_BYTES == 0
    return (not is_paged, -DTYPES[place.dtype][1], place.name)


def _header(metadata: dict[str, str], ordered: Sequence[TensorPlace]) -> bytes:
    entries: dict[str, object] = {METADATA: metadata} if metadata else {}
    at = 0
    for place in ordered:
        end = at + place.num_bytes
        entries[place.name] = {
            "dtype": DTYPES[place.dtype][0],
            "shape": place.shape,
            "data_offsets": (at, end),
        }
        at = end
    text = msgspec.json.encode(entries)
    # Small files are not worth a page of blanks; the format's own writer aligns to 8.
    alignment = BLOCK_BYTES if at >= DIRECT_FROM_BYTES else 8
    length = round_up(_LENGTH_BYTES + len(text), alignment) - _LENGTH_BYTES
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)


def _bytes_of(place: TensorPlace, storages: Sequence[memoryview]) -> memoryview:
    storage = storages[place.storage]
    end = place.offset_bytes + place.num_bytes
    if end > storage.nbytes:
        raise SegmentInvalid(
            f"The table says that {place.name} ends at byte {end} of a storage that has {storage.nbytes}."
        )
    return storage[place.offset_bytes : end]
