"""Killed roles and machines of the example of reinforcement learning: see unified.py."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from dlrover.unified.core.messages import InstanceStatus
from examples.grpo.run import GrpoRun, raylet_of
from tests.ray.lab import RayLab, until

WORKERS = ("worker-0", "worker-1")
ENDLESS = 1_000_000
HEADWAY = 6
"""Steps between two kills."""
IDLE = 2.0
"""Seconds between two kills: workers are forked ahead then, as in a job that trains for long."""


def measure_roles(lab: RayLab, folder: Path, num_kills: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"policy, to the next new step of both workers": [], "a step": []}
    with _running(lab, folder) as grpo:
        for number in range(num_kills):
            _await_steady(grpo)
            found["policy, to the next new step of both workers"].append(_kill_worker(grpo, WORKERS[number % 2]))
        for name in ("rollout-1", "reward-0"):
            what = f"{name.partition('-')[0]}, until its next life runs"
            found[what] = []
            for _ in range(num_kills):
                _await_steady(grpo)
                life, pid = _life(grpo, name).incarnation, grpo.pids()[name]
                began = time.monotonic()
                os.kill(pid, signal.SIGKILL)
                until(lambda name=name, life=life: _is_back(grpo, name, life), grpo.explain)
                found[what].append(time.monotonic() - began)
        ends = [event["at"] for event in grpo.events() if event["rank"] == 0][-30:]
        found["a step"] = [after - before for before, after in itertools.pairwise(ends)]
    for name in ("rollout", "reward"):
        found[f"imports of the {name}"] = [_import(f"examples.grpo.{name}") for _ in range(3)]
    found["start of an empty actor"] = [_empty_actor() for _ in range(3)]
    return found


def measure_machines(lab: RayLab, folder: Path, num_kills: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"Ray's report": [], "roles run again after it": []}
    with _running(lab, folder) as grpo:
        for _ in range(num_kills):
            lab.add_machine(num_cpus=1)
            _await_steady(grpo)
            before = {
                name: pid for name, pid in grpo.pids().items() if name.startswith(("rollout", "reward", "samples"))
            }
            [machine] = [each for each in lab.machines if lab.raylet(each) == raylet_of(before["rollout-0"])]
            lost = [name for name, pid in before.items() if raylet_of(pid) == lab.raylet(machine)]
            lives = {name: _life(grpo, name).incarnation for name in lost}
            reported: list[float] = []
            watching = threading.Thread(target=_await_report, args=(machine.node_id, reported))
            watching.start()
            began = time.monotonic()
            lab.remove_machine(machine)
            until(lambda lives=lives: all(_is_back(grpo, name, life) for name, life in lives.items()), grpo.explain)
            back = time.monotonic()
            watching.join()
            found["Ray's report"].append(reported[0] - began)
            found["roles run again after it"].append(back - reported[0])
    return found


@contextmanager
def _running(lab: RayLab, folder: Path) -> Iterator[GrpoRun]:
    grpo = GrpoRun(lab, folder, num_steps=ENDLESS, restart_pause=0.0)
    try:
        yield grpo
    finally:
        grpo.job.stop("measured")
        grpo.wait()


def _await_steady(grpo: GrpoRun) -> None:
    """All run, and have done so for a while."""
    until(lambda: all(each.state == "running" for role in grpo.job.status().roles for each in role.instances))
    grpo.await_step(grpo.step() + HEADWAY)
    time.sleep(IDLE)


def _kill_worker(grpo: GrpoRun, name: str) -> float:
    pids = grpo.pids()
    old = {pids[worker] for worker in WORKERS}
    began = time.time()
    os.kill(pids[name], signal.SIGKILL)
    return float(until(lambda: _first_new_step(grpo.events(), old, began), grpo.explain) - began)


def _first_new_step(events: list[dict[str, Any]], old: set[int], began: float) -> float:
    """When both new workers had done a step that no former one had; 0: not yet."""
    newest = max(event["step"] for event in events if event["pid"] in old)
    firsts: dict[int, float] = {}
    for event in events:
        if event["pid"] not in old and event["at"] > began and event["step"] > newest:
            firsts.setdefault(event["rank"], event["at"])
    return max(firsts.values()) if len(firsts) == len(WORKERS) else 0.0


def _life(grpo: GrpoRun, name: str) -> InstanceStatus:
    return next(each for role in grpo.job.status().roles for each in role.instances if each.name == name)


def _is_back(grpo: GrpoRun, name: str, life: int) -> bool:
    now = _life(grpo, name)
    return now.incarnation > life and now.state == "running"


def _await_report(node_id: str, reported: list[float]) -> None:
    until(lambda: any(each["NodeID"] == node_id and not each["Alive"] for each in ray.nodes()))
    reported.append(time.monotonic())


def _import(module: str) -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, cwd=Path(__file__).parents[1])
    return time.monotonic() - began


def _empty_actor() -> float:
    class Empty:
        def answer(self) -> int:
            return 1

    began = time.monotonic()
    actor = ray.remote(Empty).options(num_cpus=0).remote()
    ray.get(actor.answer.remote())
    took = time.monotonic() - began
    ray.kill(actor)
    return took
