"""One evaluation: metrics over the whole input, from one checkpoint, in a session of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dlrover.trainer.tensorflow.estimator.layer.specs import EstimatorSpec

v1 = tf.compat.v1
LOSS = "loss"
GLOBAL_STEP = "global_step"


class _StopAfter(v1.train.SessionRunHook):  # type: ignore[misc, name-defined]
    def __init__(self, steps: int) -> None:
        self._left = steps

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._left -= 1
        if self._left <= 0:
            run_context.request_stop()


def run(
    spec: EstimatorSpec,
    step: Any,
    *,
    checkpoint: str | None,
    steps: int | None,
    hooks: Sequence[Any],
    session_config: Any,
    directory: str,
) -> dict[str, Any]:
    """`checkpoint`: None: the variables as they begin."""
    values, updates = _metrics(spec)
    if LOSS not in values:
        values[LOSS], update = v1.metrics.mean(spec.loss)
        updates.append(update)
    if GLOBAL_STEP in values:
        raise ValueError(f"The name {GLOBAL_STEP} is reserved. Give the metric another name.")
    values[GLOBAL_STEP] = step
    last = v1.train.FinalOpsHook(values)
    all_hooks = [*hooks, last, *([] if steps is None else [_StopAfter(steps)])]
    creator = v1.train.ChiefSessionCreator(
        scaffold=spec.scaffold, config=session_config, checkpoint_filename_with_path=checkpoint
    )
    with v1.train.MonitoredSession(creator, hooks=all_hooks) as session:
        while not session.should_stop():
            session.run(updates)
    result: dict[str, Any] = last.final_ops_values
    _write(directory, result)
    return result


def _metrics(spec: EstimatorSpec) -> tuple[dict[str, Any], list[Any]]:
    values, updates = {}, []
    for name, metric in sorted(spec.eval_metric_ops.items()):
        if isinstance(metric, tuple):
            values[name] = metric[0]
            updates.append(metric[1])
        else:  # a Keras metric: its variables are local to this session
            values[name] = metric.result()
            updates.extend(metric.updates)
            for variable in metric.variables:
                v1.add_to_collection(v1.GraphKeys.LOCAL_VARIABLES, variable)
    return values, updates


def _write(directory: str, result: dict[str, Any]) -> None:
    """For TensorBoard, and for `BestExporter` in the next life of the process."""
    os.makedirs(directory, exist_ok=True)
    summary = v1.Summary()
    for name, value in result.items():
        if name != GLOBAL_STEP and isinstance(value, float | int | np.floating | np.integer):
            summary.value.add(tag=name, simple_value=float(value))
    writer = v1.summary.FileWriterCache.get(directory)
    writer.add_summary(summary, int(result[GLOBAL_STEP]))
    writer.flush()
