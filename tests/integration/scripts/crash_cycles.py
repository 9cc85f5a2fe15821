"""
Each life makes one step of progress and then rank 1 dies, until the given number of lives is over.

    crash_cycles.py FOLDER LIVES [HOLD_IN]...

In a life of HOLD_IN nobody dies before FOLDER/go-LIFE is there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import dlrover.trainer

folder, lives, holds = Path(sys.argv[1]), int(sys.argv[2]), [int(word) for word in sys.argv[3:]]
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dlrover.trainer.report(life + 1)
if life in holds:
    (folder / f"holding-{life}-{rank}").touch()
    while not (folder / f"go-{life}").exists():
        dlrover.trainer.report(life + 1)  # who stood still would be looked at
        time.sleep(0.02)
if life < lives:
    if rank == 1:
        os._exit(9)
    signal.pause()
