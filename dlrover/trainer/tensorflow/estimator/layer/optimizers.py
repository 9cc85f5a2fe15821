"""
The optimizers of canned models: Adagrad and FTRL as Keras 2 had them, with the names of their variables in checkpoints.

Keras 3 has other ones, and those of `tf.compat.v1` begin and divide in other ways: with them a training would go on differently.
"""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

v1 = tf.compat.v1
_FIRST_ACCUMULATOR = 0.1
_EPSILON = 1e-7


class _Optimizer:
    name = ""
    slots: ClassVar[dict[str, float]] = {}
    numbers: ClassVar[dict[str, float]] = {}
    """Beside the rate of learning. They lie in the checkpoint, too."""

    def __init__(self, learning_rate: float) -> None:
        self._rate = learning_rate

    def minimize(self, loss: Any, variables: list[Any]) -> Any:
        """One operation for all."""
        gradients = tf.gradients(loss, variables)
        with v1.variable_scope(f"training/{self.name}", reuse=v1.AUTO_REUSE):
            numbers = {
                name: _variable(name, value) for name, value in {"learning_rate": self._rate, **self.numbers}.items()
            }
        updates = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is None:
                continue
            name = f"training/{self.name}/{variable.op.name}"
            slots = [_variable(f"{name}/{slot}", value, like=variable) for slot, value in self.slots.items()]
            with tf.device(variable.device):
                updates.append(self._apply(variable, slots, gradient, numbers))
        return tf.group(*updates)

    def _apply(self, variable: Any, slots: list[Any], gradient: Any, numbers: dict[str, Any]) -> Any:
        raise NotImplementedError


class Adagrad(_Optimizer):
    name = "Adagrad"
    slots: ClassVar[dict[str, float]] = {"accumulator": _FIRST_ACCUMULATOR}
    numbers: ClassVar[dict[str, float]] = {"decay": 0.0}

    def _apply(self, variable: Any, slots: list[Any], gradient: Any, numbers: dict[str, Any]) -> Any:
        given = {"var": variable.handle, "accum": slots[0].handle, "lr": numbers["learning_rate"], "epsilon": _EPSILON}
        if isinstance(gradient, tf.IndexedSlices):
            values, indices = _summed(gradient)
            return tf.raw_ops.ResourceSparseApplyAdagradV2(grad=values, indices=indices, use_locking=True, **given)
        return tf.raw_ops.ResourceApplyAdagradV2(grad=gradient, use_locking=True, **given)


class Ftrl(_Optimizer):
    name = "Ftrl"
    slots: ClassVar[dict[str, float]] = {"accumulator": _FIRST_ACCUMULATOR, "linear": 0.0}
    numbers: ClassVar[dict[str, float]] = {
        "beta": 0.0, "decay": 0.0, "l1_regularization_strength": 0.0, "l2_regularization_strength": 0.0, "learning_rate_power": -0.5,
    }  # fmt: skip

    def _apply(self, variable: Any, slots: list[Any], gradient: Any, numbers: dict[str, Any]) -> Any:
        rate = numbers["learning_rate"]
        given = {
            "var": variable.handle,
            "accum": slots[0].handle,
            "linear": slots[1].handle,
            "lr": rate,
            "l1": numbers["l1_regularization_strength"],
            "l2": numbers["l2_regularization_strength"] + numbers["beta"] / (2.0 * rate),
            "lr_power": numbers["learning_rate_power"],
        }
        if isinstance(gradient, tf.IndexedSlices):
            values, indices = _summed(gradient)
            return tf.raw_ops.ResourceSparseApplyFtrl(grad=values, indices=indices, use_locking=True, **given)
        return tf.raw_ops.ResourceApplyFtrl(grad=gradient, use_locking=True, **given)


def optimizer_of(given: Any, learning_rate: float) -> Any:
    """What a user gives: a name, an optimizer of `tf.compat.v1`, or a function that makes one. Raises ValueError."""
    if isinstance(given, str):
        match given:
            case "Adagrad":
                return Adagrad(learning_rate)
            case "Ftrl":
                return Ftrl(learning_rate)
            case "Adam":
                return v1.train.AdamOptimizer(learning_rate)
            case "RMSProp":
                return v1.train.RMSPropOptimizer(learning_rate)
            case "SGD":
                return v1.train.GradientDescentOptimizer(learning_rate)
        raise ValueError(
            f"optimizer {given!r}: give Adagrad, Adam, Ftrl, RMSProp or SGD, or one of tf.compat.v1.train."
        )
    made = given() if callable(given) and not isinstance(given, v1.train.Optimizer) else given
    if not isinstance(made, v1.train.Optimizer | _Optimizer):
        raise ValueError(f"optimizer is {type(made).__name__}: give a name, or one of tf.compat.v1.train.")
    return made


def minimize(optimizer: Any, loss: Any, variables: list[Any]) -> Any:
    """Without the global step."""
    if isinstance(optimizer, _Optimizer):
        return optimizer.minimize(loss, variables)
    return optimizer.minimize(loss, var_list=variables)


def _variable(name: str, value: float, like: Any = None) -> Any:
    shape = [] if like is None else like.shape
    with v1.colocate_with(like) if like is not None else tf.name_scope(""):
        return v1.get_variable(
            name, shape, tf.float32, initializer=v1.constant_initializer(value), trainable=False, use_resource=True
        )


def _summed(gradient: Any) -> tuple[Any, Any]:
    """Rows that occur twice count once, with the sum of both."""
    unique, places = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, places, tf.shape(unique)[0]), unique
