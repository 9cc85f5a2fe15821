"""
A callback for the Trainer of Lightning.

    trainer = Trainer(callbacks=[FlashLightningCallback("/shared/run7")], enable_checkpointing=False)
    trainer.fit(module, loader)

Steps and logged numbers are reported, the state is saved when it is due, and a training that starts again goes on from the newest state. The way to
save is that of `dlrover.Checkpointer`. Lightning's `ModelCheckpoint` works beside it.
"""

from __future__ import annotations

import os
from typing import Any

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import DeepSpeedStrategy
except ImportError:  # the same under its older name
    from pytorch_lightning import Callback
    from pytorch_lightning.strategies import DeepSpeedStrategy

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.progress import report
from dlrover.trainer.torch.checkpointer import Checkpointer


class FlashLightningCallback(Callback):  # type: ignore[misc]
    """
    What it restores: model, optimizers, schedules, the progress of Lightning's loops, the precision plugin, the data module, and every other callback
    that has a state. The position in the data comes back with loaders that have a state, such as torchdata's `StatefulDataLoader` or one over a
    `dlrover.ShardDataset`; any other loader begins its epoch again, and Lightning takes only as many batches as the epoch still lacks.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str] = "", **options: Any) -> None:
        """`checkpoint_dir`: by default `flash` in the root directory of the Trainer. `options` are those of `dlrover.Checkpointer`."""
        super().__init__()
        self._checkpoint_dir, self._options = os.fspath(checkpoint_dir), options
        self.checkpointer: Checkpointer | None = None
        self.restored_step: int | None = None
        """None: there was nothing to restore."""
        self._newest_step = 0
        """Of the steps that this training has made or restored."""
        self._stored_step: int | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Model and optimizers have their final form here, and the loops have not begun."""
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ConfigError(
                "FlashLightningCallback does not save DeepSpeed's state. Use another strategy, or DeepSpeedCheckpointer in a loop of your own."
            )
        if not trainer.strategy.restore_checkpoint_after_setup:
            _refuse_ckpt_path(trainer)
        also = _parts_of(trainer, self)
        optimizers = list(trainer.optimizers)
        if len(optimizers) > 1:  # each is a part of its own
            also |= {f"optimizer_{number}": each for number, each in enumerate(optimizers)}
        self.checkpointer = Checkpointer(
            self._checkpoint_dir or os.path.join(trainer.default_root_dir, "flash"),
            model=trainer.strategy.model,
            optimizer=optimizers[0] if len(optimizers) == 1 else None,
            also=also,
            **self._options,
        )
        if self.checkpointer.kind != "plain" and len(optimizers) > 1:
            self.close()
            raise ConfigError(
                f"A sharded model with {len(optimizers)} optimizers cannot be saved. Give the module one optimizer with several groups of parameters."
            )
        self.restored_step = self.checkpointer.restore()
        self._newest_step = trainer.global_step
        self._stored_step = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """No step was made. Strategies that shard a model say only here whether Lightning has loaded a file over it."""
        _refuse_ckpt_path(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        """Not after every batch is there a step: gradients may be accumulated."""
        step = trainer.global_step
        if step == self._newest_step:
            return
        assert self.checkpointer is not None, "the Trainer has begun"
        self._newest_step = step
        is_logged = step % max(trainer.log_every_n_steps, 1) == 0
        report(step, **(_numbers(trainer.callback_metrics) if is_logged else {}))
        self.checkpointer.save_if_due(step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last state goes to storage, except that of a finished training that started again."""
        assert self.checkpointer is not None, "the Trainer has begun"
        if self._newest_step != (self.restored_step or 0):
            self.checkpointer.save(self._newest_step, to="storage", on_busy="block")
            self.checkpointer.wait()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. The Trainer does it, also for a training that raised."""
        if self.checkpointer is not None:
            self.checkpointer.close()
        self.checkpointer = None


def _refuse_ckpt_path(trainer: Any) -> None:
    if trainer.ckpt_path:  # its loops and optimizers are loaded after ours
        raise ConfigError(
            f"Give either FlashLightningCallback or ckpt_path={str(trainer.ckpt_path)!r}: both restore the training. To begin with the weights of "
            "a file, load them into the module before fit."
        )


def _parts_of(trainer: Any, this: Callback) -> dict[str, Any]:
    """Whatever has a state beside model and optimizers, by a name that stays the same."""
    parts: dict[str, Any] = {"fit_loop": _Loops(trainer), "precision": trainer.precision_plugin}
    parts |= {f"scheduler_{number}": each.scheduler for number, each in enumerate(trainer.lr_scheduler_configs)}
    parts |= {each.state_key: each for each in trainer.callbacks if each is not this and each.state_dict()}
    if trainer.datamodule is not None:
        parts["data"] = trainer.datamodule
    return parts


class _Loops:
    """
    How far Lightning's loops are, with the position of the loader. After the last batch of an epoch the loader stands at its end, and would give
    nothing to the next epoch: so that one begins with a loader that has no position.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._trainer.fit_loop.state_dict()
        if self._trainer.is_last_batch:
            state["state_dict"].pop("combined_loader", None)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state)


def _numbers(metrics: Any) -> dict[str, float]:
    """Without `step`, by which Lightning names the x axis of its loggers."""
    return {name: float(value) for name, value in metrics.items() if name != "step"}
