"""
What planned changes, lost workers and lost chiefs cost those who go on, and what a large model costs.

    python benchmarks/tensorflow_changes.py [--rounds 3] [--gigabytes 1]

Four parts, each with jobs under `dlrover local`:

* Servers 1 -> 3 -> 2 and an exchange. The pause is the time between the last step before the change and the first one after it, of the chief and of the last
  worker. Beside each the floor of the same minute: `tensorflow_floor.py` ends and forks the same number of processes and restores. A change also
  saves, which the floor does not; the save stands apart.
* A worker, then the chief, is killed. The pause is the longest time between two steps of each other process around the kill, beside the 99th percentile
  of its steps.
* A server is stopped (SIGSTOP). The time until the chief's next step is that of two heartbeats, in which its agent finds it, and that of a loss.
* A model of so many gigabytes of variables on 2 servers: how long a save, the restore after a killed server and a planned change take.

Exit code 1 if a pause is over its limit: 1.3 x the floor and the save for a change, twice the 99th percentile for a kill, 13 s for a stopped server. `--only`
runs one part, for a machine that is quiet for minutes only.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["COUNTING_PACE"] = "0.05"
os.environ["COUNTING_RECORDS"] = "1000000"  # each has a number in the model, of ours and of the floor alike

from tests.tensorflow.cluster_job import ClusterJob

TRAINS = r"Version \d+ trains"
TRAINED = ("chief-0", "worker-0", "worker-1")
CHANGES = (
    ("scale", "--replicas", "ps=3"),
    ("scale", "--replicas", "ps=2"),
    ("migrate", "--node", "ps-0", "--cpu", "1", "--memory-mb", "0"),
    ("scale", "--replicas", "ps=1"),
)
LIMIT_OF_CHANGE, LIMIT_OF_KILL, LIMIT_OF_STOP = 1.3, 2.0, 13.0
AROUND = 10.0
"""Seconds after a kill in which a pause is looked for."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="how often each change and each kill is made")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of variables; 0: no large model")
    parser.add_argument("--only", choices=("changes", "kills", "stops", "large"), help="one part; otherwise all")
    options = parser.parse_args()
    import tensorflow  # noqa: F401  once, before the floor forks

    with tempfile.TemporaryDirectory(prefix="dlrover-tf-") as name:
        directory = Path(name)
        is_good = True
        if options.only in (None, "changes"):
            is_good &= measure_changes(directory, options.rounds)
        if options.only in (None, "kills"):
            is_good &= measure_kills(directory, options.rounds)
        if options.only in (None, "stops"):
            is_good &= measure_stops(directory, options.rounds)
        if options.gigabytes and options.only in (None, "large"):
            measure_large(directory, options.gigabytes)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 0 if is_good else 1


def start(directory: Path, name: str, *options: str, **environ: object) -> ClusterJob:
    own = directory / name
    own.mkdir()
    return ClusterJob(own, *options, **{"save_steps": 100_000, "is_watched": 0, **environ})


def measure_changes(directory: Path, rounds: int) -> bool:
    from benchmarks.tensorflow_failover import steps, wait_for_steps
    from benchmarks.tensorflow_floor import Floor

    job = start(directory, "changes", "--ps", "1", "--chief", "1", "--nodes", "2")
    theirs = directory / "floor"
    theirs.mkdir()
    ratios, pauses, floors = [], [], []
    try:
        with Floor(theirs) as floor:
            for number, change in enumerate(itertools.islice(itertools.cycle(CHANGES), 3 * rounds + 1), start=1):
                wait_for_steps(job.directory, number, 10)
                job.command(*change)
                wait_for_steps(job.directory, number + 1, 1)
                ours = [pause_of_change(job, who, number + 1) for who in TRAINED]
                saved = save_of_change(job, number)
                wait_for_steps(theirs, number, 10)
                killed_at = floor.kill_server()
                wait_for_steps(theirs, number + 1, 1)
                least = steps(theirs, "chief-0", number + 1)[0] - killed_at
                ratios.append((ours[0] - saved) / least)
                pauses.append(max(ours))
                floors.append(least)
                print(
                    f"{' '.join(change):58} chief {ours[0]:.2f} s, last worker {max(ours[1:]):.2f} s, save {saved:.2f} s; floor {least:.2f} s",
                    flush=True,
                )
    finally:
        job.close()
    ratio = statistics.median(ratios)
    print(
        f"planned change, pause, median: {statistics.median(pauses):.2f} s (longest {max(pauses):.2f}); floor {statistics.median(floors):.2f} s; "
        f"without the save {ratio:.2f} x the floor\n"
    )
    return ratio <= LIMIT_OF_CHANGE


