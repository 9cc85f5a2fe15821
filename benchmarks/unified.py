"""
Multi-role jobs: how long a killed instance is away, what a call costs beside a plain actor call of Ray, and how many items a stream hands over.

    python benchmarks/unified.py --json unified.json

A Ray of two machines runs on this one. The peer is Ray itself, in the same cluster and the same run: an actor that Ray restarts, and plain
actor calls. Each figure is a median with its spread.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
os.environ["PYTHONPATH"] = str(REPOSITORY)

import ray  # noqa: E402

from dlrover.unified import Ensemble, Role, Stream, current, group, rpc  # noqa: E402
from tests.ray.lab import RayLab, until  # noqa: E402

SIZES = {"100 B": 100, "1 MB": 1 << 20, "32 MB": 32 << 20}
NUM_KILLS = 5
NUM_CALLS = {"100 B": 300, "1 MB": 50, "32 MB": 10}
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
        plain = ray.remote(_PlainCallee).options(num_cpus=0).remote()
        found: dict[str, dict[str, list[float]]] = {}
        for name, size in SIZES.items():
            payload = numpy.zeros(size, dtype=numpy.uint8)
            ours = lambda payload=payload: callee.call("echo", payload).result()  # noqa: E731
            theirs = lambda payload=payload: ray.get(plain.echo.remote(payload))  # noqa: E731
            found[name] = {"ours": [], "ray": []}
            for system, call in (("ours", ours), ("ray", theirs)):
                call()
                found[name][system] = [_timed(call) for _ in range(NUM_CALLS[name])]
        (folder / "calls.json").write_text(json.dumps(found))
        stream, began = Stream("items"), time.monotonic()
        for step in range(NUM_STEPS):
            stream.get(step)
        (folder / "stream.json").write_text(json.dumps(NUM_STEPS * BATCH / (time.monotonic() - began)))
        while not (folder / "stop").exists():
            time.sleep(0.02)


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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dr-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        lab = RayLab(directory)
        try:
            for _ in range(2):
                lab.add_machine(num_cpus=2)
            samples = _measure(Path(directory))
        finally:
            lab.close()
    _print(samples)
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1))
    return 0


def _measure(folder: Path) -> dict[str, Any]:
    module = "benchmarks.unified"
    job = Ensemble(
        "bench",
        roles=[
            Role.simple("callee", f"{module}.Callee", cpus=0.1, max_restarts=100, restart_pause=0.0),
            Role.simple("feeder", f"{module}.Feeder", cpus=0.1, count=2),
            Role.simple("caller", f"{module}.Caller", cpus=0.1, driver=True, needs=["callee"]),
            Role.stream("items", batch=BATCH),
        ],
        config={"folder": str(folder)},
    ).submit()
    until(lambda: (folder / "stream.json").exists(), lambda: str(job.status()), deadline=300.0)
    calls = json.loads((folder / "calls.json").read_text())
    rate = json.loads((folder / "stream.json").read_text())
    ours = []
    for _ in range(NUM_KILLS):
        account = job.account()
        [(name, pid)] = [(name, pid) for name, pid in account.pids.items() if name.startswith("callee")]
        life = int(name.rpartition(".")[2])
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        until(lambda life=life: _is_back(job, life))
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
    return {"calls": calls, "items per second": rate, "recovery": {"ours": ours, "ray": theirs}}


def _is_back(job: Any, life: int) -> bool:
    [callee] = [role for role in job.status().roles if role.name == "callee"]
    return bool(callee.instances[0].incarnation > life and callee.instances[0].state in ("running", "succeeded"))


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _print(samples: dict[str, Any]) -> None:
    def shown(values: list[float], unit: float = 1e3) -> str:
        middle = statistics.median(values) * unit
        return f"{middle:8.2f} ({min(values) * unit:.2f} to {max(values) * unit:.2f})"

    print("A call and its answer, in ms: median (least to most)")
    for size, values in samples["calls"].items():
        factor = statistics.median(values["ours"]) / statistics.median(values["ray"])
        print(f"  {size:>7}: ours {shown(values['ours'])}, a plain actor call {shown(values['ray'])}: {factor:.2f} x")
    print(f"A stream of batches of {BATCH}: {samples['items per second']:.0f} items per second with two feeders")
    recovery = samples["recovery"]
    print(
        f"A killed instance is back after {shown(recovery['ours'], 1.0)} s; an actor restarted by Ray {shown(recovery['ray'], 1.0)} s"
    )


if __name__ == "__main__":
    sys.exit(main())
