"""`GlobalStepHook`: reports the global step to the node's agent, without an extra run of the session."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dlrover.trainer import progress


class GlobalStepHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    def __init__(self) -> None:
        self._step: Any = None

    def begin(self) -> None:
        self._step = tf.compat.v1.train.get_or_create_global_step()

    def before_run(self, run_context: Any) -> Any:
        return tf.compat.v1.train.SessionRunArgs(self._step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        progress.report(int(run_values.results))
