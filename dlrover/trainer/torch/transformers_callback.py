"""
A callback for the Trainer of transformers, and for the trainers that are built on it.

    trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[FlashCallback("/shared/run7")])
    trainer.train()

Steps and logged numbers are reported, the state is saved when it is due, and a training that starts again goes on from the newest state. The way to
save is that of `dlrover.Checkpointer`; for checkpoints in the format of transformers, and for DeepSpeed, there is `FlashCkptTrainer`.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.progress import report
from dlrover.trainer.torch.checkpointer import Checkpointer


class FlashCallback(TrainerCallback):  # type: ignore[misc]
    """
    What it restores: model, optimizer, schedule and count of steps. The Trainer then reads its data from the beginning of an epoch; with a
    `dlrover.ShardDataset` the data go back with the model. The first loss that it logs after a restore is the sum divided by all steps.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str] = "", **options: Any) -> None:
        """`checkpoint_dir`: by default `flash` in the output directory of the Trainer. `options` are those of `dlrover.Checkpointer`."""
        self._checkpoint_dir, self._options = os.fspath(checkpoint_dir), options
        self.checkpointer: Checkpointer | None = None
        self.restored_step: int | None = None
        """None: there was nothing to restore."""
        self._was_finished = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        if getattr(args, "deepspeed", None) or getattr(
            args, "deepspeed_plugin", None
        ):  # the second: by accelerate's launcher
            raise ConfigError("FlashCallback does not save DeepSpeed's state. Use FlashCkptTrainer instead of Trainer.")
        optimizer = objects["optimizer"]
        self.checkpointer = Checkpointer(
            self._checkpoint_dir or os.path.join(args.output_dir, "flash"),
            model=objects["model"],
            optimizer=getattr(optimizer, "optimizer", optimizer),  # without accelerate's wrapper
            also={"lr_scheduler": objects["lr_scheduler"]},
            **self._options,
        )
        self.restored_step = self.checkpointer.restore()
        if self.restored_step is not None:
            state.global_step = self.restored_step
        self._was_finished = self.restored_step is not None and self.restored_step >= state.max_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        assert self.checkpointer is not None, "the Trainer has begun"
        if self._was_finished:
            return
        report(state.global_step)
        self.checkpointer.save_if_due(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **objects: Any) -> None:
        numbers = {
            name: value for name, value in (logs or {}).items() if isinstance(value, int | float) and name != "step"
        }
        report(state.global_step, **numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The last state goes to storage. The Trainer makes a step of a finished training before it asks: that one is taken back."""
        assert self.checkpointer is not None, "the Trainer has begun"
        if self._was_finished:
            self.checkpointer.restore()
            state.global_step = self.restored_step
            self.close()
            return
        self.checkpointer.save(state.global_step, to="storage", on_busy="block")
        self.checkpointer.wait()
        self.close()

    def close(self) -> None:
        """For a training that raised: end the threads. `on_train_end` does it otherwise."""
        if self.checkpointer is not None:
            self.checkpointer.close()
        self.checkpointer = None
