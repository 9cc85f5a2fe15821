"""The example of Lightning, with a rank that is killed once in its eighth step: lightning_lives.py FOLDER."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from dlrover.trainer import progress

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning" / "train.py"
KILLED = Path(sys.argv[1]) / "killed"
tell = progress.report


def report(step: int, **metrics: object) -> None:
    tell(step, **metrics)
    if step == 8 and os.environ["RANK"] == "1" and not KILLED.exists():
        KILLED.touch()
        os.kill(os.getpid(), signal.SIGKILL)


progress.report = report  # type: ignore[assignment]
runpy.run_path(str(EXAMPLE), run_name="__main__")
