"""Pieces of the saving of cut states that need no second process: plans, padding, old files, old names, wrong calls."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dlrover.protocol.errors import ConfigError  # noqa: E402
from dlrover.snapshot.files.dcp_file import ELSEWHERE  # noqa: E402
from dlrover.snapshot.memory.checksum import Corrupt  # noqa: E402
from dlrover.snapshot.storage.manifest import ManifestInvalid  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint import fsdp_engine  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.dcp import (  # noqa: E402
    DirectoryReader,
    FlashStorageReader,
    FlashStorageWriter,
)
from dlrover.trainer.torch.flash_checkpoint.frameworks import dcp_items  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.frameworks.dcp_plan import RankShare, assign, metadata_of  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.frameworks.piece_engine import file_bytes  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer, StorageType  # noqa: E402


@pytest.fixture
def checkpointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(tmp_path / "snapshots"))
    made = FsdpShardCheckpointer(tmp_path / "run")
    yield made
    made.close()


def claim_of(state: dict[str, Any], node: str) -> RankShare:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    plan = planner.create_local_plan()
    items = dcp_items.collect_items(planner, plan, planner.mappings, dcp_items.Serialiser())
    lengths = [file_bytes(item) for item in items]
    return RankShare(plan, lengths, [item.num_bytes for item in items], node)


def test_what_all_ranks_hold_is_written_once_and_kept_once_per_node() -> None:
    state = {f"t{size}": torch.zeros(size) for size in (1000, 900, 800, 700, 10, 1)}
    claims = [claim_of(state, node) for node in ("a", "a", "b", "b")]
    given = assign(claims)
    for position in range(len(state)):
        writers = [rank for rank in range(4) if given[rank].places[position] != ELSEWHERE]
        assert len(writers) == 1
        keepers = [rank for rank in range(4) if given[rank].keep[position]]
        assert sorted(claims[rank].node for rank in keepers) == ["a", "b"]
        assert writers[0] in keepers, "what a rank writes lies in its own memory"
    written = [
        sum(length for length, at in zip(claim.file_bytes, each.places, strict=True) if at != ELSEWHERE)
        for claim, each in zip(claims, given, strict=True)
    ]
    assert max(written) < 2 * min(written), f"the work is not shared: {written}"
    assert [each.ranks_here for each in given] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    metadata = metadata_of(claims, given)
    assert set(metadata.state_dict_metadata) == set(state)
    assert {info.relative_path for info in metadata.storage_data.values()} == {
        f"__{rank}_0.distcp" for rank in range(4)
    }


def test_bytes_keep_their_length_until_they_outgrow_it() -> None:
    serialise = dcp_items.Serialiser()
    first = serialise.content_of("step", 9)
    assert serialise.content_of("step", 9) is first, "the same value is not serialised again"
    for value in (10, 70_000, -1, 1 << 70, True, 0.5, "a text", None, [1, {"a": (2.5,)}]):
        content = serialise.content_of("step", value)
        assert len(content) == len(first)
        loaded = torch.load(io.BytesIO(content), weights_only=False)
        assert (type(loaded), loaded) == (type(value), value)
    longer = serialise.content_of("step", "x" * 3000)
    assert len(longer) > len(first)
    assert torch.load(io.BytesIO(longer)) == "x" * 3000
    assert len(serialise.content_of("step", 1)) == len(first), "and it shrinks again"
    assert serialise.content_of("zero", 0.0) != serialise.content_of("zero", -0.0)


def test_a_single_process_saves_and_restores(checkpointer: FsdpShardCheckpointer, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert checkpointer.save_checkpoint(7, model, optimizer, {"step": 7}, path=str(tmp_path / "elsewhere" / "seven"))
    assert checkpointer.wait_latest_checkpoint(20)
    for path in ("", str(tmp_path / "run" / "7"), str(tmp_path / "elsewhere" / "seven")):
        other = torch.nn.Linear(3, 2)
        other_optimizer = torch.optim.Adam(other.parameters())
        assert checkpointer.load_checkpoint(other, other_optimizer, path) == {"step": 7}
        assert torch.equal(other.weight, model.weight)
        assert torch.equal(other_optimizer.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    weights = torch.nn.Linear(3, 2)
    assert checkpointer.load_checkpoint(weights)["step"] == 7
    assert torch.equal(weights.weight, model.weight)


def write_as_the_original(directory: Path) -> torch.Tensor:
    """Bare bytes one behind the other, and metadata that refers to the original's own class."""
    weight = torch.arange(6.0).reshape(3, 2)
    step = io.BytesIO()
    torch.save(5, step)
    directory.mkdir(parents=True)
    info = fsdp_engine._StorageInfo
    content = weight.numpy().tobytes()
    (directory / "__0_0.distcp").write_bytes(content[:16] + step.getvalue())
    (directory / "__1_0.distcp").write_bytes(content[16:])
    size = torch.Size
    chunks = [ChunkStorageMetadata(size([0, 0]), size([2, 2])), ChunkStorageMetadata(size([2, 0]), size([1, 2]))]
    metadata = Metadata(
        {
            "model.weight": TensorStorageMetadata(TensorProperties(), size([3, 2]), chunks),
            "step": BytesStorageMetadata(),
        },
        planner_data={"model.weight": ("model", "weight"), "step": ("step",)},
        storage_data={
            MetadataIndex("model.weight", [0, 0]): info("__0_0.distcp", 0, 16),
            MetadataIndex("model.weight", [2, 0]): info("__1_0.distcp", 0, 8),
            MetadataIndex("step"): info("__0_0.distcp", 16, len(step.getvalue())),
        },
    )
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return weight


