"""Our Estimator against TensorFlow 2.15's own: the same losses, and checkpoints that either reads of the other."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dlrover.trainer.tensorflow.estimator.layer.api import api
from tests.tensorflow.conftest import HAS_OWN_ESTIMATOR
from tests.tensorflow.record import MIDDLE, NEWEST, RECORDED

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

OURS = api()
needs_both = pytest.mark.skipif(not HAS_OWN_ESTIMATOR, reason="this TensorFlow has no Estimator of its own")


KINDS = ("linear", "numbers", "deep", "classes", "deep-numbers", "wide-and-deep")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("job")))
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.fixture
def model(jobs: None) -> Any:
    return importlib.import_module("columns_model")


@pytest.fixture
def canned(jobs: None) -> Any:
    return importlib.import_module("canned_models")


def recorded(name: str = "columns_model") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return found


def begin_with(model_dir: Path, name: str, step: int) -> None:
    """A checkpoint that TensorFlow 2.15 wrote."""
    model_dir.mkdir(exist_ok=True)
    for path in RECORDED.glob(f"{name}-{step}.*"):
        shutil.copy(path, model_dir / path.name.replace(name, "model.ckpt"))
    (model_dir / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')


def assert_same(losses: list[float], first: int = 0) -> None:
    expected = recorded()["losses"][first:]
    assert len(losses) == len(expected)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_losses_are_those_of_tensorflow(model: Any, tmp_path: Path) -> None:
    losses, result, exports = model.train(OURS, tmp_path)
    assert_same(losses)
    assert {key: float(value) for key, value in result.items()} == pytest.approx(recorded()["evaluation"], rel=1e-5)
    [export] = exports
    served = tf.saved_model.load(export.decode()).signatures["serving_default"]
    rows = served(x=tf.constant([0.0, 0.5]), category=tf.constant([1, 2], tf.int64))["y"].numpy()
    predicted = [each["y"] for each in model.estimator_of(OURS, tmp_path).predict(model.evaluation_fn)]
    assert len(predicted) == 64
    assert rows.shape == (2,)
    assert np.isfinite(rows).all()


def test_a_checkpoint_of_tensorflow_is_trained_on(model: Any, tmp_path: Path) -> None:
    begin_with(tmp_path, "model.ckpt", MIDDLE)
    losses, _, _ = model.train(OURS, tmp_path)
    assert_same(losses, MIDDLE)
    assert sorted(name for name, _ in tf.train.list_variables(str(tmp_path))) == [
        "beta1_power", "beta2_power", "global_step", "line/weights", "line/weights/Adam", "line/weights/Adam_1",
    ]  # fmt: skip


@needs_both
@pytest.mark.parametrize("order", ["ours first", "ours last"])
def test_either_goes_on_with_a_checkpoint_of_the_other(model: Any, tmp_path: Path, order: str) -> None:
    first, second = (OURS, tf.estimator) if order == "ours first" else (tf.estimator, OURS)
    model.train(first, tmp_path / "mixed", max_steps=MIDDLE)
    losses, _, _ = model.train(second, tmp_path / "mixed")
    assert_same(losses, MIDDLE)


@needs_both
@pytest.mark.parametrize("whose", ["TensorFlow's", "ours"])
def test_2_15_goes_on_with_a_checkpoint_of_the_newest_tensorflow(model: Any, tmp_path: Path, whose: str) -> None:
    begin_with(tmp_path, NEWEST, MIDDLE)
    losses, _, _ = model.train(OURS if whose == "ours" else tf.estimator, tmp_path)
    assert_same(losses, MIDDLE)


@pytest.mark.skipif(HAS_OWN_ESTIMATOR, reason="recorded with the newest TensorFlow")
def test_what_is_recorded_for_2_15_is_what_the_newest_tensorflow_writes(model: Any, tmp_path: Path) -> None:
    model.train(OURS, tmp_path / "now", max_steps=MIDDLE)
    (tmp_path / "recorded").mkdir()
    begin_with(tmp_path / "recorded", NEWEST, MIDDLE)
    now, then = (tf.train.load_checkpoint(str(tmp_path / name)) for name in ("now", "recorded"))
    assert now.get_variable_to_shape_map() == then.get_variable_to_shape_map()
    for name in now.get_variable_to_shape_map():
        assert now.get_tensor(name) == pytest.approx(then.get_tensor(name), rel=1e-5)


@needs_both
def test_what_is_recorded_is_what_tensorflow_does(model: Any, tmp_path: Path) -> None:
    losses, _, _ = model.train(tf.estimator, tmp_path)
    assert_same(losses)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ready_made_model_goes_on_with_a_checkpoint_of_tensorflow(canned: Any, tmp_path: Path, kind: str) -> None:
    assert set(KINDS) == set(canned.KINDS)
    begin_with(tmp_path, kind, canned.FIRST)
    expected = recorded("canned_models")[kind]
    losses = canned.train(OURS, kind, tmp_path, canned.SECOND)
    assert len(losses) == canned.SECOND
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
    result = canned.model_of(OURS, kind, tmp_path).evaluate(canned.input_fn, steps=4)
    assert {name: float(value) for name, value in result.items()} == pytest.approx(expected["evaluation"], rel=1e-4)


@needs_both
@pytest.mark.parametrize("kind", KINDS)
def test_tensorflow_goes_on_with_a_ready_made_model_of_ours(canned: Any, tmp_path: Path, kind: str) -> None:
    canned.train(OURS, kind, tmp_path / "ours", canned.FIRST)
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    losses = canned.train(OURS, kind, tmp_path / "ours", canned.SECOND)
    assert canned.train(tf.estimator, kind, tmp_path / "theirs", canned.SECOND) == pytest.approx(losses, rel=1e-5)
    ours, theirs = (
        next(iter(canned.model_of(est, kind, tmp_path / "theirs").predict(canned.input_fn)))
        for est in (OURS, tf.estimator)
    )
    assert set(ours) == set(theirs)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.skipif(HAS_OWN_ESTIMATOR, reason="this TensorFlow has an Estimator of its own")
def test_a_script_finds_ours_where_it_looks_for_it() -> None:
    code = """if True:
        import dlrover.trainer.tensorflow.estimator.layer.api as api
        api.offer()
        import tensorflow as tf
        import tensorflow.compat.v1 as tf1
        from tensorflow import estimator
        from dlrover.trainer.tensorflow.estimator import Estimator, EstimatorSpec
        assert tf.estimator is tf1.estimator is estimator
        assert Estimator is tf.estimator.Estimator
        assert tf.estimator.DNNClassifier
        try:
            tf.estimator.BaselineClassifier
        except AttributeError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert "tf.estimator.BaselineClassifier: DLRover's Estimator" in done.stdout


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda est: est.EstimatorSpec("train", loss=1.0), "no train_op"),
        (lambda est: est.EstimatorSpec("eval"), "no loss"),
        (lambda est: est.EstimatorSpec("infer"), "no predictions"),
        (lambda est: est.EvalSpec(lambda: None, steps=0), "steps above 0"),
        (lambda est: est.RunConfig(save_checkpoints_steps=1, save_checkpoints_secs=1), "not both"),
        (lambda est: est.RunConfig().replace(task_id=3), "cannot change 'task_id'"),
        (lambda est: est.Estimator(lambda labels: None), "argument features"),
        (lambda est: est.Estimator(lambda features: None, params={"a": 1}), "no argument params"),
        (lambda est: est.BestExporter(), "serving_input_receiver_fn"),
        (lambda est: est.LinearClassifier([]), "has no feature columns"),
        (lambda est: est.LinearClassifier(["x"], n_classes=1), "at least 2"),
        (lambda est: est.LinearClassifier(["x"], weight_column="w"), "does not have weight_column"),
        (lambda est: est.DNNRegressor([], ["x"]), "has no hidden_units"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    est: ModuleType = OURS
    with pytest.raises(ValueError, match=sentence):
        make(est)
