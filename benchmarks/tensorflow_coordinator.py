"""
The coordinator runtime loses a server, its chief, or a worker, and changes its servers: how long until the next step?

    python benchmarks/tensorflow_coordinator.py [--rounds 5] [--only servers]

A program with 2 parameter servers, a chief and 2 workers trains under `dlrover local` at a slow pace. A step counts when its result has come back to the chief,
who is the only one that knows. Beside it trains the floor of the same minute, a script that forks the same processes and decides nothing
(`tensorflow_floor.py`). Both make a fresh strategy, restore and trace the program anew.

* A server is killed; then the chief. Both are losses of a version.
* A worker is killed. Its batch is trained by the other one, so the pause is the longest time between two steps.
* Servers 2 -> 3 -> 2 and an exchange. A change also parks and saves, which the floor does not; that stands apart.

Exit code 1 if a median is over 1.3 times the floor's (for a change: without the save), or a killed worker costs more than 2 s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the floor forks, and numpy would start threads
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
from tests.tensorflow.cluster_job import ClusterJob

SETTINGS = {"pace": 0.05, "records": 1_000_000, "save_steps": 20, "keep": 5, "is_watched": 0}
CHANGES = (
    ("scale", "--replicas", "ps=3"),
    ("scale", "--replicas", "ps=2"),
    ("migrate", "--node", "ps-0", "--cpu", "1", "--memory-mb", "0"),
)
PATIENCE = 300.0
LIMIT, LIMIT_OF_WORKER = 1.3, 2.0
AROUND = 10.0
"""Seconds after the kill of a worker in which a pause is looked for."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is killed; changes are made as often")
    parser.add_argument("--only", choices=("servers", "chiefs", "workers", "changes"), help="one part; otherwise all")
    parser.add_argument("--json", default="", help="write the figures there")
    options = parser.parse_args()
    os.environ.update({f"COORDINATED_{name.upper()}": str(value) for name, value in SETTINGS.items()})
    import tensorflow  # noqa: F401  once, before the floor forks

    from benchmarks.tensorflow_floor import CoordinatedFloor

    figures: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="dlrover-tf-") as name:
        ours, theirs = Path(name) / "ours", Path(name) / "floor"
        ours.mkdir()
        theirs.mkdir()
        job = ClusterJob(ours, "--ps", "2", "--chief", "1", "--nodes", "2", conf="coordinated_conf.Conf", **SETTINGS)
        try:
            with CoordinatedFloor(theirs) as floor:
                contest = Contest(job, theirs)
                if options.only in (None, "servers"):
                    figures["server killed"] = [contest.loss("ps-0", floor.kill_server) for _ in range(options.rounds)]
                if options.only in (None, "chiefs"):
                    figures["chief killed"] = [contest.loss("chief-0", floor.kill_chief) for _ in range(options.rounds)]
                if options.only in (None, "changes"):
                    wanted = itertools.islice(itertools.cycle(CHANGES), options.rounds)
                    figures["planned change"] = [contest.change(change, floor.kill_server) for change in wanted]
                pauses = [contest.worker() for _ in range(options.rounds)] if options.only in (None, "workers") else []
        finally:
            job.close()
    return report(figures, pauses, options.json)


class Contest:
    """Ours and the floor, disturbed in turn."""

    def __init__(self, job: ClusterJob, theirs: Path) -> None:
        self._job, self._theirs = job, theirs
        self._version, self._floor_version = 1, 1

    def loss(self, who: str, end_floors: Callable[[], float]) -> tuple[float, float]:
        """Seconds from the kill to the next step, ours and the floor's."""
        self._wait_for_steps()
        killed_at = self._job.kill(who)
        self._version += 1
        first = self._first_step(self._job.directory, self._version) - killed_at
        return self._told(f"{who} killed", first, self._floor(end_floors))

    def change(self, change: tuple[str, ...], end_floors: Callable[[], float]) -> tuple[float, float]:
        """The pause without parking and the save, and the floor's."""
        self._wait_for_steps()
        self._job.command(*change)
        self._version += 1
        first = self._first_step(self._job.directory, self._version)
        last = steps(self._job.directory, self._version - 1)[-1]
        saved_at = self._job.decided_at(f"Version {self._version} of the cluster begins")
        print(
            f"{' '.join(change)}: pause {first - last:.2f} s, of it parked and saved {saved_at - last:.2f} s",
            flush=True,
        )
        return self._told(" ".join(change), first - max(last, saved_at), self._floor(end_floors))

    def worker(self) -> float:
        """The longest time between two steps around the kill."""
        before = len(steps(self._job.directory))
        wait_until(lambda: len(steps(self._job.directory)) > before + 30, "steps before a worker is killed")
        killed_at = self._job.kill("worker-1")
        end_at = killed_at + AROUND
        wait_until(lambda: steps(self._job.directory)[-1] > end_at, "steps after a killed worker")
        times = [at for at in steps(self._job.directory) if killed_at - 1 < at < end_at]
        pause = max(after - before for before, after in itertools.pairwise(times) if after > killed_at)
        print(f"worker-1 killed: longest pause {pause:.2f} s", flush=True)
        return pause

    def _floor(self, end_floors: Callable[[], float]) -> float:
        wait_until(lambda: len(steps(self._theirs, self._floor_version)) >= 30, "steps of the floor")
        killed_at = end_floors()
        self._floor_version += 1
        return self._first_step(self._theirs, self._floor_version) - killed_at

    def _wait_for_steps(self) -> None:
        """So many that there is a checkpoint of this version."""
        wait_until(lambda: len(steps(self._job.directory, self._version)) >= 30, f"steps of version {self._version}")

    def _first_step(self, directory: Path, version: int) -> float:
        wait_until(lambda: bool(steps(directory, version)), f"a step of version {version} in {directory.name}")
        return steps(directory, version)[0]

    def _told(self, what: str, ours: float, floor: float) -> tuple[float, float]:
        print(f"{what}: ours {ours:.2f} s, floor {floor:.2f} s, ratio {ours / floor:.2f}", flush=True)
        return ours, floor


def wait_until(is_met: Callable[[], bool], what: str) -> None:
    end_at = time.monotonic() + PATIENCE
    while not is_met():
        if time.monotonic() > end_at:
            raise SystemExit(f"not within {PATIENCE:g} s: {what}")
        time.sleep(0.02)


def steps(directory: Path, version: int | None = None) -> list[float]:
    """When the chief heard of each step of that version; None: of any."""
    path = directory / "trained-chief-0.txt"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [float(line[0]) for line in lines if len(line) == 3 and version in (None, int(line[1]))]


def report(figures: dict[str, list[tuple[float, float]]], pauses: list[float], path: str) -> int:
    print()
    is_good = True
    for what, found in figures.items():
        ours, floor = (statistics.median(column) for column in zip(*found, strict=True))
        is_good &= ours / floor <= LIMIT
        print(f"{what}, median of {len(found)}: ours {ours:.2f} s, floor {floor:.2f} s, ratio {ours / floor:.2f}")
    if pauses:
        is_good &= max(pauses) <= LIMIT_OF_WORKER
        print(f"worker killed, {len(pauses)} times: longest pause of the program {max(pauses):.2f} s")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if path:
        told = {"figures": figures, "pauses": pauses, "load": os.getloadavg()}
        Path(path).write_text(json.dumps(told, indent=2))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
