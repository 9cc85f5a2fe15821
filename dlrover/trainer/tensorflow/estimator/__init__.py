"""
Estimator models. `Estimator` and its companions are TensorFlow's own where it has them (2.15), and DLRover's on 2.16 and newer.
"""

from __future__ import annotations

import importlib

_NAMES = (
    "BestExporter", "Estimator", "EstimatorSpec", "EvalSpec", "Exporter", "FinalExporter", "LatestExporter", "ModeKeys", "RunConfig",
    "TrainSpec", "WarmStartSettings", "export", "train_and_evaluate",
)  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(name)
    importlib.import_module("dlrover.trainer.tensorflow.estimator.layer.api").offer()
    return getattr(importlib.import_module("tensorflow").estimator, name)