def pause_of_change(job: ClusterJob, who: str, version: int) -> float:
    before = max(step.at for step in job.steps(who) if step.version == version - 1)
    return min(step.at for step in job.steps(who) if step.version == version) - before


def save_of_change(job: ClusterJob, version: int) -> float:
    """From the last step of anybody to the next version: parking and the save."""
    last = max(step.at for who in TRAINED for step in job.steps(who) if step.version == version)
    return max(0.0, job.decided_at(f"Version {version + 1} of the cluster begins") - last)


def measure_kills(directory: Path, rounds: int) -> bool:
    job = start(directory, "kills", "--ps", "2", "--chief", "1", "--nodes", "2", save_steps=20)
    is_good = True
    try:
        for who in [name for name in ("worker-1", "chief-0") for _ in range(rounds)]:
            job.wait_until(f"{who} trains", lambda who=who: len(job.steps(who)) > 20)  # type: ignore[misc]
            begin_at = time.time()
            job.wait_until("all train", lambda at=begin_at: all(count_after(job, each, at) > 40 for each in TRAINED))  # type: ignore[misc]
            killed_at = job.kill(who)
            job.wait_until("it is back", lambda at=killed_at, who=who: count_after(job, who, at + 0.5) > 20)  # type: ignore[misc]
            for other in (each for each in TRAINED if each != who):
                pause, usual = pause_around(job, other, begin_at, killed_at)
                is_good &= pause <= LIMIT_OF_KILL * usual
                print(
                    f"{who} killed: longest pause of {other} {1000 * pause:.0f} ms, 99 % of its steps {1000 * usual:.0f} ms",
                    flush=True,
                )
        fallen = [who for who in TRAINED if (found := [step.step for step in job.steps(who)]) != sorted(found)]
        print(f"the global step fell for: {', '.join(fallen) or 'nobody'}\n")
    finally:
        job.close()
    return is_good and not fallen


def count_after(job: ClusterJob, who: str, at: float) -> int:
    return sum(step.at > at for step in job.steps(who))


def pause_around(job: ClusterJob, who: str, begin_at: float, killed_at: float) -> tuple[float, float]:
    """The longest time between two steps after the kill, and the 99th percentile before it."""
    times = [step.at for step in job.steps(who) if begin_at < step.at < killed_at + AROUND]
    before = [after - first for first, after in itertools.pairwise(times) if after <= killed_at]
    around = [after - first for first, after in itertools.pairwise(times) if after > killed_at]
    return max(around), statistics.quantiles(before, n=100)[98]


def measure_stops(directory: Path, rounds: int) -> bool:
    job = start(directory, "stops", "--ps", "2", "--chief", "1", "--nodes", "1", save_steps=20)
    times = []
    try:
        for version in range(1, rounds + 1):
            job.wait_for_steps("chief-0", 30, version=version)
            stopped_at = job.kill("ps-1", signal.SIGSTOP)
            job.wait_for_steps("chief-0", 1, version=version + 1)
            times.append(job.steps_of("chief-0", version + 1)[0].at - stopped_at)
            found = job.decided_at(r"is stopped \(SIGSTOP\)", version) - stopped_at
            print(
                f"ps-1 stopped: found after {found:.1f} s, next step of the chief after {times[-1]:.1f} s", flush=True
            )
    finally:
        job.close()
    print()
    return max(times) <= LIMIT_OF_STOP


def measure_large(directory: Path, gigabytes: float) -> None:
    rows = int(gigabytes * 1e9 / 64)
    job = start(directory, "large", "--ps", "2", "--chief", "1", "--nodes", "1", table=rows, save_steps=60, keep=2)
    try:
        job.wait_for_steps("chief-0", 40, version=1)
        job.wait_until("a save", lambda: len(saves(job)) >= 2)
        killed_at = job.kill("ps-0")
        job.wait_for_steps("chief-0", 1, version=2)
        lost = job.steps_of("chief-0", 2)[0].at - killed_at
        job.wait_for_steps("chief-0", 10, version=2)
        job.command("scale", "--replicas", "ps=3")
        job.wait_for_steps("chief-0", 1, version=3)
        change = job.steps_of("chief-0", 3)[0].at - job.steps_of("chief-0", 2)[-1].at
        print(
            f"{gigabytes:g} GB of variables: save {statistics.median(saves(job)):.2f} s, server killed -> first step {lost:.2f} s, "
            f"servers 2 -> 3 {change:.2f} s\n"
        )
    finally:
        job.close()


def saves(job: ClusterJob) -> list[float]:
    """Seconds of each save, as the chief tells them."""
    return [float(found) for found in re.findall(r"saved step \d+ with cut \d+ in ([\d.]+) s", job.output)]


if __name__ == "__main__":
    sys.exit(main())
