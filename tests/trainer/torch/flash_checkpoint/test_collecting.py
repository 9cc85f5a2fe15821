"""What libraries would write is kept: by this thread, below one directory, for the time of a block, and nothing else is touched."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
import torch

safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package (extra `frameworks`)")

from dlrover.trainer.torch.flash_checkpoint.encoding.parts import RawPart  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.encoding.safetensors_part import SafetensorsPart  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.saving.collecting import FileCollector, FilePart  # noqa: E402


@pytest.fixture
def scratch(tmp_path) -> Path:
    place = tmp_path / "scratch"
    place.mkdir()
    return place


def test_objects_are_kept_by_their_path_and_not_written(scratch):
    collector = FileCollector("/nowhere")
    state = {"w": torch.ones(2)}
    with collector.collecting(scratch):
        torch.save(state, str(scratch / "checkpoint-1" / "optimizer.pt"), _use_new_zipfile_serialization=True)
        torch.save(1, scratch / "checkpoint-1" / "deep" / "rng.pth")
        safetensors.save_file({"w": torch.ones(3)}, scratch / "checkpoint-1" / "model.safetensors", {"format": "pt"})
    assert collector.state_dict["checkpoint-1/optimizer.pt"] is state
    assert collector.state_dict["checkpoint-1/deep/rng.pth"] == 1
    part = collector.state_dict["checkpoint-1/model.safetensors"]
    assert isinstance(part, SafetensorsPart)
    assert part.metadata == {"format": "pt"}
    assert not list(scratch.iterdir())


def test_what_is_not_ours_is_written_as_ever(scratch, tmp_path):
    collector = FileCollector("/nowhere")
    buffer = io.BytesIO()
    with collector.collecting(scratch):
        torch.save(1, buffer)
        torch.save(2, tmp_path / "elsewhere.pt")
        torch.save(3, tmp_path / "scratch-of-another.pt")
        safetensors.save_file({"w": torch.ones(1)}, tmp_path / "elsewhere.safetensors")
    assert not collector.state_dict
    assert buffer.tell()
    assert torch.load(tmp_path / "elsewhere.pt") == 2
    assert list(safetensors.load_file(tmp_path / "elsewhere.safetensors")) == ["w"]


def test_other_threads_notice_nothing(scratch):
    collector = FileCollector("/nowhere")
    with collector.collecting(scratch):
        other = threading.Thread(target=torch.save, args=(5, scratch / "theirs.pt"))
        other.start()
        other.join()
    assert not collector.state_dict
    assert torch.load(scratch / "theirs.pt") == 5


def test_two_threads_collect_each_for_itself_and_all_is_put_back_after_the_last(scratch):
    before = (torch.save, safetensors.save_file)
    collectors = [FileCollector("/nowhere") for _ in range(2)]
    is_inside, may_leave = threading.Event(), threading.Event()

    def collect() -> None:
        with collectors[1].collecting(scratch):
            is_inside.set()
            assert may_leave.wait(10)
            torch.save(1, scratch / "one.pt")

    other = threading.Thread(target=collect)
    with collectors[0].collecting(scratch):
        other.start()
        assert is_inside.wait(10)
        torch.save(0, scratch / "zero.pt")
    may_leave.set()
    other.join()
    assert [list(each.state_dict) for each in collectors] == [["zero.pt"], ["one.pt"]]
    assert (torch.save, safetensors.save_file) == before


def test_everything_is_put_back_after_an_error(scratch):
    before = (torch.save, safetensors.save_file)
    collector = FileCollector("/nowhere")

    def fail() -> None:
        with collector.collecting(scratch):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert (torch.save, safetensors.save_file) == before
    assert collector.root == "/nowhere"


def test_real_files_are_taken_as_they_are(scratch):
    (scratch / "checkpoint-1").mkdir()
    (scratch / "checkpoint-1" / "config.json").write_text("{}")
    (scratch / "checkpoint-1" / "large.bin").write_bytes(bytes(range(256)) * 5000)
    collector = FileCollector(scratch)
    collector.add_files()
    small, large = (collector.state_dict[f"checkpoint-1/{name}"] for name in ("config.json", "large.bin"))
    assert isinstance(small, RawPart)
    assert small.content == b"{}"
    assert isinstance(large, FilePart)
    assert bytes(large["content"].numpy()) == bytes(range(256)) * 5000


def test_what_we_cannot_keep_is_left_to_the_library_its_errors_included(scratch):
    collector = FileCollector(scratch)
    with collector.collecting(scratch):
        with pytest.raises(TypeError):
            safetensors.save_file({"w": torch.ones(3)}, scratch / "odd.safetensors", unheard_of=True)
        with pytest.raises(ValueError, match="sparse"):
            safetensors.save_file({"w": torch.eye(3).to_sparse()}, scratch / "sparse.safetensors")
    assert not collector.state_dict
