"""
A model that counts: each record adds exactly 1 to its own number in `seen`, so the checkpoint itself says what the model has learned from.

Everything that a test wants to change comes from the environment.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import tensorflow as tf

from dlrover.trainer.tensorflow.reader.base_reader import ElasticReader
from dlrover.trainer.tensorflow.util.column_info import Column

v1 = tf.compat.v1
DIRECTORY = os.environ["COUNTING_DIR"]
NUM_RECORDS = int(os.environ.get("COUNTING_RECORDS", "2000"))
PACE = float(os.environ.get("COUNTING_PACE", "0"))
TABLE = int(os.environ.get("COUNTING_TABLE", "100000"))
OWN_SAVER = os.environ.get("COUNTING_OWN_SAVER", "") == "1"
FAULT = os.environ.get("COUNTING_FAULT", "")
BURNING = os.environ.get("COUNTING_BURNING", "")
"""A server that has much to compute in the first version: its number."""


class Numbers(ElasticReader):
    def count_data(self):
        self._data_nums = NUM_RECORDS

    def read_data_by_index_range(self, start_index, end_index):
        name = f"read-{os.environ['DLROVER_TASK_TYPE']}-{os.environ['DLROVER_TASK_RANK']}.txt"
        with open(os.path.join(DIRECTORY, name), "a") as file:
            file.write(f"{os.environ['DLROVER_CLUSTER_VERSION']} {start_index} {end_index}\n")
        return (f"{number},1" for number in range(start_index, end_index))


def hold(where):
    """Say that this process is here, and stay as long as the test wants it to."""
    open(os.path.join(DIRECTORY, f"reached-{where}"), "w").close()
    while os.path.exists(os.path.join(DIRECTORY, f"hold-{where}")):
        time.sleep(0.02)


class HeldSaver(v1.train.Saver):
    def save(self, *args, **kwargs):
        hold("saving")
        return super().save(*args, **kwargs)


def model_fn(features, labels, mode, params, config):
    if FAULT == "model":
        raise RuntimeError("this model cannot be built")
    partitioner = v1.fixed_size_partitioner(max(1, config.num_ps_replicas))
    with v1.variable_scope("counting", partitioner=partitioner):
        seen = v1.get_variable("seen", [NUM_RECORDS, 1], initializer=v1.zeros_initializer())
        table = v1.get_variable("table", [TABLE, 16], initializer=v1.random_normal_initializer())
    ids = features["id"]
    if mode == tf.estimator.ModeKeys.PREDICT:
        found = {"seen": v1.nn.embedding_lookup(seen, ids, partition_strategy="div")}
        outputs = {"serving_default": tf.estimator.export.PredictOutput(found)}
        return tf.estimator.EstimatorSpec(mode, predictions=found, export_outputs=outputs)
    counted = v1.nn.embedding_lookup(seen, ids, partition_strategy="div")
    row = v1.nn.embedding_lookup(table, ids % TABLE, partition_strategy="div")
    loss = -tf.reduce_sum(counted) - 0.5 * tf.reduce_sum(row)
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss)
    if BURNING and os.environ.get("DLROVER_CLUSTER_VERSION") == "1":
        with tf.device(f"/job:ps/task:{BURNING}"):
            work = v1.random_uniform([600, 600])
            for _ in range(10):
                work = tf.tanh(tf.matmul(work, work))
            loss += 1e-30 * tf.reduce_mean(work)
    optimizer = v1.train.GradientDescentOptimizer(1.0, use_locking=True)
    train_op = optimizer.minimize(loss, global_step=v1.train.get_global_step())
    scaffold = None
    if OWN_SAVER:
        scaffold = v1.train.Scaffold(saver=HeldSaver(sharded=True, save_relative_paths=True, max_to_keep=200))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, scaffold=scaffold)


class Counting(tf.estimator.Estimator):
    def __init__(self, model_dir, config=None, params=None):
        super().__init__(model_fn, model_dir=model_dir, config=config, params=params)


class Steps(v1.train.SessionRunHook):
    """Writes the global step of each run, at a pace that a test can follow."""

    def begin(self):
        self.step = v1.train.get_global_step()
        name = f"steps-{os.environ['DLROVER_TASK_TYPE']}-{os.environ['DLROVER_TASK_RANK']}.txt"
        self.file = open(os.path.join(DIRECTORY, name), "a", buffering=1)  # noqa: SIM115

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self.step)

    def after_run(self, run_context, run_values):
        self.file.write(f"{time.time():.4f} {os.environ['DLROVER_CLUSTER_VERSION']} {int(run_values.results)}\n")
        hold("stepping")
        if not os.path.exists(os.path.join(DIRECTORY, "hurry")):  # the test has seen what it came for
            time.sleep(PACE)


class Restored(v1.train.SessionRunHook):
    """Keeps the values that the chief begins a version with, before anybody trains."""

    def begin(self):
        self.variables = [each for each in v1.global_variables() if each.op.name.startswith("counting/table")]
        self.step = v1.train.get_global_step()

    def after_create_session(self, session, coord):
        version = os.environ["DLROVER_CLUSTER_VERSION"]
        values = np.concatenate(session.run(sorted(self.variables, key=lambda each: each.op.name)))
        path = os.path.join(DIRECTORY, f"restored-{version}.npz")
        np.savez(path + ".part.npz", table=values, step=session.run(self.step), count=len(self.variables))
        os.replace(path + ".part.npz", path)
        hold("restoring")


class StopAt(v1.train.SessionRunHook):
    """A user's own stop hook."""

    def after_run(self, run_context, run_values):
        if FAULT == "stop-hook":
            run_context.request_stop()


with open(os.path.join(DIRECTORY, "starts.txt"), "a") as starts:  # one line for each process that imports this
    is_warm = "dlrover.trainer.worker.zygote" in sys.modules
    starts.write(f"{os.environ.get('DLROVER_TASK_TYPE', 'floor')} {'warm' if is_warm else 'cold'}\n")

COLUMNS = [Column.create(name="id", dtype="int64"), Column.create(name="label", dtype="float32", is_label=True)]


class Conf:
    classifier_class = Counting
    model_dir = os.path.join(DIRECTORY, "model")
    save_steps = int(os.environ.get("COUNTING_SAVE_STEPS", "20"))
    max_steps = int(os.environ["COUNTING_MAX_STEPS"]) if "COUNTING_MAX_STEPS" in os.environ else None
    keep_checkpoint_max = int(os.environ.get("COUNTING_KEEP", "200"))
    exact_saves = os.environ.get("COUNTING_EXACT_SAVES", "") == "1"
    data_on_restore = os.environ.get("COUNTING_ON_RESTORE", "resume")
    savesteps = 7  # a typing mistake, to be warned of
    training_hooks = [Steps(), StopAt()]
    training_chief_hooks = [Restored()] if os.environ.get("COUNTING_IS_WATCHED", "1") == "1" else []
    train_set = {"reader": Numbers("numbers"), "columns": COLUMNS, "epoch": 1, "batch_size": 10}
    eval_set = {"reader": Numbers("numbers"), "columns": COLUMNS, "batch_size": 100}
