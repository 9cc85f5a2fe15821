"""
What a change of size costs: how long training pauses when a job grows by one node, and when it shrinks by one.

    python benchmarks/scaling_pauses.py            ten of each, between 2 and 3 nodes (about 3 minutes)
    python benchmarks/scaling_pauses.py --quick    three of each

A real job of `dlrover local` that saves each step in memory. The pause is the time from the last step of the old world to the first of the new one, as rank 0 wrote
them. Growing: the old nodes must train while the new one starts, so the steps between the order and the pause are counted too. Budget: medians of 2 s and 1 s on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = DdpCheckpointer(os.path.join(sys.argv[1], "checkpoints"))
state = checkpointer.load_checkpoint()
step = 0
if state:
    model.load_state_dict(state["model"])
    step = state["step"]
while True:
    step += 1
    time.sleep(0.02)
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    checkpointer.save_checkpoint(step, {"model": model.state_dict(), "step": step}, storage_type=StorageType.MEMORY)
    if dist.get_rank() == 0:
        with open(os.path.join(sys.argv[1], "steps"), "a") as out:
            out.write(f"{time.monotonic()} {dist.get_world_size()} {step}\\n")
"""
LEAST, MOST = 2, 3


class Pause(NamedTuple):
    seconds: float
    steps_before: int
    """Of the old world, after the order."""


def lines(path: Path) -> list[tuple[float, int]]:
    if not path.exists():
        return []
    found = [line.split() for line in path.read_text().splitlines()]
    return [(float(words[0]), int(words[1])) for words in found if len(words) == 3]


def wait_for(path: Path, size: int, after: float, job: subprocess.Popen[bytes]) -> None:
    end_at = time.monotonic() + 120
    while not any(at > after and workers == size for at, workers in lines(path)[-50:]):
        if job.poll() is not None or time.monotonic() > end_at:
            raise SystemExit(f"no step with {size} nodes; the job's exit code is {job.poll()}")
        time.sleep(0.05)


def change(path: Path, name: str, size: int, job: subprocess.Popen[bytes]) -> Pause:
    ordered_at = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "dlrover.cli.main", "scale", f"--nodes={size}", name],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wait_for(path, size, ordered_at, job)
    steps = lines(path)
    first_new = next(at for at, workers in steps if at > ordered_at and workers == size)
    last_old = max(at for at, workers in steps if at < first_new)
    return Pause(first_new - last_old, sum(ordered_at < at <= last_old for at, _ in steps))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--quick", action="store_true", help="three of each instead of ten")
    num = 3 if parser.parse_args().quick else 10
    folder = Path(tempfile.mkdtemp(prefix="dlrover-pauses-"))
    name = f"pauses-{os.getpid()}"
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "dlrover.cli.main",
        "local",
        f"--nodes={LEAST}:{MOST}",
        "--auto-scale=on",
        "--netns=off",
    ]
    command += [f"--job-name={name}", "--", str(folder / "train.py"), str(folder)]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    grown, shrunk = [], []
    try:
        wait_for(folder / "steps", LEAST, 0.0, job)
        for number in range(num):
            time.sleep(3.0)
            grown.append(change(folder / "steps", name, MOST, job))
            time.sleep(3.0)
            shrunk.append(change(folder / "steps", name, LEAST, job))
            print(
                f"{number + 1}: growing {grown[-1].seconds:.2f} s after {grown[-1].steps_before} more steps, shrinking {shrunk[-1].seconds:.2f} s",
                flush=True,
            )
    finally:
        job.send_signal(signal.SIGINT)
        job.wait()
        shutil.rmtree(folder, ignore_errors=True)
    for what, pauses, budget in (("growing", grown, 2.0), ("shrinking", shrunk, 1.0)):
        seconds = sorted(pause.seconds for pause in pauses)
        median = statistics.median(seconds)
        print(
            f"{what}: median {median:.2f} s, {seconds[0]:.2f} to {seconds[-1]:.2f} s (budget {budget:g} s, load {os.getloadavg()[0]:.1f})"
        )
    least = min(pause.steps_before for pause in grown)
    print(f"while a new node started the others did at least {least} steps")
    return 0 if least > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
