"""Models that users need not write: linear, deep, and both together, for classes or for numbers. Checkpoints are those of TensorFlow 2.15's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dlrover.trainer.tensorflow.estimator.layer.estimator import Estimator
from dlrover.trainer.tensorflow.estimator.layer.heads import ClassHead, Head, NumberHead
from dlrover.trainer.tensorflow.estimator.layer.optimizers import minimize, optimizer_of
from dlrover.trainer.tensorflow.estimator.layer.specs import EstimatorSpec, ModeKeys

v1 = tf.compat.v1
_DNN_RATE = 0.001
_LINEAR_RATE, _LINEAR_RATE_BESIDE_DNN = 0.2, 0.005
_DNN, _LINEAR = "dnn", "linear"
_NOT_SERVED = ("weight_column", "label_vocabulary", "batch_norm")


class _Canned(Estimator):
    """`options` are those that only one of the kinds has, under their historical names."""

    def __init__(
        self,
        head: Head,
        *,
        linear_columns: Sequence[Any] = (),
        dnn_columns: Sequence[Any] = (),
        hidden_units: Sequence[int] = (),
        activation: Callable[[Any], Any] = tf.nn.relu,
        dropout: float | None = None,
        linear_optimizer: Any = "Ftrl",
        dnn_optimizer: Any = "Adagrad",
        sparse_combiner: str = "sum",
        model_dir: Any = None,
        config: Any = None,
        warm_start_from: Any = None,
        **options: Any,
    ) -> None:
        """Raises ValueError."""
        for name, value in options.items():
            if name not in _NOT_SERVED:
                raise TypeError(f"{type(self).__name__} has no argument {name!r}.")
            if value:
                raise ValueError(f"{type(self).__name__} does not have {name}. Write the model as a model_fn.")
        if not linear_columns and not dnn_columns:
            raise ValueError("The model has no feature columns. Give at least one.")
        if dnn_columns and not hidden_units:
            raise ValueError("The deep model has no hidden_units. Give their numbers, for example [64, 32].")

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            logits = []
            if dnn_columns:
                logits.append(
                    _dnn_logits(features, dnn_columns, hidden_units, head.num_logits, activation, dropout, mode)
                )
            if linear_columns:
                logits.append(_linear_logits(features, linear_columns, head.num_logits, sparse_combiner))
            trainers: list[tuple[str, Any]] = []
            if dnn_columns:
                trainers.append((_DNN, optimizer_of(dnn_optimizer, _DNN_RATE)))
            if linear_columns:
                most = _LINEAR_RATE_BESIDE_DNN if dnn_columns else _LINEAR_RATE
                rate = min(most, 1.0 / math.sqrt(len(linear_columns)))
                trainers.append((_LINEAR, optimizer_of(linear_optimizer, rate)))
            return head.spec(
                mode, tf.add_n(logits) if len(logits) > 1 else logits[0], labels, lambda loss: _train_op(loss, trainers)
            )

        super().__init__(model_fn, model_dir=model_dir, config=config, warm_start_from=warm_start_from)


class LinearClassifier(_Canned):
    def __init__(
        self,
        feature_columns: Sequence[Any],
        model_dir: Any = None,
        n_classes: int = 2,
        optimizer: Any = "Ftrl",
        **options: Any,
    ) -> None:
        super().__init__(
            ClassHead(n_classes),
            linear_columns=feature_columns,
            linear_optimizer=optimizer,
            model_dir=model_dir,
            **options,
        )


class LinearRegressor(_Canned):
    def __init__(
        self,
        feature_columns: Sequence[Any],
        model_dir: Any = None,
        label_dimension: int = 1,
        optimizer: Any = "Ftrl",
        **options: Any,
    ) -> None:
        super().__init__(
            NumberHead(label_dimension),
            linear_columns=feature_columns,
            linear_optimizer=optimizer,
            model_dir=model_dir,
            **options,
        )


class DNNClassifier(_Canned):
    def __init__(
        self, hidden_units: Sequence[int], feature_columns: Sequence[Any], model_dir: Any = None, n_classes: int = 2,
        optimizer: Any = "Adagrad", activation_fn: Callable[[Any], Any] = tf.nn.relu, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            ClassHead(n_classes), dnn_columns=feature_columns, hidden_units=hidden_units, dnn_optimizer=optimizer,
            activation=activation_fn, model_dir=model_dir, **options,
        )  # fmt: skip


class DNNRegressor(_Canned):
    def __init__(
        self, hidden_units: Sequence[int], feature_columns: Sequence[Any], model_dir: Any = None, label_dimension: int = 1,
        optimizer: Any = "Adagrad", activation_fn: Callable[[Any], Any] = tf.nn.relu, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            NumberHead(label_dimension), dnn_columns=feature_columns, hidden_units=hidden_units, dnn_optimizer=optimizer,
            activation=activation_fn, model_dir=model_dir, **options,
        )  # fmt: skip


class _Combined(_Canned):
    def __init__(
        self, head: Head, model_dir: Any, linear_feature_columns: Sequence[Any] | None, linear_optimizer: Any,
        dnn_feature_columns: Sequence[Any] | None, dnn_optimizer: Any, dnn_hidden_units: Sequence[int] | None,
        dnn_activation_fn: Callable[[Any], Any], dnn_dropout: float | None, linear_sparse_combiner: str, options: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(
            head, linear_columns=linear_feature_columns or (), linear_optimizer=linear_optimizer, dnn_columns=dnn_feature_columns or (),
            dnn_optimizer=dnn_optimizer, hidden_units=dnn_hidden_units or (), activation=dnn_activation_fn, dropout=dnn_dropout,
            sparse_combiner=linear_sparse_combiner, model_dir=model_dir, **options,
        )  # fmt: skip


class DNNLinearCombinedClassifier(_Combined):
    def __init__(
        self, model_dir: Any = None, linear_feature_columns: Sequence[Any] | None = None, linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: Sequence[Any] | None = None, dnn_optimizer: Any = "Adagrad", dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Callable[[Any], Any] = tf.nn.relu, dnn_dropout: float | None = None, n_classes: int = 2,
        linear_sparse_combiner: str = "sum", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            ClassHead(n_classes), model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer,
            dnn_hidden_units, dnn_activation_fn, dnn_dropout, linear_sparse_combiner, options,
        )  # fmt: skip


class DNNLinearCombinedRegressor(_Combined):
    def __init__(
        self, model_dir: Any = None, linear_feature_columns: Sequence[Any] | None = None, linear_optimizer: Any = "Ftrl",
        dnn_feature_columns: Sequence[Any] | None = None, dnn_optimizer: Any = "Adagrad", dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Callable[[Any], Any] = tf.nn.relu, dnn_dropout: float | None = None, label_dimension: int = 1,
        linear_sparse_combiner: str = "sum", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            NumberHead(label_dimension), model_dir, linear_feature_columns, linear_optimizer, dnn_feature_columns, dnn_optimizer,
            dnn_hidden_units, dnn_activation_fn, dnn_dropout, linear_sparse_combiner, options,
        )  # fmt: skip


def _dnn_logits(
    features: Any,
    columns: Sequence[Any],
    hidden_units: Sequence[int],
    num_logits: int,
    activation: Any,
    dropout: float | None,
    mode: str,
) -> Any:
    with v1.variable_scope(_DNN):
        with v1.variable_scope("input_from_feature_columns"):
            net = v1.feature_column.input_layer(features, columns)
        for number, units in enumerate(hidden_units):
            net = activation(_dense(net, units, f"hiddenlayer_{number}"))
            if dropout and mode == ModeKeys.TRAIN:
                net = tf.nn.dropout(net, rate=dropout)
        return _dense(net, num_logits, "logits")


def _dense(net: Any, units: int, name: str) -> Any:
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [net.shape[-1], units], initializer=v1.glorot_uniform_initializer())
        bias = v1.get_variable("bias", [units], initializer=v1.zeros_initializer())
    return tf.nn.bias_add(tf.matmul(net, kernel), bias)


def _linear_logits(features: Any, columns: Sequence[Any], num_logits: int, combiner: str) -> Any:
    with v1.variable_scope(_LINEAR):
        return v1.feature_column.linear_model(features, columns, units=num_logits, sparse_combiner=combiner)


def _train_op(loss: Any, trainers: list[tuple[str, Any]]) -> Any:
    """Each part by its own optimizer; the global step counts once. The first one counts by it, a second by itself."""
    updates = []
    for number, (scope, optimizer) in enumerate(trainers):
        variables = v1.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES, scope=f"{scope}/")
        updates.append(minimize(optimizer, loss, variables))
        if number:
            name = f"training/{getattr(optimizer, 'name', type(optimizer).__name__)}/iter"
            steps = v1.get_variable(
                name, [], tf.int64, initializer=v1.zeros_initializer(), trainable=False, use_resource=True
            )
            updates.append(steps.assign_add(1))
    with tf.control_dependencies(updates):
        return v1.assign_add(v1.train.get_or_create_global_step(), 1).op
