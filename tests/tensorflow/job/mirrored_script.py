"""
Two workers and `MultiWorkerMirroredStrategy`: a line is fitted, saved every few steps, and restored by whoever begins again.

It writes its global step to a file, so that a test can follow it, and knows nothing of DLRover but that it is started again.
"""

import json
import os
import time

import tensorflow as tf

DIRECTORY = os.environ["MIRRORED_DIR"]
MAX_STEPS = int(os.environ.get("MIRRORED_MAX_STEPS", "60"))
PACE = float(os.environ.get("MIRRORED_PACE", "0.05"))
TASK = json.loads(os.environ["TF_CONFIG"])["task"]
IS_CHIEF = TASK["index"] == 0


def main():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weight = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        step = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    checkpoint = tf.train.Checkpoint(weight=weight, step=step)
    # Each worker writes, because variables are read by all of them together; only the first one's counts.
    place = os.path.join(DIRECTORY, "model" if IS_CHIEF else f"scratch-{TASK['index']}")
    manager = tf.train.CheckpointManager(checkpoint, place, max_to_keep=100)
    newest = tf.train.latest_checkpoint(os.path.join(DIRECTORY, "model"))
    if newest:
        checkpoint.restore(newest)

    @tf.function
    def train(x):
        def replica(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(weight * x - 3.0 * x))
            weight.assign_sub(0.01 * tape.gradient(loss, weight))
            step.assign_add(1)
            return loss

        return strategy.run(replica, args=(x,))

    name = f"steps-worker-{TASK['index']}.txt"
    with open(os.path.join(DIRECTORY, name), "a", buffering=1) as file:
        while int(step.numpy()) < MAX_STEPS:
            train(tf.constant([1.0, 2.0]))
            file.write(f"{time.time():.4f} {os.getpid()} {int(step.numpy())} {float(weight.numpy())}\n")
            if int(step.numpy()) % 10 == 0:
                manager.save(checkpoint_number=int(step.numpy()))
            time.sleep(PACE)


if __name__ == "__main__":
    main()
