"""
A model that counts, for the coordinator: each record adds exactly 1 to its own number in `seen`, so the checkpoint itself says what was learned.

Everything that a test wants to change comes from the environment.
"""

import os
import time

import tensorflow as tf

from dlrover.trainer.tensorflow.coordinator import Program
from dlrover.trainer.tensorflow.reader.base_reader import ElasticReader
from dlrover.trainer.tensorflow.util.column_info import Column

DIRECTORY = os.environ["COORDINATED_DIR"]
NUM_RECORDS = int(os.environ.get("COORDINATED_RECORDS", "2000"))
PACE = float(os.environ.get("COORDINATED_PACE", "0"))
TABLE = int(os.environ.get("COORDINATED_TABLE", "100000"))
FAULT = os.environ.get("COORDINATED_FAULT", "")


class Numbers(ElasticReader):
    """Writes down when which records are read, at a pace that a test can follow."""

    def count_data(self):
        self._data_nums = NUM_RECORDS

    def read_data_by_index_range(self, start_index, end_index):
        with open(os.path.join(DIRECTORY, "steps-chief-0.txt"), "a") as file:
            file.write(f"{time.time():.4f} {os.environ['DLROVER_CLUSTER_VERSION']} {start_index}\n")
        if not os.path.exists(os.path.join(DIRECTORY, "hurry")):  # the test has seen what it came for
            time.sleep(PACE)
        return (f"{number},1" for number in range(start_index, end_index))


def build(conf):
    seen = tf.Variable(tf.zeros([NUM_RECORDS]), name="seen")
    table = tf.Variable(tf.random.normal([TABLE, 16]), name="table")

    def train_step(features, label):
        if FAULT == "model":
            raise RuntimeError("this model cannot be built")
        ids = features["id"]
        seen.scatter_add(tf.IndexedSlices(tf.ones_like(ids, tf.float32), ids))
        rows = tf.nn.embedding_lookup(table, ids % TABLE)
        return tf.reduce_sum(rows)

    return Program(train_step, {"seen": seen, "table": table})


COLUMNS = [Column.create(name="id", dtype="int64"), Column.create(name="label", dtype="float32", is_label=True)]


class Conf:
    build = staticmethod(build)
    model_dir = os.path.join(DIRECTORY, "model")
    save_steps = int(os.environ.get("COORDINATED_SAVE_STEPS", "20"))
    max_steps = int(os.environ["COORDINATED_MAX_STEPS"]) if "COORDINATED_MAX_STEPS" in os.environ else None
    worker_join_interval = float(
        os.environ.get("COORDINATED_JOIN", "600")
    )  # however slow the machine, they begin together
    keep_checkpoint_max = 200
    train_set = {"reader": Numbers("numbers"), "columns": COLUMNS, "epoch": 1, "batch_size": 10}
