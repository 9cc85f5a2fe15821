"""Steps until told to end (a file), writing each step with the life it happened in; grandchildren on request."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader

folder = Path(sys.argv[1])
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
meeting = next((word for word in sys.argv if word.startswith("tcp://")), None)
if meeting is None:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
if "grandchildren" in sys.argv:
    subprocess.Popen(["sleep", "300"])
    subprocess.Popen(["setsid", "sleep", "300"])
    loader = DataLoader(list(range(1000)), num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)  # its worker process lives now
(folder / f"pid-{rank}.new").write_text(f"{os.getpid()} {life}")
(folder / f"pid-{rank}.new").rename(folder / f"pid-{rank}")
step = 0
while True:
    ended = [(folder / "stop").exists()]
    dist.broadcast_object_list(ended, src=0)
    if ended[0]:
        break
    step += 1
    with (folder / f"steps-{rank}").open("a") as out:
        out.write(f"{life} {step} {time.monotonic()}\n")
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
