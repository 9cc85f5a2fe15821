"""
Checkpoints: what a save takes from the training, when it is on the disk, and how fast it comes back. Ours, torch.save, torch's distributed
checkpoint, torchsnapshot and dlrover 0.6.1, against what memory and disk can do at best.

    python benchmarks/checkpoint.py                              0.25 and 1 GB, two rounds, at most 20 minutes
    python benchmarks/checkpoint.py --full --json full.json      4 GB as well, three rounds, about three hours
    python benchmarks/checkpoint.py --quick                      16 MB, one round, five systems, less than a minute
    python benchmarks/checkpoint.py --markdown full.json         only print the tables of an earlier run

Every system trains the same GPT in processes of its own (checkpoint_worker.py), one after the other, in turned order from round to round; the limits
of the machine (checkpoint_limits.py) are measured in each round and for each size, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from checkpoint_memory import MemoryWatch
from checkpoint_report import LIMITS, OUR_SYSTEMS, STORAGE_INTERVAL, Case, case_from_json, report
from checkpoint_state import shape_for
from checkpoint_systems import SYSTEMS
from peers import Launcher, Leftovers, PeerUnavailableError, dlrover_061, ours, torchsnapshot
from process_tree import end
from rounds import measuring, run_rounds

from dlrover.snapshot.copy.copying import Copier

HERE = Path(__file__).resolve().parent
WORKER, LIMITS_SCRIPT = HERE / "checkpoint_worker.py", HERE / "checkpoint_limits.py"
GIGABYTE = 10**9
TWO_WORKERS_UP_TO = 0.25
FULL_TWO_WORKERS_UP_TO = 1.0
"""Gigabytes of state; two trainings with more do not fit into the memory of the development machine."""
QUICK = ("torch.save", "dcp.async_save thread, cached", "ours plain", "ours", "ours lazy")
LOOK_EVERY = 0.02
"""Pause between two looks for the files of the worker; no figure depends on it."""


class RunFailedError(Exception):
    """A measured process failed or hung; the message carries the end of its output."""


@dataclass(frozen=True)
class Place:
    """How the processes of a system are started."""

    launcher: Launcher | None
    """None: python itself, with the environment that torchrun would give."""
    python: Path


@dataclass(frozen=True)
class Settings:
    num_saves: int
    num_storage_saves: int
    timeout: float
    is_restoring: bool
    two_workers_up_to: float = TWO_WORKERS_UP_TO
    """Gigabytes of state."""
    ends_at: float = math.inf
    """On the monotonic clock; no case is begun later."""


class Bench:
    def __init__(self, systems: Sequence[str], settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self.cases: list[Case] = []
        self.errors: list[str] = []
        self.late: list[str] = []
        """What there was no time for."""
        self._places: dict[str, Place] = {}
        for name in systems:
            try:
                self._places[name] = place_of(name)
            except PeerUnavailableError as error:
                self.errors.append(f"{name}: {error}")

    def run_round(self, number: int, sizes: Sequence[float], worker_counts: Sequence[int]) -> None:
        names = sorted(
            self._places, key=lambda name: name not in OUR_SYSTEMS
        )  # should there be no time for all of them
        first = number % max(1, len(names))
        for size in sizes:
            self._try(number, LIMITS, size, 1, self._measure_limits)
            for num_workers in worker_counts:
                if num_workers > 1 and size > self._settings.two_workers_up_to:
                    continue
                for name in names[first:] + names[:first]:
                    self._try(number, name, size, num_workers, self._measure)

    def _try(
        self, number: int, name: str, size: float, num_workers: int, measure: Callable[[Case, Path], Case]
    ) -> None:
        """A system that fails is a result, and is printed as one; it is not tried again."""
        if name != LIMITS and name not in self._places:
            return
        if time.monotonic() > self._settings.ends_at:
            self.late.append(f"round {number + 1}: {num_workers} x {name} with {size:g} GB")
            return
        num_bytes = shape_for(int(size * GIGABYTE)).num_bytes
        case = Case(number, name, size, num_workers, num_bytes)
        run = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            case = measure(case, run)
            self.cases.append(case)
            say(f"{size:g} GB, {num_workers} x {name}: {told(case)}")
        except RunFailedError as error:
            self.errors.append(f"{name}, {size:g} GB, {num_workers} workers: {error}")
            say(self.errors[-1])
        finally:
            shutil.rmtree(run, ignore_errors=True)

    def _measure_limits(self, case: Case, run: Path) -> Case:
        out = run / "limits.json"
        command = [
            sys.executable,
            str(LIMITS_SCRIPT),
            "--bytes",
            str(case.state_bytes),
            "--dir",
            str(run),
            "--out",
            str(out),
        ]
        self._run([command], clean_environment(), run)
        return replace(case, samples=json.loads(out.read_text())["samples"])

    def _measure(self, case: Case, run: Path) -> Case:
        place = self._places[case.system]
        out = run / "figures.json"
        leftovers = Leftovers.note(place.launcher) if place.launcher else None
        try:
            extra_memory = self._run(*self._command(place, case, run, out), run, out)
            unsupported = out.with_suffix(".unsupported")
            if unsupported.exists():
                raise RunFailedError(unsupported.read_text())
            if self._settings.is_restoring and case.num_workers == 1:
                if leftovers is not None:
                    leftovers.remove()  # or it would restore from memory
                self._run(*self._command(place, case, run, out, "--restore"), run)
        finally:
            if leftovers is not None:
                leftovers.remove()
        samples: dict[str, list[float]] = json.loads(out.read_text())["samples"]
        if extra_memory is not None and case.num_workers == 1:
            samples["extra_memory"] = [float(extra_memory)]
        return replace(case, samples=samples)

    def _command(
        self, place: Place, case: Case, run: Path, out: Path, *more: str
    ) -> tuple[list[list[str]], dict[str, str]]:
        script = [str(WORKER), case.system, "--bytes", str(case.state_bytes), "--dir", str(run / "checkpoints")]
        script += ["--out", str(out), "--saves", str(self._settings.num_saves)]
        script += ["--storage-saves", str(self._settings.num_storage_saves), *more]
        (run / "tmp").mkdir(exist_ok=True)
        environment = clean_environment() | {"TMPDIR": str(run / "tmp")}
        if place.launcher is not None:
            command = [*place.launcher.command, *script]
            command = [part.replace("=2", f"={case.num_workers}") if "nproc" in part else part for part in command]
            path = os.pathsep.join([str(Path(command[0]).parent), environment.get("PATH", os.defpath)])
            return [command], environment | place.launcher.environment | {"PATH": path}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"WORLD_SIZE": str(case.num_workers), "LOCAL_WORLD_SIZE": str(case.num_workers)}
        return [[str(place.python), *script] for _ in range(case.num_workers)], environment

    def _run(
        self, commands: list[list[str]], environment: dict[str, str], run: Path, out: Path | None = None
    ) -> int | None:
        """Run to the end. With `out`, the most memory taken between the worker's two marks."""
        log = run / "output.log"
        processes = []
        watch: MemoryWatch | None = None
        try:
            with log.open("wb") as output:
                for number, command in enumerate(commands):
                    ranks = {"RANK": str(number), "LOCAL_RANK": str(number)} if "WORLD_SIZE" in environment else {}
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment | ranks,
                            cwd=run,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            if out is not None:
                watch = MemoryWatch(processes[0].pid)
                self._wait(processes, log, until=out.with_suffix(".ready"))
                watch.baseline()
                self._wait(processes, log, until=out.with_suffix(".saved"))
                extra = watch.peak_extra()
            self._wait(processes, log)
            return extra if out is not None else None
        finally:
            if watch is not None:
                watch.peak_extra()
            for process in processes:
                end(process, grace=5.0)

    def _wait(self, processes: list[subprocess.Popen[bytes]], log: Path, until: Path | None = None) -> None:
        """Until a file appears, or without one until all processes have ended."""
        deadline = time.monotonic() + self._settings.timeout
        while True:
            codes = [process.poll() for process in processes]
            if any(code not in (None, 0) for code in codes):
                raise RunFailedError(f"exit codes {codes}: {tail(log)}")
            if all(code == 0 for code in codes) or (until is not None and until.exists()):
                return
            if time.monotonic() > deadline:
                raise RunFailedError(f"not done after {self._settings.timeout:g} s: {tail(log)}")
            time.sleep(LOOK_EVERY)


