"""
Strangers: what a flood of one stranger without the token costs the master of a job of four nodes, and the job.

    python benchmarks/strangers.py                                 every flood for 10 s, three rounds, about 8 minutes
    python benchmarks/strangers.py --quick                         for 4 s, one round
    python benchmarks/strangers.py --source 127.0.0.1              the stranger has the address of the honest callers
    python benchmarks/strangers.py --at neighbour                  the stranger floods another job of this machine

During each flood honest calls are made one after the other, each on a connection of its own, and one worker is killed. `none` is the same without a
flood. Recovery is the time from SIGKILL to the first step of the last of the four workers in the next round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from figures import percentile, quietness, seconds, summarise, table, times
from floods import USUAL_CONNECTIONS
from process_tree import running
from rounds import measuring, run_rounds

from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.job import Ping
from dlrover.protocol.rpc.client import ask

FLOODS = Path(__file__).resolve().parent / "floods.py"
KINDS = ("none", "reset", "open", "bodies", "idle", "settled", "handshakes")
NUM_NODES = 4
CALL_PERIOD = 0.05
CALL_TIMEOUT = 60.0
START_TIMEOUT = 120.0
WORKER = """
import os, sys, time
rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
log = open(f"{sys.argv[1]}/steps-{rank}", "a", buffering=1)
while True:
    log.write(f"{life} {os.getpid()} {time.monotonic()}\\n")
    time.sleep(0.01)
