"""The job: which model, which data, where its checkpoints go. Numbers come from the environment, so that one file serves tests and demos."""

from __future__ import annotations

import os
import time

import tensorflow as tf
from deepfm import DeepFM
from make_data import HEADER

from dlrover.trainer.tensorflow import FileReader
from dlrover.trainer.tensorflow.util.column_info import Column

_DIRECTORY = os.environ.get("CTR_DIR", ".")
_TYPES = {"l": "int32", "I": "float32", "C": "string"}
COLUMNS = [Column.create(name=name, dtype=_TYPES[name[0]], is_label=name == "label") for name in HEADER]


class Pace(tf.compat.v1.train.SessionRunHook):
    """Slows training down to a pace that a person can follow."""

    def after_run(self, run_context, run_values):
        time.sleep(float(os.environ.get("CTR_PACE", "0")))


class TrainConf:
    classifier_class = DeepFM
    model_dir = os.path.join(_DIRECTORY, "model")
    params = {"embedding_size": int(os.environ.get("CTR_EMBEDDING", "16"))}
    save_steps = int(os.environ.get("CTR_SAVE_STEPS", "100"))
    eval_steps = 10
    training_hooks = [Pace()]
    train_set = {
        "reader": FileReader(os.path.join(_DIRECTORY, "train.csv")),
        "columns": COLUMNS,
        "epoch": int(os.environ.get("CTR_EPOCHS", "1")),
        "batch_size": int(os.environ.get("CTR_BATCH", "64")),
    }
    eval_set = {"reader": FileReader(os.path.join(_DIRECTORY, "eval.csv")), "columns": COLUMNS, "batch_size": 64}
