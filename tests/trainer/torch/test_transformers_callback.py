"""`FlashCallback` in the real Trainer: a training that breaks off goes on from its newest checkpoint, to the end of an undisturbed one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers", reason="needs transformers (extra `frameworks`)")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from dlrover.trainer.torch.transformers_callback import FlashCallback

from dlrover.protocol.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS, BROKEN = 6, 5


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.inner(inputs), labels)}


class Breaks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if state.global_step == BROKEN:
            raise RuntimeError("out of luck")


def train(folder: Path, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    """Every sample is the same, so the order of the data is no part of the result."""
    samples = [{"inputs": torch.arange(4.0), "labels": torch.ones(1)} for _ in range(8)]
    args = TrainingArguments(
        output_dir=str(folder), max_steps=NUM_STEPS, per_device_train_batch_size=2, learning_rate=0.1, use_cpu=True,
        save_strategy="no", logging_steps=1, report_to=[], disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = Trainer(model=Model(), args=args, train_dataset=samples, callbacks=list(callbacks))
    trainer.train()
    return trainer


def test_a_training_that_broke_off_goes_on_and_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "other")
    first = FlashCallback(checkpoint_interval=(1, 2), num_slots=3)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path / "run", first, Breaks())
    assert first.restored_step is None
    assert first.checkpointer is not None
    assert first.checkpointer.wait(60)
    first.close()
    second = FlashCallback(checkpoint_interval=(1, 2))
    trainer = train(tmp_path / "run", second)
    stored = int((tmp_path / "run" / "flash" / "dlrover_latest.txt").read_text())
    assert second.restored_step in range(1, BROKEN + 1)
    assert (trainer.state.global_step, stored) == (NUM_STEPS, NUM_STEPS)
    for one, other in zip(undisturbed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert trainer.lr_scheduler.state_dict() == undisturbed.lr_scheduler.state_dict()


def test_a_finished_training_that_starts_again_stays_as_it_is(tmp_path: Path) -> None:
    """The Trainer makes a step before it looks whether there is one left."""
    finished = train(tmp_path, FlashCallback())
    weights = [each.detach().clone() for each in finished.model.parameters()]
    for _ in range(2):
        again = train(tmp_path, FlashCallback())
        assert again.state.global_step == NUM_STEPS
        assert all(torch.equal(one, other) for one, other in zip(weights, again.model.parameters(), strict=True))
    assert (tmp_path / "flash" / "dlrover_latest.txt").read_text() == str(NUM_STEPS)


def test_a_number_that_is_logged_may_be_called_step(tmp_path: Path) -> None:
    class Logs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            trainer_callback.on_log(args, state, control, logs={"step": 7, "loss": 1.0})

    trainer_callback = FlashCallback()
    assert train(tmp_path, trainer_callback, Logs()).state.global_step == NUM_STEPS


def test_the_directory_can_be_named(tmp_path: Path) -> None:
    train(tmp_path / "run", FlashCallback(tmp_path / "elsewhere"))
    assert (tmp_path / "elsewhere" / "dlrover_latest.txt").read_text() == str(NUM_STEPS)
    assert not (tmp_path / "run" / "flash").exists()


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_plugin"])
def test_deepspeed_is_refused_with_a_way_out(tmp_path: Path, name: str) -> None:
    """The second is all that there is if accelerate's launcher has set it up."""

    class Arguments:
        pass

    setattr(Arguments, name, "zero1.json")
    with pytest.raises(ConfigError, match="Use FlashCkptTrainer instead of Trainer"):
        FlashCallback(tmp_path).on_train_begin(Arguments(), None, None)
