"""
The bytes of a segment, and nothing else: no file, no lock, no clock.

A segment is one file per rank. It describes itself, so that an agent or a trainer that starts later can use it without a question to another process:

    prelude      one page: magic, version, geometry, boot, owner, checksum; written once, before the file gets its name
    records      256 bytes per slot: a state word, then what the slot holds, then a checksum of that
    sums         per slot: checksums of its data, written by the agent
    metadata     per slot: named sections (tensor table, skeletons); opaque here
    data         per slot: tensors, aligned for direct I/O

Everything is little-endian. The state word holds the state in its lowest byte and the generation above it; it is stored in one piece.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.memory.checksum import CHUNK_BYTES, Algorithm

MAGIC = b"DLRSEGM\x00"
FORMAT_VERSION = 1
PAGE_BYTES = 4096
RECORD_BYTES = 256
MAX_SLOTS = 8

_PRELUDE = struct.Struct("<8sIIQQQQ16sI")
_BODY = struct.Struct("<QqqdQQII16s")
_SUMS = struct.Struct("<QIII")
_U32 = struct.Struct("<I")


class SegmentInvalid(DLRoverError):
    """The file is not a segment that this version, on this boot of the machine, can use."""


class SlotState(enum.IntEnum):
    EMPTY = 0
    WRITING = 1
    """A trainer copies into it, or died while it did; the lock on the slot tells which."""
    COMPLETE = 2


class Owner(Struct, frozen=True, kw_only=True):
    """Whose state the segment holds."""

    job: str
    launch: str
    """One start of the job on this node; a later start with the same name is another owner."""
    node_rank: int
    global_rank: int
    local_rank: int
    pid: int
    """Of the trainer that created the file, for messages only."""


_OWNER_DECODER = msgspec.msgpack.Decoder(Owner)


class Geometry(Struct, frozen=True, kw_only=True):
    """Sizes that fix where everything is."""

    num_slots: int
    meta_bytes: int
    """Room for metadata, per slot."""
    data_bytes: int
    """Room for tensors, per slot."""

    @property
    def sums_bytes(self) -> int:
        num_chunks = -(-self.data_bytes // CHUNK_BYTES)
        return round_up(_SUMS.size + 4 * num_chunks + _U32.size, PAGE_BYTES)

    @property
    def total_bytes(self) -> int:
        return self.data_at(self.num_slots)

    def record_at(self, slot: int) -> int:
        return PAGE_BYTES + slot * RECORD_BYTES

    def sums_at(self, slot: int) -> int:
        return 2 * PAGE_BYTES + slot * self.sums_bytes

    def meta_at(self, slot: int) -> int:
        return self.sums_at(self.num_slots) + slot * self.meta_bytes

    def data_at(self, slot: int) -> int:
        return self.meta_at(self.num_slots) + slot * self.data_bytes


def geometry_for(num_slots: int, meta_bytes: int, data_bytes: int) -> Geometry:
    """With whole pages, so that each part can be advised, populated and written directly."""
    assert 1 <= num_slots <= MAX_SLOTS, f"a segment has 1 to {MAX_SLOTS} slots, not {num_slots}"
    return Geometry(
        num_slots=num_slots,
        meta_bytes=round_up(max(1, meta_bytes), PAGE_BYTES),
        data_bytes=round_up(max(1, data_bytes), PAGE_BYTES),
    )


class Prelude(Struct, frozen=True, kw_only=True):
    geometry: Geometry
    sequence: int
    """Counts the files of one rank: a layout that outgrows its file gets a new one with the next number."""
    boot_id: bytes
    owner: Owner


def encode_prelude(prelude: Prelude) -> bytes:
    owner = msgspec.msgpack.encode(prelude.owner)
    geometry = prelude.geometry
    head = _PRELUDE.pack(
        MAGIC,
        FORMAT_VERSION,
        geometry.num_slots,
        geometry.meta_bytes,
        geometry.data_bytes,
        geometry.total_bytes,
        prelude.sequence,
        prelude.boot_id,
        len(owner),
    )
    page = head + owner
    page += _U32.pack(zlib.crc32(page))
    if len(page) > PAGE_BYTES:
        raise SegmentInvalid(
            f"The job's name is too long for a segment: {len(page)} bytes of {PAGE_BYTES}. Use a shorter one."
        )
    return page.ljust(PAGE_BYTES, b"\0")


def decode_prelude(page: bytes, file_bytes: int, boot_id: bytes | None) -> Prelude:
    """`boot_id` None accepts a segment of any boot: to look at it, not to use it."""
    if len(page) < PAGE_BYTES or not page.startswith(MAGIC):
        raise SegmentInvalid("it does not begin like a segment")
    fields = _PRELUDE.unpack_from(page)
    _, version, num_slots, meta_bytes, data_bytes, total_bytes, sequence, boot, owner_length = fields
    if version != FORMAT_VERSION:
        raise SegmentInvalid(f"it has format version {version}, and this dlrover reads version {FORMAT_VERSION}")
    end = _PRELUDE.size + owner_length
    if end + _U32.size > PAGE_BYTES or _U32.unpack_from(page, end)[0] != zlib.crc32(page[:end]):
        raise SegmentInvalid("its first page is damaged")
    if boot_id is not None and boot != boot_id:
        raise SegmentInvalid("it is older than the machine's last start, and its content may be lost")
    geometry = Geometry(num_slots=num_slots, meta_bytes=meta_bytes, data_bytes=data_bytes)
    if not 1 <= num_slots <= MAX_SLOTS or geometry.total_bytes != total_bytes or file_bytes != total_bytes:
        raise SegmentInvalid(f"it should have {total_bytes} bytes and has {file_bytes}")
    try:
        owner = _OWNER_DECODER.decode(page[_PRELUDE.size : end])
    except msgspec.ValidationError as error:
        raise SegmentInvalid(f"its owner cannot be read: {error}") from error
    return Prelude(geometry=geometry, sequence=sequence, boot_id=boot, owner=owner)


class SlotRecord(Struct, frozen=True, kw_only=True):
    """What a complete slot holds."""

    generation: int
    """Grows with every save of a rank, whatever the step and across files: the newest complete slot has the highest."""
    step: int
    """Of the training; 0 is a step like any other."""
    round: int
    saved_at: float
    """Wall clock, for people."""
    meta_length: int
    data_length: int
    meta_crc: int
    pid: int
    layout_hash: bytes
    """Equal for equal tables of tensors: a reader may keep what it derived from the last one."""


def encode_record(record: SlotRecord) -> bytes:
    """Without the state word, which is stored after it and alone."""
    body = _BODY.pack(
        record.generation,
        record.step,
        record.round,
        record.saved_at,
        record.meta_length,
        record.data_length,
        record.meta_crc,
        record.pid,
        record.layout_hash,
    )
    return body + _U32.pack(zlib.crc32(body))


def decode_record(word: int, body: bytes, geometry: Geometry) -> SlotRecord | None:
    """None unless the word says COMPLETE and the body belongs to it, whole."""
    state, generation = split_word(word)
    if state is not SlotState.COMPLETE:
        return None
    if _U32.unpack_from(body, _BODY.size)[0] != zlib.crc32(body[: _BODY.size]):
        return None
    record = SlotRecord(**dict(zip(SlotRecord.__struct_fields__, _BODY.unpack_from(body), strict=True)))
    fits = record.meta_length <= geometry.meta_bytes and record.data_length <= geometry.data_bytes
    return record if fits and record.generation == generation else None


def make_word(state: SlotState, generation: int) -> int:
    return generation << 8 | state


def split_word(word: int) -> tuple[SlotState, int]:
    """A word that was never written counts as EMPTY."""
    try:
        return SlotState(word & 0xFF), word >> 8
    except ValueError:
        return SlotState.EMPTY, word >> 8


class Sums(Struct, frozen=True):
    """Checksums of a slot's data, one per chunk."""

    algorithm: Algorithm
    values: tuple[int, ...]