def test_files_of_the_original_are_read(checkpointer: FsdpShardCheckpointer, tmp_path: Path) -> None:
    weight = write_as_the_original(tmp_path / "run" / "5")
    (tmp_path / "run" / "dlrover_latest.txt").write_text("5")
    model = torch.nn.Linear(2, 3, bias=False)
    assert checkpointer.load_checkpoint(model) == {"step": 5}
    assert torch.equal(model.weight, weight)
    assert checkpointer.restored_step == 5
    state = {"model": {"weight": torch.zeros(3, 2)}, "step": 0}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=DirectoryReader(tmp_path / "run" / "5"))
    assert torch.equal(state["model"]["weight"], weight)


def test_names_of_the_original_are_there() -> None:
    assert fsdp_engine.SharedMemoryWriter is FlashStorageWriter
    assert fsdp_engine.SharedMemoryReader is FlashStorageReader
    assert fsdp_engine.FileReader is DirectoryReader
    with pytest.raises(AttributeError):
        _ = fsdp_engine.Nonsense


def test_wrong_calls_are_told(checkpointer: FsdpShardCheckpointer, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    with pytest.raises(FileNotFoundError, match="not a DCP checkpoint"):
        checkpointer.load_checkpoint(model, resume_path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="model"):
        checkpointer.save_checkpoint(1, model, None, {"model": 1})
    with pytest.raises(ValueError, match="storage_type"):
        checkpointer.save_checkpoint(1, model, storage_type="disk")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state dict"):
        checkpointer.save_checkpoint(1, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="by name"):
        checkpointer.save_checkpoint(1, model, "a path")
    with pytest.raises(ConfigError, match="FsdpShardCheckpointer"):
        FlashStorageWriter(str(tmp_path))
    writer = FlashStorageWriter(checkpointer)
    writer.reset(str(tmp_path / "final"))
    with pytest.raises(ConfigError, match="step"):
        writer._step()
    reader = FlashStorageReader(checkpointer)
    assert reader.step is None
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        reader.read_metadata()
    assert checkpointer.get_storage_reader() is None


def test_a_checkpoint_of_another_model_is_not_loaded(checkpointer: FsdpShardCheckpointer) -> None:
    assert checkpointer.save_checkpoint(1, torch.nn.Linear(2, 3), storage_type=StorageType.MEMORY)
    with pytest.raises(ManifestInvalid, match="can be restored on all ranks"):
        checkpointer.load_checkpoint(torch.nn.Linear(5, 3))
    with pytest.raises(ManifestInvalid, match="can be restored on all ranks"):
        checkpointer.load_checkpoint(torch.nn.Sequential(torch.nn.Linear(2, 3)))


def test_metadata_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(Corrupt, match="cannot be read"):
        DirectoryReader(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(Corrupt, match="dict"):
        DirectoryReader(tmp_path)
