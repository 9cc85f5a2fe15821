"""Models that users take ready-made: linear, deep, wide and deep. `est` is TensorFlow's `tf.estimator` or ours."""

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
FIRST, SECOND = 4, 28
"""Steps of whoever begins, a multiple of the four batches of the input; and of whoever goes on."""


def input_fn():
    xs = np.linspace(0, 1, 64).astype("float32")
    labels = (np.arange(64) % 3 == 0).astype("int64")
    return tf.data.Dataset.from_tensor_slices(({"x": xs, "c": np.arange(64) % 8}, labels)).repeat().batch(16)


def columns():
    column = tf.feature_column
    x = column.numeric_column("x")
    category = column.categorical_column_with_identity("c", 8)
    return {
        "x": x,
        "category": category,
        "embedding": column.embedding_column(category, 4),
        "indicator": column.indicator_column(category),
        "place": column.bucketized_column(x, [0.3, 0.6]),
    }


def some(*names):
    found = columns()
    return [found[name] for name in names]


KINDS = {
    "linear": lambda est, **rest: est.LinearClassifier(some("x", "category", "place"), **rest),
    "numbers": lambda est, **rest: est.LinearRegressor(some("x", "category"), **rest),
    "deep": lambda est, **rest: est.DNNClassifier([8, 4], some("x", "embedding", "indicator"), **rest),
    "classes": lambda est, **rest: est.DNNClassifier([8], some("x"), n_classes=3, **rest),
    "deep-numbers": lambda est, **rest: est.DNNRegressor([8], some("x", "embedding"), **rest),
    "wide-and-deep": lambda est, **rest: est.DNNLinearCombinedClassifier(
        linear_feature_columns=some("category", "place"),
        dnn_feature_columns=some("x", "embedding"),
        dnn_hidden_units=[8, 4],
        **rest,
    ),
}


class Losses(v1.train.SessionRunHook):
    def __init__(self):
        self.found = []

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(v1.get_collection(v1.GraphKeys.LOSSES)[-1])

    def after_run(self, run_context, run_values):
        self.found.append(float(run_values.results))


def model_of(est, kind, model_dir):
    return KINDS[kind](est, model_dir=str(model_dir), config=est.RunConfig(tf_random_seed=1))


def train(est, kind, model_dir, steps):
    losses = Losses()
    model_of(est, kind, model_dir).train(input_fn, steps=steps, hooks=[losses])
    return losses.found
