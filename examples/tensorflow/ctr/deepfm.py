"""DeepFM for click-through rates, as an Estimator: a factorisation machine and a small network on the same embeddings."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf
from make_data import CATEGORY_SIZE, NUM_CATEGORIES, NUM_DENSE

v1 = tf.compat.v1
NUM_BUCKETS = NUM_CATEGORIES * CATEGORY_SIZE


class DeepFM(tf.estimator.Estimator):
    def __init__(self, model_dir: str, config: Any = None, params: dict[str, Any] | None = None) -> None:
        super().__init__(model_fn, model_dir=model_dir, config=config, params=params or {})


def model_fn(features: dict[str, Any], labels: Any, mode: str, params: dict[str, Any], config: Any) -> Any:
    size = params.get("embedding_size", 16)
    num_buckets = params.get("num_buckets", NUM_BUCKETS)
    # One slice of the table on each parameter server.
    partitioner = v1.fixed_size_partitioner(max(1, config.num_ps_replicas))
    with v1.variable_scope("deepfm", partitioner=partitioner):
        table = v1.get_variable(
            "embeddings", [num_buckets, size], initializer=v1.random_normal_initializer(0, 0.01, seed=1)
        )
        linear = v1.get_variable("linear", [num_buckets, 1], initializer=v1.zeros_initializer())
    dense = tf.stack([features[f"I{n}"] for n in range(1, NUM_DENSE + 1)], axis=1)
    ids = tf.stack(
        [tf.strings.to_hash_bucket_fast(features[f"C{n}"], num_buckets) for n in range(1, NUM_CATEGORIES + 1)], axis=1
    )
    embedded = v1.nn.embedding_lookup(table, ids, partition_strategy="div")
    first_order = tf.reduce_sum(v1.nn.embedding_lookup(linear, ids, partition_strategy="div"), axis=[1, 2])
    summed, squared = tf.reduce_sum(embedded, axis=1), tf.reduce_sum(tf.square(embedded), axis=1)
    second_order = 0.5 * tf.reduce_sum(tf.square(summed) - squared, axis=1)
    hidden = tf.concat([dense, tf.reshape(embedded, [-1, NUM_CATEGORIES * size])], axis=1)
    widths = [NUM_DENSE + NUM_CATEGORIES * size, *params.get("hidden", (64, 32)), 1]
    for number, (fan_in, width) in enumerate(itertools.pairwise(widths)):
        weights = v1.get_variable(
            f"dense_{number}/kernel", [fan_in, width], initializer=v1.glorot_uniform_initializer(seed=number)
        )
        bias = v1.get_variable(f"dense_{number}/bias", [width], initializer=v1.zeros_initializer())
        hidden = tf.matmul(hidden, weights) + bias
        if width != 1:
            hidden = tf.nn.relu(hidden)
    logits = first_order + second_order + tf.squeeze(hidden, axis=1)
    probability = tf.sigmoid(logits)
    if mode == tf.estimator.ModeKeys.PREDICT:
        outputs = {"serving_default": tf.estimator.export.PredictOutput({"probability": probability})}
        return tf.estimator.EstimatorSpec(mode, predictions={"probability": probability}, export_outputs=outputs)
    targets = tf.cast(labels, tf.float32)
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=logits))
    if mode == tf.estimator.ModeKeys.EVAL:
        accuracy = v1.metrics.accuracy(targets, tf.round(probability))
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": accuracy})
    optimizer = v1.train.AdagradOptimizer(params.get("learning_rate", 0.05))
    train_op = optimizer.minimize(loss, global_step=v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