def place_of(name: str) -> Place:
    """Installs what is missing."""
    if name == "dlrover-0.6.1":
        launcher = dlrover_061()
        return Place(launcher, launcher.python)
    if name in ("ours", "ours lazy"):
        return Place(ours(), Path(sys.executable))
    if name.startswith("torchsnapshot"):
        return Place(None, torchsnapshot())
    return Place(None, Path(sys.executable))


def clean_environment() -> dict[str, str]:
    """The same for all, without what the caller's shell happens to set for one of them."""
    theirs = (
        "DLROVER",
        "ELASTIC_",
        "LOCAL_",
        "MASTER_",
        "NODE_",
        "PET_",
        "PYTHON",
        "RANK",
        "TORCH",
        "VIRTUAL_ENV",
        "WORLD_SIZE",
        "OMP_",
    )
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " / ".join(line.strip() for line in lines[-6:])[-800:] or "no output"


def told(case: Case) -> str:
    names = ("first_block", "warm_block", "durable", "restore_memory", "memcpy_1", "memcpy_2", "dd")
    return ", ".join(f"{name} {value:.4g} s" for name in names if (value := case.figure(name)) is not None)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    args = parse_args()
    if args.markdown:
        print(report_of_file(args.markdown, args.interval))
        return 0
    settings = Settings(
        args.saves,
        args.storage_saves,
        args.timeout,
        not args.no_restore,
        FULL_TWO_WORKERS_UP_TO if args.full else TWO_WORKERS_UP_TO,
        time.monotonic() + 60 * args.minutes if args.minutes else math.inf,
    )
    strangers: list[float] = []
    with measuring("checkpoint-bench-", args.dir) as folder:
        bench = Bench(args.systems, settings, folder)
        run_rounds(args.rounds, lambda number: bench.run_round(number, args.sizes, args.workers), strangers)
    if bench.late:
        say(f"No time was left for {len(bench.late)} measurements (--minutes): {'; '.join(bench.late)}")
    machine = machine_line(args.rounds)
    print(report(bench.cases, bench.errors, strangers, machine=machine, interval=args.interval))
    if args.json:
        found = {"machine": machine, "others_percent": strangers, "errors": bench.errors}
        args.json.write_text(json.dumps(found | {"cases": [case.as_json() for case in bench.cases]}, indent=1) + "\n")
    return 0 if bench.cases and not bench.errors else 1


