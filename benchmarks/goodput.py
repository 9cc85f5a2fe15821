"""
Goodput: which share of its time a job computes new steps while one of its two workers is killed every 30 seconds.

    python benchmarks/goodput.py                                  20 kills for each launcher, about 35 minutes
    python benchmarks/goodput.py --kills 3 --peers ours --json goodput.json
    python benchmarks/goodput.py --kills 8 --peers ours-guarded   saves every 50 steps, and the last step is kept
    python benchmarks/goodput.py --truth                          only: does our accountant match what the script measured?

All launchers run the same script (goodput_job.py), which saves its state (9 MB) after every step: ours (lazily) and dlrover 0.6.1 into memory, torchrun with
`torch.save`. Counted is the time from the first step to the last, by what the script itself writes down: a step counts when no former process
had completed it, and then only its computation; saving, repeated steps, detection, restart and restoring are lost. Start-up is told apart.

For ours the accountant's classes are read from the job's journal and compared with the same events.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from failover import environment_for, tail
from figures import summarise, table
from peers import LAUNCHERS, Leftovers, PeerUnavailableError
from process_tree import running
from rounds import measuring

GOODPUT_JOB = Path(__file__).resolve().parent / "goodput_job.py"
NUM_RANKS = 2
DEFAULT_PEERS = "ours,torchrun,dlrover-0.6.1"

GUARDED = "ours-guarded"
"""Ours, saving every 50 steps; the survivors of a kill keep the last step."""
GUARD_WORDS = ["--save-every", "50", "--guard"]
KNOWN = (*LAUNCHERS, GUARDED)
SAVES = {"ours": "flash", GUARDED: "flash", "dlrover-0.6.1": "flash"}
START_TIMEOUT = 120.0
HANG_TIMEOUT = 90.0
"""Seconds without a new step; then the job is said to hang, and what was measured until then counts."""
BUDGETS = {"ours": 0.97, GUARDED: 0.985}
LOOK_EVERY = 0.1
CLASSES = ("compute", "redo", "checkpoint", "data-wait")
"""What the script can measure itself; the rest is the time between them."""


@dataclass
class Truth:
    """What the event files say: seconds, the mean over the ranks."""

    start: float
    """From the command to the first step."""
    window: float
    """From the first step of all to the last."""
    seconds: dict[str, float]
    num_steps: int
    recoveries: list[float]

    @property
    def goodput(self) -> float:
        return self.seconds["compute"] / self.window if self.window else 0.0


@dataclass
class Result:
    name: str
    note: str = ""
    truth: Truth | None = None
    num_kills: int = 0
    accounted: dict[str, float] = field(default_factory=dict)
    """Ours: the accountant's node-seconds by class in the whole life of the job."""
    wall: float = 0.0
    error: str = ""


