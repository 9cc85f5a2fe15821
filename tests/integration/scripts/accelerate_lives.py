"""The example of accelerate, with a rank that is killed once in its fifth step: accelerate_lives.py FOLDER."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

import dlrover

EXAMPLE = Path(__file__).parents[3] / "examples" / "accelerate" / "train.py"
KILLED = Path(sys.argv[1]) / "killed"
tell = dlrover.report


def report(step: int, **metrics: object) -> None:
    tell(step, **metrics)
    if step == 5 and os.environ["RANK"] == "1" and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)


dlrover.report = report  # type: ignore[assignment]
runpy.run_path(str(EXAMPLE), run_name="__main__")
