"""Flipped bits, in memory and in storage: a restore returns one whole step as it was saved, or an error, and never anything else."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.segment import Segment, segment_paths
from dlrover.snapshot.storage.commit import TRACKER
from dlrover.snapshot.storage.persist import persist, pin_newest, read_request, release, sum_slot
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

Make = Callable[[], DdpCheckpointer]
OLD, NEW = 1, 2


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    (tmp_path / "memory").mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(tmp_path / "memory"))
    made: list[DdpCheckpointer] = []

    def build() -> DdpCheckpointer:
        made.append(DdpCheckpointer(tmp_path / "checkpoints"))
        return made[-1]

    yield build
    for checkpointer in made:
        checkpointer.close()


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": torch.randn(500, 33, generator=generator),
        "small": [torch.full((3,), step), torch.tensor(step, dtype=torch.float64)],
        "step": step,
        "note": f"this is step {step}",
    }


def whose(state: dict[str, Any]) -> int:
    """The step that the state is, bit for bit."""
    expected = state_of(state["step"])
    assert list(state) == list(expected)
    assert torch.equal(state["weights"], expected["weights"])
    assert all(torch.equal(one, other) for one, other in zip(state["small"], expected["small"], strict=True))
    assert state["note"] == expected["note"]
    return int(state["step"])


def flip(path: Path | str, place: int, bit: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bit]))


@pytest.mark.parametrize("name", ["rank_0.pt", ".dlrover/manifest.json"])
def test_a_flipped_bit_in_a_file_is_caught_at_the_restore(make: Make, tmp_path: Path, name: str) -> None:
    """Headers, pickle, tensors, padding, the archive's directory: every place counts."""
    checkpointer = make()
    for step in (OLD, NEW):
        assert checkpointer.save_checkpoint(step, state_of(step), on_busy="block")
    checkpointer.close()
    file = tmp_path / "checkpoints" / str(NEW) / name
    dice = random.Random(name)
    size = file.stat().st_size
    places = {0, size - 1, *(dice.randrange(size) for _ in range(40))}
    for place in sorted(places):
        bit = 1 << dice.randrange(8)
        flip(file, place, bit)
        reader = make()
        found = whose(reader.load_checkpoint())
        # The manifest without the name of its checksum is one of the first version, and says the same.
        is_harmless = found == NEW and b'"checksum"' not in file.read_bytes() and name.endswith("manifest.json")
        assert found == OLD or is_harmless, f"{name}, byte {place} of {size}, bit {bit}"
        reader.close()
        flip(file, place, bit)
    assert whose(make().load_checkpoint()) == NEW


def test_flipped_bits_in_the_manifest_never_yield_another_state(make: Make, tmp_path: Path) -> None:
    """All of them: every bit of the file that says what counts."""
    checkpointer = make()
    checkpointer.save_checkpoint(NEW, state_of(NEW))
    checkpointer.close()
    from dlrover.snapshot.storage.manifest import ManifestInvalid, decode_global_manifest

    content = (tmp_path / "checkpoints" / str(NEW) / ".dlrover" / "manifest.json").read_bytes()
    good = decode_global_manifest(content)
    for place in range(len(content)):
        for bit in range(8):
            bad = bytearray(content)
            bad[place] ^= 1 << bit
            try:
                found = decode_global_manifest(bytes(bad))
            except ManifestInvalid:
                continue
            # Only the name of the checksum itself may suffer unnoticed: then there is none, and the rest is as it was.
            assert (found.step, found.attempt, found.ranks, found.data_state) == (
                good.step, good.attempt, good.ranks, good.data_state,
            )  # fmt: skip
            assert not found.checksum


def test_a_flipped_bit_in_memory_is_caught_at_the_restore(make: Make) -> None:
    """Anywhere in what belongs to the newest slot: state word, record, sums, metadata, data."""
    checkpointer = make()
    for step in (OLD, NEW):
        assert checkpointer.save_checkpoint(step, state_of(step), storage_type=StorageType.MEMORY)
    [path] = segment_paths(checkpointer._engine.outlet.home)
    with Segment(path) as segment:
        newest = segment.complete_slots()[-1]
        assert sum_slot(newest)
        pinned = segment.pin(newest.slot)
        assert pinned is not None
        geometry, record = segment.geometry, pinned.record
        pinned.close()
    areas = {
        "state word": (geometry.record_at(newest.slot), 8),
        "record": (geometry.record_at(newest.slot) + 8, 72),
        "metadata": (geometry.meta_at(newest.slot), record.meta_length),
        "data": (geometry.data_at(newest.slot), record.data_length),
    }
    dice = random.Random(3)
    for name, (start, length) in areas.items():
        for _ in range(25):
            place, bit = start + dice.randrange(length), 1 << dice.randrange(8)
            flip(path, place, bit)
            assert whose(checkpointer.load_checkpoint()) == OLD, f"{name}, byte {place - start}, bit {bit}"
            flip(path, place, bit)
    assert whose(checkpointer.load_checkpoint()) == NEW


