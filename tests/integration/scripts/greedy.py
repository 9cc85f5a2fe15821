"""Rank 0 needs so many MiB; the others wait until it has had them. Each life leaves a line."""

import os
import sys
import time
from pathlib import Path

folder, needs = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])
with (folder / f"lives-{rank}").open("a") as lives:
    lives.write(f"{os.getpid()}\n")
if rank == 0:
    memory = bytearray(b"x") * (needs << 20)  # written, so that it is really there
    (folder / "had-enough").write_text(str(len(memory)))
while not (folder / "had-enough").exists():
    time.sleep(0.05)
