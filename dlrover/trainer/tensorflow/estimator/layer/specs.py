"""What a model function returns, and what training and evaluation are told: names and fields are those that scripts use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class ModeKeys:
    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


class _Spec(NamedTuple):
    mode: str
    predictions: Any
    loss: Any
    train_op: Any
    eval_metric_ops: Any
    export_outputs: Any
    training_chief_hooks: Sequence[Any]
    training_hooks: Sequence[Any]
    scaffold: Any
    evaluation_hooks: Sequence[Any]
    prediction_hooks: Sequence[Any]


class EstimatorSpec(_Spec):
    """The model in one mode."""

    __slots__ = ()

    def __new__(
        cls,
        mode: str,
        predictions: Any = None,
        loss: Any = None,
        train_op: Any = None,
        eval_metric_ops: Any = None,
        export_outputs: Any = None,
        training_chief_hooks: Sequence[Any] | None = None,
        training_hooks: Sequence[Any] | None = None,
        scaffold: Any = None,
        evaluation_hooks: Sequence[Any] | None = None,
        prediction_hooks: Sequence[Any] | None = None,
    ) -> EstimatorSpec:
        """Raises ValueError if the mode needs something that is not given."""
        if mode == ModeKeys.TRAIN and train_op is None:
            raise ValueError("The model function returned no train_op for mode train.")
        if mode in (ModeKeys.TRAIN, ModeKeys.EVAL) and loss is None:
            raise ValueError(f"The model function returned no loss for mode {mode}.")
        if mode == ModeKeys.PREDICT and predictions is None:
            raise ValueError("The model function returned no predictions for mode infer.")
        metrics = dict(eval_metric_ops or {})
        for name, metric in metrics.items():
            if not _is_metric(metric):
                raise ValueError(f"eval_metric_ops[{name!r}] must be (value, update_op) or a Keras metric.")
        return super().__new__(
            cls,
            mode=mode,
            predictions={} if predictions is None else predictions,
            loss=None if loss is None else _as_scalar(loss),
            train_op=train_op,
            eval_metric_ops=metrics,
            export_outputs=_checked_outputs(export_outputs),
            training_chief_hooks=tuple(training_chief_hooks or ()),
            training_hooks=tuple(training_hooks or ()),
            scaffold=scaffold,
            evaluation_hooks=tuple(evaluation_hooks or ()),
            prediction_hooks=tuple(prediction_hooks or ()),
        )

    def _replace(self, **fields: Any) -> EstimatorSpec:
        return EstimatorSpec(**{**self._asdict(), **fields})


def _is_metric(metric: Any) -> bool:
    return hasattr(metric, "update_state") or (isinstance(metric, tuple) and len(metric) == 2)


def _as_scalar(loss: Any) -> Any:
    loss = tf.convert_to_tensor(loss)
    if loss.shape.num_elements() not in (None, 1):
        raise ValueError(f"The loss of a model must be one number; its shape is {loss.shape}.")
    return loss if loss.shape.rank == 0 else tf.reshape(loss, [])


def _checked_outputs(outputs: Any) -> Any:
    if outputs is None:
        return None
    if not isinstance(outputs, dict):
        raise TypeError("export_outputs must be a dictionary.")
    return dict(outputs)


class TrainSpec(NamedTuple):
    """How `train_and_evaluate` trains."""

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[Any] | None = ()
    saving_listeners: Sequence[Any] | None = ()


class _EvalSpec(NamedTuple):
    input_fn: Callable[..., Any]
    steps: int | None
    name: str | None
    hooks: Sequence[Any]
    exporters: Sequence[Any]
    start_delay_secs: float
    throttle_secs: float


class EvalSpec(_EvalSpec):
    """How `train_and_evaluate` evaluates."""

    __slots__ = ()

    def __new__(
        cls,
        input_fn: Callable[..., Any],
        steps: int | None = 100,
        name: str | None = None,
        hooks: Sequence[Any] | None = None,
        exporters: Any = None,
        start_delay_secs: float = 120,
        throttle_secs: float = 600,
    ) -> EvalSpec:
        if steps is not None and steps <= 0:
            raise ValueError(f"EvalSpec needs steps above 0 or None (got {steps}).")
        several = exporters if isinstance(exporters, list | tuple) else () if exporters is None else (exporters,)
        names = [each.name for each in several]
        if len(set(names)) != len(names):
            raise ValueError(f"Two exporters have the same name (names: {names}). Give each a name of its own.")
        return super().__new__(
            cls, input_fn, steps, name, tuple(hooks or ()), tuple(several), start_delay_secs, throttle_secs
        )