def report_of_file(path: Path, interval: float) -> str:
    """The tables of a run that was written with --json."""
    read = json.loads(path.read_text())
    cases = [case_from_json(each) for each in read["cases"]]
    return report(cases, read["errors"], read["others_percent"], machine=read["machine"], interval=interval)


def machine_line(num_rounds: int) -> str:
    rounds = f"{num_rounds} round{'s' if num_rounds != 1 else ''}"
    copier = Copier(1)
    loop = "copy loop compiled" if copier.is_streaming else "copy loop NOT compiled (python -m tools.build_hook)"
    copier.close()
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}, {loop}, {rounds}"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.25,1", help="of the state in GB (default %(default)s)")
    parser.add_argument("--full", action="store_true", help="0.25, 1 and 4 GB, three rounds, without an end")
    parser.add_argument("--rounds", type=int, default=2, help="(default %(default)s)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=18.0,
        help="nothing more is begun after that; 0: no limit (default %(default)s)",
    )
    parser.add_argument("--saves", type=int, default=5, help="warm saves of a process (default %(default)s)")
    parser.add_argument("--storage-saves", type=int, default=1, help="of a process and kind (default %(default)s)")
    parser.add_argument("--workers", default="1,2", help="numbers of workers (default %(default)s)")
    parser.add_argument("--systems", default=";".join(SYSTEMS), help="separated by semicolons (default: all)")
    parser.add_argument("--no-restore", action="store_true", help="leave out restores from storage")
    parser.add_argument("--interval", type=float, default=STORAGE_INTERVAL, help="seconds between saves to storage")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="for one process, in seconds (default %(default)s)"
    )
    parser.add_argument("--dir", type=Path, help="on the disk to be measured (default: where temporary files go)")
    parser.add_argument("--json", type=Path, help="write every sample into this file")
    parser.add_argument(
        "--markdown", type=Path, metavar="JSON", help="print the tables of that file and do nothing else"
    )
    parser.add_argument("--quick", action="store_true", help="16 MB, one round, five systems, no restores from storage")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds, args.saves, args.storage_saves = "0.016", 1, 2, 1
        args.workers, args.systems, args.no_restore = "1", ";".join(QUICK), True
    elif args.full:
        args.sizes, args.rounds, args.minutes = "0.25,1,4", max(args.rounds, 3), 0.0
    try:
        args.sizes = [float(size) for size in args.sizes.split(",")]
        args.workers = [int(count) for count in args.workers.split(",")]
    except ValueError as error:
        parser.error(f"--sizes and --workers are numbers with commas between them: {error}")
    args.systems = [name.strip() for name in args.systems.split(";")]
    unknown = [name for name in args.systems if name not in SYSTEMS]
    if unknown:
        parser.error(f"--systems: unknown {'; '.join(unknown)}. Known are: {'; '.join(SYSTEMS)}")
    if min(args.sizes) <= 0 or min(args.workers) < 1 or args.rounds < 1 or args.saves < 1 or args.storage_saves < 1:
        parser.error("--sizes must be above 0; --workers, --rounds, --saves and --storage-saves at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
