"""The same job for the coordinator: DeepFM with Keras 3 layers and a loop of its own, on today's TensorFlow."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf
from make_data import CATEGORY_SIZE, HEADER, NUM_CATEGORIES, NUM_DENSE

from dlrover.trainer.tensorflow import FileReader
from dlrover.trainer.tensorflow.coordinator import Program
from dlrover.trainer.tensorflow.util.column_info import Column

_DIRECTORY = os.environ.get("CTR_DIR", ".")
_TYPES = {"l": "int32", "I": "float32", "C": "string"}
NUM_BUCKETS = NUM_CATEGORIES * CATEGORY_SIZE
RATE = 0.05


def build(conf: Any) -> Program:
    """Tables of this size are spread over the parameter servers by the strategy."""
    size = conf.params.embedding_size
    table = tf.Variable(tf.random.stateless_normal([NUM_BUCKETS, size], seed=[1, 2], stddev=0.01), name="embeddings")
    linear = tf.Variable(tf.zeros([NUM_BUCKETS, 1]), name="linear")
    deep = keras.Sequential([keras.layers.Dense(width, activation="relu") for width in (64, 32)])
    deep.add(keras.layers.Dense(1))
    deep.build([None, NUM_DENSE + NUM_CATEGORIES * size])
    parts = [*_parts(table), *_parts(linear), *(variable.value for variable in deep.trainable_variables)]

    def train_step(features: dict[str, Any], label: Any) -> Any:
        dense = tf.stack([features[f"I{n}"] for n in range(1, NUM_DENSE + 1)], axis=1)
        names = tf.stack([features[f"C{n}"] for n in range(1, NUM_CATEGORIES + 1)], axis=1)
        ids = tf.strings.to_hash_bucket_fast(names, NUM_BUCKETS)
        with tf.GradientTape() as tape:
            embedded = tf.nn.embedding_lookup(table, ids)
            first_order = tf.reduce_sum(tf.nn.embedding_lookup(linear, ids), axis=[1, 2])
            summed, squared = tf.reduce_sum(embedded, axis=1), tf.reduce_sum(tf.square(embedded), axis=1)
            second_order = 0.5 * tf.reduce_sum(tf.square(summed) - squared, axis=1)
            hidden = tf.concat([dense, tf.reshape(embedded, [-1, NUM_CATEGORIES * size])], axis=1)
            logits = first_order + second_order + deep(hidden)[:, 0]
            targets = tf.cast(label, tf.float32)
            loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=logits))
        for variable, gradient in zip(parts, tape.gradient(loss, parts), strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))
            elif gradient is not None:
                variable.assign_sub(RATE * gradient)
        return loss

    return Program(train_step, {"embeddings": table, "linear": linear, "deep": deep})


def _parts(variable: Any) -> list[Any]:
    """One for each parameter server that has a part of it."""
    return list(getattr(variable, "variables", [variable]))


class TrainConf:
    build = staticmethod(build)
    model_dir = os.path.join(_DIRECTORY, "coordinated")
    params = {"embedding_size": int(os.environ.get("CTR_EMBEDDING", "16"))}
    save_steps = int(os.environ.get("CTR_SAVE_STEPS", "100"))
    train_set = {
        "reader": FileReader(os.path.join(_DIRECTORY, "train.csv")),
        "columns": [Column.create(name=name, dtype=_TYPES[name[0]], is_label=name == "label") for name in HEADER],
        "epoch": int(os.environ.get("CTR_EPOCHS", "1")),
        "batch_size": int(os.environ.get("CTR_BATCH", "64")),
    }
