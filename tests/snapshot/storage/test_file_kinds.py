"""What a slot becomes in storage, by the kind of file; DCP items are read back by torch alone."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dlrover.snapshot.copy.copying import Copier  # noqa: E402
from dlrover.snapshot.files.dcp_file import DcpItem, dcp_image, encode_table, next_place  # noqa: E402
from dlrover.snapshot.files.direct_io import image_chunks  # noqa: E402
from dlrover.snapshot.memory.contents import DISTCP, RAW, Contents, FileEntry, decode_contents, encode_contents  # noqa: E402
from dlrover.snapshot.memory.layout import Layout  # noqa: E402
from dlrover.snapshot.memory.segment import Segment, SegmentWriter  # noqa: E402
from dlrover.snapshot.memory.segment_format import Owner, SegmentInvalid  # noqa: E402
from dlrover.snapshot.storage.file_kinds import file_image, write_kind  # noqa: E402
from dlrover.snapshot.storage.storage import LocalStorage  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.parts import RawPart  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.skeleton import make_skeleton  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter, load_state  # noqa: E402


def tensor_item(name: str, tensor: torch.Tensor, storage: int, at: int) -> DcpItem:
    return DcpItem(
        name=name,
        path=(name,),
        prepared=make_skeleton(tensor).content,
        at=at,
        dtype="float32",
        storage=storage,
        num_bytes=tensor.nbytes,
        shape=tuple(tensor.shape),
        offset=(0,) * tensor.dim(),
        global_shape=tuple(tensor.shape),
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().reshape(-1).view("uint8").data)


def test_entries_of_an_older_trainer_are_torch_files() -> None:
    contents = Contents(Layout(), (FileEntry("a", (), "a.pt"),), {"a": b""})
    assert decode_contents(encode_contents(contents)[0]).files[0].kind == "torch"


def test_a_raw_part_becomes_its_bytes_and_comes_back_from_memory(home: Path, owner: Owner, tmp_path: Path) -> None:
    writer, copier = SegmentWriter(home, owner), Copier(1)
    parts = {"config": RawPart(b'{"a": 1}'), "empty": RawPart(b""), "state": {"w": torch.arange(4)}}
    paths = {"config": "config.json", "empty": "nothing", "state": "state.pt"}
    name = StateWriter(writer, copier).save(parts, step=1, paths=paths)
    assert name is not None
    with Segment(name.path, private=True) as segment, segment.pin(name.slot) as pinned:
        contents = decode_contents(pinned.sections())
        for entry in contents.files:
            write_kind(LocalStorage(), str(tmp_path / entry.path), contents, entry, pinned.data)
        restored = load_state(pinned, copier)
    assert (tmp_path / "config.json").read_bytes() == b'{"a": 1}' == restored["config"]
    assert (tmp_path / "nothing").read_bytes() == b"" == restored["empty"]
    assert torch.load(tmp_path / "state.pt")["w"].tolist() == [0, 1, 2, 3] == restored["state"]["w"].tolist()
    writer.close()
    copier.close()


def test_every_item_of_a_dcp_file_is_an_archive_that_torch_reads(tmp_path: Path) -> None:
    tensors = [torch.randn(3, 5), torch.randn(700, 600), torch.randn(()), torch.empty(0, 4)]
    items: list[DcpItem] = []
    end = 0
    for number, tensor in enumerate(tensors):
        items.append(tensor_item(f"t{number}", tensor, number, next_place(end, tensor.nbytes)))
        end = items[-1].at + items[-1].file_bytes
    items.append(DcpItem("note", ("note",), b"some bytes", end))
    items.append(tensor_item("held by us, written by another", tensors[0], 0, -1))
    entry = FileEntry("dcp", (), "__0_0.distcp", DISTCP)
    image = dcp_image(encode_table(items), [bytes_of(tensor) for tensor in tensors])
    written, chunks = image_chunks(*image)
    content = b"".join(chunks)
    assert written.size_bytes == len(content) == end + 10
    for item, tensor in zip(items, tensors, strict=False):
        archive = content[item.at : item.at + item.file_bytes]
        assert torch.equal(torch.load(io.BytesIO(archive), weights_only=True), tensor)
        assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None
    assert content[end:] == b"some bytes"
    assert items[1].at % 4096 == 0, "large tensors lie on pages, for direct I/O"
    contents = Contents(Layout(), (entry,), {"dcp": encode_table(items[4:5])})
    write_kind(LocalStorage(), str(tmp_path / "file"), contents, entry, memoryview(b""))
    assert (tmp_path / "file").read_bytes() == bytes(end) + b"some bytes"


@pytest.mark.parametrize(
    "items",
    [
        [DcpItem("a", ("a",), b"12345", 0), DcpItem("b", ("b",), b"1", 4)],
        [DcpItem("a", ("a",), b"p", 0, "float32", storage=3, num_bytes=4)],
        [DcpItem("a", ("a",), b"p", 0, "float32", storage=0, start=2, num_bytes=4)],
    ],
)
def test_a_table_that_does_not_fit_is_refused(items: list[DcpItem]) -> None:
    with pytest.raises(SegmentInvalid):
        dcp_image(encode_table(items), [memoryview(b"1234")])


def test_damage_and_unknown_kinds_are_named() -> None:
    with pytest.raises(SegmentInvalid, match="cannot be read"):
        dcp_image(b"\xff no table", [])
    entry = FileEntry("a", (), "a", "hologram")
    with pytest.raises(SegmentInvalid, match="hologram"):
        file_image(Contents(Layout(), (entry,), {"a": b""}), entry, memoryview(b""))
    raw = FileEntry("a", (), "a", RAW)
    assert file_image(Contents(Layout(), (raw,), {"a": b"xy"}), raw, memoryview(b"")).total_bytes == 2