def test_a_bit_that_flips_in_memory_does_not_become_a_file(make: Make, tmp_path: Path) -> None:
    """What waits to be written, for another save or for a break: it was summed, and is not what it was."""
    checkpointer = make()
    assert checkpointer.save_checkpoint(NEW, state_of(NEW), storage_type=StorageType.MEMORY)
    [path] = segment_paths(checkpointer._engine.outlet.home)
    with Segment(path) as segment:
        [name] = segment.complete_slots()
        data_at = segment.geometry.data_at(name.slot)
    assert sum_slot(name)
    pinned = pin_newest(name.path, name.slot, name.generation)
    assert pinned is not None
    request = read_request(decode_contents(pinned.sections()))
    assert request is not None
    flip(path, data_at + 5000, 4)
    with pytest.raises(Corrupt, match="differ from their checksum"):
        persist(pinned, request)
    assert not list((tmp_path / "checkpoints").iterdir()), "nothing is left of it"
    flip(path, data_at + 5000, 4)
    persist(pinned, request)
    release(pinned)


MANIFEST = f"{NEW}/.dlrover/manifest.json"


@pytest.mark.parametrize(
    ("missing", "content", "expected", "warning"),
    [
        (TRACKER, None, NEW, "dlrover_latest.txt is missing. The newest complete checkpoint is used: step 2"),
        (
            TRACKER,
            "",
            NEW,
            "must contain the number of a step (found b''). Write the step to restore into it. The newest complete",
        ),
        (TRACKER, "\u2028 -7", NEW, "The newest complete checkpoint is used: step 2"),
        (TRACKER, "9" * 5000, NEW, "The newest complete checkpoint is used: step 2"),
        (MANIFEST, None, OLD, "step 2 in {} is incomplete"),
        (MANIFEST, "{ damaged", OLD, "step 2 in {} is incomplete"),
        (str(NEW), None, OLD, "The next older complete checkpoint is used: step 1"),
    ],
)
def test_a_beginning_is_an_empty_directory(
    make: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    missing: str,
    content: str | None,
    expected: int,
    warning: str,
) -> None:
    """Decision 46: a lost tracker or a lost newest checkpoint costs a warning and at most one save, never the training."""
    checkpointer = make()
    assert checkpointer.load_checkpoint() == {}
    assert "checkpoint" not in caplog.text, "nothing is lost where nothing was saved"
    for step in (OLD, NEW):
        assert checkpointer.save_checkpoint(step, state_of(step), on_busy="block")
    checkpointer.close()
    lose(tmp_path / "checkpoints" / missing, content)
    assert whose(make().load_checkpoint()) == expected
    assert warning.format(tmp_path / "checkpoints") in caplog.text


@pytest.mark.parametrize("has_tracker", [True, False])
@pytest.mark.parametrize("content", [None, "{ damaged"])
def test_a_directory_of_damaged_checkpoints_only_is_an_error(
    make: Make, tmp_path: Path, content: str | None, has_tracker: bool
) -> None:
    checkpointer = make()
    checkpointer.save_checkpoint(NEW, state_of(NEW))
    checkpointer.close()
    lose(tmp_path / "checkpoints" / MANIFEST, content)
    if not has_tracker:
        lose(tmp_path / "checkpoints" / TRACKER)
    with pytest.raises(DLRoverError, match=r"are damaged\. The manifest is missing or damaged in: 2"):
        make().load_checkpoint()


def test_checkpoints_of_others_without_a_tracker_are_told(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints" / "5").mkdir(parents=True)
    torch.save(state_of(5), tmp_path / "checkpoints" / "5" / "rank_0.pt")
    assert make().load_checkpoint() == {}
    assert "steps [5], which other software wrote, are not restored" in caplog.text


def lose(path: Path, content: str | None = None) -> None:
    """The file or directory is gone, or holds something else."""
    if path.is_dir():
        shutil.rmtree(path)
    elif content is None:
        path.unlink()
    else:
        path.write_text(content)


def test_when_everything_is_damaged_there_is_an_error_and_no_state(make: Make, tmp_path: Path) -> None:
    checkpointer = make()
    checkpointer.save_checkpoint(NEW, state_of(NEW))
    checkpointer.close()
    file = tmp_path / "checkpoints" / str(NEW) / "rank_0.pt"
    flip(file, file.stat().st_size // 2, 1)
    with pytest.raises(DLRoverError, match="can be restored on all ranks"):
        make().load_checkpoint()
    os.unlink(file)
    with pytest.raises(DLRoverError, match="can be restored on all ranks"):
        make().load_checkpoint()
