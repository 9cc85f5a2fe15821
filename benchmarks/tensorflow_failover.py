"""
A parameter server is killed: how long until the chief, and then the last worker, make their next step?

    python benchmarks/tensorflow_failover.py [--kills 5]

Two jobs of the same model train side by side at a slow pace: ours under `dlrover local` (2 parameter servers, chief, 2 workers), and the floor, a script
that forks the same processes and decides nothing (`tensorflow_floor.py`). Kills alternate, so both meet the same machine in the same minute. Exit code 1
if the median is over 1.3 times the floor's, any last worker comes more than a second after its chief, or anybody waits 10 s.

`--original 2` adds the original's way, as often: the server comes back at its former address, and the sessions of TensorFlow recover by themselves. Its workers look
every 30 s, and its sessions may hang, so each kill takes a minute or two. TensorFlow 2.15 only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the floor forks, and numpy would start threads
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["COUNTING_PACE"] = "0.05"
os.environ["COUNTING_RECORDS"] = "1000000"  # each has a number in the model, of ours and of the floor alike

PATIENCE = 300.0
RATIO = 1.3
LAST_WORKER = 1.0
LONGEST_WAIT = 10.0
LONGEST_LOOK = 120.0
"""Seconds after which a process of the original's way counts as hanging."""
TRAINED = ("chief-0", "worker-0", "worker-1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--original", type=int, default=0, help="so many kills in the original's way, after the others")
    parser.add_argument("--json", default="", help="write the figures there")
    options = parser.parse_args()
    import tensorflow  # noqa: F401  once, before the floor forks

    from benchmarks.tensorflow_floor import Floor, OriginalFlow
    from tests.tensorflow.cluster_job import ClusterJob

    figures: dict[str, list[tuple[float, float]]] = {"ours": [], "floor": []}
    with tempfile.TemporaryDirectory(prefix="dlrover-tf-") as name:
        ours, theirs = Path(name) / "ours", Path(name) / "floor"
        ours.mkdir()
        theirs.mkdir()
        shape = ("--ps", "2", "--chief", "1", "--nodes", "2")
        job = ClusterJob(ours, *shape, save_steps=20, keep=5, is_watched=0)
        try:
            with Floor(theirs) as floor:
                for kill in range(1, options.kills + 1):
                    for who, directory, end in (
                        ("ours", ours, lambda: job.kill("ps-0")),
                        ("floor", theirs, floor.kill_server),
                    ):
                        wait_for_steps(directory, kill, 10)
                        killed_at = end()
                        wait_for_steps(directory, kill + 1, 1)
                        firsts = [first_step(directory, task, kill + 1) - killed_at for task in TRAINED]
                        figures[who].append((firsts[0], max(firsts)))
                        print(
                            f"kill {kill} {who:5}: chief {firsts[0]:5.2f} s, last worker {max(firsts[1:]):5.2f} s",
                            flush=True,
                        )
        finally:
            job.close()
        if options.original:
            way = Path(name) / "original"
            way.mkdir()
            with OriginalFlow(way) as flow:
                for kill in range(1, options.original + 1):
                    kill_in_the_originals_way(flow, kill)
    return report(figures, options.json)


def kill_in_the_originals_way(flow: OriginalFlow, kill: int) -> None:  # noqa: F821
    """Its processes have no versions, so a first step is the first one after the server is back."""
    wait_for_steps(flow.directory, flow.version, 10)
    killed_at = flow.kill_server()
    back_at = time.time()
    end_at = killed_at + LONGEST_LOOK
    waits = {}
    for who in TRAINED:
        found: list[float] = []
        while not found and time.time() < end_at:
            time.sleep(0.02)
            found = [at for at in steps(flow.directory, who, flow.version) if at > back_at]
        waits[who] = f"{found[0] - killed_at:.2f} s" if found else f"none within {LONGEST_LOOK:g} s"
    told = ", ".join(f"{who} {wait}" for who, wait in waits.items())
    print(f"kill {kill} in the original's way, to the next step: {told}", flush=True)
    if any("none" in wait for wait in waits.values()):
        flow.begin_anew()


def wait_for_steps(directory: Path, version: int, count: int) -> None:
    end_at = time.monotonic() + PATIENCE
    while not all(len(steps(directory, task, version)) >= count for task in TRAINED):
        if time.monotonic() > end_at:
            raise SystemExit(f"no {count} steps of version {version} within {PATIENCE:g} s in {directory.name}")
        time.sleep(0.02)


def first_step(directory: Path, task: str, version: int) -> float:
    return steps(directory, task, version)[0]


def steps(directory: Path, task: str, version: int) -> list[float]:
    path = directory / f"steps-{task}.txt"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [float(line[0]) for line in lines if len(line) == 3 and int(line[1]) == version]


def report(figures: dict[str, list[tuple[float, float]]], path: str) -> int:
    chief = {who: statistics.median(first for first, _ in found) for who, found in figures.items()}
    last = {who: max(late - first for first, late in found) for who, found in figures.items()}
    ratio = chief["ours"] / chief["floor"]
    print(
        f"\nkill -> first step of the chief, median: ours {chief['ours']:.2f} s, floor {chief['floor']:.2f} s, ratio {ratio:.2f}"
    )
    print(f"last worker after the chief, longest:     ours {last['ours']:.2f} s, floor {last['floor']:.2f} s")
    pairs = [ours / floor for (ours, _), (floor, _) in zip(figures["ours"], figures["floor"], strict=True)]
    print(f"kill by kill, ours / floor of the same minute: {', '.join(f'{pair:.2f}' for pair in pairs)}")
    is_met = [
        pair <= RATIO and late - first <= LAST_WORKER
        for pair, (first, late) in zip(pairs, figures["ours"], strict=True)
    ]
    print(
        f"{sum(is_met)} of {len(is_met)} kills meet the budget: {RATIO} x floor to the chief, {LAST_WORKER:g} s to the last worker"
    )
    slowest = max(late for _, late in figures["ours"])
    print(f"longest wait of ours: {slowest:.2f} s; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if path:
        Path(path).write_text(json.dumps({"figures": figures, "ratio": ratio, "load": os.getloadavg()}, indent=2))
    return 0 if ratio <= RATIO and last["ours"] <= LAST_WORKER and slowest < LONGEST_WAIT else 1


if __name__ == "__main__":
    sys.exit(main())
