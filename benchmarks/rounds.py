"""
What every benchmark that starts processes does around its measurements: a folder that goes, a tree of processes that ends, and a look at who
else uses the machine.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import psutil
from process_tree import adopt_orphans, end_descendants


@contextlib.contextmanager
def measuring(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder to measure in. Ctrl-C ends the measurements, not the report; nothing that was started outlives them."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, _leave)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    except KeyboardInterrupt:
        print("Interrupted; what was measured until now:", file=sys.stderr)
    finally:
        end_descendants(deadline_at=time.monotonic() + 10)
        shutil.rmtree(folder, ignore_errors=True)


def run_rounds(num_rounds: int, run_round: Callable[[int], None], strangers: list[float]) -> None:
    """All systems of one round after the other, round by round. `strangers` gets the share of the machine that others used in between."""
    for number in range(num_rounds):
        strangers.append(look_at_others())
        print(f"round {number + 1}: others use {strangers[-1]:.0f} % of the machine", file=sys.stderr, flush=True)
        run_round(number)
    strangers.append(look_at_others())


def look_at_others() -> float:
    """Percent of the machine that is used while we do nothing."""
    return psutil.cpu_percent(interval=2.0)


def _leave(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)
