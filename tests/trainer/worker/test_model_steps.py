"""
Where a life goes on, learned from what a script restores: plain torch, accelerate, transformers and Lightning, each in a process of its own.

One process imports the frameworks; each life is a fork of it, as a worker is of its zygote. Its first half writes a checkpoint before anything is
hooked, its second half is the life that restores it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.agent.monitor.worker_view import WatchedWorker
from dlrover.protocol.messages.watch import Reach
from dlrover.protocol.progress_page import Reading

DEADLINE = 200.0
LIVES = Path(__file__).parent / "restoring_lives.py"
HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None


def run(folder: Path, *names: str) -> dict[str, Reading]:
    """What the pages say at the end of each life."""
    seats = {name: WatchedWorker(local_rank=0, global_rank=0) for name in names}
    try:
        pages = [f"{name}={seat.page.path}" for name, seat in seats.items()]
        command = [sys.executable, str(LIVES), str(folder), *pages]
        environ = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, env=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return {name: seat.read() for name, seat in seats.items()}
    finally:
        for seat in seats.values():
            seat.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reading]:
    """Of the lives that need no framework."""
    restoring = (
        "adam",
        "sgd",
        "momentum_sgd",
        "weights",
        "whole_model",
        "nothing",
        "data",
        "two",
        "dummy_step",
        "back",
    )
    counting = ("reset", "own_reset", "first_epoch", "half_epoch", "evaluation", "taken_back", "sampler")
    return run(tmp_path_factory.mktemp("lives"), *restoring, *counting)


def place(reading: Reading) -> tuple[int | None, int | None]:
    return reading.model_start, reading.model_step


def test_what_plain_torch_restores(found: dict[str, Reading]) -> None:
    assert place(found["adam"]) == (8, 11), "the optimizer's own count"
    assert found["adam"].step == 11, "and the step that is shown"
    assert not found["adam"].is_step_named, "a restart is not judged by it"
    assert place(found["sgd"]) == (None, 3), "nothing counts its steps"
    assert place(found["momentum_sgd"]) == (None, 3)
    assert place(found["weights"]) == (None, 3), "a fresh optimizer for weights that were loaded"
    assert place(found["whole_model"]) == (None, 3)
    assert place(found["nothing"]) == (0, 3)
    assert place(found["data"]) == (0, 3), "samples that are loaded are no state"
    assert place(found["two"]) == (8, 11), "the optimizer that is furthest"
    assert place(found["dummy_step"]) == (8, 11), "a step before the state is loaded, to make room for it"
    assert place(found["back"]) == (8, 9), "a life that goes back by itself"


@pytest.mark.slow
def test_what_frameworks_restore(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    names = ["accelerate", "transformers", *(["lightning"] if HAS_LIGHTNING else [])]
    found = run(tmp_path, *names)
    assert {name: place(found[name]) for name in names} == dict.fromkeys(names, (8, 11))


def test_what_a_script_that_counts_anew_tells(found: dict[str, Reading]) -> None:
    told = {name: reading.reach for name, reading in found.items()}
    assert told["reset"] == Reach(model_step=7, model_start=0, has_whole_epoch=True, is_counting_anew=True)
    assert found["reset"].step == 1, "what the script says"
    assert told["own_reset"] == Reach(model_step=6, model_start=0, has_whole_epoch=True, is_counting_anew=True)
    assert told["first_epoch"] == Reach(model_step=3, model_start=0, has_whole_epoch=True, is_counting_anew=True)
    assert told["half_epoch"] == Reach(model_step=2, model_start=0, is_counting_anew=True)
    assert not told["evaluation"].has_whole_epoch, "nothing was trained on what it read to the end"
    assert not told["taken_back"].is_counting_anew, "its last steps were bad, and it takes them again"
    assert told["sampler"] == Reach(data=(4, 6))
