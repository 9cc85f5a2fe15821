"""
A model as users of the Estimator have it: feature columns, a partitioned variable, Adam, a metric, and a best export.

`est` is TensorFlow's `tf.estimator` or ours, so that both can train it in one process.
"""

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
NUM_STEPS = 64


def columns():
    column = tf.feature_column
    category = column.categorical_column_with_identity("category", 8)
    place = column.bucketized_column(column.numeric_column("x"), [0.25, 0.5, 0.75])
    return [column.numeric_column("x"), column.indicator_column(category), place]


def input_fn():
    xs = np.linspace(0, 1, 64).astype("float32")
    features = {"x": xs, "category": np.arange(64) % 8}
    labels = (3 * xs + np.arange(64) % 8).astype("float32")
    return tf.data.Dataset.from_tensor_slices((features, labels)).repeat().batch(16)


def evaluation_fn():
    return input_fn().take(4)


def model_fn_of(est):
    def model_fn(features, labels, mode, params):
        inputs = v1.feature_column.input_layer(features, columns())
        with v1.variable_scope("line", partitioner=v1.fixed_size_partitioner(2)):
            weights = v1.get_variable("weights", [13, 1], initializer=v1.constant_initializer(0.1))
        predicted = tf.matmul(inputs, tf.convert_to_tensor(weights))[:, 0]
        if mode == est.ModeKeys.PREDICT:
            return est.EstimatorSpec(mode, predictions={"y": predicted})
        loss = tf.reduce_mean(tf.square(predicted - labels))
        optimizer = v1.train.AdamOptimizer(params["rate"])
        return est.EstimatorSpec(
            mode,
            predictions={"y": predicted},
            loss=loss,
            train_op=optimizer.minimize(loss, global_step=v1.train.get_global_step()),
            eval_metric_ops={"error": v1.metrics.mean(tf.abs(predicted - labels))},
        )

    return model_fn


class Losses(v1.train.SessionRunHook):
    def __init__(self):
        self.found = []

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(v1.get_collection(v1.GraphKeys.LOSSES)[-1])

    def after_run(self, run_context, run_values):
        self.found.append(float(run_values.results))


def receiver_of(est):
    def receiver():
        x = v1.placeholder(tf.float32, [None], name="x")
        category = v1.placeholder(tf.int64, [None], name="category")
        return est.export.ServingInputReceiver({"x": x, "category": category}, {"x": x, "category": category})

    return receiver


def estimator_of(est, model_dir):
    config = est.RunConfig(model_dir=str(model_dir), save_checkpoints_steps=32, tf_random_seed=7)
    return est.Estimator(model_fn_of(est), config=config, params={"rate": 0.05})


def train(est, model_dir, max_steps=NUM_STEPS):
    """Losses by step, the last evaluation, and the directories of the exports."""
    losses = Losses()
    exporter = est.BestExporter("best", receiver_of(est))
    result, exports = est.train_and_evaluate(
        estimator_of(est, model_dir),
        est.TrainSpec(input_fn, max_steps=max_steps, hooks=[losses]),
        est.EvalSpec(evaluation_fn, steps=None, throttle_secs=0, exporters=[exporter]),
    )
    return losses.found, result, exports
