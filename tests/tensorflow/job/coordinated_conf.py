"""
A model that counts, for the coordinator: each record adds exactly 1 to its own number in `seen`, so the checkpoint itself says what was learned.

Everything that a test wants to change comes from the environment.
"""

import os

import numpy as np
import tensorflow as tf
from paced_reader import DIRECTORY, NUM_RECORDS, PacedReader, hold

from dlrover.trainer.tensorflow.coordinator import Program
from dlrover.trainer.tensorflow.util.column_info import Column

TABLE = int(os.environ.get("COORDINATED_TABLE", "100000"))
FAULT = os.environ.get("COORDINATED_FAULT", "")
IS_WATCHED = os.environ.get("COORDINATED_IS_WATCHED", "1") == "1"
BUILT = {}


class Held(tf.train.experimental.PythonState):
    """A part of each checkpoint: the chief comes here when it saves and when it restores."""

    def serialize(self):
        hold("saving")
        return ""

    def deserialize(self, string_value):
        hold("restoring")


def keep_restored():
    """The values that a version begins with, before the first batch of it is scheduled."""
    path = os.path.join(DIRECTORY, f"restored-{os.environ['DLROVER_CLUSTER_VERSION']}.npz")
    parts = getattr(BUILT["table"], "variables", [BUILT["table"]])
    table = np.concatenate([part.numpy() for part in parts])
    np.savez(path + ".part.npz", table=table, count=len(parts))
    os.replace(path + ".part.npz", path)


def build(conf):
    seen = tf.Variable(tf.zeros([NUM_RECORDS]), name="seen")
    table = tf.Variable(tf.random.normal([TABLE, 16]), name="table")
    BUILT["table"] = table

    def train_step(features, label):
        if FAULT == "model":
            raise RuntimeError("this model cannot be built")
        ids = features["id"]
        seen.scatter_add(tf.IndexedSlices(tf.ones_like(ids, tf.float32), ids))
        rows = tf.nn.embedding_lookup(table, ids % TABLE)
        # So values of a checkpoint differ from those before and after it.
        table.scatter_add(tf.IndexedSlices(tf.ones_like(rows), ids % TABLE))
        return tf.reduce_sum(rows)

    return Program(train_step, {"seen": seen, "table": table, "held": Held()})


COLUMNS = [Column.create(name="id", dtype="int64"), Column.create(name="label", dtype="float32", is_label=True)]


class Conf:
    build = staticmethod(build)
    model_dir = os.path.join(DIRECTORY, "model")
    save_steps = int(os.environ.get("COORDINATED_SAVE_STEPS", "20"))
    max_steps = int(os.environ["COORDINATED_MAX_STEPS"]) if "COORDINATED_MAX_STEPS" in os.environ else None
    worker_join_interval = float(
        os.environ.get("COORDINATED_JOIN", "600")
    )  # however slow the machine, they begin together
    keep_checkpoint_max = int(os.environ.get("COORDINATED_KEEP", "200"))
    train_set = {
        "reader": PacedReader("numbers", lambda number: f"{number},1", keep_restored if IS_WATCHED else None),
        "columns": COLUMNS,
        "epoch": 1,
        "batch_size": 10,
    }
