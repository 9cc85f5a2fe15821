"""
The fault corpus: does the master name the right rank and the right class of fault, how soon, and does it leave healthy jobs alone?

`python benchmarks/diagnosis.py` injects faults into real jobs of four gloo workers (`diagnosis_job.py`), several in each job, three jobs at a time, and compares
each verdict with the truth. Beside them run healthy jobs that pause, evaluate and compute in ways that could be mistaken for hangs: each must go on
undisturbed. `--quick` injects each kind once, `--kinds a,b` only these.

The file of `--json` is written after each fault. `--resume` goes on where it ends, with the same plan and the same commit; `--show A.json B.json` puts runs
together.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from diagnosis_kinds import FIRST, HEALTHY, KINDS, NUM_RANKS, Kind
from diagnosis_lab import Job
from diagnosis_machine import why_not
from diagnosis_results import Episode, Ledger, Result, commit_here, read_ledger, summary, tell
from process_tree import adopt_orphans, end_descendants

from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.watch import Autopsy, PastVerdict

MAX_ACTED = 6
"""Hangs that one job is restarted for; after more of them in an hour it would end."""
MAX_FAULTS = 10
SETTLING = 1.0
"""Seconds after the first verdict on a fault in which a surer one may come."""
Fault = tuple[int, str, int]
"""Number in the plan, kind, rank."""
T = TypeVar("T")
stopping = threading.Event()
"""Somebody wants the run to end: what is under way is finished."""


class NotReadyError(Exception):
    """The job did not train before anything was done to it: the fault before has ended it."""


def try_fault(job: Job, fault: Fault) -> Result:
    number, name, rank = fault
    kind, result = KINDS[name], Result(number, name, rank, load=os.getloadavg()[0])
    try:
        job.train(kind.steps_before)
    except RuntimeError as error:
        raise NotReadyError(str(error)) from error
    known = {_key(past): past.count for past in job.diagnosis().verdicts}
    life = job.life
    at = job.inject(name, rank)
    newest, looked_at = _await_verdicts(job, kind, known)
    result.to_look = None if looked_at is None else looked_at - at
    if newest:
        found = _told(list(newest), kind)
        result.to_verdict = newest[found] - at
        result.found_class = found.verdict.fault.value
        result.found_ranks = tuple(job.rank_of(culprit) for culprit in found.verdict.culprits)
        result.is_class_right = found.verdict.fault is kind.fault
        result.is_culprit_right = result.found_ranks == (rank,)
        result.has_acted = found.has_acted
        result.note = " ".join(found.verdict.evidence[:1])
        others = dict.fromkeys(_brief(past) for past in newest)
        result.others = tuple(brief for brief in others if brief != _brief(found))
        if kind.has_stack or name == "stop":
            result.has_page = _shows(job.diagnosis().autopsy, rank, is_in_script=kind.has_stack)
    else:
        result.note = "no verdict"
    job.undo(name, rank)
    if result.has_acted:
        job.num_acted += 1
        job.train(1)
        result.to_training = job.stepped_at - at
    elif job.life == life and not kind.goes_on:
        job.release()
    return result


def _await_verdicts(
    job: Job, kind: Kind, known: dict[tuple[object, ...], int]
) -> tuple[dict[PastVerdict, float], float | None]:
    """
    Those on this fault, and when they were there: until one acts, or a moment after the first one, which may be followed by a surer one.

    And when the job was looked at because it stood still.
    """
    until, is_first = time.monotonic() + kind.within, True
    newest: dict[PastVerdict, float] = {}
    came_at: dict[tuple[object, ...], float] = {}
    looked_at: float | None = None
    while time.monotonic() < until:
        try:
            verdicts = job.diagnosis().verdicts
        except DLRoverError:  # the master is busy: ask again
            verdicts = ()
        now = time.time()
        if looked_at is None and job.has_stalled():
            looked_at = now
        for past in verdicts:
            if past.count > known.get(_key(past), 0):
                came_at.setdefault(_key(past), now)
        newest = {past: came_at[_key(past)] for past in verdicts if _key(past) in came_at} or newest
        counts = [past for past in newest if past.verdict.fault is kind.fault or not kind.takes_time]
        if any(past.has_acted for past in newest) or (counts and kind.takes_time):
            break
        if counts and is_first:
            is_first, until = False, min(until, time.monotonic() + SETTLING)
        time.sleep(0.1)  # a question each time: the master tells nobody by itself
    return newest, looked_at


def _told(newest: Sequence[PastVerdict], kind: Kind) -> PastVerdict:
    """What people would go by: the verdict that acts, else the surest. Of faults that others come before, the one that was waited for."""
    acted = [past for past in newest if past.has_acted]
    expected = [past for past in newest if past.verdict.fault is kind.fault] if kind.takes_time else []
    return max(acted or expected or newest, key=lambda past: (past.verdict.confidence, past.at))


def _shows(page: Autopsy | None, rank: int, *, is_in_script: bool) -> bool:
    if page is None or f"# Rank {rank} on" not in page.text:
        return False
    _, _, rest = page.text.partition(f"## Rank {rank} is here")
    section = rest.partition("\n## ")[0]
    return "diagnosis_job.py:" in section if is_in_script else "```" in section


def _key(past: PastVerdict) -> tuple[object, ...]:
    verdict = past.verdict
    return (past.at, verdict.diagnostician, verdict.fault, verdict.culprits)


def _brief(past: PastVerdict) -> str:
    ranks = ",".join(str(culprit.global_rank) for culprit in past.verdict.culprits) or "nobody"
    return f"{past.verdict.fault.value} of rank {ranks} by {past.verdict.diagnostician}"


class Lane:
    """Jobs one after the other; others run beside it."""

    def __init__(self, name: str, folder: Path, ledger: Ledger) -> None:
        self._name, self._folder, self._ledger = name, folder, ledger
        self._num_jobs = 0

    def inject_all(self, faults: queue.SimpleQueue[Fault], *, of_nodes: bool) -> None:
        job: Job | None = None
        try:
            while (fault := _next(faults)) is not None:
                began_at = time.monotonic()
                if job is not None and (job.is_over or job.num_acted >= MAX_ACTED or job.num_faults >= MAX_FAULTS):
                    job.close()
                    job = None
                job = job or self._job(of_nodes=of_nodes)
                try:
                    result = try_fault(job, fault)
                except NotReadyError as error:
                    print(f"a new job, because the former one does not train: {str(error)[-300:]!r}", flush=True)
                    job.close()
                    job = self._job(of_nodes=of_nodes)
                    result = self._try_again(job, fault)
                except (RuntimeError, DLRoverError, OSError) as error:
                    result = Result(*fault, note=f"{type(error).__name__}: {str(error)[:600]}")
                if not result.found_class:
                    job.close()
                    job = None
                result.took = time.monotonic() - began_at
                self._ledger.add(result)
                print(tell(result), flush=True)
        finally:
            if job is not None:
                job.close()

    def _try_again(self, job: Job, fault: Fault) -> Result:
        try:
            return try_fault(job, fault)
        except (NotReadyError, RuntimeError, DLRoverError, OSError) as error:
            return Result(*fault, note=f"{type(error).__name__}: {str(error)[:600]}")

    def leave_alone(self, episodes: queue.SimpleQueue[Episode]) -> None:
        """Each in a job of its own."""
        while (episode := _next(episodes)) is not None:
            job = self._job(first=FIRST if episode.variation == FIRST else "")
            try:
                if episode.variation != FIRST:
                    job.train(25)
                    job.inject(episode.variation, episode.rank)
                job.train(20)
                acted = [past for past in job.diagnosis().verdicts if past.has_acted]
                episode.is_disturbed = job.life > 0 or bool(acted)
                episode.note = " ".join(sentence for past in acted for sentence in past.verdict.evidence)
            except (RuntimeError, DLRoverError, OSError) as error:
                episode.is_disturbed, episode.note = True, f"{type(error).__name__}: {str(error)[:600]}"
            finally:
                job.close()
            episode.load = os.getloadavg()[0]
            self._ledger.add(episode)
            what = f"DISTURBED. {episode.note}" if episode.is_disturbed else "left alone"
            print(f"healthy {episode.variation} on rank {episode.rank}: {what}", flush=True)

    def _job(self, *, of_nodes: bool = False, first: str = "") -> Job:
        self._num_jobs += 1
        return Job(self._folder / f"{self._name}-{self._num_jobs}", of_nodes=of_nodes, first=first)


def _next(waiting: queue.SimpleQueue[T]) -> T | None:
    if stopping.is_set():
        return None
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def plan_faults(names: Sequence[str], times: int, seed: int) -> list[Fault]:
    choice = random.Random(seed)
    faults = [(name, choice.randrange(NUM_RANKS)) for name in names for _ in range(times)]
    choice.shuffle(faults)
    return [(number, name, rank) for number, (name, rank) in enumerate(faults)]


def plan_healthy(num_episodes: int, seed: int) -> list[Episode]:
    choice = random.Random(seed)
    names = [HEALTHY[number % len(HEALTHY)] for number in range(num_episodes)]
    return [
        Episode(number, name, 0 if name == FIRST else choice.randrange(NUM_RANKS)) for number, name in enumerate(names)
    ]


def run(ledger: Ledger, faults: Sequence[Fault], episodes: Sequence[Episode], num_lanes: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="dlrover-corpus-"))
    print(f"working in {folder}, commit {ledger.commit}", flush=True)
    done, seen = {result.number for result in ledger.results}, {episode.number for episode in ledger.episodes}
    on_nodes: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    on_one: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    healthy: queue.SimpleQueue[Episode] = queue.SimpleQueue()
    for fault in faults:
        if fault[0] not in done:
            (on_nodes if KINDS[fault[1]].of_node else on_one).put(fault)
    for episode in episodes:
        if episode.number not in seen:
            healthy.put(episode)

    def work(name: str) -> None:
        lane = Lane(name, folder, ledger)
        todo: list[Callable[[], None]] = [
            lambda: lane.inject_all(on_nodes, of_nodes=True),
            lambda: lane.inject_all(on_one, of_nodes=False),
            lambda: lane.leave_alone(healthy),
        ]
        # One lane begins with healthy jobs, so that these run beside faults in others.
        for part in reversed(todo) if name == "lane-1" else todo:
            part()

    lanes = [threading.Thread(target=work, args=(f"lane-{number}",)) for number in range(num_lanes)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    wrong = [each for each in ledger.results if not (each.is_class_right and each.is_culprit_right)]
    if not wrong and not any(each.is_disturbed for each in ledger.episodes):
        shutil.rmtree(folder, ignore_errors=True)  # else somebody will want to read the logs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=7, help="injections of each kind (7: more than 200 in all)")
    parser.add_argument("--healthy", type=int, default=50, help="healthy jobs")
    parser.add_argument("--kinds", default="", help="only these, separated by commas")
    parser.add_argument("--quick", action="store_true", help="each kind once, each healthy variation once")
    parser.add_argument("--lanes", type=int, default=3, help="jobs at the same time")
    parser.add_argument("--json", type=Path, help="write all results there, after each fault")
    parser.add_argument("--resume", action="store_true", help="leave out what the file of --json has already")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="only tell what these files have")
    options = parser.parse_args()
    if options.show:
        print(summary([read_ledger(path) for path in options.show]))
        return 0
    names = [name for name in options.kinds.split(",") if name] or list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    times, num_healthy = (1, len(HEALTHY)) if options.quick else (options.times, options.healthy)
    ledger = Ledger(options.json, commit_here(), options.seed, times, names)
    if options.resume:
        if options.json is None or not options.json.exists():
            parser.error("--resume needs the file of --json")
        ledger = read_ledger(options.json)
        if (ledger.commit, ledger.seed, ledger.times, ledger.kinds) != (commit_here(), options.seed, times, names):
            parser.error(
                f"{options.json} has another plan: commit {ledger.commit}, --seed {ledger.seed}, --times {ledger.times}, "
                f"--kinds {','.join(ledger.kinds)}"
            )
    ledger.left_out = {name: why for name in names if (why := why_not(KINDS[name].needs))}
    faults = [fault for fault in plan_faults(names, times, options.seed) if fault[1] not in ledger.left_out]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    adopt_orphans()
    began_at = time.monotonic()
    try:
        run(ledger, faults, plan_healthy(num_healthy, options.seed), options.lanes)
    finally:
        ledger.minutes += (time.monotonic() - began_at) / 60
        ledger.write()
        end_descendants(deadline_at=time.monotonic() + 10)
    print(summary([ledger]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
