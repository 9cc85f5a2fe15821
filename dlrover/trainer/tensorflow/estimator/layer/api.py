"""
What a script finds as `tf.estimator` on a TensorFlow that has none: `offer` puts it there. It is the one place where a TensorFlow name is set.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, NamedTuple

import tensorflow as tf

from dlrover.trainer.tensorflow.estimator.layer import canned, exporters, loop, specs
from dlrover.trainer.tensorflow.estimator.layer import export as exporting
from dlrover.trainer.tensorflow.estimator.layer.estimator import Estimator
from dlrover.trainer.tensorflow.estimator.layer.run_config import RunConfig

_HOOKS = (
    "CheckpointSaverHook", "CheckpointSaverListener", "FeedFnHook", "FinalOpsHook", "GlobalStepWaiterHook", "LoggingTensorHook",
    "NanLossDuringTrainingError", "NanTensorHook", "ProfilerHook", "SecondOrStepTimer", "SessionRunArgs", "SessionRunContext",
    "SessionRunHook", "SessionRunValues", "StepCounterHook", "StopAtStepHook", "SummarySaverHook", "VocabInfo",
)  # fmt: skip
_CANNED = (
    "DNNClassifier", "DNNLinearCombinedClassifier", "DNNLinearCombinedRegressor", "DNNRegressor", "LinearClassifier", "LinearRegressor",
)  # fmt: skip
_NAME = "estimator"


class WarmStartSettings(NamedTuple):
    """Which variables of which checkpoint a new model begins with."""

    ckpt_to_initialize_from: str
    vars_to_warm_start: Any = ".*"
    var_name_to_vocab_info: dict[str, Any] | None = None
    var_name_to_prev_var_name: dict[str, str] | None = None


def api() -> ModuleType:
    """A module with everything that `tf.estimator` had and that we have."""
    export = ModuleType("tensorflow.estimator.export")
    for name in (
        "ClassificationOutput", "EvalOutput", "ExportOutput", "PredictOutput", "RegressionOutput", "ServingInputReceiver",
        "TensorServingInputReceiver", "build_parsing_serving_input_receiver_fn", "build_raw_serving_input_receiver_fn",
    ):  # fmt: skip
        setattr(export, name, getattr(exporting, name))
    module = ModuleType("tensorflow.estimator", "DLRover's Estimator, for a TensorFlow without one.")
    contents: dict[str, Any] = {
        "Estimator": Estimator,
        "EstimatorSpec": specs.EstimatorSpec,
        "EvalSpec": specs.EvalSpec,
        "ModeKeys": specs.ModeKeys,
        "TrainSpec": specs.TrainSpec,
        "RunConfig": RunConfig,
        "WarmStartSettings": WarmStartSettings,
        "BestExporter": exporters.BestExporter,
        "Exporter": exporters.ModelExporter,
        "FinalExporter": exporters.FinalExporter,
        "LatestExporter": exporters.LatestExporter,
        "train_and_evaluate": loop.train_and_evaluate,
        "export": export,
    }
    for name in _CANNED:
        contents[name] = getattr(canned, name)
    for name in _HOOKS:
        contents[name] = getattr(tf.compat.v1.train, name)
    for name, value in contents.items():
        setattr(module, name, value)
    vars(module)["__getattr__"] = _missing
    return module


def offer() -> None:
    """Nothing happens where TensorFlow has its own."""
    if hasattr(tf, _NAME):
        return
    module = api()
    # `import tensorflow.compat.v1` finds another object than `tf.compat.v1`, if the import system made it first.
    imported = {name: importlib.import_module(name) for name in ("tensorflow.compat.v1", "tensorflow.compat.v2")}
    for name, owner in {"tensorflow": tf, **imported}.items():
        setattr(owner, _NAME, module)
        sys.modules[f"{name}.{_NAME}"] = module
    for owner in (tf.compat.v1, tf.compat.v2):
        setattr(owner, _NAME, module)
        sys.modules[f"{owner.__name__}.{_NAME}"] = module


def _missing(name: str) -> Any:
    raise AttributeError(
        f"tf.estimator.{name}: DLRover's Estimator for TensorFlow {tf.__version__} does not have it. Use TensorFlow 2.15 "
        "(pip install 'dlrover[tensorflow-estimator]'), or write the model as a model_fn."
    )
