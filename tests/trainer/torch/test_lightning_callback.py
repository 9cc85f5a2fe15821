"""`FlashLightningCallback` in the real Trainer: a training that breaks off goes on from its newest checkpoint, to the end of an undisturbed one."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning", reason="needs lightning (extra `frameworks`): `make setup` installs it")
    pytest.importorskip("torchdata", reason="needs torchdata (extra `frameworks`)")
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from torchdata.stateful_dataloader import StatefulDataLoader

    from dlrover.trainer.torch.lightning_callback import FlashLightningCallback

from dlrover.protocol.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_EPOCHS, BATCHES, BROKEN = 3, 5, 7
NUM_STEPS = NUM_EPOCHS * BATCHES


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = torch.nn.Linear(4, 1)
        self.seen: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.seen.append(float(batch[0].sum()))
        loss = torch.nn.functional.mse_loss(self.inner(batch[0]), batch[1])
        self.log("loss", loss)
        self.log("step", float(self.current_epoch))  # how a module names the x axis of its loggers
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


class TwoOptimizers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizers = self.optimizers()
        for each in optimizers:
            each.zero_grad()
        self.manual_backward(loss)
        for each in optimizers:
            each.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam([each], lr=0.1) for each in self.inner.parameters()]


class Breaks(Callback):
    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == BROKEN:
            raise RuntimeError("out of luck")


class Counts(Callback):
    """Another callback with a state."""

    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_start(self, *rest: Any) -> None:
        self.num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]


def train(folder: Path, module: Regression, *callbacks: Callback, fit: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(1)
    records = torch.utils.data.TensorDataset(torch.randn(4 * BATCHES, 4), torch.randn(4 * BATCHES, 1))
    options.setdefault("max_epochs", NUM_EPOCHS)
    trainer = Trainer(
        accelerator="cpu", default_root_dir=folder, callbacks=list(callbacks), log_every_n_steps=1,
        enable_checkpointing=False, logger=False, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, StatefulDataLoader(records, batch_size=4), **(fit or {}))
    return trainer


def is_same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", [Regression, TwoOptimizers])
def test_a_training_that_broke_off_goes_on_in_the_middle_of_an_epoch_and_ends_as_an_undisturbed_one(
    kind: type[Regression], tmp_path: Path
) -> None:
    undisturbed, first, second = kind(), kind(), kind()
    counts = Counts()
    train(tmp_path / "other", undisturbed)
    with pytest.raises(RuntimeError, match="out of luck"):
        train(
            tmp_path / "run", first, FlashLightningCallback(checkpoint_interval=(1, 2), num_slots=3), Counts(), Breaks()
        )
    callback = FlashLightningCallback(checkpoint_interval=(1, 2))
    trainer = train(tmp_path / "run", second, callback, counts)
    per_batch = 2 if kind is TwoOptimizers else 1  # Lightning counts the steps of each optimizer
    assert callback.restored_step in range(1, BROKEN * per_batch + 1)
    num_repeated = BROKEN - callback.restored_step // per_batch
    assert first.seen[: BROKEN - num_repeated] + second.seen == undisturbed.seen, "each batch counts once"
    assert (trainer.global_step, trainer.current_epoch) == (NUM_STEPS * per_batch, NUM_EPOCHS)
    assert is_same(undisturbed, second)
    assert counts.num_batches == NUM_STEPS
    stored = int((tmp_path / "run" / "flash" / "dlrover_latest.txt").read_text())
    assert stored == NUM_STEPS * per_batch
    for one, other in zip(undisturbed.trainer.lr_scheduler_configs, trainer.lr_scheduler_configs, strict=True):
        assert one.scheduler.state_dict() == other.scheduler.state_dict()


def test_a_training_that_ended_with_an_epoch_goes_on_with_the_next_one(tmp_path: Path) -> None:
    undisturbed, first, second = Regression(), Regression(), Regression()
    train(tmp_path / "other", undisturbed)
    train(tmp_path / "run", first, FlashLightningCallback(), max_epochs=1)
    callback = FlashLightningCallback()
    train(tmp_path / "run", second, callback)
    assert callback.restored_step == BATCHES
    assert first.seen + second.seen == undisturbed.seen
    assert is_same(undisturbed, second)


def test_a_finished_training_that_starts_again_stays_as_it_is(tmp_path: Path) -> None:
    finished, again = Regression(), Regression()
    train(tmp_path, finished, FlashLightningCallback())
    written = (tmp_path / "flash" / "dlrover_latest.txt").stat().st_mtime_ns
    assert train(tmp_path, again, FlashLightningCallback()).global_step == NUM_STEPS
    assert again.seen == []
    assert is_same(finished, again)
    assert (tmp_path / "flash" / "dlrover_latest.txt").stat().st_mtime_ns == written


def test_batches_of_accumulated_gradients_count_as_one_step_in_a_named_directory(tmp_path: Path) -> None:
    train(tmp_path / "run", Regression(), FlashLightningCallback(tmp_path / "named"), accumulate_grad_batches=5)
    assert (tmp_path / "named" / "dlrover_latest.txt").read_text() == str(NUM_EPOCHS)
    assert not (tmp_path / "run" / "flash").exists()


def test_a_checkpoint_of_lightning_beside_it_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "theirs.ckpt"
    train(tmp_path, Regression()).save_checkpoint(path)
    with pytest.raises(ConfigError, match=r"ckpt_path='.*theirs\.ckpt'.*load them into the module before fit"):
        train(tmp_path, Regression(), FlashLightningCallback(), fit={"ckpt_path": path, "weights_only": False})


def test_deepspeed_is_refused_with_a_way_out(tmp_path: Path) -> None:
    class DeepSpeedTrainer:
        strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)  # a real one wants devices

    with pytest.raises(ConfigError, match=r"does not save DeepSpeed's state\. Use another strategy"):
        FlashLightningCallback(tmp_path).on_fit_start(DeepSpeedTrainer(), None)
