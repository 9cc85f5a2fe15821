"""Steps without torch whose length follows a law of the number of workers, until told to end (a file): `FOLDER CONSTANT EACH KNEE FACTOR`."""

import os
import random
import sys
import time
from pathlib import Path

from dlrover.trainer.progress import report

folder = Path(sys.argv[1])
constant, each, knee, factor = (float(word) for word in sys.argv[2:6])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
seconds = (constant + each * (size - 1)) * (factor if knee and size > knee else 1.0)
(folder / f"life-{rank}-{os.getpid()}").write_text(f"{size} {time.monotonic()}\n")
before = folder / "alive-0"
step = int(before.read_text().split()[1]) if before.exists() and len(before.read_text().split()) == 2 else 0
while not (folder / "stop").exists():
    step += 1
    time.sleep(seconds * (1.0 + random.Random(step).gauss(0.0, 0.05)))
    report(step)
    (folder / f"alive-{rank}").write_text(f"{size} {step}\n")
