"""
Failover: how long a job stands still when one of its two workers is killed: torchrun, dlrover 0.6.1 and this project.

    python benchmarks/failover.py                                    everything, about 20 minutes
    python benchmarks/failover.py --quick                            torchrun and ours, 3 kills each
    python benchmarks/failover.py --kills 13 --peers torchrun,ours --json failover.json

Each launcher runs the same script (reference_job.py). A run is: start, measure the time from the command to the first
step, then SIGKILL one worker several times, each time waiting for the first step that had not been done before,
completed by all ranks. Runs of the launchers alternate, so that a noisy minute of the machine falls on all of them. A
launcher that hangs, fails or cannot be installed is a result and is printed as one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from figures import Summary, ratio, seconds, summarise, table, times
from launcher_log import LogLine
from peers import LAUNCHERS, Launcher, Leftovers, PeerUnavailableError
from process_tree import running
from rounds import measuring
from timeline import PHASES, EventFolder, Recovery, first_step_at_ns, lives, num_steps_since, recovery

REFERENCE_JOB = Path(__file__).resolve().parent / "reference_job.py"
NUM_RANKS = 2
DEFAULT_PEERS = "torchrun,torchrun-default,dlrover-0.6.1,ours"
START_TIMEOUT = 120.0
LOOK_EVERY = 0.02
"""Pause between two looks at the event files. Figures come from the times in the files, so this costs no accuracy;
watching them with inotify would need a dependency for nothing."""


@dataclass(frozen=True)
class Kill:
    local_rank: int
    recovery: Recovery | None
    """None: no new step within the time limit."""


@dataclass
class Result:
    """All that was measured of one launcher."""

    name: str
    note: str = ""
    starts: list[float] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def recoveries(self) -> list[Recovery]:
        return [kill.recovery for kill in self.kills if kill.recovery is not None]

    @property
    def num_hangs(self) -> int:
        return len(self.kills) - len(self.recoveries)

    def start_summary(self) -> Summary | None:
        return summarise(self.starts)

    def kill_summary(self) -> Summary | None:
        return summarise([recovery.seconds for recovery in self.recoveries])


class RunFailedError(Exception):
    """The job ended or did not start; the message carries the end of its output."""


def main() -> int:
    args = parse_args()
    results = [Result(name) for name in args.peers]
    with measuring("failover-") as folder:
        measure(results, args, folder)
    print(report(results, args.hang_timeout))
    if args.json:
        args.json.write_text(json.dumps(as_json(results), indent=1) + "\n")
    return 0 if all(result.recoveries for result in results) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=13, help="per launcher (default %(default)s)")
    parser.add_argument(
        "--kills-per-run", type=int, default=3, help="then the job is started anew (default %(default)s)"
    )
    parser.add_argument(
        "--peers", default=DEFAULT_PEERS, help=f"of {', '.join(LAUNCHERS)}; 'torchrun' stands for both settings"
    )
    parser.add_argument(
        "--hang-timeout", type=float, default=60.0, help="seconds without a new step (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="for the moments of the kills")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    parser.add_argument("--quick", action="store_true", help="3 kills, torchrun and ours, one run each")
    args = parser.parse_args()
    names = args.peers.split(",")
    if args.quick:
        args.kills, args.kills_per_run, names = 3, 3, ["torchrun", "ours"]
    elif "torchrun" in names and "torchrun-default" not in names:
        names.insert(names.index("torchrun") + 1, "torchrun-default")
    unknown = [name for name in names if name not in LAUNCHERS]
    if unknown:
        parser.error(f"--peers: unknown {', '.join(unknown)}; known are {', '.join(LAUNCHERS)}")
    if args.kills < 1 or args.kills_per_run < 1:
        parser.error("--kills and --kills-per-run must be at least 1")
    args.peers = names
    return args


def measure(results: list[Result], args: argparse.Namespace, folder: Path) -> None:
    launchers = {}
    for result in results:
        try:
            launchers[result.name] = LAUNCHERS[result.name]()
        except PeerUnavailableError as error:
            result.errors.append(str(error))
            continue
        result.note = launchers[result.name].note
    for python in {launcher.python for launcher in launchers.values()}:
        # Else the first start of each environment would measure the disk.
        subprocess.run([python, "-c", "import torch, torch._dynamo"], check=False, stderr=subprocess.DEVNULL)

    chance = random.Random(args.seed)
    for number in range(
        2 * args.kills
    ):  # a run that hangs ends early; twice as many rounds as could be needed is the bound
        open_results = [r for r in results if r.name in launchers and len(r.kills) < args.kills and len(r.errors) < 3]
        if not open_results:
            return
        first = number % len(open_results)
        for result in open_results[first:] + open_results[:first]:
            num_kills = min(args.kills_per_run, args.kills - len(result.kills))
            run = folder / f"{number}-{result.name}"
            leftovers = Leftovers.note(launchers[result.name])
            try:
                measure_run(launchers[result.name], result, run, num_kills, args.hang_timeout, chance)
            except RunFailedError as error:
                result.errors.append(str(error))
                say(result, f"failed: {error}")
            finally:
                leftovers.remove()
                shutil.rmtree(run, ignore_errors=True)


def measure_run(
    launcher: Launcher, result: Result, run: Path, num_kills: int, hang_timeout: float, chance: random.Random
) -> None:
    run.mkdir()
    (run / "tmp").mkdir()
    log = run / "output.log"
    command = [*launcher.command, str(REFERENCE_JOB), "--dir", str(run), *launcher.options]
    files = EventFolder(run / "events")
    began_at_ns = time.monotonic_ns()
    with running(command, environment=environment_for(launcher, run), folder=run, log=log) as process:
        while (first_at_ns := first_step_at_ns(files.refresh(), NUM_RANKS)) is None:
            look_again(process, log, until=began_at_ns / 1e9 + START_TIMEOUT, waiting_for="the first step")
        result.starts.append((first_at_ns - began_at_ns) / 1e9)
        say(result, f"started in {result.starts[-1]:.2f} s")
        for _ in range(num_kills):
            kill = kill_and_watch(launcher, process, files, log, len(result.kills) % NUM_RANKS, hang_timeout, chance)
            result.kills.append(kill)
            if kill.recovery is None:
                say(result, f"rank {kill.local_rank} killed: no new step within {hang_timeout:g} s")
                return  # its later kills would hit a job that does not train
            say(result, f"rank {kill.local_rank} killed: new step after {kill.recovery.seconds:.3f} s")


def kill_and_watch(
    launcher: Launcher,
    process: subprocess.Popen[bytes],
    files: EventFolder,
    log: Path,
    local_rank: int,
    hang_timeout: float,
    chance: random.Random,
) -> Kill:
    num_calm_steps = chance.randint(10, 20)  # a settled job, killed at no particular moment
    calm_until = time.monotonic() + START_TIMEOUT
    while (
        not (pids := lives(files.refresh(), NUM_RANKS)) or num_steps_since(files.events, pids.values()) < num_calm_steps
    ):
        look_again(process, log, until=calm_until, waiting_for=f"{num_calm_steps} steps in a row")
    time.sleep(chance.uniform(0, 0.05))  # anywhere within a step

    descriptors: dict[int, int] = {}
    try:
        for rank, pid in pids.items():
            descriptors[os.pidfd_open(pid)] = rank
        victim = next(fd for fd, rank in descriptors.items() if rank == local_rank)
        survivors = [fd for fd in descriptors if fd != victim]
        old_pids = {event.pid for event in files.refresh()}
        clock = KillClock(log, victim=pids[local_rank])
        signal.pidfd_send_signal(victim, signal.SIGKILL)
        gone_at_ns = wait_for_exit(survivors, timeout=hang_timeout)
        found: Recovery | None = None
        while time.monotonic_ns() < clock.killed_at_ns + hang_timeout * 1e9:
            found = recovery(
                files.refresh(),
                killed_at_ns=clock.killed_at_ns,
                survivors_gone_at_ns=gone_at_ns,
                old_pids=old_pids,
                num_ranks=NUM_RANKS,
                detected_at_ns=clock.read(launcher.detected),
                met_at_ns=clock.read(launcher.met),
            )
            if found:
                break
            look_again(process, log, until=float("inf"), waiting_for="the recovery")
    except ProcessLookupError as error:
        raise RunFailedError(f"a worker ended before it was killed: {tail(log)}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return Kill(local_rank, found)


class KillClock:
    """Both clocks at the moment of the kill; translates the times of the launcher's log from one into the other."""

    def __init__(self, log: Path, *, victim: int) -> None:
        self._log = log
        self._victim = victim
        self._log_size = log.stat().st_size
        self._killed_at = time.time()
        self.killed_at_ns = time.monotonic_ns()

    def read(self, line: LogLine | None) -> int | None:
        """When the launcher wrote this line, on the monotonic clock; None if it has not (yet), or has no such line."""
        if line is None:
            return None
        with self._log.open(errors="replace") as file:
            file.seek(self._log_size)
            at = line.first_after(file, killed_at=self._killed_at, victim=self._victim)
        return None if at is None else self.killed_at_ns + int((at - self._killed_at) * 1e9)


