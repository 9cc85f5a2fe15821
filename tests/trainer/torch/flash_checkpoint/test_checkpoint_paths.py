"""Every checkpointer takes paths as text and as `os.PathLike`, and shows its directory and its storage to scripts of the original."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dlrover.python.common.storage import (  # noqa: E402
    CheckpointStorage,
    KeepLatestStepStrategy,
    PosixDiskStorage,
    PosixStorageWithDeletion,
)
from dlrover.python.elastic_agent.torch.ckpt_saver import (  # noqa: E402
    AsyncCheckpointSaver,
    DeepSpeedCheckpointSaver,
    MegatronCheckpointSaver,
)

from dlrover.trainer.torch.flash_checkpoint.dcp import FlashStorageReader  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpFullCheckpointer, FsdpShardCheckpointer  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.full_ckpt_engine import FullCheckpointEngine  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.megatron import MegatronCheckpointer  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt import MegatronDistCheckpointer  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.megatron_sharded import MegatronShardedCheckpointer  # noqa: E402
from tests.trainer.torch.flash_checkpoint.frameworks.test_deepspeed import StandIn  # noqa: E402

STATE = {"weight": torch.arange(6.0), "step": 4}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(tmp_path / "memory"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_ddp(directory: Path, tmp_path: Path) -> None:
    with closing(DdpCheckpointer(directory)) as checkpointer:
        inside, elsewhere = directory / "4" / "mine.pt", tmp_path / "elsewhere" / "mine.pt"
        for path in (inside, elsewhere):
            assert checkpointer.save_checkpoint(4, STATE, path=path, storage_type=StorageType.DISK)
            assert checkpointer.wait_latest_checkpoint(60)
            assert torch.equal(torch.load(path)["weight"], STATE["weight"]), "it is there when the wait ends"
        for path in (elsewhere, directory / "4"):
            assert checkpointer.load_checkpoint(path)["step"] == 4
            assert checkpointer.load_checkpoint(resume_path=str(path))["step"] == 4


def test_fsdp_in_pieces(directory: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(FsdpShardCheckpointer(directory)) as checkpointer:
        assert checkpointer.save_checkpoint(3, dict(STATE), tmp_path / "old" / "3", StorageType.DISK)
        assert checkpointer.wait_latest_checkpoint(60)
        assert (tmp_path / "old" / "3" / ".metadata").is_file(), "the older call has the path in the optimizer's place"
        with pytest.raises(TypeError, match="by name"):
            checkpointer.save_checkpoint(4, model, directory / "4")
        assert checkpointer.save_checkpoint(4, model, optimizer, {"step": 4}, path=directory / "4")
        assert checkpointer.wait_latest_checkpoint(60)
        assert checkpointer.load_checkpoint(model, optimizer, resume_path=directory / "4") == {"step": 4}
        reader = checkpointer.get_storage_reader(directory / "4")
        assert reader is not None
        assert "step" in reader.read_metadata().state_dict_metadata
        assert "step" in FlashStorageReader(checkpointer, directory / "4").read_metadata().state_dict_metadata


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_fsdp_in_one_file(directory: Path, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(FsdpFullCheckpointer(directory)) as checkpointer:
        assert checkpointer.save_checkpoint(4, model, optimizer, {"step": 4}, path=tmp_path / "whole.pt")
        assert checkpointer.wait_latest_checkpoint(60)
        assert torch.load(tmp_path / "whole.pt")["step"] == 4
        assert checkpointer.load_checkpoint(model, optimizer, tmp_path / "whole.pt") == {"step": 4}


def test_deepspeed(directory: Path) -> None:
    engine = StandIn()
    with closing(DeepSpeedCheckpointer(engine, directory)) as checkpointer:
        assert checkpointer.save_checkpoint(directory, tag=4, client_state={"step": 4})
        assert checkpointer.wait_latest_checkpoint(60)
        assert (directory / DeepSpeedCheckpointSaver.TRACER_FILE).read_text() == "4"
        assert checkpointer.load_checkpoint(directory)[1] is not None
        assert checkpointer.checkpoint_dir == str(directory)
        assert isinstance(checkpointer.storage, PosixDiskStorage)


def test_engines_and_savers_of_the_original(directory: Path) -> None:
    with closing(FullCheckpointEngine(directory, PosixDiskStorage())) as engine:
        file = directory / "4" / "model_states.pt"
        assert engine.save_to_storage(4, {"model_states": STATE}, {"model_states": file})
        assert engine.wait_latest_checkpoint(60)
        assert engine.load(file)["step"] == 4
        assert engine.storage.exists(file)
    with closing(AsyncCheckpointSaver(directory)) as saver:
        assert saver.checkpoint_dir == str(directory)


@pytest.mark.parametrize("kind", [DdpCheckpointer, FsdpShardCheckpointer, FsdpFullCheckpointer])
def test_the_storage_is_the_one_that_was_given_or_one_that_deletes_as_the_strategy_says(
    kind: Any, directory: Path
) -> None:
    with closing(kind(directory)) as checkpointer:
        assert type(checkpointer.storage) is PosixDiskStorage
        checkpointer.storage.safe_makedirs(directory)
        checkpointer.storage.write("here", directory / "note.txt")
        assert checkpointer.storage.read(directory / "note.txt") == "here"
        assert checkpointer.checkpoint_dir == str(directory)
    with closing(kind(str(directory), deletion_strategy=KeepLatestStepStrategy(1, directory))) as checkpointer:
        assert isinstance(checkpointer.storage, PosixStorageWithDeletion)
        for step in (1, 2):
            checkpointer.storage.safe_makedirs(directory / str(step))
            checkpointer.storage.write(str(step), directory / "dlrover_latest.txt")
            checkpointer.storage.commit(step, True)
        assert not (directory / "1").exists()
        assert (directory / "2").exists()
    given = PosixDiskStorage()
    with closing(kind(directory, storage=given)) as checkpointer:
        assert checkpointer.storage is given
    with closing(kind("memory://checkpoints")) as checkpointer:
        assert checkpointer.storage is None, "no storage of this kind knows URLs"


def test_megatron_takes_back_what_megatron_wrote_of_an_iteration_in_memory(directory: Path) -> None:
    with closing(MegatronCheckpointer(directory)) as checkpointer:
        assert checkpointer.checkpoint_dir == str(directory)
        assert isinstance(checkpointer.storage, CheckpointStorage)
        tracker = directory / MegatronCheckpointSaver.TRACER_FILE

        def as_megatron_does(iteration: int) -> Path:
            made = directory / f"iter_{iteration:07d}"
            (made / "mp_rank_00").mkdir(parents=True)
            tracker.write_text(str(iteration))
            return made

        first = as_megatron_does(3)
        checkpointer.update_tracer_file(3)
        assert not first.exists()
        assert not tracker.exists(), "nothing was committed yet"
        assert checkpointer.engine.save(5, {"mp_rank_00/model_optim_rng.pt": STATE}, is_storage=True)
        assert checkpointer.wait_latest_checkpoint(60)
        second = as_megatron_does(7)
        checkpointer.update_tracer_file(7)
        assert not second.exists()
        assert tracker.read_text() == "5"
        checkpointer.update_tracer_file(5)
        assert (directory / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt").is_file(), (
            "a commit is not taken back"
        )
        assert tracker.read_text() == "5"


@pytest.mark.parametrize("kind", [MegatronDistCheckpointer, MegatronShardedCheckpointer])
def test_the_other_megatron_front_ends(kind: Any, directory: Path) -> None:
    with closing(kind(directory)) as checkpointer:
        assert checkpointer.engine.checkpoint_dir == str(directory)
        assert isinstance(checkpointer.engine.storage, PosixDiskStorage)
