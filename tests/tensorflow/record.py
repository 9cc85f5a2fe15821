"""
What TensorFlow 2.15's own Estimator does with the models of `job/`: `.venv-tf215/bin/python -m tests.tensorflow.record`.

Its losses, and a checkpoint of the middle of the training. Ours has to come to the same on every version. With the newest TensorFlow
(`.venv-tf/bin/python -m tests.tensorflow.record`) it records a checkpoint of ours alone, for 2.15 to read.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
NEWEST = "newest"
"""Name of the checkpoint that the newest TensorFlow wrote."""
MIDDLE = 32
"""A multiple of the four batches of the input: whoever goes on from there reads them in the same order."""


def record() -> None:
    import tensorflow as tf

    sys.path.insert(0, str(HERE / "job"))
    import canned_models
    import columns_model

    RECORDED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        losses, result, _ = columns_model.train(tf.estimator, name)
        numbers = {key: float(value) for key, value in result.items()}
        _keep(name, MIDDLE, "model.ckpt")
    _write("columns_model", {"losses": losses, "evaluation": numbers})
    canned = {}
    for kind in canned_models.KINDS:
        with tempfile.TemporaryDirectory() as name:
            canned_models.train(tf.estimator, kind, name, canned_models.FIRST)
            _keep(name, canned_models.FIRST, kind)
            losses = canned_models.train(tf.estimator, kind, name, canned_models.SECOND)
            result = canned_models.model_of(tf.estimator, kind, name).evaluate(canned_models.input_fn, steps=4)
            canned[kind] = {"losses": losses, "evaluation": {key: float(value) for key, value in result.items()}}
    _write("canned_models", canned)


def record_newest() -> None:
    from dlrover.trainer.tensorflow.estimator.layer.api import api

    sys.path.insert(0, str(HERE / "job"))
    import columns_model

    with tempfile.TemporaryDirectory() as name:
        columns_model.train(api(), name, max_steps=MIDDLE)
        _keep(name, MIDDLE, NEWEST)


def _keep(model_dir: str, step: int, name: str) -> None:
    for path in Path(model_dir).glob(f"model.ckpt-{step}.[di]*"):
        shutil.copy(path, RECORDED / path.name.replace("model.ckpt", name))


def _write(name: str, content: dict[str, Any]) -> None:
    (RECORDED / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    record() if importlib.util.find_spec("tensorflow_estimator") else record_newest()
