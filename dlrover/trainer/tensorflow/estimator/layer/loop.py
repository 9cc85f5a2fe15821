"""
`train_and_evaluate` without parameter servers of ours: alone on a machine, or as the evaluator of a cluster.

Chiefs and workers of a job never come here: the starter puts `estimator.plain` in its place.
"""

from __future__ import annotations

import os
import time
from typing import Any

import tensorflow as tf

from dlrover.trainer.tensorflow.config import EVALUATOR
from dlrover.trainer.tensorflow.estimator.layer.evaluation import GLOBAL_STEP
from dlrover.trainer.tensorflow.estimator.layer.specs import EvalSpec, TrainSpec

v1 = tf.compat.v1


class _Evaluator:
    """Each checkpoint once."""

    def __init__(self, estimator: Any, train_spec: TrainSpec, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self._max_steps = train_spec.max_steps
        self._seen: str | None = None
        self.result: dict[str, Any] | None = None
        self.exports: list[Any] = []

    def evaluate(self, *, is_final: bool = False) -> bool:
        """False: there is no newer checkpoint."""
        newest = self._estimator.latest_checkpoint()
        if newest is None or newest == self._seen:
            return False
        spec = self._spec
        result = self._estimator.evaluate(
            spec.input_fn, steps=spec.steps, hooks=spec.hooks, checkpoint_path=newest, name=spec.name
        )
        self._seen, self.result = newest, result
        is_final = is_final or (self._max_steps is not None and result[GLOBAL_STEP] >= self._max_steps)
        self.exports = [
            exporter.export(
                self._estimator,
                os.path.join(self._estimator.model_dir, "export", exporter.name),
                newest,
                result,
                is_final,
            )
            for exporter in spec.exporters
        ]
        return True

    @property
    def has_seen_last(self) -> bool:
        return self._max_steps is not None and self.result is not None and self.result[GLOBAL_STEP] >= self._max_steps


class _EvaluateAfterSaves(v1.train.CheckpointSaverListener):  # type: ignore[misc, name-defined]
    """Not after the first save, which is before the first step; and not too often."""

    def __init__(self, evaluator: _Evaluator, throttle: float) -> None:
        self._evaluator, self._throttle = evaluator, throttle
        self._is_first = True
        self._at = -float("inf")

    def after_save(self, session: Any, global_step_value: Any) -> None:
        if not self._is_first and time.monotonic() - self._at >= self._throttle:
            self._evaluator.evaluate()
            self._at = time.monotonic()
        self._is_first = False


def train_and_evaluate(estimator: Any, train_spec: TrainSpec, eval_spec: EvalSpec) -> tuple[Any, Any]:
    """The last evaluation, and what the exporters gave with it."""
    config = estimator.config
    evaluator = _Evaluator(estimator, train_spec, eval_spec)
    if config.task_type == EVALUATOR:
        _evaluate_forever(evaluator, eval_spec)
        return evaluator.result, evaluator.exports
    if config.num_ps_replicas:
        raise ValueError(
            "TF_CONFIG lists parameter servers, but this process runs outside a job. Start it with `dlrover "
            "local --ps N`."
        )
    estimator.train(
        train_spec.input_fn,
        max_steps=train_spec.max_steps,
        hooks=list(train_spec.hooks or ()),
        saving_listeners=[
            *(train_spec.saving_listeners or ()),
            _EvaluateAfterSaves(evaluator, eval_spec.throttle_secs),
        ],
    )
    evaluator.evaluate(is_final=True)
    return evaluator.result, evaluator.exports


def _evaluate_forever(evaluator: _Evaluator, spec: EvalSpec) -> None:
    """Until the last step is seen; without one the job ends this process."""
    time.sleep(spec.start_delay_secs)
    while not evaluator.has_seen_last:
        began_at = time.monotonic()
        evaluator.evaluate()
        if not evaluator.has_seen_last:  # files of another machine tell nobody that they have come
            time.sleep(max(0.0, spec.throttle_secs - (time.monotonic() - began_at)))
