"""
Estimator models. This version needs a TensorFlow that has `tf.estimator`; 2.15 is the last one.
"""

from __future__ import annotations

_NAMES = ("Estimator", "EstimatorSpec", "EvalSpec", "ModeKeys", "RunConfig", "TrainSpec", "train_and_evaluate")


def __getattr__(name: str) -> object:
    if name in _NAMES:
        raise ImportError(
            f"{__name__}.{name}: the layer for TensorFlow 2.16 and newer is not there yet. Use tf.estimator.{name} of TensorFlow 2.15 "
            "(pip install 'dlrover[tensorflow-estimator]')."
        )
    raise AttributeError(name)
