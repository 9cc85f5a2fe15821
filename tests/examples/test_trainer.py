"""The example trainer runs without any launcher and resumes from its checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINER = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "train.py"


@pytest.mark.parametrize("how", ["flash", pytest.param("torch", marks=pytest.mark.chaos)])
def test_the_trainer_runs_three_steps_alone_and_resumes(tmp_path: Path, how: str) -> None:
    pytest.importorskip("torch")
    small = ["--width=16", "--layers=1", "--heads=2", "--batch-size=2", "--context=16", "--checkpoint-every=2"]
    small += [f"--checkpoint={how}", "--compare=2"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["DLROVER_SNAPSHOT_DIR"] = str(tmp_path)

    def train(num_steps: int) -> str:
        command = [sys.executable, str(TRAINER), f"--steps={num_steps}", f"--dir={tmp_path}", *small]
        command.append(f"--metrics={tmp_path / 'metrics.jsonl'}")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "step 3/3: loss" in train(3)
    assert "resumed from step 3" in train(4)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in metrics if entry["event"] == "step"] == [1, 2, 3, 4]
    assert all(entry["saving"] > 0 for entry in metrics if entry["event"] == "step")
    assert [len(entry["seconds"]) for entry in metrics if entry["event"] == "torch.save"] == [2, 2]
    assert not list(tmp_path.glob("*.tmp*"))
    if how == "flash":
        assert (tmp_path / "dlrover_latest.txt").read_text() == "4"
        torch = pytest.importorskip("torch")
        assert torch.load(tmp_path / "4" / "rank_0.pt")["step"] == 4
