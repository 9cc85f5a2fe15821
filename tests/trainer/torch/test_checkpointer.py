"""`dlrover.Checkpointer` in one process: what it saves, what it refuses, and what the older front ends read of it."""

from __future__ import annotations

import pytest
import torch

import dlrover
from dlrover.protocol.errors import ConfigError
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))


class Trained:
    """A small model with its optimizer and schedule."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(5, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def step(self) -> None:
        self.model(torch.ones(2, 5)).square().sum().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def bits(self) -> list[torch.Tensor]:
        moments = [each for state in self.optimizer.state.values() for each in state.values()]
        return [each.detach().clone() for each in (*self.model.parameters(), *moments)]


@pytest.fixture
def make(tmp_path):
    made = []

    def build(trained: Trained, **options) -> dlrover.Checkpointer:
        options = {"also": [trained.schedule], "optimizer": trained.optimizer, **options}
        made.append(dlrover.Checkpointer(tmp_path / "run", model=trained.model, **options))
        return made[-1]

    yield build
    for each in made:
        each.close()


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_nothing_is_restored_at_the_beginning(make):
    trained = Trained(1)
    before = trained.bits()
    assert make(trained).restore() is None
    assert_same(trained.bits(), before)


def test_model_optimizer_schedule_and_extra_come_back_from_memory(make, tmp_path):
    trained = Trained(1)
    checkpointer = make(trained)
    for _ in range(3):
        trained.step()
    assert checkpointer.save(3, {"best": 0.5, "name": "a"})
    saved, schedule = trained.bits(), trained.schedule.state_dict()
    trained.step()
    assert checkpointer.restore() == 3
    assert checkpointer.extra == {"best": 0.5, "name": "a"}
    assert_same(trained.bits(), saved)
    assert trained.schedule.state_dict() == schedule
    assert not (tmp_path / "run").exists(), "memory is the default"


def test_another_run_goes_on_from_storage_also_without_an_optimizer(make):
    trained = Trained(1)
    trained.step()
    checkpointer = make(trained)
    assert checkpointer.save(1, to="storage")
    assert checkpointer.wait(60)
    checkpointer.close()
    other = Trained(2)
    assert make(other, optimizer=None, also=()).restore() == 1
    assert_same(list(other.model.parameters()), list(trained.model.parameters()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where its compiler is imported
def test_a_compiled_model_has_the_names_of_the_plain_one(make, tmp_path):
    trained = Trained(1)
    checkpointer = dlrover.Checkpointer(tmp_path / "run", model=torch.compile(trained.model))
    assert checkpointer.save(1, to="storage")
    assert checkpointer.wait(60)
    checkpointer.close()
    state = torch.load(tmp_path / "run" / "1" / "rank_0.pt")
    assert sorted(state["model"]) == ["bias", "weight"]
    assert state["step"] == 1


def test_saves_come_by_the_given_rhythm(make):
    trained = Trained(1)
    checkpointer = make(trained, checkpoint_interval=(2, 4))
    results = {step: checkpointer.save_if_due(step, {"step": step}) for step in range(1, 9)}
    assert sum(result is not None for result in results.values()) == 4
    newest = max(step for step, result in results.items() if result)  # one that found no room was skipped
    assert checkpointer.restore() == newest
    assert checkpointer.extra == {"step": newest}


def test_a_checkpoint_of_an_older_front_end_is_told_apart(make, tmp_path):
    older = DdpCheckpointer(tmp_path / "run")
    assert older.save_checkpoint(4, {"weights": torch.ones(2)}, storage_type=StorageType.DISK)
    assert older.wait_latest_checkpoint(60)
    older.close()
    with pytest.raises(ConfigError, match=r"dlrover\.Checkpointer did not save it"):
        make(Trained(1)).restore()


def test_an_object_that_the_checkpoint_does_not_have_is_named(make):
    trained = Trained(1)
    checkpointer = make(trained, also={})
    assert checkpointer.save(1)
    checkpointer._also = {"schedule": trained.schedule}
    with pytest.raises(ConfigError, match="step 1 has no state of schedule"):
        checkpointer.restore()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "fsdp"}, "kind='fsdp' is unknown. Give one of auto, plain, sharded, deepspeed, megatron"),
        ({"also": [3]}, r"`also`: 0 is a int, which lacks state_dict\(\)"),
        ({"checkpoint_interval": 0}, "checkpoint_interval 0 is not valid"),
        ({"replica_count": -1}, "replica_count"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_exists(make, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        make(Trained(1), **options)
    assert not list((tmp_path / "memory").rglob("rank-*"))


def test_a_state_dict_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"`model` is a dict\. Give a torch module"):
        dlrover.Checkpointer(tmp_path, model={"weight": torch.ones(1)})


def test_an_unknown_place_is_refused(make):
    with pytest.raises(ConfigError, match="to='disk' is unknown"):
        make(Trained(1)).save(1, to="disk")
