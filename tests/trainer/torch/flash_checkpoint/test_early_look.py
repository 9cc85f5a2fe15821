"""What a restarted trainer finds out about its memory before it is asked to restore."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.memory.segment import Segment, SegmentWriter, SlotName
from dlrover.snapshot.memory.segment_format import Owner
from dlrover.snapshot.storage.persist import sum_slot
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter, load_state
from dlrover.trainer.torch.flash_checkpoint.restoring.early_look import EarlyLook


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[StateWriter]:
    owner = Owner(job="job", launch="a", node_rank=0, global_rank=3, local_rank=1, pid=os.getpid())
    segments, copier = SegmentWriter(tmp_path, owner), Copier(1)
    yield StateWriter(segments, copier)
    segments.close()
    copier.close()


def save(writer: StateWriter, step: int) -> SlotName:
    name = writer.save({"part": {"x": torch.full((300_000,), step)}}, step=step)
    assert name is not None
    return name


@pytest.mark.parametrize("has_sums", [True, False])
def test_the_newest_state_is_ready_and_given_once(tmp_path: Path, writer: StateWriter, has_sums: bool) -> None:
    save(writer, 4)
    newest = save(writer, 5)
    if has_sums:
        assert sum_slot(newest)
    look = EarlyLook(tmp_path, 3)
    segment = look.take(newest)
    assert segment is not None
    with segment:
        pinned = segment.pin(newest.slot, newest.generation)
        assert pinned is not None
        with pinned:
            state = load_state(pinned, writer.copier)["part"]
    assert torch.equal(state["x"], torch.full((300_000,), 5))
    assert look.take(newest) is None


def test_a_damaged_state_is_left_to_the_restore(tmp_path: Path, writer: StateWriter) -> None:
    name = save(writer, 5)
    assert sum_slot(name)
    with Segment(name.path) as segment:
        at = segment.geometry.data_at(name.slot) + 1_000_001
    with open(name.path, "r+b") as file:
        file.seek(at)
        [was] = file.read(1)
        file.seek(at)
        file.write(bytes([was ^ 4]))
    assert EarlyLook(tmp_path, 3).take(name) is None


def test_another_state_than_the_newest_was_not_looked_at(tmp_path: Path, writer: StateWriter) -> None:
    older, _newest = save(writer, 4), save(writer, 5)
    assert EarlyLook(tmp_path, 3).take(older) is None


def test_what_was_overwritten_after_the_look_cannot_be_pinned_any_more(tmp_path: Path, writer: StateWriter) -> None:
    seen = save(writer, 4)
    look = EarlyLook(tmp_path, 3)
    look.wait()
    save(writer, 5)
    assert save(writer, 6).slot == seen.slot  # nothing is held by a look
    segment = look.take(seen)
    assert segment is not None
    with segment:
        assert segment.pin(seen.slot, seen.generation) is None


def test_nothing_is_looked_at_where_there_is_nothing(tmp_path: Path) -> None:
    look = EarlyLook(tmp_path / "none", 0)
    assert look.take(SlotName(1, 1, 0, str(tmp_path / "none"), 0)) is None
    look.close()


def test_an_outgrown_file_is_not_kept_by_a_look_that_was_closed(tmp_path: Path, writer: StateWriter) -> None:
    name = save(writer, 4)
    look = EarlyLook(tmp_path, 3)
    look.wait()
    assert name.path in Path("/proc/self/maps").read_text()
    writer.segments.close()
    look.close()
    look.close()
    assert name.path not in Path("/proc/self/maps").read_text()
