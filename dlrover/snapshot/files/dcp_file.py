"""
Files of torch's distributed checkpoint (DCP), written without torch.

Such a file (`__{rank}_0.distcp`) is a sequence of items. A tensor, or a rank's piece of one, is a whole archive as `torch.save` writes it; anything
else is the bytes that it was serialised to. Where each begins and how long it is stands in the checkpoint's `.metadata`, which the
trainer of rank 0 makes; so every item has its place before anything is written.

The table of a rank's items is more than the file needs: it says of every piece which part of which tensor it is, also of pieces that another
rank writes. A restore finds there what it needs, whatever rank it was saved by.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from dlrover.snapshot.files.direct_io import FilePiece, Late
from dlrover.snapshot.files.torch_file import torch_file_bytes, torch_image
from dlrover.snapshot.memory.layout import LINE_ALIGNMENT, PAGE_ALIGNED_FROM_BYTES, PAGE_ALIGNMENT
from dlrover.snapshot.memory.segment_format import SegmentInvalid, round_up

ELSEWHERE = -1
"""Place of an item that another rank writes."""


class DcpItem(Struct, frozen=True, array_like=True):
    """One thing that a rank holds: a tensor, a piece of a tensor, or serialised bytes."""

    name: str
    path: tuple[str | int, ...]
    """Where it belongs in the nested state; `name` is the same in one string."""
    prepared: bytes
    """Of a tensor in a storage the pickle in its archive, else the content itself."""
    at: int = ELSEWHERE
    """In the file."""
    dtype: str = ""
    """Empty for bytes."""
    storage: int = -1
    """Which of the file's storages holds it; -1: `prepared` is all there is, also of tensors that only their own pickle can describe."""
    start: int = 0
    """In bytes, in that storage."""
    num_bytes: int = 0
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    """Where the piece begins in the whole tensor."""
    global_shape: tuple[int, ...] = ()

    @property
    def is_tensor(self) -> bool:
        return bool(self.dtype)

    @property
    def is_in_storage(self) -> bool:
        return self.storage >= 0

    @property
    def file_bytes(self) -> int:
        """Length in the file."""
        return torch_file_bytes(len(self.prepared), [self.num_bytes]) if self.is_in_storage else len(self.prepared)


def next_place(end: int, num_bytes: int) -> int:
    """Where an item with that many bytes may begin, behind another: large tensors so that their bytes lie on whole pages."""
    return round_up(end, PAGE_ALIGNMENT if num_bytes >= PAGE_ALIGNED_FROM_BYTES else LINE_ALIGNMENT)


_DECODER = msgspec.msgpack.Decoder(list[DcpItem])


def encode_table(items: Sequence[DcpItem]) -> bytes:
    return msgspec.msgpack.encode(items)


def decode_table(content: bytes) -> list[DcpItem]:
    try:
        return _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise SegmentInvalid(
            f"A DCP file in the snapshot is damaged: its tensor table cannot be read: {error}"
        ) from error


def item_bytes(item: DcpItem, storages: Sequence[memoryview]) -> memoryview:
    """The tensor's bytes where they lie."""
    try:
        found = storages[item.storage][item.start : item.start + item.num_bytes]
    except IndexError:
        found = memoryview(b"")
    if found.nbytes != item.num_bytes:
        raise SegmentInvalid(
            f"A DCP file in the snapshot is damaged: its tensor table places {item.name} outside its storage."
        )
    return found


def dcp_image(table: bytes, storages: Sequence[memoryview]) -> tuple[list[FilePiece], Late, int]:
    """The file of one rank: the items that it writes, each at its place."""
    pieces: list[FilePiece] = []
    archives: list[tuple[int, int, int, Late]] = []
    """Of each tensor: which pieces are its own, where it begins, and what follows from their sums."""
    end = 0
    for item in sorted((item for item in decode_table(table) if item.at != ELSEWHERE), key=lambda item: item.at):
        if item.at < end:
            raise SegmentInvalid(
                f"A DCP file in the snapshot is damaged: its tensor table places {item.name} over the item before it."
            )
        first = len(pieces)
        if item.is_in_storage:
            own, late, length = torch_image(item.prepared, [item_bytes(item, storages)])
            pieces += [FilePiece(item.at + offset, content) for offset, content in own]
            archives.append((first, len(pieces), item.at, late))
        else:
            length = len(item.prepared)
            pieces.append(FilePiece(item.at, item.prepared))
        end = item.at + length

    def late_pieces(sums: list[int]) -> list[FilePiece]:
        return [
            FilePiece(at + offset, content)
            for first, last, at, late in archives
            for offset, content in late(sums[first:last])
        ]

    return pieces, late_pieces, end
