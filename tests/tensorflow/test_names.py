"""Names of the original that need TensorFlow, and the border between what does and what does not."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import tensorflow as tf

from dlrover.trainer.tensorflow.hooks.elastic_data_shard_report_hook import ElasticDataShardReportHook


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("dlrover.trainer.tensorflow.hooks.global_step_hook", "GlobalStepHook"),
        ("dlrover.trainer.tensorflow.hooks.elastic_data_shard_report_hook", "ElasticDataShardReportHook"),
        ("dlrover.python.elastic_agent.tensorflow.hooks", "ElasticDataShardReportHook"),
    ],
)
def test_hooks_are_hooks_of_tensorflow(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    assert issubclass(found, tf.compat.v1.train.SessionRunHook)


def test_what_comes_with_newer_versions_says_so() -> None:
    from dlrover.trainer.tensorflow import estimator

    with pytest.raises(ImportError, match="is not there yet"):
        estimator.Estimator  # noqa: B018


def test_readers_conf_classes_and_the_starter_import_no_tensorflow() -> None:
    code = """if True:
        import sys
        import dlrover.trainer.tensorflow.starter, dlrover.trainer.tensorflow.conf, dlrover.trainer.tensorflow.link
        import dlrover.trainer.tensorflow.executor.estimator_executor, dlrover.trainer.tensorflow.util.column_info
        print("tensorflow" in sys.modules, "grpc" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]


class Client:
    def __init__(self) -> None:
        self.num_batches = 0

    def report_batch_done(self) -> None:
        self.num_batches += 1


def test_a_shard_report_hook_reports_each_step() -> None:
    client = Client()
    with tf.Graph().as_default():
        step = tf.compat.v1.train.get_or_create_global_step()
        add = step.assign_add(1)
        hooks = [ElasticDataShardReportHook(client)]  # type: ignore[arg-type]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            for _ in range(3):
                session.run(add)
    assert client.num_batches == 3
