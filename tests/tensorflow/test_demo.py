"""`make demo-tensorflow`: what it claims is seen, on a machine that may be busy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tensorflow.conftest import HAS_OWN_ESTIMATOR

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_OWN_ESTIMATOR, reason="make demo-tensorflow runs with TensorFlow 2.15"),
]

DEMO = Path(__file__).parents[2] / "examples" / "tensorflow" / "ctr" / "demo.py"
LIMIT = 180
"""Seconds on a quiet machine (decision 55)."""


def run(limit: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), "--limit", str(limit)],
        capture_output=True,
        text=True,
        timeout=limit + 120,
        check=False,
    )


def test_the_demonstration_shows_what_it_claims() -> None:
    done = run(2 * LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "count 80,000 of 80,000 records" in done.stdout
    assert "NOT" not in done.stdout


def test_the_demonstration_fails_when_its_time_is_over() -> None:
    done = run(5)
    assert done.returncode == 1
    assert "it was not over within 5 s" in done.stderr
