"""
What pods cost: replacements after a loss, a thousand launches and removals, a master that has a thousand pods.

    python benchmarks/kubernetes_pods.py [--parts replacement thousand master] [--runs 5] [--pods 1000] [--idle 120] [--kubeconfig FILE] [--json FILE]

The API server is a process of its own: that of the tests, or the one of `--kubeconfig`. Nothing runs in the pods. Times
are those of requests and of our own code; the requests are counted by the server of the tests.

* replacement: 30 of 32 pods are deleted at once; from each deletion to the accepted create of the replacement. Once with the
  platform alone, once with a real master, whose creates are seen by a watch.
* thousand: from the first intent to the last accepted create, by the platform in this process (32 calls at a time, as the master
  does it); how late a tick of this process's event loop came meanwhile; requests for each launched and each removed pod.
* master: a real master with a job of a thousand workers: while it makes its pods, how often its own watch (every 0.5 s) found its
  loop late by more than 0.1 s; after that its memory, beside that of a local master, and its requests in `--idle` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from figures import percentile, summarise, table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the API server and the lab of the tests

from dlrover.master.__main__ import GC_THRESHOLD
from dlrover.master.loop.stalls import LATE
from dlrover.master.platform_driver import MAX_CALLS
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.platform import PodPlatform
from dlrover.protocol.messages.fleet import NodeChanged, NodePhase
from tests.kubernetes.platform.lab import ELASTIC_JOBS, TEMPLATE, PodLab
from tests.platforms.contract import JOB, launch, remove, watching

PARTS = ("replacement", "thousand", "master")
REPLACED = 30
TICK = 0.01
WHOLE = "whole"
"""The job that has a master."""
LIMITS = {"replacement p99": 1.0, "creates": 30.0, "late": 0.1, "requests each": 1.1, "memory": 40.0, "idle": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--idle", type=float, default=120.0, help="seconds in which a master's requests are counted")
    parser.add_argument("--kubeconfig", type=Path, help="of another API server; its requests are not counted")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, object] = {}
    gc.freeze()  # as the master does it: what is measured is its loop
    gc.set_threshold(*GC_THRESHOLD)
    with tempfile.TemporaryDirectory() as directory, _server(arguments.kubeconfig, Path(directory)) as kubeconfig:
        counts = None if arguments.kubeconfig else Counts(kubeconfig)
        if "replacement" in arguments.parts:
            found |= asyncio.run(replacements(kubeconfig, arguments.runs))
            found |= asyncio.run(replacements_of_a_master(kubeconfig, arguments.runs, Path(directory)))
        if "thousand" in arguments.parts:
            found |= asyncio.run(thousand(kubeconfig, arguments.runs, arguments.pods, counts))
        if "master" in arguments.parts:
            found |= asyncio.run(whole_master(kubeconfig, arguments.pods, arguments.idle, counts, Path(directory)))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


async def replacements(kubeconfig: Path, num_runs: int) -> dict[str, object]:
    waits: list[float] = []
    for _ in range(num_runs):
        async with PodLab(kubeconfig, capacity=0) as lab:
            waits += await _replace(lab)
    p99 = percentile(waits, 99)
    show(
        f"Replacement of {REPLACED} of {REPLACED + 2} pods, {num_runs} times; p99 at most {LIMITS['replacement p99']:g} s",
        {"seconds": shown(waits), "p99": f"{p99:.3f}"},
    )
    return {"replacement": {"seconds": waits, "p99": p99}}


async def _replace(lab: PodLab) -> list[float]:
    platform = lab.platform()
    deleted_at: dict[int, float] = {}
    waited: list[float] = []

    async def delete(node: int) -> None:
        await lab.cluster.delete(lab.path(names.pod_name(JOB, "worker", node)), grace=30)
        deleted_at[node] = time.monotonic()

    async def replace(node: int) -> None:
        await platform.apply(launch(1000 + node, rank=node))
        waited.append(time.monotonic() - deleted_at.get(node, time.monotonic()))

    async with watching(platform) as watch:
        await asyncio.gather(*(platform.apply(launch(node)) for node in range(REPLACED + 2)))
        await _seen(watch, NodePhase.RUNNING, REPLACED + 2)
        lost = asyncio.gather(*(delete(node) for node in range(REPLACED)))
        replacing = []
        while len(replacing) < REPLACED:
            sight = await watch.next()
            if isinstance(sight, NodeChanged) and sight.node.phase is NodePhase.DELETED:
                replacing.append(asyncio.ensure_future(replace(sight.node.id)))
        await asyncio.gather(lost, *replacing)
    return waited


async def replacements_of_a_master(kubeconfig: Path, num_runs: int, directory: Path) -> dict[str, object]:
    waits: list[float] = []
    for _ in range(num_runs):
        async with PodLab(kubeconfig, capacity=0) as lab:
            await _add_job(lab, REPLACED + 2)
            waits += await _replaced_by_master(lab, kubeconfig, directory)
    p99 = percentile(waits, 99)
    show(
        f"The same by a real master, {num_runs} times; p99 at most {LIMITS['replacement p99']:g} s",
        {"seconds": shown(waits), "p99": f"{p99:.3f}"},
    )
    return {"replacement by a master": {"seconds": waits, "p99": p99}}


async def _replaced_by_master(lab: PodLab, kubeconfig: Path, directory: Path) -> list[float]:
    seen_at: dict[str, float] = {}
    """Rank to when its newest pod was seen first."""
    newest: dict[str, str] = {}
    running: set[str] = set()

    async def look() -> None:
        async for kind, seen in lab.cluster.follow(f"/api/v1/namespaces/{lab.namespace}/pods"):
            for pod in (seen.get("items") or ()) if kind == "LISTED" else (seen,):
                name, rank = pod["metadata"].get("name", ""), pod["metadata"].get("labels", {}).get(names.RANK_INDEX)
                if kind == "ADDED":
                    newest[rank], seen_at[rank] = name, time.monotonic()
                if pod.get("status", {}).get("phase") == "Running":
                    running.add(name)

    looking = asyncio.ensure_future(look())
    command = ("--platform", "pyk8s", "--namespace", lab.namespace, "--job_name", WHOLE)
    master = await _started(directory, *command, KUBECONFIG=str(kubeconfig))
    try:
        while len(running) < REPLACED + 2:  # noqa: ASYNC110 (the watch is a loop of its own)
            await asyncio.sleep(TICK)
        lost = dict(sorted(newest.items())[:REPLACED])
        deleted_at: dict[str, float] = {}

        async def delete(rank: str, name: str) -> None:
            await lab.cluster.delete(lab.path(name), grace=30)
            deleted_at[rank] = time.monotonic()

        await asyncio.gather(*(delete(rank, name) for rank, name in lost.items()))
        while any(newest[rank] == name for rank, name in lost.items()):  # noqa: ASYNC110
            await asyncio.sleep(TICK)
        return [max(0.0, seen_at[rank] - at) for rank, at in deleted_at.items()]
    finally:
        looking.cancel()
        await asyncio.wait((looking,))
        await _stop(master)


async def _add_job(lab: PodLab, num_pods: int) -> None:
    body = {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": WHOLE},
        "spec": {
            "distributionStrategy": "AllreduceStrategy",
            "replicaSpecs": {"worker": {"replicas": num_pods, "template": TEMPLATE}},
        },
    }
    await lab.create(ELASTIC_JOBS.format(lab.namespace), body)


async def thousand(kubeconfig: Path, num_runs: int, num_pods: int, counts: Counts | None) -> dict[str, object]:
    rows: list[dict[str, float]] = []
    for _ in range(num_runs):
        async with PodLab(kubeconfig, capacity=0) as lab:
            lab.is_awake.clear()
            platform = lab.platform()
            async with watching(platform) as watch:
                row: dict[str, float] = {}
                for name, intents in (
                    ("creates", [launch(node) for node in range(num_pods)]),
                    ("deletes", [remove(node) for node in range(num_pods)]),
                ):
                    before = counts.read() if counts else 0
                    began_at = time.monotonic()
                    row[f"{name} late"] = await _apply_all(platform, intents)
                    row[name] = time.monotonic() - began_at
                    if counts:
                        row[f"requests for each of the {name}"] = (counts.read() - before) / num_pods
                await _seen(watch, NodePhase.DELETED, num_pods)
            rows.append(row)
    show(
        f"{num_pods} pods, {num_runs} times, {MAX_CALLS} calls at a time; creates within {LIMITS['creates']:g} s, the loop late "
        f"by at most {LIMITS['late']:g} s, {LIMITS['requests each']:g} requests for each pod",
        {name: shown([row[name] for row in rows]) for name in rows[0]},
    )
    return {"thousand": rows}


async def _apply_all(platform: PodPlatform, intents: Sequence[object]) -> float:
    """The latest tick of the loop, in seconds behind its time."""
    slots = asyncio.Semaphore(MAX_CALLS)
    late = 0.0

    async def apply(intent: object) -> None:
        async with slots:
            await platform.apply(intent)  # type: ignore[arg-type]

    async def tick() -> None:
        nonlocal late
        while True:
            due_at = time.monotonic() + TICK
            await asyncio.sleep(TICK)
            late = max(late, time.monotonic() - due_at)

    ticking = asyncio.ensure_future(tick())
    await asyncio.gather(*(apply(intent) for intent in intents))
    ticking.cancel()
    return late


async def _seen(watch: object, phase: NodePhase, number: int) -> None:
    seen: set[int] = set()
    while len(seen) < number:
        sight = await watch.next()  # type: ignore[attr-defined]
        if isinstance(sight, NodeChanged) and sight.node.phase is phase:
            seen.add(sight.node.id)


async def whole_master(
    kubeconfig: Path, num_pods: int, idle: float, counts: Counts | None, directory: Path
) -> dict[str, object]:
    async with PodLab(kubeconfig, capacity=0) as lab:
        lab.is_awake.clear()
        await _add_job(lab, num_pods)
        local = await _started(directory, "--platform", "local", "--job_name", "alone")
        try:
            local_mb = _memory_mb(_master_of(local))
        finally:
            await _stop(local)
        began_at = time.monotonic()
        command = ("--platform", "pyk8s", "--namespace", lab.namespace, "--job_name", WHOLE)
        master = await _started(directory, *command, KUBECONFIG=str(kubeconfig))
        try:
            while len(await lab.pods()) < num_pods:  # noqa: ASYNC110 (there is no event for it)
                await asyncio.sleep(0.2)
            seconds = time.monotonic() - began_at
            await asyncio.sleep(5.0)  # marks of the ledger settle
            before = counts.read() if counts else 0
            await asyncio.sleep(idle)
            requests = (counts.read() - before) if counts else 0
            memory_mb = _memory_mb(_master_of(master))
        finally:
            said = await _stop(master)
    stalls = [float(each) for each in re.findall(r"the master was paused for_seconds=(\S+?):", said)]
    row = {
        "seconds from its start to all pods": seconds,
        f"loop late by more than {LATE:g} s, times": float(len(stalls)),
        "worst of these s": max(stalls, default=0.0),
        "MB above a local master": memory_mb - local_mb,
        "local master MB": local_mb,
        "requests a minute while idle": requests / idle * 60.0,
    }
    show(
        f"A master with {num_pods} pods; at most {LIMITS['memory']:g} MB above a local one, {LIMITS['idle']:g} request a minute",
        {name: f"{value:.2f}" for name, value in row.items()},
    )
    return {"master": row}


def shown(samples: Sequence[float]) -> str:
    found = summarise(samples)
    return "-" if found is None else f"{found.median:.3f} ({found.lowest:.3f} to {found.highest:.3f})"


def show(title: str, row: dict[str, str]) -> None:
    print(f"\n{title}\n\n{table(list(row), [list(row.values())])}", flush=True)


async def _started(directory: Path, *options: str, **environ: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dlrover.python.master.main", *options, "--port", "0"),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(directory), **environ},
    )
    assert process.stderr is not None
    while b"serving job=" not in (line := await process.stderr.readline()):
        assert line, "the master does not start"
    process.reading = asyncio.ensure_future(process.stderr.read())  # type: ignore[attr-defined]
    return process


def _master_of(process: asyncio.subprocess.Process) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0])


def _memory_mb(pid: int) -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def _stop(process: asyncio.subprocess.Process) -> str:
    """What it has said."""
    process.terminate()
    said: bytes = await process.reading  # type: ignore[attr-defined]
    await process.wait()
    return said.decode()


class Counts:
    """Requests at the server of the tests, watches left out."""

    def __init__(self, kubeconfig: Path) -> None:
        found = re.search(r"server: (\S+)", kubeconfig.read_text())
        assert found is not None
        self._url = f"{found[1]}/test/counts"

    def read(self) -> int:
        with urllib.request.urlopen(self._url) as answer:
            requests = json.load(answer)["requests"]
        return sum(count for name, count in requests.items() if not name.startswith("watch "))


@contextlib.contextmanager
def _server(kubeconfig: Path | None, directory: Path) -> Iterator[Path]:
    if kubeconfig is not None:
        yield kubeconfig
        return
    ready = directory / "ready.json"
    command = [sys.executable, "-m", "tests.kubernetes.server", "--port", "0", "--ready-file", str(ready)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1])
    try:
        while not ready.exists():
            assert process.poll() is None, "the API server does not start"
            time.sleep(0.05)
        yield Path(json.loads(ready.read_text())["kubeconfig"])
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
