"""
Spends known times on known things, dies once, and writes down what each took: the truth for whoever accounts for it.

No collective and no torch: each worker sleeps by itself. It dies at step 24 of its first life and goes on from step 12.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from dlrover.trainer import phases, report

folder = Path(sys.argv[1])
rank = os.environ["RANK"]
is_second_life = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
took: dict[str, float] = {}


def spend(kind: str, seconds: float) -> None:
    began_at = time.monotonic()
    time.sleep(seconds)
    took[kind] = took.get(kind, 0.0) + time.monotonic() - began_at


def write_truth() -> None:
    (folder / f"truth-{rank}-{int(is_second_life)}.json").write_text(json.dumps(took))


spend("start-up", 0.5)
if is_second_life:
    with phases.span(phases.RESTORE):
        spend("restore", 0.8)
for step in range(13 if is_second_life else 1, 61):
    with phases.span(phases.DATA):
        spend("data-wait", 0.02)
    spend("redo" if is_second_life and step <= 24 else "compute", 0.06)
    report(step)
    with phases.span(phases.CHECKPOINT):
        spend("checkpoint", 0.01)
    if step == 24 and not is_second_life:
        write_truth()
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
write_truth()
