"""
A script as TensorFlow's documentation shows it: a model function, two input functions, `train_and_evaluate`. It knows nothing of DLRover.

It writes the global step of each run to a file named after its task in `TF_CONFIG`, so that a test can follow it.
"""

import json
import os
import time

import tensorflow as tf

v1 = tf.compat.v1
DIRECTORY = os.environ["PLAIN_DIR"]
MAX_STEPS = int(os.environ.get("PLAIN_MAX_STEPS", "300"))
PACE = float(os.environ.get("PLAIN_PACE", "0.02"))
TASK = json.loads(os.environ["TF_CONFIG"])["task"]


def input_fn():
    inputs = tf.data.Dataset.range(1000).repeat().map(lambda number: tf.cast(number, tf.float32) / 1000.0)
    return inputs.map(lambda x: ({"x": x[tf.newaxis]}, 3.0 * x[tf.newaxis] + 1.0)).batch(16)


def evaluation_fn():
    return input_fn().take(4)


def model_fn(features, labels, mode):
    with v1.variable_scope("line", partitioner=v1.fixed_size_partitioner(2)):
        weights = v1.get_variable("weights", [2, 1], initializer=v1.zeros_initializer())
    inputs = tf.concat([features["x"], tf.ones_like(features["x"])], axis=1)
    predicted = tf.matmul(inputs, tf.convert_to_tensor(weights))
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predicted)
    loss = tf.reduce_mean(tf.square(predicted - labels))
    train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, global_step=v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


class Steps(v1.train.SessionRunHook):
    def begin(self):
        self.step = v1.train.get_global_step()
        self.file = open(os.path.join(DIRECTORY, f"steps-{TASK['type']}-{TASK['index']}.txt"), "a", buffering=1)  # noqa: SIM115

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self.step)

    def after_run(self, run_context, run_values):
        self.file.write(f"{time.time():.4f} {os.getpid()} {int(run_values.results)}\n")
        time.sleep(PACE)


if __name__ == "__main__":
    config = tf.estimator.RunConfig(model_dir=os.path.join(DIRECTORY, "model"), save_checkpoints_steps=20)
    estimator = tf.estimator.Estimator(model_fn, config=config)
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(input_fn, max_steps=MAX_STEPS, hooks=[Steps()]),
        tf.estimator.EvalSpec(evaluation_fn, steps=None, start_delay_secs=1, throttle_secs=1),
    )
