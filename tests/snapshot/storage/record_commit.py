"""
Saves a few checkpoints for real, to be watched: a step, the same step again, and a newer one with which the old ones go.

    python -m tests.snapshot.storage.record_commit HOME DIRECTORY
"""

from __future__ import annotations

import os
import sys

from dlrover.snapshot.files.direct_io import WriteOptions
from dlrover.snapshot.memory.contents import Contents, FileEntry, encode_contents
from dlrover.snapshot.memory.layout import Layout, StorageEntry
from dlrover.snapshot.memory.segment import SegmentWriter
from dlrover.snapshot.storage.persist import REQUEST, SaveRequest, encode_request, finish, persist, pin_newest, release
from tests.snapshot.conftest import owner_of

SIZES = (1024 * 1024 + 5000, 700)
"""One storage that goes to the disk directly from memory, and one that is put together with the headers."""
SAVES = ((10, "a-1"), (20, "a-2"), (20, "b-1"), (30, "b-2"))


def save(writer: SegmentWriter, directory: str, step: int, attempt: str) -> None:
    request = SaveRequest(
        directory=directory,
        target=str(step),
        step=step,
        attempt=attempt,
        shard=0,
        num_shards=1,
        world_size=1,
        is_storage=True,
        is_writer=True,
        is_committer=True,
        trackers={"latest": str(step)},
        keep_latest=1 if step == 30 else 0,
    )
    layout = Layout((StorageEntry(0, SIZES[0]), StorageEntry(2 * 1024 * 1024, SIZES[1])), ())
    contents = Contents(
        layout=layout,
        files=(FileEntry("model", (0, 1), "sub/model.pt"),),
        pickles={"model": f"pickle of {attempt}".encode()},
        extra={REQUEST: encode_request(request)},
    )
    sections, layout_hash = encode_contents(contents)
    slot = writer.begin(2 * 1024 * 1024 + SIZES[1], 65536)
    assert slot is not None
    for entry in layout.storages:
        slot.data[entry.offset : entry.offset + entry.num_bytes] = bytes([step]) * entry.num_bytes
    name = slot.complete(
        step=step, round_=1, data_length=layout.data_length, layout_hash=layout_hash, sections=sections
    )
    pinned = pin_newest(name.path, name.slot, name.generation)
    assert pinned is not None
    persist(pinned, request, options=WriteOptions(num_threads=1))
    release(pinned)
    finish(request)


if __name__ == "__main__":
    segments = SegmentWriter(sys.argv[1], owner_of(0))
    os.makedirs(sys.argv[2], exist_ok=True)
    for step, attempt in SAVES:
        save(segments, sys.argv[2], step, attempt)
    segments.close()
