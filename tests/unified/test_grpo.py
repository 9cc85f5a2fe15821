"""The example's run depends on its keys and steps alone: not on which rollout was faster, nor on a trainer that was started again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from examples.grpo.compare import differences, repeated_keys, rewards

ROOT = Path(__file__).parents[2]


def run(folder: Path, num_steps: int, *, stale: int = 0) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "tests.unified.grpo_in_process", str(folder), str(num_steps), str(stale)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)


def record(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "record.json").read_text()))


def test_a_run_is_the_same_whoever_was_faster_and_after_a_restart_and_it_learns(tmp_path: Path):
    whole = run(tmp_path / "whole", 60)
    assert whole.returncode == 0, whole.stderr
    for num_steps in (20, 60):
        part = run(tmp_path / "parts", num_steps)
        assert part.returncode == 0, part.stderr
    assert differences(record(tmp_path / "whole"), record(tmp_path / "parts")) == []
    assert repeated_keys(record(tmp_path / "parts")) == []
    events = [json.loads(line) for line in (tmp_path / "parts" / "events-0.jsonl").read_text().splitlines()]
    second = [event["step"] for event in events if event["pid"] == events[-1]["pid"]]
    assert second == list(range(20, 61)), "the second life went on where the first one ended"
    first, last = rewards(record(tmp_path / "whole"))
    assert last >= 2 * first, (first, last)


def test_a_rollout_with_older_weights_than_it_says_is_found(tmp_path: Path):
    stale = run(tmp_path, 5, stale=1)
    assert stale.returncode == 1
    assert "were not made with the weights of this step" in stale.stderr


def test_the_comparison_finds_what_differs():
    line = {"step": 0, "loss": "0x1p0", "reward": 0.5, "keys": [0, 1], "weights": "a"}
    assert differences([line], [line]) == []
    assert differences([line], [{**line, "loss": "0x1.1p0"}]) == ["step 0: loss 0x1p0 and 0x1.1p0"]
    assert differences([line], []) == ["1 steps and 0 steps"]
    assert repeated_keys([line, {**line, "step": 1}]) == [0, 1, 2, 3]
