"""
The master is killed with SIGKILL again and again while two workers train: how long until it answers again?

    python benchmarks/master_restart.py [--kills N]

Two figures: from the signal to the first answer of the new master to a question over the network, and the longest pause between two
steps of the workers, beside the longest pause of the same job before the first kill. Nobody else can be measured beside it: torchrun's store
and dlrover 0.6.1's local master do not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from figures import summarise

from dlrover.agent.config import AgentConfig
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.job import AskStatus, JobStatus
from dlrover.protocol.rpc.client import ask

SCRIPT = """
import sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
out = open(f"{sys.argv[1]}/steps-{dist.get_rank()}", "a", buffering=1)
while True:
    dist.barrier()
    out.write(f"{time.monotonic()}\\n")
    time.sleep(0.01)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlr-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        job = subprocess.Popen(
            [sys.executable, "-m", "dlrover.trainer.torch.main", "--nproc-per-node=2", folder / "train.py", folder],
            env={**os.environ, "TMPDIR": name, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
        )
        try:
            return asyncio.run(measure(folder, arguments.kills))
        finally:
            job.terminate()
            job.wait(60)


async def measure(folder: Path, num_kills: int) -> int:
    chance = random.Random(3)
    await until(lambda: len(steps(folder)) > 200, 60)
    config = msgspec.json.decode(next(folder.glob("dlrover-*/*/*/agent.json")).read_bytes(), type=AgentConfig)
    token = Path(config.token_file).read_text().strip()
    quiet = longest_pause(steps(folder))
    back: list[float] = []
    status = await answer(config.master_addr, token)
    first_round = status.round
    for _ in range(num_kills):
        await asyncio.sleep(chance.uniform(0.3, 1.0))
        killed_at = time.monotonic()
        os.kill(master_pid(folder), signal.SIGKILL)
        epoch = status.master_epoch
        while (status := await answer(config.master_addr, token)).master_epoch == epoch:
            continue
        back.append(time.monotonic() - killed_at)
    figures = summarise(back)
    assert figures is not None
    print(f"{num_kills} kills of the master, 2 workers training")
    print(
        f"serving again: median {figures.median:.3f} s, p95 {figures.p95:.3f} s, {figures.lowest:.3f}-{figures.highest:.3f} s"
    )
    print(f"longest pause between steps: {longest_pause(steps(folder)):.3f} s (undisturbed: {quiet:.3f} s)")
    print(f"rounds begun because of it: {status.round - first_round}")
    return 0 if status.round == first_round else 1


async def answer(address: str, token: str) -> JobStatus:
    while True:
        try:
            reply = await ask(address, AskStatus(), token=token, timeout=5)
        except Unavailable:
            await asyncio.sleep(0.005)  # nobody listens: nothing can tell us when somebody does
            continue
        assert isinstance(reply, JobStatus)
        return reply


def master_pid(folder: Path) -> int:
    return int(msgspec.json.decode(next(folder.glob("dlrover-*/*/*/master.ready")).read_bytes())["pid"])


def steps(folder: Path) -> list[float]:
    try:
        return [float(line) for line in (folder / "steps-0").read_text().split("\n")[:-1]]
    except FileNotFoundError:
        return []


def longest_pause(times: list[float]) -> float:
    return max(after - before for before, after in itertools.pairwise(times))


async def until(condition: Callable[[], bool], timeout: float) -> None:
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 (the workers write to a file, which tells nobody)
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
