"""Conf classes, columns, readers and TF_CONFIG. No TensorFlow is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.tensorflow import FileReader
from dlrover.trainer.tensorflow.conf import Conf, load_conf, merge_confs
from dlrover.trainer.tensorflow.config import own_task, read_tf_config, task_config
from dlrover.trainer.tensorflow.executor.estimator_executor import EstimatorExecutor
from dlrover.trainer.tensorflow.reader.base_reader import ElasticReader
from dlrover.trainer.tensorflow.util.column_info import Column, label_of


class Base:
    classifier_class = "module.Model"
    model_dir = "/models/one"
    params = {"size": 8, "rate": 0.1}  # noqa: RUF012
    train_set = {"reader": object(), "columns": [], "batch_size": 32}  # noqa: RUF012


class Above:
    params = {"rate": 0.2}  # noqa: RUF012
    max_steps = 500


def test_conf_classes_merge_by_priority_and_defaults_fill_the_rest() -> None:
    conf = merge_confs([Base, Above], {"save_steps": 7})
    assert conf.params.to_dict() == {"size": 8, "rate": 0.2}
    assert (conf.max_steps, conf.save_steps, conf.keep_checkpoint_max, conf.log_steps) == (500, 7, 5, 100)
    assert (conf.train_set.batch_size, conf.train_set.epoch, conf.train_set.field_delim) == (32, 10, ",")
    assert conf["model_dir"] == conf.get("model_dir") == "/models/one"
    assert conf.nothing_of_the_kind is None


def test_an_unknown_key_is_kept_with_a_warning_that_names_the_nearest(caplog: pytest.LogCaptureFixture) -> None:
    conf = merge_confs([Base], {"save_step": 5, "my_own_constant": 1})
    assert "'save_step', which has no effect. Did you mean 'save_steps'?" in caplog.text
    assert "'my_own_constant', which has no effect." in caplog.text
    assert conf.my_own_constant == 1


def test_without_dynamic_sharding_each_process_reads_everything() -> None:
    class Three(ElasticReader):
        def count_data(self) -> None:
            self._data_nums = 3

        def read_data_by_index_range(self, start_index: int, end_index: int) -> list[int]:
            return list(range(start_index, end_index))

    reader = Three("three")
    merge_confs([Base], {"train_set": {"reader": reader}, "enable_dynamic_sharding": False})
    reader.set_num_epochs(2)
    assert list(reader.iterator()) == [0, 1, 2, 0, 1, 2]
    assert reader.build_data_shard_client() is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"classifier_class": None}, "no classifier_class"),
        ({"model_dir": None}, "no model_dir"),
        ({"train_set": None}, "no train_set"),
        ({"train_set": [1]}, "must be a dictionary"),
        ({"train_set": {"reader": None}}, "train_set has no reader"),
        ({"backend": "jax"}, "give auto, graph or coordinator"),
        ({"backend": "coordinator"}, "has no build"),
        ({"data_on_restore": "maybe"}, "give resume or continue"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_starts(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        merge_confs([Base], change)


def test_a_conf_class_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_conf_of_this_test.py").write_text(
        "class TrainConf:\n  classifier_class = 'm.M'\n  model_dir = 'm'\n  train_set = {'reader': object()}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_conf("my_conf_of_this_test.TrainConf").model_dir == "m"
    with pytest.raises(ConfigError, match="Did you mean 'TrainConf'"):
        load_conf("my_conf_of_this_test.TrainCnf")
    for name in ("TrainConf", "no_such_module_here.TrainConf"):
        with pytest.raises(ConfigError):
            load_conf(name)


def test_columns_say_what_they_cannot_be() -> None:
    column = Column.create(name="price", dtype="double")
    assert (column.tensor_dtype, column.default) == ("float64", 0.0)
    assert Column.create(name="n", dtype="int").tensor_dtype == "int64"
    assert Column.create(name="s", dtype="string").default == ""
    for properties in ({"name": "a", "shape": 1}, {"dtype": "int"}, {"name": "a", "dtype": "complex"}):
        with pytest.raises(ValueError, match=r"[Cc]olumn"):
            Column.create(**properties)
    with pytest.raises(ValueError, match="Exactly one column must be the label"):
        label_of([column])


@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_file_is_read_by_ranges_and_opened_late(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "train.csv"
    reader = FileReader(f"file://{path}")  # opens nothing: the file is not even there
    path.write_text("head\n" + "\n".join(f"{number},x" for number in range(100)) + ending)
    assert reader.size == 100
    assert list(reader.read_data_by_index_range(7, 10)) == ["7,x", "8,x", "9,x"]
    reader.set_enable_dynamic_sharding(False)
    reader.set_batch_size(30)
    assert [len(batch) for batch in reader.batches()] == [30, 30, 30, 10]
    assert [len(batch) for batch in reader.whole()] == [30, 30, 30, 10]
    assert len(list(reader.iterator())) == 100
    assert FileReader(str(path), skip_header=False).size == 101


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="/no/such/file cannot be read"):
        FileReader("/no/such/file").count_data()


class Ten(ElasticReader):
    def count_data(self) -> None:
        self._data_nums = 10

    def read_data_by_index_range(self, start_index: int, end_index: int) -> range:
        return range(start_index, end_index)


def test_a_batch_never_has_records_of_two_shards() -> None:
    reader = Ten("ten")
    reader.set_batch_size(3)
    reader.set_num_minibatches_per_shard(2)
    gate = Gate()
    batches = list(reader.batches(gate))
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    assert sorted(record for batch in batches for record in batch) == list(range(10))
    assert gate.calls[:2] == ["starving", "fed"]
    client = reader.data_shard_client
    assert client is not None
    for batch in batches:
        client.report_batch_done(len(batch))
    assert client.flush()
    client.close()


class Gate:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def starving(self) -> None:
        self.calls.append("starving")

    def fed(self) -> None:
        self.calls.append("fed")


def test_readers_say_what_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="count_data"):
        ElasticReader("x").count_data()
    with pytest.raises(NotImplementedError, match="read_data_by_index_range"):
        ElasticReader("x").read_data_by_index_range(0, 1)


def test_tf_config_names_all_servers_and_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    config = task_config("worker", 2, ("h:1", "h:2"), own_address="h:9", target="grpc://h:9")
    assert read_tf_config(config.to_text()) == config
    assert config.cluster["ps"] == ["h:1", "h:2"]
    assert len(config.cluster["worker"]) == 3
    monkeypatch.setenv("TF_CONFIG", config.to_text())
    assert own_task() == config.task
    for text in ("{", '{"cluster": {}}', '{"cluster": 3, "task": {"type": "ps"}}'):
        with pytest.raises(ConfigError, match="TF_CONFIG cannot be read"):
            read_tf_config(text)


def test_an_executor_waits_for_its_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "")
    executor = EstimatorExecutor(Base)
    with pytest.raises(TimeoutError):
        executor.wait_for_tf_config(0.01)
    executor.set_tf_config({"cluster": {"ps": ["h:1"]}, "task": {"type": "chief", "index": 0}})
    assert executor.wait_for_tf_config(1).task.type == "chief"
    assert isinstance(executor.conf, Conf)
    with pytest.raises(ConfigError, match="no conf class"):
        EstimatorExecutor().prepare()
