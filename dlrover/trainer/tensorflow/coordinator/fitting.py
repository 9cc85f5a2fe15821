"""
`fit` of `tf_keras` with the batches of the master.

What `fit` calls for each step schedules a batch of ours in place of one that a worker reads by itself. So epochs, callbacks and metrics are those of
`fit`, and what a lost worker had is trained by another one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from dlrover.trainer.tensorflow.coordinator.program import Program

_WHOLE = -1
"""Steps of an epoch that lasts until the data ends."""


def prepare(program: Program) -> None:
    """In the scope of the strategy. Variables that `fit` would make with its first step are restored like all others."""
    build = getattr(program.model.optimizer, "build", None)
    if build is not None:
        build(program.model.trainable_variables)


def step_of(program: Program) -> Callable[[dict[str, Any], Any], Any]:
    """What one batch does; gives the metrics by name."""

    def train_step(features: dict[str, Any], label: Any) -> Any:
        return program.model.train_step((features if program.inputs is None else program.inputs(features), label))

    return train_step


def fit(
    program: Program,
    batches: Iterator[list[Any]],
    train: Callable[[list[Any]], Any],
    settle: Callable[[], Any],
    step: int,
) -> None:
    """`train` schedules a batch, `settle` waits for all of them; both give the newest metrics. `step`: that the model has made before."""

    following = next(batches, None)
    if following is None:
        return

    def train_function(_iterator: Any) -> Any:
        nonlocal following
        assert following is not None, "fit made a step after it was told to stop"
        metrics = train(following)
        following = next(batches, None)
        if following is None:  # known one batch ahead: no epoch begins that would have none
            program.model.stop_training = True
        return metrics or settle()

    package = importlib.import_module("tf_keras")
    steps_per_epoch = program.fit_options.get("steps_per_epoch") or _WHOLE
    options = {
        "epochs": 1,
        "verbose": 0,
        "initial_epoch": 0 if steps_per_epoch == _WHOLE else step // steps_per_epoch,
        **program.fit_options,
        "steps_per_epoch": steps_per_epoch,
    }
    program.model.make_train_function = lambda force=False: train_function
    unread = package.utils.experimental.DatasetCreator(lambda context: tf.data.Dataset.from_tensors(0).repeat())
    program.model.fit(unread, **options)