def wait_for_exit(descriptors: list[int], *, timeout: float) -> int | None:
    """When the last of these processes (pidfds) had ended; None if one lives on."""
    waiting = set(descriptors)
    deadline = time.monotonic() + timeout
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            return None
        for descriptor, _ in ready:
            poll.unregister(descriptor)
            waiting.discard(descriptor)
    return time.monotonic_ns()


def look_again(process: subprocess.Popen[bytes], log: Path, *, until: float, waiting_for: str) -> None:
    """Pause before the next look at the files; raise if there is nothing left to wait for."""
    if process.poll() is not None:
        raise RunFailedError(f"ended with exit code {process.returncode} while waiting for {waiting_for}: {tail(log)}")
    if time.monotonic() > until:
        raise RunFailedError(f"timed out waiting for {waiting_for}: {tail(log)}")
    time.sleep(LOOK_EVERY)


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " / ".join(line.strip() for line in lines[-3:])[-400:] or "no output"


def environment_for(launcher: Launcher, run: Path) -> dict[str, str]:
    """The same for all launchers, without what the caller's shell happens to set for one of them."""
    ours = ("DLROVER", "ELASTIC_", "MASTER_", "NODE_", "PET_", "PYTHON", "RANK", "TORCH", "VIRTUAL_ENV", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(run / "tmp")}
    environment["PATH"] = os.pathsep.join([str(Path(launcher.command[0]).parent), environment.get("PATH", os.defpath)])
    return environment | launcher.environment


