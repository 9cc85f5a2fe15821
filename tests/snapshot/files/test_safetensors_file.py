"""Safetensors files made from a slot: read by the safetensors package, ties and all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package (extra `frameworks`)")

from safetensors import deserialize  # noqa: E402

from dlrover.snapshot.copy.copying import Copier  # noqa: E402
from dlrover.snapshot.files.direct_io import image_chunks  # noqa: E402
from dlrover.snapshot.files.safetensors_file import (  # noqa: E402
    DTYPES,
    SafetensorsTable,
    TensorPlace,
    encode_table,
    safetensors_image,
)
from dlrover.snapshot.memory.contents import decode_contents  # noqa: E402
from dlrover.snapshot.memory.segment import Segment, SegmentWriter  # noqa: E402
from dlrover.snapshot.memory.segment_format import Owner, SegmentInvalid  # noqa: E402
from dlrover.snapshot.storage.file_kinds import write_kind  # noqa: E402
from dlrover.snapshot.storage.storage import LocalStorage  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.safetensors_part import SafetensorsPart  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter  # noqa: E402


def through_a_slot(home: Path, owner: Owner, part: SafetensorsPart, path: Path) -> None:
    writer = StateWriter(SegmentWriter(home, owner), Copier(1))
    name = writer.save({"model": part}, step=1, paths={"model": path.name})
    assert name is not None
    with Segment(name.path) as segment, segment.pin(name.slot) as pinned:
        contents = decode_contents(pinned.sections())
        [entry] = contents.files
        write_kind(LocalStorage(), str(path), contents, entry, pinned.data)


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_every_dtype_and_shape_comes_back(home: Path, owner: Owner, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        f"of.{name}": torch.arange(24).remainder(2).to(getattr(torch, name)).reshape(2, 3, 4) for name in DTYPES
    }
    tensors |= {
        "number": torch.tensor(7.5),
        "nothing": torch.empty(0, 5),
        "large": torch.arange(1 << 19, dtype=torch.float32),
        "also large": torch.arange((1 << 19) + 3, dtype=torch.int16),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "a piece": torch.arange(100.0)[10:20],
    }
    path = tmp_path / "model.safetensors"
    through_a_slot(home, owner, SafetensorsPart(tensors, {"format": "pt"}), path)
    found = safetensors.load_file(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bytes_of(found[name]) == bytes_of(tensor), name
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tied_tensors_are_written_once_and_the_metadata_says_where(home: Path, owner: Owner, tmp_path: Path) -> None:
    """As safetensors does it for a model, and its own loader ties them again."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    path, theirs = tmp_path / "model.safetensors", tmp_path / "theirs.safetensors"
    through_a_slot(home, owner, SafetensorsPart(model.state_dict(), {"format": "pt"}), path)
    safetensors.save_model(model, theirs, {"format": "pt"})
    assert list(safetensors.load_file(path)) == list(safetensors.load_file(theirs)) == ["0.weight"]
    for each in (path, theirs):
        with safetensors.safe_open(each, "pt") as file:
            assert file.metadata() == {"format": "pt", "1.weight": "0.weight"}
    other = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    other[1].weight = other[0].weight
    assert safetensors.load_model(other, path) == (set(), [])
    assert torch.equal(other[1].weight, model[0].weight)


def test_views_that_only_overlap_are_written_out_each(home: Path, owner: Owner, tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    path = tmp_path / "model.safetensors"
    through_a_slot(home, owner, SafetensorsPart({"a": whole[:6], "b": whole[4:]}), path)
    found = safetensors.load_file(path)
    assert torch.equal(found["a"], whole[:6])
    assert torch.equal(found["b"], whole[4:])


@settings(max_examples=40, deadline=None)
@given(some.lists(some.tuples(some.sampled_from(sorted(DTYPES)), some.integers(0, 50)), max_size=8))
def test_the_header_leaves_no_byte_between_tensors(sizes: list[tuple[str, int]]) -> None:
    places, storages = [], []
    for number, (dtype, length) in enumerate(sizes):
        num_bytes = length * DTYPES[dtype][1]
        places.append(TensorPlace(f"t{number}", dtype, (length,), number, 0, num_bytes))
        storages.append(memoryview(bytes([number]) * num_bytes))
    written, chunks = image_chunks(*safetensors_image(encode_table(SafetensorsTable(tuple(places))), storages))
    content = b"".join(chunks)
    assert len(content) == written.size_bytes
    length = int.from_bytes(content[:8], "little")
    assert (8 + length) % 8 == 0
    entries = json.loads(content[8 : 8 + length])
    at = 0
    for entry in sorted(entries.values(), key=lambda entry: entry["data_offsets"]):
        assert entry["data_offsets"][0] == at
        at = entry["data_offsets"][1]
    assert 8 + length + at == len(content)
    assert sorted(name for name, _ in deserialize(content)) == sorted(place.name for place in places)


def test_large_tensors_begin_at_a_page() -> None:
    """So they go to the disk from where they lie."""
    size = 1 << 20
    places = (TensorPlace("a", "uint8", (3,), 0, 0, 3), TensorPlace("b", "float32", (size // 4,), 1, 0, size))
    pieces, _, _ = safetensors_image(
        encode_table(SafetensorsTable(places)), [memoryview(b"abc"), memoryview(bytes(size))]
    )
    [large] = [piece for piece in pieces if len(piece.content) == size]
    assert large.offset % 4096 == 0


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.eye(3).to_sparse(), "plain dense"),
        (torch.zeros(3, dtype=torch.complex128), "complex128"),
        (torch.zeros(3, device="meta"), "meta"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_where_it_can_be_mended(tensor: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SafetensorsPart({"w": tensor})


def test_a_table_that_does_not_fit_its_storages_is_refused() -> None:
    place = TensorPlace("w", "uint8", (5,), 0, 0, 5)
    with pytest.raises(SegmentInvalid, match="w ends at byte 5 of a storage that has 4"):
        safetensors_image(encode_table(SafetensorsTable((place,))), [memoryview(b"abcd")])
    with pytest.raises(SegmentInvalid, match="cannot be read"):
        safetensors_image(b"\xc1", [])
