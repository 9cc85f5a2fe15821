"""Sums of many snapshots, with segments that stay mapped."""

from __future__ import annotations

from pathlib import Path

from dlrover.snapshot.memory.segment import Segment, SegmentWriter, SlotName
from dlrover.snapshot.memory.segment_format import Owner
from dlrover.snapshot.storage.summing import Summer


def save(writer: SegmentWriter, step: int, size: int = 5000) -> SlotName:
    slot = writer.begin(size, 64)
    assert slot is not None
    with slot:
        slot.data[:size] = bytes([step]) * size
        return slot.complete(step=step, round_=0, data_length=size, layout_hash=b"", sections={})


def is_summed(name: SlotName) -> bool:
    with Segment(name.path) as segment:
        pinned = segment.pin(name.slot, name.generation)
        assert pinned is not None
        with pinned:
            return pinned.verify()


def test_every_state_is_summed_with_one_mapping(tmp_path: Path, owner: Owner) -> None:
    writer, summer = SegmentWriter(tmp_path, owner), Summer()
    names = [save(writer, step) for step in range(3)]
    assert summer.sum(names[0]) is False  # two slots: its bytes are gone
    assert summer.sum(names[1]) is True
    assert summer.sum(names[2]) is True
    assert is_summed(names[1])
    assert is_summed(names[2])
    assert Path("/proc/self/maps").read_text().count(names[2].path) == 2  # the writer's and ours
    summer.close()
    writer.close()
    assert names[2].path not in Path("/proc/self/maps").read_text()


def test_a_replaced_file_is_not_kept_alive(tmp_path: Path, owner: Owner) -> None:
    writer, summer = SegmentWriter(tmp_path, owner), Summer()
    old = save(writer, 1)
    assert summer.sum(old)
    new = save(writer, 2, size=1 << 20)
    assert new.path != old.path
    assert summer.sum(new)
    assert old.path not in Path("/proc/self/maps").read_text()
    assert summer.sum(old) is False
    summer.close()
    writer.close()
