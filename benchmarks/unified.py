"""
Multi-role jobs: what calls and streams cost, and how long a killed role is away.

    python benchmarks/unified.py --json unified.json
    python benchmarks/unified.py --parts roles --kills 6

`calls`: a call and its answer beside a plain actor call of Ray, items per second of a stream, a killed instance beside an actor that Ray restarts, and
how soon a call to a dead role raises. Ray is the peer, in the same cluster and the same run.

`roles`: the example of reinforcement learning. From SIGKILL of a worker of the policy to the end of the first step that both workers had not done; of
a rollout and of the reward until the next life runs; and what no role can save: its imports, and the start of an empty actor.

`machine`: a raylet of that example with all that runs on it. From Ray's report that the machine is dead until its roles run again.

A Ray of two or four machines runs on this one. Each figure is a median with its spread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
os.environ["PYTHONPATH"] = str(REPOSITORY)

import ray  # noqa: E402

from benchmarks.unified_roles import measure_machines, measure_roles  # noqa: E402
from dlrover.unified import (  # noqa: E402
    Ensemble,
    EnsembleHandle,
    InstanceLost,
    Role,
    RoleGone,
    Stream,
    current,
    group,
    rpc,
)
from dlrover.unified.core.messages import InstanceStatus  # noqa: E402
from examples.grpo.run import new_lab  # noqa: E402
from tests.ray.lab import RayLab, until  # noqa: E402

SIZES = {"100 B": 100, "1 MB": 1 << 20, "32 MB": 32 << 20}
NUM_KILLS = 5
PARTS = ("calls", "roles", "machine")
NUM_CALLS = {"100 B": 300, "1 MB": 50, "32 MB": 40}
NUM_STEPS, BATCH = 40, 64


class Callee:
    @rpc(retry=True)
    def echo(self, payload: Any) -> int:
        return len(payload)


class Caller:
    """Measures inside the job, where calls are made."""

    def run(self) -> None:
        import numpy

        folder = Path(current().config["folder"])
        callee = group("callee")[0]
        (folder / "dead.json").write_text(json.dumps(_calls_to_the_dead(folder)))
        plain = ray.remote(_PlainCallee).options(num_cpus=0).remote()
        found: dict[str, dict[str, list[float]]] = {}
        for name, size in SIZES.items():
            payload = numpy.zeros(size, dtype=numpy.uint8)
            ours = lambda payload=payload: callee.call("echo", payload).result()  # noqa: E731
            theirs = lambda payload=payload: ray.get(plain.echo.remote(payload))  # noqa: E731
            found[name] = {"ours": [], "ray": []}
            systems = (("ours", ours), ("ray", theirs))
            for _, call in systems:
                call()
            for _ in range(NUM_CALLS[name]):  # in turns
                for system, call in systems:
                    found[name][system].append(_timed(call))
        (folder / "calls.json").write_text(json.dumps(found))
        stream, began = Stream("items"), time.monotonic()
        for step in range(NUM_STEPS):
            stream.get(step)
        (folder / "stream.json").write_text(json.dumps(NUM_STEPS * BATCH / (time.monotonic() - began)))
        while not (folder / "stop").exists():
            time.sleep(0.02)


class Victim:
    @rpc(retry=True)
    def pid(self) -> int:
        return os.getpid()

    @rpc()
    def hang(self) -> None:
        (Path(current().config["folder"]) / f"hangs-{os.getpid()}").touch()
        current().ending.wait()


def returns() -> None:
    """A role that has ended once its process is killed."""


def _calls_to_the_dead(folder: Path) -> dict[str, list[float]]:
    """From SIGKILL of a callee until the call raises that it works on; and calls to a role that has ended."""
    found: dict[str, list[float]] = {"under way": [], "role that ended": []}
    for _ in range(NUM_KILLS):
        pid = group("victim")[0].send("pid", retry=True).result()
        call = group("victim")[0].call("hang")
        until((folder / f"hangs-{pid}").exists)
        began = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        assert isinstance(call.exception(), InstanceLost)
        found["under way"].append(time.perf_counter() - began)
    (folder / "kill-short").touch()
    until(lambda: isinstance(group("short")[0].call("anything").exception(), RoleGone))
    found["role that ended"] = [_timed(group("short")[0].call("anything").exception) for _ in range(NUM_KILLS)]
    return found


class Feeder:
    def run(self) -> None:
        for task in Stream("items").tasks(most=16):
            task.put(task.key)


class _PlainCallee:
    def echo(self, payload: Any) -> int:
        return len(payload)

    def pid(self) -> int:
        return os.getpid()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all samples to this file")
    parser.add_argument("--parts", default=",".join(PARTS), help="(default %(default)s)")
    parser.add_argument(
        "--kills", type=int, default=NUM_KILLS, help="of each role of the example (default %(default)s)"
    )
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts {unknown[0]}: give some of {', '.join(PARTS)}")
    samples: dict[str, Any] = {}
    if "calls" in parts:
        with new_lab(num_machines=2, settings=None) as lab, _folder() as folder:
            samples.update(_measure_calls(lab, folder))
    if "roles" in parts:
        with new_lab() as lab, _folder() as folder:
            samples["roles"] = measure_roles(lab, folder, options.kills)
    if "machine" in parts:
        with new_lab() as lab, _folder() as folder:
            samples["machine"] = measure_machines(lab, folder, min(options.kills, 3))
    _print(samples)
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1))
    return 0


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dlrover-bench-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _measure_calls(lab: RayLab, folder: Path) -> dict[str, Any]:
    module = "benchmarks.unified"
    restarts: dict[str, Any] = {"cpus": 0.1, "max_restarts": 100, "restart_pause": 0.0}
    job = Ensemble(
        "bench",
        roles=[
            Role.simple("callee", f"{module}.Callee", **restarts),
            Role.simple("victim", f"{module}.Victim", **restarts),
            Role.simple("short", f"{module}.returns", cpus=0.1),
            Role.simple("feeder", f"{module}.Feeder", cpus=0.1, count=2),
            Role.simple("caller", f"{module}.Caller", cpus=0.1, driver=True, needs=["callee", "victim"]),
            Role.stream("items", batch=BATCH),
        ],
        config={"folder": str(folder)},
    ).submit()
    until((folder / "kill-short").exists, lambda: str(job.status()), deadline=300.0)
    until(lambda: _instance(job, "short").state == "succeeded")
    os.kill(job.account().pids["short-0.1"], signal.SIGKILL)
    until((folder / "stream.json").exists, lambda: str(job.status()), deadline=300.0)
    ours = []
    for _ in range(NUM_KILLS):
        life = _instance(job, "callee").incarnation
        pid = job.account().pids[f"callee-0.{life}"]
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        until(
            lambda life=life: (
                _instance(job, "callee").incarnation > life and _instance(job, "callee").state == "running"
            )
        )
        ours.append(time.monotonic() - began)
    (folder / "stop").touch()
    assert job.wait(120) == 0
    peer = ray.remote(_PlainCallee).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
    theirs = []
    for _ in range(NUM_KILLS):
        pid = ray.get(peer.pid.remote())
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ray.get(peer.pid.remote())
        theirs.append(time.monotonic() - began)
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("calls", "dead", "stream")}
    return {**found, "recovery": {"ours": ours, "ray": theirs}}


def _instance(job: EnsembleHandle, name: str) -> InstanceStatus:
    [role] = [role for role in job.status().roles if role.name == name]
    return role.instances[0]


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _print(samples: dict[str, Any]) -> None:
    def shown(values: list[float], unit: float = 1e3, digits: int = 2) -> str:
        middle = statistics.median(values) * unit
        return f"{middle:8.{digits}f} ({min(values) * unit:.{digits}f} to {max(values) * unit:.{digits}f})"

    if "calls" in samples:
        print("A call and its answer, in ms: median (least to most)")
        for size, values in samples["calls"].items():
            factor = statistics.median(values["ours"]) / statistics.median(values["ray"])
            print(
                f"  {size:>7}: ours {shown(values['ours'])}, a plain actor call {shown(values['ray'])}: {factor:.2f} x"
            )
        print(
            f"A stream of batches of {BATCH}: {samples['stream']:.0f} items per second with two feeders\n"
            f"A killed instance is back after {shown(samples['recovery']['ours'], 1.0)} s; an actor restarted by Ray "
            f"{shown(samples['recovery']['ray'], 1.0)} s"
        )
        for what, values in samples["dead"].items():
            print(f"A call to a dead callee raises after, in ms, {what}: {shown(values)}")
    for part in ("roles", "machine"):
        for what, values in samples.get(part, {}).items():
            print(f"{part}: {what}: {shown(values, 1.0, 3)} s, {len(values)} times")


if __name__ == "__main__":
    sys.exit(main())
