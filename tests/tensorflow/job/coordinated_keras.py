"""A line fitted by Keras 3 or by `tf_keras`, with its optimizer, as a program of the coordinator."""

import importlib
import json
import os

import tensorflow as tf
from paced_reader import DIRECTORY, PacedReader

from dlrover.trainer.tensorflow.coordinator import Program
from dlrover.trainer.tensorflow.util.column_info import Column

PACKAGE = os.environ["COORDINATED_KERAS"]


def point(number):
    """Of y = 3x + 1."""
    return f"{number % 10 / 10},{3 * (number % 10) / 10 + 1}"


def epochs_into_file(keras):
    """A callback of a user: the numbers of each epoch that `fit` has ended."""

    def told(epoch, logs):
        with open(os.path.join(DIRECTORY, "epochs.jsonl"), "a") as file:
            file.write(json.dumps({"epoch": epoch, **{name: float(value) for name, value in logs.items()}}) + "\n")

    return keras.callbacks.LambdaCallback(on_epoch_end=told)


def build(conf):
    keras = importlib.import_module(PACKAGE)
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
    model.build([None, 1])
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)

    if os.environ.get("COORDINATED_FIT"):
        model.compile(optimizer, loss="mse", metrics=["mae"])
        return Program(
            model=model,
            inputs=lambda features: features["x"][:, None],
            fit_options={"steps_per_epoch": 50, "epochs": 100, "callbacks": [epochs_into_file(keras)]},
        )

    def train_step(features, label):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(features["x"][:, None])[:, 0] - label))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return Program(train_step, {"model": model, "optimizer": optimizer})


class Conf:
    build = staticmethod(build)
    model_dir = os.path.join(DIRECTORY, "model")
    save_steps = 20
    train_set = {
        "reader": PacedReader("points", point),
        "columns": [Column.create(name="x"), Column.create(name="y", is_label=True)],
        "epoch": 1,
        "batch_size": 10,
    }
