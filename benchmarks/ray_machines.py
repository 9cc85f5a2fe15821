"""
Machines of a Ray cluster that go and come: what `ray_recovery.py` measures beside killed workers and nodes.

A job of two nodes and a standby trains on raylets of this machine; its host and master are on a raylet of their own. SIGKILL goes to

* `raylet`: the raylet above a training node. Seconds until the master's core shows it, until no process of that node lives, and until the next step.
* `host`: the host actor. Seconds until the master answers with the whole world again. No worker's process may change.
* `host-raylet`: the raylet above the host. The same.
* `no-room`: nothing is killed. The job is told to grow beyond what the machines have: seconds until the status has a Pending node with the sentence that
  says what is missing, and, from the moment when Ray shows a new machine, until the node runs there.
* `ctrl-c`: SIGINT to the driver, as the last part. Seconds until it has ended and no process, actor, key or placement group of the job is left; `deaf` is a
  second job whose workers ignore signals, with a shutdown timeout of 5 s.

Each with Ray's default health check and with the settings that docs/how-to/ray.md recommends.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from figures import seconds, summarise, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dlrover.platforms.ray import cluster
from dlrover.protocol.messages.fleet import FleetNodeStatus, NodePhase, ScaleJob
from tests.ray.jobs import RunningRayJob, actor_above, below, living, raylet_above
from tests.ray.lab import RECOMMENDED, RayLab, until

PARTS = ("raylet", "host", "host-raylet", "no-room", "ctrl-c")
DEAF_TIMEOUT = 5.0
"""Shutdown timeout of the job that is deaf."""
SETTINGS: dict[str, dict[str, Any] | None] = {"default": None, "recommended": RECOMMENDED}
BUDGETS = {
    ("raylet", "seen by the core"): 1.0,
    ("raylet", "processes gone"): 6.0,
    ("host", "master serves"): 10.0,
    ("host-raylet", "master serves"): {"default": 25.0, "recommended": 10.0},
    ("no-room", "pending with a sentence"): 1.0,
    ("no-room", "new machine is used"): 5.0,
    ("ctrl-c", "nothing is left"): 35.0,
    ("ctrl-c", "nothing is left of a deaf job"): DEAF_TIMEOUT + 5.0,
}
Samples = dict[tuple[str, str, str], list[float]]
"""By part, settings and what was measured."""


def measure_machines(parts: list[str], settings: str, results: Samples) -> None:
    """One cluster and one job; each part once."""
    with tempfile.TemporaryDirectory(prefix="dr-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        lab = RayLab(f"{folder}/ray", settings=SETTINGS[settings])
        job = None
        try:
            home = lab.add_machine(num_cpus=0)
            for _ in range(4):
                lab.add_machine()
            data = Path(folder, "job")
            data.mkdir()
            options = ("--nodes", "2", "--standby", "1", "--max-relaunches", "100", "--host-machine", home.node_id)
            job = RunningRayJob(lab, data, *options)
            job.await_steps(10, world_size=2)
            for part in parts:
                for what, took in PROBES[part](job).items():
                    results.setdefault((part, settings, what), []).append(took)
                    print(f"  {part}, {settings} settings: {what} after {took:.3f} s", file=sys.stderr, flush=True)
                if part == "ctrl-c":
                    return
                job.await_steps(10, world_size=2)
            job.let_end()
            job.wait()
        finally:
            if job is not None:
                job.close()
            lab.close()


def lose_raylet(job: RunningRayJob) -> dict[str, float]:
    victim = job.workers()[1]
    processes = [actor_above(victim), *below(actor_above(victim).pid)]
    raylet, world, last = raylet_above(victim), world_of(job), job.steps()[-1]
    began = time.monotonic()
    os.kill(raylet, signal.SIGKILL)
    until(lambda: world_of(job) != world, job.output)
    seen = time.monotonic() - began
    until(lambda: not living(processes), lambda: f"still there: {living(processes)}")
    gone = time.monotonic() - began

    def steps_of_next_round() -> list[float]:
        """Survivors of the old round may still complete a step: those do not count."""
        newest = max(step.step for step in job.steps() if step.round <= last.round)
        return [step.at for step in job.steps() if step.round > last.round and step.step > newest]

    until(steps_of_next_round, job.output)
    return {"seen by the core": seen, "processes gone": gone, "next new step": min(steps_of_next_round()) - began}


def lose_host(job: RunningRayJob) -> dict[str, float]:
    return _lose(job, job.account().pid)


def lose_host_raylet(job: RunningRayJob) -> dict[str, float]:
    return _lose(job, raylet_above(job.account().pid))


def _lose(job: RunningRayJob, pid: int) -> dict[str, float]:
    epoch, workers = job.account().host_epoch, job.workers()
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    until(lambda: job.account().host_epoch > epoch, job.output)
    until(lambda: job.status().world_size == 2, job.output)
    took = time.monotonic() - began
    job.await_steps(world_size=2)
    if job.workers() != workers:
        raise SystemExit(f"workers were replaced although only the host was lost: {workers} are {job.workers()} now")
    return {"master serves": took}


def lack_room(job: RunningRayJob) -> dict[str, float]:
    free = sum(int(machine.free.get("CPU", 0)) for machine in cluster.machines())
    known = {node["NodeID"] for node in ray.nodes()}
    began = time.monotonic()
    job.ask(ScaleJob(min_nodes=2, max_nodes=2 + free + 1))
    until(lambda: any("It asks for" in node.message for node in waiting(job)), job.output)
    seen = time.monotonic() - began
    adding = threading.Thread(target=job.lab.add_machine)
    adding.start()
    until(lambda: any(node["Alive"] and node["NodeID"] not in known for node in ray.nodes()), job.output)
    began = time.monotonic()
    until(lambda: not waiting(job), job.output)
    used = time.monotonic() - began
    adding.join()
    job.await_steps(world_size=2 + free + 1)
    job.ask(ScaleJob(min_nodes=2, max_nodes=2))
    return {"pending with a sentence": seen, "new machine is used": used}


def waiting(job: RunningRayJob) -> list[FleetNodeStatus]:
    return [node for node in job.status().fleet if node.phase in (NodePhase.INITIAL, NodePhase.PENDING)]


def interrupt(job: RunningRayJob) -> dict[str, float]:
    took = _interrupt(job, job.script)
    folder = job.folder / "deaf"
    folder.mkdir()
    (folder / "deaf.py").write_text(DEAF)
    deaf = RunningRayJob(
        job.lab, folder, script=str(folder / "deaf.py"), launch=(f"--shutdown-timeout={DEAF_TIMEOUT}",)
    )
    try:
        until(lambda: (folder / "is-deaf").exists(), deaf.output)
        return {"nothing is left": took, "nothing is left of a deaf job": _interrupt(deaf, str(folder))}
    finally:
        deaf.close()


DEAF = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "is-deaf").touch()
while True:
    signal.pause()
"""


def _interrupt(job: RunningRayJob, needle: str) -> float:
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    job.wait()
    job.lab.await_nothing_left(needle)
    return time.monotonic() - began


def world_of(job: RunningRayJob) -> tuple[object, ...]:
    status = job.status()
    return (status.round, *((node.node, node.status) for node in status.nodes if node.group_rank >= 0))


PROBES: dict[str, Callable[[RunningRayJob], dict[str, float]]] = {
    "raylet": lose_raylet,
    "host": lose_host,
    "host-raylet": lose_host_raylet,
    "no-room": lack_room,
    "ctrl-c": interrupt,
}


def report_machines(results: Samples) -> None:
    rows = []
    for (part, settings, what), samples in results.items():
        figures = summarise(samples)
        assert figures is not None
        budget = BUDGETS.get((part, what))
        limit = budget[settings] if isinstance(budget, dict) else budget
        rows.append(
            (
                f"{part}, {settings} settings: {what}",
                str(figures.num_samples),
                seconds(figures.median),
                seconds(figures.lowest),
                seconds(figures.highest),
                seconds(limit),
            )
        )
    print(table(("SIGKILL of", "kills", "median s", "lowest", "highest", "budget"), rows))
