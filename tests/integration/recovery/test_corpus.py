"""Faults that need networks, disks, clocks and limits of their own, in real jobs: the rank is named, and what has happened to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[3] / "benchmarks/diagnosis.py"
KINDS = "network-loss,clock-jump,disk-stall,fork-limit,memory-kill"


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_what_the_machine_does_to_a_rank_is_told_from_what_the_rank_does(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(CORPUS), "--times=1", "--healthy=0", f"--kinds={KINDS}", f"--json={found}"]
    subprocess.run(command, check=True, timeout=580)
    told = json.loads(found.read_text())
    if len(told["left_out"]) == len(KINDS.split(",")):
        pytest.skip(f"nothing of it can be done here: {told['left_out']}")
    assert {result["kind"] for result in told["results"]} == set(KINDS.split(",")) - set(told["left_out"])
    wrong = [each for each in told["results"] if not (each["is_class_right"] and each["is_culprit_right"])]
    assert wrong == []
