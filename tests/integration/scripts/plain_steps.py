"""Steps without torch until told to end (a file): each line is `life world_size address node_rank step`."""

import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
rank, life, size = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"))
step = 0
while not (folder / "stop").exists():
    step += 1
    with (folder / f"steps-{rank}").open("a") as out:
        out.write(f"{life} {size} {os.environ['MASTER_ADDR']} {os.environ['NODE_RANK']} {step}\n")
    time.sleep(0.02)
