"""The demonstration on a machine without TensorFlow."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[3] / "examples" / "tensorflow" / "ctr" / "demo.py"


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed here")
def test_without_tensorflow_the_demonstration_names_the_extra() -> None:
    done = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "dlrover[tensorflow-estimator]" in done.stderr
    assert not done.stdout
