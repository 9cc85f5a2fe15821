"""
The demonstration behind `make demo-ray`: an elastic job on a Ray cluster that is made of processes of this machine.

    python examples/ray/demo.py

A head and four raylets start, `dlrover ray run` submits the program of examples/kubernetes with two nodes and a standby, and then SIGKILL goes to a
worker, to a node's actor, to a whole raylet and to the job's host. Ends with a report of what each of these cost, computed from what the workers wrote.
Exit code 0 only if the job recovered from all of it within three minutes, each step has the same loss in each life, and nothing is left in the
cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from msgspec import Struct

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.ray.jobs import RunningRayJob, actor_above, raylet_above  # noqa: E402
from tests.ray.lab import RayLab, until  # noqa: E402

PROGRAM = str(REPOSITORY / "examples" / "kubernetes" / "train.py")
NUM_RECORDS = 24_000
NUM_STEPS = NUM_RECORDS // 60
TIME_LIMIT = 180.0


class Fault(Struct, frozen=True, kw_only=True):
    what: str
    seconds: float
    """From the kill to a step of the job beyond the last one before."""
    num_redone: int
    """Steps that were done again."""
    num_touched: int
    """Workers that are other processes than before."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    parser.add_argument(
        "--time-limit", type=float, default=TIME_LIMIT, metavar="SECONDS", help="for all of it (default %(default).0f)"
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="dr-", dir="/tmp"))
    try:
        return Demo(folder, options.time_limit).run()
    finally:
        if options.keep:
            print(f"Logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Demo:
    def __init__(self, folder: Path, time_limit: float) -> None:
        self._folder = folder
        self._time_limit = time_limit
        self._began_at = time.monotonic()
        self._faults: list[Fault] = []

    def run(self) -> int:
        self._say("starting a Ray cluster: a head and four machines")
        lab = RayLab(str(self._folder / "ray"))
        job = None
        try:
            for _ in range(4):
                lab.add_machine()
            data = self._folder / "job"
            data.mkdir()
            options = ("--nodes", "2", "--standby", "1", "--job-name", "points")
            self._say(f"dlrover ray run {' '.join(options)} -- train.py")
            words = (f"--records={NUM_RECORDS}", "--pace=0.1", "--dir")
            job = RunningRayJob(lab, data, *options, script=PROGRAM, args=(*words, str(data)), has_folder=False)
            problem = self._direct(lab, job)
        finally:
            if job is not None:
                job.close()
            lab.close()
        return self._report(problem)

    def _direct(self, lab: RayLab, job: RunningRayJob) -> str:
        """What went wrong; empty: nothing."""
        until(lambda: self._newest() > 5, job.output)
        self._say(
            f"two nodes train; the master runs below the job's host and knows nothing of Ray (pid {job.account().master_pid})"
        )
        self._inflict("SIGKILL of a worker", job, lambda workers: workers[1])
        self._inflict("SIGKILL of a node's actor", job, lambda workers: actor_above(workers[1]).pid)
        self._inflict("SIGKILL of a machine's raylet", job, lambda workers: raylet_above(workers[0]))
        self._inflict("SIGKILL of the job's host", job, lambda workers: job.account().pid)
        (self._folder / "job" / "hurry").touch()
        exit_code = job.wait()
        if exit_code != 0:
            return f"the job ended with exit code {exit_code}:\n{job.output()[-3000:]}"
        try:
            lab.await_nothing_left(PROGRAM)
        except AssertionError as error:
            return str(error)
        return ""

    def _inflict(self, what: str, job: RunningRayJob, choose: Callable[[list[int]], int]) -> None:
        until(self._workers, job.output)
        before, last = self._workers(), self._newest()
        victim = choose(before)
        at = time.time()
        os.kill(victim, signal.SIGKILL)
        until(lambda: self._newest() > last + 3, job.output)
        until(self._workers, job.output)
        steps = [event for event in self._events() if event["event"] == "step" and event["at"] > at]
        newest_before = max(event["step"] for event in self._events() if event["event"] == "step" and event["at"] <= at)
        redone = {event["step"] for event in steps if event["step"] <= newest_before}
        touched = set(self._workers()) - set(before)
        first = min(event["at"] for event in steps if event["step"] > newest_before)
        fault = Fault(what=what, seconds=first - at, num_redone=len(redone), num_touched=len(touched))
        self._faults.append(fault)
        self._say(f"{what} (pid {victim}): next new step after {fault.seconds:.2f} s")

    def _events(self) -> list[dict[str, object]]:
        found = []
        for path in (self._folder / "job").glob("events-*.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue  # a killed worker's last line
        return found

    def _newest(self) -> int:
        return max((event["step"] for event in self._events() if event["event"] == "step"), default=0)

    def _workers(self) -> list[int]:
        """Pids by rank of the workers that live, if all of them have done a step; else empty."""
        newest = {}
        for event in sorted(self._events(), key=lambda event: event["at"]):
            newest[event["rank"]] = (event["pid"], event["event"])
        is_whole = len(newest) == 2 and all(name == "step" and psutil.pid_exists(pid) for pid, name in newest.values())
        return [newest[rank][0] for rank in sorted(newest)] if is_whole else []

    def _report(self, problem: str) -> int:
        took = time.monotonic() - self._began_at
        steps = [event for event in self._events() if event["event"] == "step"]
        losses: dict[int, set[str]] = {}
        for event in steps:
            losses.setdefault(event["step"], set()).add(f"{event['loss']:.4f}")
        unequal = [step for step, found in losses.items() if len(found) > 1]
        print("\nReport")
        for fault in self._faults:
            print(
                f"  {fault.what:32} {fault.seconds:6.2f} s to the next new step, {fault.num_redone} steps redone, {fault.num_touched} of 2 workers replaced"
            )
        print(f"  steps: {len(losses)} of {NUM_STEPS}, and {len(unequal)} of them differ between two lives")
        print(f"  whole demonstration: {took:.0f} s")
        is_host_unnoticed = self._faults[-1:] and self._faults[-1].num_touched == 0
        if problem:
            print(f"FAILED: {problem}")
            return 1
        if len(self._faults) != 4 or len(losses) != NUM_STEPS or unequal or not is_host_unnoticed:
            print("FAILED: what the demonstration claims was not seen")
            return 1
        if took > self._time_limit:
            print(
                f"FAILED: it took {took:.0f} s, and has {self._time_limit:.0f} s. Is this machine busy? See --time-limit."
            )
            return 1
        print("  nothing is left in the cluster: no process, no actor, no key")
        return 0

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_at:5.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