"""


@dataclass
class Samples:
    calls: list[float] = field(default_factory=list)
    num_failed: int = 0
    growth_mb: list[float] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    num_restarts: int = 0
    """Of the whole job, beyond those that the kills cause."""


class Job:
    """Four nodes on this machine, with one worker each that only counts."""

    def __init__(self, folder: Path, launcher: int) -> None:
        self._folder = folder
        self._launcher = launcher

    def steps(self, rank: int) -> list[tuple[int, int, float]]:
        """Life, pid and instant of each step that was written whole."""
        try:
            lines = (self._folder / f"steps-{rank}").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        words = [line.split() for line in lines if line.endswith("\n")]
        return [(int(life), int(pid), float(at)) for life, pid, at in words]

    def life(self) -> int:
        """The one in which all ranks step; -1: there is none."""
        lives = {steps[-1][0] if (steps := self.steps(rank)) else -1 for rank in range(NUM_NODES)}
        return lives.pop() if len(lives) == 1 else -1

    async def wait_for_life(self, life: int) -> None:
        async with asyncio.timeout(START_TIMEOUT):
            while self.life() < life:  # noqa: ASYNC110 - other processes write the files
                await asyncio.sleep(0.02)

    async def recover(self) -> float:
        """Kills the worker of rank 1."""
        life = self.life()
        killed_at = time.monotonic()
        os.kill(self.steps(1)[-1][1], signal.SIGKILL)
        await self.wait_for_life(life + 1)
        return max(self._first_step(rank, life + 1) for rank in range(NUM_NODES)) - killed_at

    def _first_step(self, rank: int, life: int) -> float:
        return next(at for each, _, at in self.steps(rank) if each == life)

    @property
    def master(self) -> psutil.Process:
        for each in psutil.Process(self._launcher).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "dlrover.master" in each.cmdline():
                    return each
        raise AssertionError("the job has no master")

    @property
    def address(self) -> str:
        [port] = {each.laddr.port for each in self.master.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        return f"127.0.0.1:{port}"

    @property
    def token(self) -> str:
        config = json.loads(Path(self.master.cmdline()[-1]).read_bytes())
        return Path(config["token_file"]).read_text().strip()


@contextmanager
def local_job(folder: Path, num_nodes: int = NUM_NODES) -> Iterator[Job]:
    folder.mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, "-m", "dlrover.cli.main", "local", f"--nodes={num_nodes}", "--netns=off", "--"]
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    with running(
        [*command, "--max-restarts=1000", str(script), str(folder)],
        environment=environment,
        folder=folder,
        log=folder / "log",
    ) as launcher:
        yield Job(folder, launcher.pid)


async def measure(job: Job, kind: str, samples: Samples, *, target: str, length: float, source: str) -> None:
    life = job.life()
    ends_at = time.monotonic() + length
    calling = asyncio.ensure_future(_call(job.address, job.token, job.master, samples, ends_at))
    flood = None
    if kind != "none":
        argv = [sys.executable, str(FLOODS), kind, target, "--seconds", str(length), "--source", source]
        flood = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220
        assert flood.stdout is not None
        await asyncio.to_thread(flood.stdout.readline)
    try:
        await asyncio.sleep(length / 3)
        samples.recoveries.append(await job.recover())
        await calling
    finally:
        if flood is not None:
            flood.communicate()
    samples.num_restarts += job.life() - life - 1


async def _call(address: str, token: str, master: psutil.Process, samples: Samples, ends_at: float) -> None:
    before = highest = master.memory_info().rss
    while time.monotonic() < ends_at:
        began_at = time.monotonic()
        try:
            await ask(address, Ping(), token=token, timeout=CALL_TIMEOUT)
        except DLRoverError:
            samples.num_failed += 1
        samples.calls.append(time.monotonic() - began_at)
        highest = max(highest, master.memory_info().rss)
        await asyncio.sleep(CALL_PERIOD)
    samples.growth_mb.append((highest - before) / 2**20)


def report(all_samples: dict[str, Samples], strangers: list[float]) -> str:
    usual = summarise(all_samples["none"].recoveries)
    rows = []
    for kind, samples in all_samples.items():
        recovery = summarise(samples.recoveries)
        if recovery is None or not samples.calls:
            continue
        calls = samples.calls
        rows.append(
            (
                kind if kind == "none" else f"{kind} ({USUAL_CONNECTIONS[kind]:,})",
                str(len(calls)),
                str(samples.num_failed),
                seconds(percentile(calls, 50)),
                seconds(percentile(calls, 95)),
                seconds(max(calls)),
                f"{max(samples.growth_mb):.0f} MB",
                f"{recovery.median:.2f} ({recovery.lowest:.2f} to {recovery.highest:.2f})",
                times(None if usual is None else recovery.median / usual.median),
                str(samples.num_restarts),
            )
        )
    head = ("flood (connections)", "calls", "failed", "median s", "95 % s", "worst s", "memory", "recovery s", "usual")
    return f"{table((*head, 'other restarts'), rows)}\n\n{quietness(strangers)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each flood (default 10)")
    parser.add_argument("--source", default="127.0.0.2", help="address of the stranger (default 127.0.0.2)")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"(default {','.join(KINDS)})")
    parser.add_argument(
        "--at",
        choices=("job", "neighbour"),
        default="job",
        help="whom the stranger floods: this job, or another one on the same machine (shows what the flood itself uses)",
    )
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    parser.add_argument("--quick", action="store_true", help="4 s, one round")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    is_aside = options.at == "neighbour"
    length = 4.0 if options.quick else options.seconds
    all_samples = {kind: Samples() for kind in kinds}
    strangers: list[float] = []
    with measuring("dlrover-strangers-") as folder:

        def run_round(number: int) -> None:
            with local_job(folder / str(number)) as job, ExitStack() as others:
                neighbour = others.enter_context(local_job(folder / f"{number}-neighbour", 1)) if is_aside else None
                asyncio.run(floods(job, neighbour, number))

        async def floods(job: Job, neighbour: Job | None, number: int) -> None:
            await job.wait_for_life(0)
            while neighbour is not None and not neighbour.steps(0):  # noqa: ASYNC110 - another process writes the file
                await asyncio.sleep(0.02)
            target = (neighbour or job).address
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                await measure(job, kind, all_samples[kind], target=target, length=length, source=options.source)

        run_rounds(1 if options.quick else options.rounds, run_round, strangers)
    print(report(all_samples, strangers))
    if options.json:
        options.json.write_text(json.dumps({kind: vars(samples) for kind, samples in all_samples.items()}))


if __name__ == "__main__":
    main()
