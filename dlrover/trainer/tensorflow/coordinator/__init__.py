"""
The coordinator runtime: one process (the chief) runs the program of a `ParameterServerStrategy`, workers and parameter servers serve it.

It never imports the graph runtime or the Estimator.
"""

from __future__ import annotations

from dlrover.trainer.tensorflow.coordinator.program import Program

__all__ = ["Program"]