class Steps:
    """Follows the event files of the ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.events: list[dict[str, Any]] = []

    def refresh(self) -> list[dict[str, Any]]:
        for path in sorted(self._folder.glob("rank*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            self.events.extend(json.loads(line) for line in whole.splitlines())
        return self.events

    def newest(self) -> int:
        """The highest step that all ranks have completed."""
        highest = dict.fromkeys(range(NUM_RANKS), 0)
        for event in self.refresh():
            if event["event"] == "step":
                highest[event["rank"]] = max(highest[event["rank"]], event["step"])
        return min(highest.values())

    def pid_of(self, rank: int) -> int:
        return next(event["pid"] for event in reversed(self.events) if event["rank"] == rank)


def main() -> int:
    args = parse_args()
    results = []
    with measuring("goodput-") as folder:
        for name in [] if args.truth else args.peers:
            extra = GUARD_WORDS if name == GUARDED else []
            result = measure(name, folder / name, kills=args.kills, every=args.every, extra=extra)
            results.append(result)
            say(result)
        if args.truth or "ours" in args.peers:
            extra = ["--save-every", "40", "--data-wait", "0.01"]
            kills, every = (4, 12.0) if not args.truth else (args.kills, args.every)
            results.append(measure("ours", folder / "truth", kills=kills, every=every, extra=extra))
            results[-1].name = "ours, with injected losses"
            say(results[-1])
    print(report(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    judged = [(result.truth, BUDGETS[result.name]) for result in results if result.name in BUDGETS]
    is_good = all(truth is not None and truth.goodput >= budget for truth, budget in judged)
    return 0 if is_good and not any(result.error for result in results if "ours" in result.name) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="per launcher (default %(default)s)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills (default %(default)s)")
    parser.add_argument("--peers", default=DEFAULT_PEERS, help=f"of {', '.join(KNOWN)}")
    parser.add_argument("--truth", action="store_true", help="only compare our accountant with injected losses")
    parser.add_argument("--json", type=Path, help="write everything into this file")
    args = parser.parse_args()
    args.peers = args.peers.split(",")
    unknown = [name for name in args.peers if name not in KNOWN]
    if unknown:
        parser.error(f"--peers: unknown {', '.join(unknown)}; known are {', '.join(KNOWN)}")
    if args.kills < 1 or args.every <= 0:
        parser.error("--kills and --every must be above 0")
    return args


def measure(name: str, run: Path, *, kills: int, every: float, extra: list[str]) -> Result:
    result = Result(name)
    try:
        launcher = LAUNCHERS["ours" if name == GUARDED else name]()
    except PeerUnavailableError as error:
        result.error = str(error)
        return result
    result.note = launcher.note
    subprocess.run([launcher.python, "-c", "import torch, torch._dynamo"], check=False, stderr=subprocess.DEVNULL)
    run.mkdir()
    (run / "tmp").mkdir()
    is_ours = name in BUDGETS
    journal = ["--journal", str(run / "journal")] if is_ours else []
    command = [
        *launcher.command,
        *journal,
        str(GOODPUT_JOB),
        "--dir",
        str(run),
        "--save",
        SAVES.get(name, "torch"),
        *extra,
    ]
    steps, log = Steps(run / "events"), run / "output.log"
    kill_times: list[int] = []
    leftovers = Leftovers.note(launcher)
    began_ns = time.monotonic_ns()
    try:
        with running(command, environment=environment_for(launcher, run), folder=run, log=log) as process:
            if wait_for_step(steps, 1, process, START_TIMEOUT):
                result.error = drive(steps, process, kills=kills, every=every, kill_times=kill_times)
            else:
                result.error = "no first step"
            process.send_signal(signal.SIGTERM)  # the job of ours ends in good order: its journal is complete
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                pass
        result.error += f": {tail(log)}" if result.error else ""
        result.num_kills = len(kill_times)
        result.truth = truth_of(steps.refresh(), began_ns, kill_times)
        if is_ours:
            read_accounts(result, run / "journal")
    finally:
        leftovers.remove()
        if not result.error:
            shutil.rmtree(run, ignore_errors=True)
    return result


def drive(steps: Steps, process: subprocess.Popen[bytes], *, kills: int, every: float, kill_times: list[int]) -> str:
    """Kill a worker after each `every` seconds; what went wrong, or nothing."""
    next_at = time.monotonic() + every
    while True:
        newest = steps.newest()
        if not wait_for_step(steps, newest + 1, process, HANG_TIMEOUT):
            return f"no new step for {HANG_TIMEOUT:g} s after {len(kill_times)} kills"
        if time.monotonic() < next_at:
            continue
        if len(kill_times) == kills:
            return ""
        next_at += every
        try:
            victim = steps.pid_of(len(kill_times) % NUM_RANKS)
            kill_times.append(time.monotonic_ns())
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            kill_times.pop()  # it is just being replaced


def wait_for_step(steps: Steps, step: int, process: subprocess.Popen[bytes], timeout: float) -> bool:
    until = time.monotonic() + timeout
    while steps.newest() < step:
        if process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(LOOK_EVERY)
    return True


def truth_of(events: list[dict[str, Any]], began_ns: int, kill_times: list[int]) -> Truth | None:
    """Steps count for each rank when no former process of that rank had completed them."""
    totals = dict.fromkeys(CLASSES, 0.0)
    firsts, lasts, reached = {}, {}, dict.fromkeys(range(NUM_RANKS), 0)
    new_at: list[int] = []
    for event in sorted(events, key=lambda each: each["at_ns"]):
        if event["event"] != "step":
            continue
        rank, step = event["rank"], event["step"]
        is_first = rank not in firsts
        firsts.setdefault(rank, event["at_ns"])
        lasts[rank] = event["at_ns"]
        is_new = step > reached[rank]
        reached[rank] = max(reached[rank], step)
        if is_first:
            continue  # the window begins with its end
        totals["compute" if is_new else "redo"] += event["compute_ns"] / 1e9
        totals["checkpoint"] += event["save_ns"] / 1e9
        totals["data-wait"] += event["data_ns"] / 1e9
        if is_new:
            new_at.append(event["at_ns"])
    if len(firsts) < NUM_RANKS:
        return None
    window = (min(lasts.values()) - max(firsts.values())) / 1e9
    seconds = {name: value / NUM_RANKS for name, value in totals.items()}
    seconds["rest"] = max(0.0, window - sum(seconds.values()))
    recoveries = []
    for killed_ns in kill_times:
        after = [at for at in new_at if at > killed_ns + 200_000_000]
        if after:
            recoveries.append((after[0] - killed_ns) / 1e9)
    return Truth((max(firsts.values()) - began_ns) / 1e9, window, seconds, min(reached.values()), recoveries)


def read_accounts(result: Result, folder: Path) -> None:
    """What our own accountant says, from the journal."""
    from dlrover.cli.show.history import read_history

    (journal,) = folder.glob("*.sqlite")
    goodput = read_history(journal).goodput
    result.accounted = {class_.value: seconds for class_, seconds in goodput.seconds.items()}
    result.wall = sum(node.lived for node in goodput.nodes)


def report(results: list[Result]) -> str:
    rows = []
    for result in results:
        truth = result.truth
        if truth is None:
            rows.append([result.name, "-", "-", "-", "-", "-", "-", "-", result.error or "nothing measured"])
            continue
        median = summarise(truth.recoveries)
        share = {name: f"{100 * value / (truth.window or 1):.2f} %" for name, value in truth.seconds.items()}
        rows.append(
            [
                result.name,
                f"{100 * truth.goodput:.2f} %",
                str(result.num_kills),
                share["redo"],
                share["checkpoint"],
                share["data-wait"],
                share["rest"],
                f"{truth.start:.1f} s",
                "-" if median is None else f"{median.median:.2f} s",
            ]
        )
    head = ["launcher", "goodput", "kills", "redo", "saving", "data", "restarts", "start-up", "kill to new step"]
    lines = [table(head, rows), ""]
    for result in results:
        if result.truth is not None and result.accounted:
            lines += comparison(result)
        if result.error:
            lines.append(f"{result.name}: {result.error}")
    return "\n".join(lines)


def comparison(result: Result) -> list[str]:
    """The accountant counts from the first node to the last, the script from its first step to its last: that is the beginning's share."""
    truth = result.truth
    assert truth is not None
    total = sum(result.accounted.values())
    named = {name: result.accounted.get(name, 0.0) for name in CLASSES}
    worst = max(abs(named[name] - truth.seconds[name]) / (truth.window or 1) for name in CLASSES)
    rows = [[name, f"{truth.seconds[name]:.2f}", f"{named[name]:.2f}"] for name in CLASSES]
    rows.append(["rest", f"{truth.seconds['rest']:.2f}", f"{total - sum(named.values()):.2f} with start-up and end"])
    off = 100 * abs(total - result.wall) / (result.wall or 1)
    sums = f"classes sum to {total:.3f} of {result.wall:.3f} node-seconds ({off:.4f} %, allowed 0.1 %)"
    return [
        f"{result.name}: what the script measured, and what the accountant says (seconds)",
        table(["class", "script", "accountant"], rows),
        f"largest difference {100 * worst:.2f} % of the time (allowed 2 %); {sums}",
        "",
    ]


def say(result: Result) -> None:
    figure = "-" if result.truth is None else f"{100 * result.truth.goodput:.2f} %"
    print(f"{result.name}: {figure} {result.error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
