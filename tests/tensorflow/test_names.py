"""Names of the original that need TensorFlow, and the border between what does and what does not."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.tensorflow.conf import Conf
from dlrover.trainer.tensorflow.estimator.training import build_users_estimator
from dlrover.trainer.tensorflow.hooks.elastic_data_shard_report_hook import ElasticDataShardReportHook
from dlrover.trainer.tensorflow.hooks.model_info_hook import model_facts
from dlrover.trainer.tensorflow.starter import get_parsed_args
from dlrover.trainer.worker.tf_kubernetes_worker import TFKubernetesWorker


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("dlrover.trainer.tensorflow.hooks.global_step_hook", "GlobalStepHook"),
        ("dlrover.trainer.tensorflow.hooks.elastic_data_shard_report_hook", "ElasticDataShardReportHook"),
        ("dlrover.python.elastic_agent.tensorflow.hooks", "ElasticDataShardReportHook"),
        ("dlrover.python.elastic_agent.tensorflow.hooks", "ReportModelInfoHook"),
        ("dlrover.python.elastic_agent.tensorflow.hooks", "ReportModelMetricHook"),
    ],
)
def test_hooks_are_hooks_of_tensorflow(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    assert issubclass(found, tf.compat.v1.train.SessionRunHook)


def test_the_estimator_is_found_under_our_path_too() -> None:
    from dlrover.trainer.tensorflow import estimator

    assert estimator.Estimator is tf.estimator.Estimator
    with pytest.raises(AttributeError):
        estimator.NoSuchName  # noqa: B018


def test_a_process_of_no_job_says_how_to_start_one() -> None:
    worker = TFKubernetesWorker(get_parsed_args(["--conf=conf.TrainConf"]))
    with pytest.raises(ConfigError, match="dlrover local --ps N"):
        worker.start_executor_service()


def test_a_model_may_be_named_by_module_and_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`classifier_class` is called with the model's directory, its configuration and its parameters."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "named_model.py").write_text(
        "def Model(model_dir, config, params):\n    return model_dir, config, params\n"
    )
    conf = Conf({"classifier_class": "named_model.Model", "model_dir": "/models/one", "params": {"size": 8}})
    assert build_users_estimator(conf, "a RunConfig") == ("/models/one", "a RunConfig", {"size": 8})


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("dlrover.trainer.tensorflow.coordinator.training", ("graph", "estimator")),
        ("dlrover.trainer.tensorflow.coordinator.serving", ("graph", "estimator")),
        ("dlrover.trainer.tensorflow.graph.hooks", ("coordinator",)),
        ("dlrover.trainer.tensorflow.estimator.plain", ("coordinator",)),
        ("dlrover.trainer.tensorflow.mirrored", ("graph", "estimator", "coordinator")),
    ],
)
def test_no_runtime_imports_the_other(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"""if True:
        import sys
        for name in {forbidden!r}:
            sys.modules["dlrover.trainer.tensorflow." + name] = None
        import {module}
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


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


def test_the_size_of_a_model_is_read_from_its_graph() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.train.get_or_create_global_step()
        table = v1.get_variable("table", [100, 16])
        bias = v1.get_variable("bias", [16])
        v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(table.read_value()) + tf.reduce_sum(bias))
        facts = model_facts(graph)
    assert (facts.variable_count, facts.total_variable_size, facts.max_variable_size) == (3, 1 + 1600 + 16, 1600)
    assert facts.op_count == len(graph.get_operations())
    assert facts.update_op_count > 0
    assert facts.read_op_count > 0


def test_the_trace_of_a_step_tells_of_tensors_and_of_the_wait_for_data() -> None:
    from dlrover.python.elastic_agent.tensorflow.profile_extractor import ProfileExtracter  # type: ignore[import-not-found]
    from tensorflow.python.client import timeline  # the place that scripts of the original take it from

    v1 = tf.compat.v1
    server = tf.distribute.Server({"chief": ["127.0.0.1:0"]}, job_name="chief", task_index=0)
    with tf.Graph().as_default():
        batch = v1.data.make_one_shot_iterator(tf.data.Dataset.range(100).batch(10)).get_next()
        total = tf.reduce_sum(tf.cast(batch, tf.float32))
        told = v1.RunMetadata()
        with v1.Session(server.target) as session:
            session.run(total, options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), run_metadata=told)
    found = ProfileExtracter(timeline.Timeline(told.step_stats))
    sizes = {device: size for device, size in found.get_tensor_alloc_bytes().items() if "/job:chief" in device}
    assert sum(sizes.values()) >= 10 * 8 + 10 * 4 + 4, "the batch, its cast, the sum"
    assert found.get_input_fetch_dur() > 0
    assert found.get_chief_recv_op_count() == 0, "nothing came from another device"
