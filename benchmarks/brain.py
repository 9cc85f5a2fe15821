"""
What Brain bears: many virtual masters with a report a minute each, and start plans over many stored runs.

    python benchmarks/brain.py [--masters 1000] [--seconds 120] [--runs 1000000]

The service is a process of its own on SQLite. Each master tells a run a minute and asks for a plan every five, at moments that are spread evenly. Printed: how long questions took, and the
cores and the memory of the service. Then the store is filled with runs of 10,000 jobs, and start plans are asked for, one at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
from sqlalchemy import insert
from sqlalchemy.engine import make_url

from dlrover.brain.store.database import open_engine
from dlrover.brain.store.schema import RUN
from dlrover.brain.store.writing import store_beginning, store_end, store_runs
from dlrover.protocol.messages.brain import (
    JobBegan,
    JobBounds,
    JobEnded,
    JobRecipe,
    JobRef,
    PlanAsked,
    RunsTold,
    StartPlan,
)
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.job import ExitReason
from dlrover.protocol.messages.scaling import Configuration, GroupSize, RunMeasured, TypeUse
from dlrover.protocol.rpc.brain import BrainChannel

JOBS = 10_000
KINDS = 500
"""Recipes of the stored jobs."""
CHANNELS = 50
"""Connections that the virtual masters share."""


def run(number: int, nodes: int) -> RunMeasured:
    use = TypeUse(node_type=NodeType.WORKER, cpu=3.5, cpu_most=3.9, cpu_max=3.9, memory_mb=4000.0 + number)
    groups = (GroupSize(NodeType.WORKER, nodes, 4.0, 8000),)
    return RunMeasured(
        number=number, configuration=Configuration(groups=groups), seconds=60.0, steps=120, step_time=0.5, types=(use,)
    )


def began(index: int, kind: int, *, wants_plan: bool = False) -> JobBegan:
    recipe = JobRecipe(name=f"kind-{kind}")
    bounds = JobBounds(max_nodes=64)
    return JobBegan(job=JobRef(uid=f"job-{index}"), recipe=recipe, bounds=bounds, wants_plan=wants_plan)


class Load:
    def __init__(self, address: str) -> None:
        self.channels = [BrainChannel(address, token="") for _ in range(CHANNELS)]
        self.times: dict[str, list[float]] = {}
        self.num_failed = 0

    async def ask(self, index: int, question: JobBegan | RunsTold | PlanAsked, *, is_counted: bool = True) -> object:
        began_at = time.perf_counter()
        try:
            answer = await self.channels[index % CHANNELS].ask(question, timeout=30)
        except Exception as error:
            self.num_failed += 1
            print("failed:", error)
            return None
        if is_counted:
            self.times.setdefault(type(question).__name__, []).append(time.perf_counter() - began_at)
        return answer

    async def master(self, index: int, masters: int, until: float) -> None:
        await asyncio.sleep(60.0 * index / masters)
        number = 0
        while time.monotonic() < until:
            number += 1
            job = JobRef(uid=f"job-{index}")
            await self.ask(index, RunsTold(job=job, runs=(run(number, 1 + index % 8),)))
            if number % 5 == 1:
                await self.ask(index, PlanAsked(job=job))
            await asyncio.sleep(60.0)

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def show(times: dict[str, list[float]]) -> None:
    for kind, found in times.items():
        middle, most = quantile(found, 0.5), quantile(found, 0.99)
        print(f"  {kind}: {len(found)} answers, median {middle * 1000:.1f} ms, p99 {most * 1000:.1f} ms")


async def bear(address: str, process: psutil.Process, masters: int, seconds: float) -> None:
    load = Load(address)
    for first in range(0, masters, CHANNELS):
        await asyncio.gather(
            *(
                load.ask(index, began(index, index % KINDS), is_counted=False)
                for index in range(first, min(masters, first + CHANNELS))
            )
        )
    before, began_at = sum(process.cpu_times()[:2]), time.monotonic()
    tasks = [asyncio.ensure_future(load.master(index, masters, began_at + seconds)) for index in range(masters)]
    await asyncio.sleep(seconds)
    cores = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began_at)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await load.close()
    print(
        f"{masters} masters, {seconds:g} s: {cores:.2f} cores, {process.memory_info().rss / 2**20:.0f} MiB, {load.num_failed} failed"
    )
    show(load.times)


def fill(path: Path, num_runs: int) -> None:
    """As 10,000 completed jobs would have left it, by the statements of the service; the runs in bulk."""
    engine = open_engine(make_url(f"sqlite:///{path}"))
    each = max(1, num_runs // JOBS)
    encode = msgspec.msgpack.Encoder().encode
    rows = [
        {"number": number, "at": time.time(), "seconds": 60.0, "steps": 120, "step_time": 0.5, "records_per_second": 0.0,
         "workers": 4, "servers": 0, "data": encode(run(number, 4))}
        for number in range(2, each + 1)
    ]  # fmt: skip
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        for index in range(JOBS):
            job, now = JobRef(uid=f"old-{index}"), time.time() - 3600 + index / 10
            store_beginning(connection, "default", msgspec.structs.replace(began(index, index % KINDS), job=job), now)
            store_runs(connection, "default", job, (run(1, 1),), newest=each, now=now)
            store_end(connection, "default", JobEnded(job=job, reason=ExitReason.COMPLETED), now)
        ids = connection.exec_driver_sql("SELECT id FROM job WHERE uid LIKE 'old-%'").scalars().all()
        for id_ in ids:
            connection.execute(insert(RUN), [{**row, "job_id": id_} for row in rows])
    engine.dispose()


async def start(address: str, count: int) -> None:
    load = Load(address)
    plans = 0
    for index in range(count):
        answer = await load.ask(
            index, msgspec.structs.replace(began(index, index % KINDS, wants_plan=True), job=JobRef(uid=f"new-{index}"))
        )
        plans += isinstance(answer, StartPlan) and answer.plan is not None
    await load.close()
    print(f"start plans: {plans} of {count} had a plan")
    show(load.times)


def main() -> None:
    parser = argparse.ArgumentParser(description="What Brain bears.")
    parser.add_argument("--masters", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--runs", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="brain-bench-") as folder:
        path, log = Path(folder) / "brain.sqlite", Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "dlrover.cli.main",
            "brain",
            "serve",
            f"--sqlite={path}",
            "--port=0",
            "--http-port=none",
        ]
        with log.open("wb") as output:
            service = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            while not (found := re.search(r"Brain serves .* on (\S+:\d+)", log.read_text())):
                if service.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.1)
            asyncio.run(bear(found[1], psutil.Process(service.pid), options.masters, options.seconds))
            began_at = time.monotonic()
            fill(path, options.runs)
            print(
                f"{options.runs} runs stored in {time.monotonic() - began_at:.0f} s, {path.stat().st_size / 2**20:.0f} MiB"
            )
            asyncio.run(start(found[1], 500))
        finally:
            service.terminate()
            service.wait()


if __name__ == "__main__":
    main()
