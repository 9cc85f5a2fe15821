"""Waits for SIGTERM or SIGUSR1 and writes down which one came."""

import os
import pathlib
import signal
import sys

folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]


def hear(number: int, frame: object) -> None:
    (folder / f"heard-{rank}").write_text(signal.Signals(number).name)
    sys.exit(0)


for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, hear)
(folder / f"ready-{rank}").touch()
signal.pause()