def report(results: list[Result], hang_timeout: float) -> str:
    by_name = {result.name: result for result in results}
    ours = by_name.get("ours", Result("ours"))
    rows = []
    for result in results:
        kill, start = result.kill_summary(), result.start_summary()
        lost = summarise([float(recovery.num_steps_lost) for recovery in result.recoveries])
        rows.append(
            [
                result.name,
                seconds(kill.median if kill else None),
                seconds(kill.p95 if kill else None),
                f"{kill.lowest:.3f}-{kill.highest:.3f}" if kill else "-",
                times(ratio(kill, ours.kill_summary())),
                f"{result.num_hangs} of {len(result.kills)}",
                f"{lost.median:g} (max {lost.highest:g})" if lost else "-",
                seconds(start.median if start else None),
                times(ratio(ours.start_summary(), start)),
            ]
        )
    head = [
        "launcher",
        "kill to new step, median s",
        "p95",
        "min-max",
        "/ ours",
        "hangs",
        "steps lost",
        "start, median s",
        "ours / it",
    ]
    phase_rows = [[result.name, *(seconds(median_phase(result, phase)) for _, phase in PHASES)] for result in results]
    lines = [
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "",
        table(head, rows),
        "",
        "'start' is from the command to the first step of all ranks.",
        f"'hangs' are kills without a new step within {hang_timeout:g} s; they are not in the other figures.",
        "",
        "Where the time from kill to new step goes (medians, s):",
        "",
        table(["launcher", *(phase for _, phase in PHASES)], phase_rows),
        "",
        *(undetected(result) for result in results if any("detect" not in each.phases for each in result.recoveries)),
        *(f"{result.name}: {result.note}" for result in results if result.note),
        *(f"{result.name}: NOT FULLY MEASURED: {e}" for result in results for e in dict.fromkeys(result.errors)),
    ]
    return "\n".join(lines)


def median_phase(result: Result, phase: str) -> float | None:
    """Of a launcher that sometimes says when it detects, only these kills tell detection from stop."""
    told = [recovery.phases for recovery in result.recoveries if "detect" in recovery.phases]
    samples = told if told and phase in ("detect", "stop") else [recovery.phases for recovery in result.recoveries]
    summary = summarise([phases[phase] for phases in samples if phase in phases])
    return summary.median if summary else None


def undetected(result: Result) -> str:
    missing = sum("detect" not in recovery.phases for recovery in result.recoveries)
    return (
        f"{result.name}: its log did not tell when it noticed {missing} of {len(result.recoveries)} kills, and from outside "
        "detection cannot be told from the stop of the survivors."
    )


def as_json(results: list[Result]) -> dict[str, object]:
    def summary(value: Summary | None) -> dict[str, float] | None:
        return asdict(value) if value else None

    return {
        "machine": {"num_cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "launchers": [
            asdict(result)
            | {
                "kill_to_new_step": summary(result.kill_summary()),
                "command_to_first_step": summary(result.start_summary()),
            }
            for result in results
        ],
    }


def say(result: Result, text: str) -> None:
    print(f"{result.name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