def encode_sums(generation: int, sums: Sums) -> bytes:
    values = struct.pack(f"<{len(sums.values)}I", *sums.values)
    head = _SUMS.pack(generation, sums.algorithm, len(sums.values), CHUNK_BYTES)
    return head + values + _U32.pack(zlib.crc32(head + values))


def decode_sums(area: bytes, generation: int) -> Sums | None:
    """None when there are none for this generation (yet)."""
    was_for, algorithm, count, chunk_bytes = _SUMS.unpack_from(area)
    end = _SUMS.size + 4 * count
    if was_for != generation or chunk_bytes != CHUNK_BYTES or end + _U32.size > len(area):
        return None
    if _U32.unpack_from(area, end)[0] != zlib.crc32(area[:end]):
        return None
    if algorithm not in list(Algorithm):
        return None  # another version's: it has no sums that we could check
    return Sums(Algorithm(algorithm), struct.unpack_from(f"<{count}I", area, _SUMS.size))


def encode_sections(sections: Mapping[str, bytes]) -> bytes:
    """Named byte strings, one after the other, behind a list of names and lengths."""
    head = msgspec.msgpack.encode([(name, len(section)) for name, section in sections.items()])
    return _U32.pack(len(head)) + head + b"".join(sections.values())


def decode_sections(area: bytes) -> dict[str, bytes]:
    (head_length,) = _U32.unpack_from(area)
    start = _U32.size + head_length
    names = msgspec.msgpack.decode(area[_U32.size : start], type=list[tuple[str, int]])
    sections = {}
    for name, length in names:
        sections[name] = area[start : start + length]
        start += length
    return sections


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
