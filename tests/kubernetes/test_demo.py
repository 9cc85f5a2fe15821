"""`make demo-kubernetes`: it ends well where no cluster is, and its report has each loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kubernetes.kubelet.network import available

DEMO = Path(__file__).parents[2] / "examples" / "kubernetes" / "demo.py"
LIMIT = 180
"""Seconds on a quiet machine; a busy one gets twice as many."""

pytestmark = [
    pytest.mark.timeout(3 * LIMIT),
    pytest.mark.slow,
    pytest.mark.skipif(bool(available()), reason=available()),
]


def test_the_demonstration_recovers_from_each_loss() -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO)],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the model contains 6000 of 6000 records, each once" in done.stdout
    assert "no worker restarted" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    for what in ("deleted", "evicted"):
        [row] = [words for words in rows if words[1:2] == [what]]
        assert row[-1] == "0", "another pod started again"
