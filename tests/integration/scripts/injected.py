"""
Spends known times on known things, dies once, and writes down what each took: the truth for whoever accounts for it.

No collective and no torch: each worker sleeps by itself. It dies at step 24 of its first life and goes on from step 12. No time is left out of
the truth, or a busy machine would give to others what nobody wrote down.
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
booked_until = time.monotonic()


def book(kind: str) -> None:
    """All the time since the last call."""
    global booked_until
    now = time.monotonic()
    took[kind] = took.get(kind, 0.0) + now - booked_until
    booked_until = now


def truth(of_rank: str) -> Path:
    return folder / f"truth-{of_rank}-{int(is_second_life)}.json"


def write_truth() -> None:
    draft = truth(rank).with_suffix(".new")
    draft.write_text(json.dumps(took))
    draft.rename(truth(rank))


time.sleep(0.5)
kind = "start-up"
if is_second_life:
    with phases.span(phases.RESTORE):
        book(kind)
        time.sleep(0.8)
        book("restore")
for step in range(13 if is_second_life else 1, 61):
    with phases.span(phases.DATA):
        book(kind)
        time.sleep(0.02)
        book("data-wait")
    time.sleep(0.06)
    kind = "redo" if is_second_life and step <= 24 else "compute"
    report(step)
    with phases.span(phases.CHECKPOINT):
        book(kind)
        time.sleep(0.01)
        book("checkpoint")
    while step == 24 and not is_second_life:
        book(kind)
        write_truth()
        if rank == "1" and truth("0").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
write_truth()
