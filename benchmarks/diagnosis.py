"""
The fault corpus: does the master name the right rank and the right class of fault, how soon, and does it leave healthy jobs alone?

`python benchmarks/diagnosis.py` injects faults into real jobs of four gloo workers (`diagnosis_job.py`), one after the other, several in each job, and compares
each verdict with the truth. Then come healthy jobs that pause, evaluate and compute in ways that could be mistaken for hangs: each must go on
undisturbed. `--quick` injects each kind once, `--kinds a,b` only these.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.rpc import ask
from dlrover.protocol.watch_messages import AskDiagnosis, Diagnosis, FaultClass, PastVerdict

JOB = Path(__file__).with_name("diagnosis_job.py")
TOKEN = "a token for the corpus"
NUM_RANKS = 4
LOOK = 2.0
"""Seconds that a rank stands still before anybody looks: the least threshold."""
PER_JOB = 5
"""Injections into one job: after six hangs in an hour it would end."""
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    fault: FaultClass
    has_culprit: bool = True
    within: float = 30.0
    """Seconds in which a verdict is waited for."""
    is_hang: bool = True
    """Then the time to the verdict is measured against the look."""


KINDS: dict[str, Kind] = {
    "kill": Kind(FaultClass.DEAD, is_hang=False),
    "segmentation-fault": Kind(FaultClass.DEAD, is_hang=False),
    "stop": Kind(FaultClass.STOPPED),
    "debugger": Kind(FaultClass.STOPPED),
    "deadlock-lock": Kind(FaultClass.DEADLOCK),
    "deadlock-queue": Kind(FaultClass.DEADLOCK),
    "deadlock-pipe": Kind(FaultClass.DEADLOCK),
    "deadlock-socket": Kind(FaultClass.DEADLOCK),
    "endless-sleep": Kind(FaultClass.DEADLOCK),
    "waits-for-child": Kind(FaultClass.DEADLOCK),
    "skipped-collective": Kind(FaultClass.SKIPPED_COLLECTIVE),
    "extra-collective": Kind(FaultClass.SKIPPED_COLLECTIVE),
    "mismatched-shape": Kind(FaultClass.MISMATCHED_COLLECTIVE),
    "mismatched-operation": Kind(FaultClass.MISMATCHED_COLLECTIVE),
    "slow-rank": Kind(FaultClass.STRAGGLER, within=60.0, is_hang=False),
    "busy-loop": Kind(FaultClass.BUSY),
    "gil-held": Kind(FaultClass.BUSY),
    "loader-stuck": Kind(FaultClass.DATA_STALL),
    "loader-stopped": Kind(FaultClass.DATA_STALL),
    "loader-killed": Kind(FaultClass.DATA_STALL, is_hang=False),
    "checkpoint-stall": Kind(FaultClass.STORAGE_STALL, within=45.0, is_hang=False),
    "uninterruptible": Kind(FaultClass.STORAGE_STALL),
    "io-error": Kind(FaultClass.STORAGE_STALL, is_hang=False),
    "leak": Kind(FaultClass.MEMORY_LEAK, within=120.0, is_hang=False),
    "nan": Kind(FaultClass.NUMERICS, is_hang=False),
    "loss-spike": Kind(FaultClass.LOSS_SPIKE, within=60.0, is_hang=False),
    "flipped-bit": Kind(FaultClass.CORRUPTION, within=45.0, is_hang=False),
    "full-disk": Kind(FaultClass.DISK_FULL, is_hang=False),
    "process-limit": Kind(FaultClass.PROCESS_LIMIT, is_hang=False),
    "memory-error": Kind(FaultClass.OUT_OF_MEMORY, is_hang=False),
    "exception": Kind(FaultClass.EXCEPTION, is_hang=False),
    "exit-code": Kind(FaultClass.EXCEPTION, is_hang=False),
    "crash-loop": Kind(FaultClass.CRASH_LOOP, within=60.0, is_hang=False),
}
HEALTHY = ("short-pause", "pause-with-cpu", "pause-with-io", "evaluation", "slow-first-step")


@dataclass
class Result:
    kind: str
    rank: int
    found_class: str = ""
    found_ranks: tuple[int, ...] = ()
    is_class_right: bool = False
    is_culprit_right: bool = False
    to_verdict: float | None = None
    """Seconds from the fault to the verdict."""
    to_training: float | None = None
    """Seconds from the fault to the next step, where the verdict acted."""
    has_acted: bool = False
    note: str = ""


class Job:
    """One job, from its start to its end."""

    def __init__(self, folder: Path, *options: str, first: str = "") -> None:
        """`first`: what rank 0 does in its very first step."""
        self.folder = folder
        folder.mkdir(parents=True)
        if first:
            told = {"number": 0, "kind": first, "rank": 0, "after_step": 0}
            (folder / "fault.json").write_text(json.dumps(told))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self._runtime = tempfile.mkdtemp(prefix="dlr-")
        self._segments = tempfile.mkdtemp(prefix="dlr-", dir="/dev/shm")
        environment = {
            **os.environ,
            "TMPDIR": self._runtime,
            "DLROVER_SNAPSHOT_DIR": self._segments,
            "DLROVER_JOB_TOKEN": TOKEN,
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable, "-m", "dlrover.trainer.torch.main", f"--nproc-per-node={NUM_RANKS}", "--canary=20",
            f"--rdzv-endpoint={self.address}", f"--log-dir={folder / 'logs'}", *options, str(JOB), str(folder),
        ]  # fmt: skip
        with (folder / "out").open("wb") as out:
            self._process = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._num_faults = 0

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def steps(self) -> list[tuple[int, int]]:
        found = []
        for rank in range(NUM_RANKS):
            try:
                step, life = (self.folder / f"step-{rank}").read_text().split()
                found.append((int(step), int(life)))
            except (FileNotFoundError, ValueError):
                found.append((0, -1))
        return found

    @property
    def life(self) -> int:
        return max(life for _, life in self.steps())

    def train(self, num_steps: int, *, timeout: float = 120.0) -> None:
        """All ranks in one life, and so many steps more."""

        def together() -> bool:
            lives = {life for _, life in self.steps()}
            return len(lives) == 1 and -1 not in lives

        self._wait(together, timeout)
        goal = max(step for step, _ in self.steps()) + num_steps
        self._wait(lambda: min(step for step, _ in self.steps()) >= goal and together(), timeout)

    def inject(self, kind: str, rank: int) -> float:
        """The moment at which it happened."""
        self._num_faults += 1
        told = {"number": self._num_faults, "kind": kind, "rank": rank, "after_step": max(self.steps())[0] + 3}
        (self.folder / "fault.new").write_text(json.dumps(told))
        (self.folder / "fault.new").rename(self.folder / "fault.json")
        mark = self.folder / f"injected-{self._num_faults}"
        self._wait(mark.exists, 60)
        return mark.stat().st_mtime

    def release(self) -> None:
        """Whoever is still in trouble is killed, and the job goes on."""
        (self.folder / "fault.json").unlink(missing_ok=True)
        mark = self.folder / f"injected-{self._num_faults}"
        for line in mark.read_text().splitlines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)

    def diagnosis(self) -> Diagnosis:
        answer = asyncio.run(ask(self.address, AskDiagnosis(last=100), token=TOKEN, timeout=10))
        assert isinstance(answer, Diagnosis)
        return answer

    def close(self) -> None:
        (self.folder / "end").touch()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self._runtime, ignore_errors=True)
        shutil.rmtree(self._segments, ignore_errors=True)

    def _wait(self, condition: Callable[[], bool], timeout: float) -> None:
        until = time.monotonic() + timeout
        while not condition():
            if self.is_over:
                raise RuntimeError(f"the job ended: {(self.folder / 'out').read_text()[-2000:]}")
            if time.monotonic() > until:
                raise RuntimeError(f"not within {timeout:g} s; see {self.folder}")
            time.sleep(0.05)  # files of other processes: nothing tells when they change


def try_fault(job: Job, name: str, rank: int) -> Result:
    kind, result = KINDS[name], Result(name, rank)
    job.train(1000 if name == "loss-spike" else 25)
    known = {_key(past): past.count for past in job.diagnosis().verdicts}
    life = job.life
    at = job.inject(name, rank)
    found = _await_verdict(job, kind, known)
    if found is None:
        result.note = "no verdict"
    else:
        result.to_verdict = time.time() - at
        result.found_class = found.verdict.fault.value
        result.found_ranks = tuple(culprit.global_rank for culprit in found.verdict.culprits)
        result.is_class_right = found.verdict.fault is kind.fault
        result.is_culprit_right = result.found_ranks == (rank,)
        result.has_acted = found.has_acted
        result.note = " ".join(found.verdict.evidence[:1])
    if result.has_acted:
        job.train(1)
        result.to_training = max((job.folder / f"step-{each}").stat().st_mtime for each in range(NUM_RANKS)) - at
    if job.life == life:
        job.release()
    (job.folder / "fault.json").unlink(missing_ok=True)
    return result


def _await_verdict(job: Job, kind: Kind, known: dict[tuple[object, ...], int]) -> PastVerdict | None:
    """The first one that acts or is what it should be; else the surest one when time is over, or 3 s after the first."""
    until, first_at, newest = time.monotonic() + kind.within, None, []
    while time.monotonic() < until:
        try:
            verdicts = job.diagnosis().verdicts
        except DLRoverError:
            time.sleep(0.2)
            continue
        newest = [past for past in verdicts if past.count > known.get(_key(past), 0)]
        for past in newest:
            if past.has_acted or past.verdict.fault is kind.fault:
                return past
        patient = kind.fault in (FaultClass.CRASH_LOOP, FaultClass.MEMORY_LEAK, FaultClass.STRAGGLER)
        if newest and first_at is None and not patient:
            first_at = time.monotonic()
            until = min(until, first_at + 3.0)
        time.sleep(0.1)  # a question each time: the master tells nobody by itself
    return max(newest, key=lambda past: past.verdict.confidence, default=None)


def _key(past: PastVerdict) -> tuple[object, ...]:
    verdict = past.verdict
    return (past.at, verdict.diagnostician, verdict.fault, verdict.culprits)


def inject_all(folder: Path, faults: Sequence[tuple[str, int]], say: Callable[[str], None]) -> list[Result]:
    results: list[Result] = []
    for number, batch in enumerate(_batches(faults, PER_JOB)):
        job = Job(folder / f"job-{number}")
        try:
            for name, rank in batch:
                try:
                    results.append(try_fault(job, name, rank))
                except (RuntimeError, DLRoverError, OSError) as error:
                    results.append(Result(name, rank, note=f"{type(error).__name__}: {str(error)[:200]}"))
                say(_line(results[-1]))
                if job.is_over or "not within" in results[-1].note:
                    job.close()
                    job = Job(folder / f"job-{number}-{len(results)}")
        finally:
            job.close()
    return results


def leave_alone(folder: Path, num_runs: int, say: Callable[[str], None]) -> tuple[int, list[str]]:
    """How many healthy episodes there were, and which were disturbed."""
    choice, disturbed, done = random.Random(5), [], 0
    variations = [HEALTHY[number % len(HEALTHY)] for number in range(num_runs)]
    for number, batch in enumerate(_batches(variations, PER_JOB)):
        job = Job(folder / f"healthy-{number}")
        try:
            for variation in batch:
                rank = choice.randrange(NUM_RANKS)
                if variation == "slow-first-step":
                    job.close()
                    rank, job = 0, Job(folder / f"healthy-{number}-first-{done}", first=variation)
                else:
                    job.train(25)
                    job.inject(variation, rank)
                job.train(20)
                done += 1
                acted = [past for past in job.diagnosis().verdicts if past.has_acted]
                is_disturbed = job.life > 0 or bool(acted)
                say(f"healthy {variation} on rank {rank}: {'DISTURBED' if is_disturbed else 'left alone'}")
                if is_disturbed:
                    disturbed.append(f"{variation} on rank {rank}: {[past.verdict.evidence for past in acted]}")
                    break
        finally:
            job.close()
    return done, disturbed


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _line(result: Result) -> str:
    class_, rank = ("ok" if right else "WRONG" for right in (result.is_class_right, result.is_culprit_right))
    took = "-" if result.to_verdict is None else f"{result.to_verdict:.1f} s"
    again = "" if result.to_training is None else f", training after {result.to_training:.1f} s"
    ranks = ",".join(map(str, result.found_ranks)) or "nobody"
    found = result.found_class or "nothing"
    return f"{result.kind} on rank {result.rank}: {found} ({class_}), rank {ranks} ({rank}), {took}{again}. {result.note[:160]}"


def summary(results: Sequence[Result]) -> str:
    lines = [
        "| kind | faults | class right | rank right | to the verdict, median s | to training, median s |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(result.kind for result in results):
        mine = [result for result in results if result.kind == name]
        lines.append(
            f"| {name} | {len(mine)} | {sum(each.is_class_right for each in mine)} | {sum(each.is_culprit_right for each in mine)} | "
            f"{_median([each.to_verdict for each in mine])} | {_median([each.to_training for each in mine])} |"
        )
    hangs = [each for each in results if KINDS[each.kind].is_hang and each.to_verdict is not None]
    late = [each for each in hangs if each.to_verdict is not None and each.to_verdict > LOOK + 5.0]
    lines += [
        "",
        f"{len(results)} faults of {len({result.kind for result in results})} kinds.",
        f"Class right {_share(results, lambda each: each.is_class_right)}, rank right {_share(results, lambda each: each.is_culprit_right)}.",
        f"Hangs: {len(hangs) - len(late)} of {len(hangs)} verdicts within 5 s of the look.",
    ]
    return "\n".join(lines)


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}" if known else "-"


def _share(results: Sequence[Result], is_right: Callable[[Result], bool]) -> str:
    return f"{100 * sum(map(is_right, results)) / max(1, len(results)):.1f} %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=7, help="injections of each kind (7: more than 200 in all)")
    parser.add_argument("--healthy", type=int, default=50, help="healthy episodes")
    parser.add_argument("--kinds", default="", help="only these, separated by commas")
    parser.add_argument("--quick", action="store_true", help="each kind once, each healthy variation once")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    names = [name for name in options.kinds.split(",") if name] or list(KINDS)
    times, num_healthy = (1, len(HEALTHY)) if options.quick else (options.times, options.healthy)
    choice = random.Random(options.seed)
    faults = [(name, choice.randrange(NUM_RANKS)) for name in names for _ in range(times)]
    choice.shuffle(faults)
    folder = Path(tempfile.mkdtemp(prefix="dlrover-corpus-"))
    print(f"working in {folder}", flush=True)
    began_at = time.monotonic()
    results = inject_all(folder, faults, lambda text: print(text, flush=True))
    print(summary(results), flush=True)
    done, disturbed = leave_alone(folder, num_healthy, lambda text: print(text, flush=True))
    print(f"{done} healthy episodes, {len(disturbed)} disturbed.", *disturbed, sep="\n")
    print(f"took {(time.monotonic() - began_at) / 60:.0f} minutes")
    if options.json is not None:
        told = {"results": [asdict(result) for result in results], "healthy": done, "disturbed": disturbed}
        options.json.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
