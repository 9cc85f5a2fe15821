"""
A slot as one row of bytes, so that it can be cut into pieces: a head that says what it is, the metadata, the data.

The image of a save is the same wherever and whenever it is made: what a slot gets anew with each copy (its generation, its place in a file) is
not in it. That is what parity rests on, which is computed on one day from the image of a slot and used on another with the image of its copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.memory.mirror import read_transfer
from dlrover.snapshot.memory.segment import PinnedSlot
from dlrover.snapshot.memory.segment_format import Geometry, SlotRecord, Sums, encode_record, encode_sums
from dlrover.snapshot.storage.persist import SaveRequest

_MAX_HEAD_BYTES = 64 * 1024 * 1024


class ImageHead(Struct, frozen=True, kw_only=True):
    shard: int
    attempt: str
    num_slots: int
    meta_bytes: int
    data_bytes: int
    record: bytes
    sums: bytes


class Image:
    """Of a pinned slot; it must stay pinned."""

    def __init__(self, pinned: PinnedSlot, request: SaveRequest) -> None:
        sums = pinned.sums()
        if sums is None:
            raise Corrupt(f"{pinned} has no checksums yet.")
        geometry = pinned.segment.geometry
        head = ImageHead(
            shard=request.shard,
            attempt=request.attempt,
            num_slots=geometry.num_slots,
            meta_bytes=geometry.meta_bytes,
            data_bytes=geometry.data_bytes,
            record=encode_record(replace(pinned.record, generation=0)),
            sums=encode_sums(0, sums),
        )
        body = msgspec.msgpack.encode(head)
        start = geometry.meta_at(pinned.slot)
        self._parts = (
            memoryview(len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body),
            pinned.segment.view[start : start + pinned.record.meta_length],
            pinned.data,
        )
        self.num_bytes = sum(part.nbytes for part in self._parts)

    def read(self, start: int, end: int) -> Iterator[memoryview]:
        """A range of it, in one to three parts, without a copy."""
        offset = 0
        for part in self._parts:
            first, last = max(start - offset, 0), min(end - offset, part.nbytes)
            if first < last:
                yield part[first:last]
            offset += part.nbytes

    def close(self) -> None:
        for part in self._parts:
            part.release()


_DECODER = msgspec.msgpack.Decoder(ImageHead)


def read_head(image: memoryview, shard: int, attempt: str) -> tuple[int, Geometry, SlotRecord, Sums]:
    """Where the metadata begins, and what the slot is like. Raises Corrupt unless it is the image of that shard of that save."""
    length = int.from_bytes(image[:4], "little")
    body = image[8 : 8 + length]
    if length > _MAX_HEAD_BYTES or zlib.crc32(body) != int.from_bytes(image[4:8], "little"):
        raise Corrupt(f"The image of shard {shard} is damaged: its head fails its checksum.")
    try:
        head = _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"The image of shard {shard} is damaged: its head cannot be read: {error}") from error
    if (head.shard, head.attempt) != (shard, attempt):
        raise Corrupt(f"The image of shard {shard} is damaged: its head names shard {head.shard}.")
    geometry = Geometry(num_slots=head.num_slots, meta_bytes=head.meta_bytes, data_bytes=head.data_bytes)
    record, sums = read_transfer(head.record, head.sums, geometry)
    return 8 + length, geometry, record, sums
