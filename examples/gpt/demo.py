"""
The demonstration behind `make demo`: train the GPT of train.py with two workers, kill one in the middle, watch it
recover.

    python examples/gpt/demo.py                          a live display in a terminal, plain lines elsewhere (CI)
    python examples/gpt/demo.py --launcher torchrun      the same with torchrun, to compare

Under dlrover-run every step is saved into memory, so the kill costs no step; under torchrun every fifth is written with torch.save. Ends with a
report of what the kill cost, what the checkpoints cost, and what torch.save would have. Exit code 0 only if the job recovered and ended
well; nothing is left behind, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

TRAINER = Path(__file__).resolve().with_name("train.py")
NUM_WORKERS = 2
VICTIM = 1
NUM_COMPARISONS = 7
"""Times that torch.save is measured after the last step."""
LOOK_EVERY = 0.05
"""Seconds between two looks at the metrics file, which also paces the display; the report uses the times in the
file."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Step:
    """One execution of one training step, as rank 0 recorded it. `at` is its end; all times in monotonic seconds."""

    number: int
    at: float
    seconds: float
    loss: float
    pid: int
    saving: float = 0.0
    """For which training stood still after it, for the checkpoint."""


@dataclass(frozen=True)
class Report:
    num_steps: int
    num_restarts: int
    start_up: float
    """From the command to the beginning of the first step."""
    wall: float
    """From the beginning of the first step to the end of the last."""
    useful: float
    """Time in steps whose result the final model contains."""
    redone: float
    """Time in steps that had to be done again."""
    num_redone_steps: int
    recovery: float | None
    """From the kill to the end of the first step that was new; None: there was none."""
    saving: float = 0.0
    """Time for which training stood still for checkpoints."""
    median_saving: float = 0.0
    torch_save: float | None = None
    """Median time of torch.save for the same state, measured after the last step; None: it was not."""

    @property
    def saved(self) -> float | None:
        """What torch.save would have taken more for as many checkpoints."""
        return None if self.torch_save is None else self.torch_save * self.num_steps - self.saving

    @property
    def goodput(self) -> float:
        return self.useful / self.wall if self.wall > 0 else 0.0

    @property
    def goodput_with_start_up(self) -> float:
        return self.useful / (self.start_up + self.wall) if self.wall > 0 else 0.0


def make_report(
    steps: Sequence[Step],
    *,
    began_at: float,
    killed_at: float | None,
    num_restarts: int,
    torch_saves: Sequence[float] = (),
) -> Report:
    """`steps` in the order in which they were recorded."""
    kept = {step.number: step for step in steps}  # a later execution of the same step replaces the earlier one
    redone = [step for step in steps if kept[step.number] is not step]
    first_began_at = steps[0].at - steps[0].seconds if steps else began_at
    return Report(
        num_steps=len(kept),
        num_restarts=num_restarts,
        start_up=first_began_at - began_at,
        wall=steps[-1].at - first_began_at if steps else 0.0,
        useful=sum(step.seconds for step in kept.values()),
        redone=sum(step.seconds for step in redone),
        num_redone_steps=len(redone),
        recovery=None if killed_at is None else recovery_seconds(steps, killed_at),
        saving=sum(step.saving for step in steps),
        median_saving=statistics.median(step.saving for step in steps) if steps else 0.0,
        torch_save=statistics.median(torch_saves) if torch_saves else None,
    )


def recovery_seconds(steps: Iterable[Step], killed_at: float) -> float | None:
    """From the kill to the first step, by a new process, that no process from before the kill had completed."""
    steps = list(steps)
    old_pids = {step.pid for step in steps if step.at <= killed_at}
    last_old_number = max((step.number for step in steps if step.pid in old_pids), default=0)
    for step in steps:
        if step.pid not in old_pids and step.number > last_old_number:
            return step.at - killed_at
    return None


class Metrics:
    """What the trainer has written to its metrics file until now."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.steps: list[Step] = []
        self.pids: dict[int, int] = {}
        """The newest process of each rank."""
        self.num_restarts = 0
        self.torch_saves: list[float] = []

    def refresh(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            fields = json.loads(line)
            if fields["event"] == "start":
                self.pids[fields["rank"]] = fields["pid"]
                self.num_restarts = max(self.num_restarts, fields["restart"])
            elif fields["event"] == "torch.save":
                self.torch_saves = fields["seconds"]
            else:
                at = fields["at"] - fields["saving"]  # written after the checkpoint
                step = Step(fields["step"], at, fields["seconds"], fields["loss"], fields["pid"], fields["saving"])
                self.steps.append(step)

    def num_alive(self) -> int:
        return sum(is_alive(pid) for pid in self.pids.values())


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Demo:
    """The course of the demonstration: what has happened and what is still to be done."""

    launcher: subprocess.Popen[bytes]
    metrics: Metrics
    num_steps: int
    kill_at_step: int
    began_at: float
    deadline_at: float
    killed_at: float | None = None

    def watch(self, show: Callable[[Demo], None]) -> int | None:
        """Until the job ends; returns its exit code, None if it outlived the deadline."""
        while (exit_code := self.launcher.poll()) is None:
            self.metrics.refresh()
            if self.killed_at is None and self._is_time_to_kill():
                self.killed_at = time.monotonic()
                os.kill(self.metrics.pids[VICTIM], signal.SIGKILL)
            show(self)
            if time.monotonic() > self.deadline_at:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.launcher.wait(LOOK_EVERY)
        self.metrics.refresh()
        show(self)
        return exit_code

    def _is_time_to_kill(self) -> bool:
        steps, pids = self.metrics.steps, self.metrics.pids
        return bool(steps) and steps[-1].number >= self.kill_at_step and VICTIM in pids and is_alive(pids[VICTIM])

    def stage(self) -> str:
        """In words, for people."""
        if not self.metrics.steps:
            return "starting"
        if self.killed_at is None:
            return f"training; worker {VICTIM} will be killed at step {self.kill_at_step}"
        recovery = recovery_seconds(self.metrics.steps, self.killed_at)
        if recovery is None:
            return f"worker {VICTIM} was killed with SIGKILL; recovering"
        return f"recovered: first new step {recovery:.2f} s after the kill"


def main() -> int:
    options = parse_options()
    launcher = Path(sys.executable).with_name(options.launcher)
    if not launcher.exists():
        print(f"{options.launcher} is not installed beside {sys.executable}; run `make setup`.", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="dlrover-demo-"))
    log = folder / "output.log"
    command = [str(launcher), "--standalone", f"--nproc-per-node={NUM_WORKERS}", "--max-restarts=3", str(TRAINER)]
    is_flash = options.launcher == "dlrover-run"
    command += [f"--steps={options.steps}", f"--dir={folder}", f"--metrics={folder / 'metrics.jsonl'}"]
    command += [f"--compare={NUM_COMPARISONS}"] if is_flash else ["--checkpoint=torch", "--checkpoint-every=5"]
    console.print(f"$ {options.launcher} {' '.join(command[1:4])} examples/gpt/train.py --steps={options.steps}")
    signal.signal(signal.SIGTERM, _leave)
    try:
        began_at = time.monotonic()
        with running(command, log) as process:
            metrics = Metrics(folder / "metrics.jsonl")
            # Three steps past a checkpoint in storage, so that work would have to be redone if only that counted.
            demo = Demo(process, metrics, options.steps, options.steps // 2 + 3, began_at, began_at + options.timeout)
            with display(console, is_plain=options.plain) as show:
                exit_code = demo.watch(show)
        report = make_report(
            metrics.steps,
            began_at=began_at,
            killed_at=demo.killed_at,
            num_restarts=metrics.num_restarts,
            torch_saves=metrics.torch_saves,
        )
        console.print(render_report(report, exit_code))
        problem = find_problem(report, exit_code, options.steps, may_lose_steps=not is_flash)
        if problem:
            lines = log.read_text(errors="replace").splitlines()[-30:]
            console.print(f"The demonstration failed: {problem}. The last lines of the job's output:", style="bold red")
            console.print("\n".join(lines), markup=False)
        return 1 if problem else 0
    except KeyboardInterrupt:
        console.print("Interrupted; the job was stopped.")
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="length of the training (default %(default)s)")
    parser.add_argument("--launcher", default="dlrover-run", choices=["dlrover-run", "torchrun"])
    parser.add_argument("--plain", action="store_true", help="lines instead of a live display, also in a terminal")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for everything (default %(default)s)")
    return parser.parse_args()


def _leave(signal_number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signal_number)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher ends its job when it is told to; what it might leave comes to us (subreaper) and is killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to us alone; we stop the job in order
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        deadline_at = time.monotonic() + 10
        while (remaining := psutil.Process().children(recursive=True)) and time.monotonic() < deadline_at:
            for child in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(remaining, timeout=1)


@contextlib.contextmanager
def display(console: Console, *, is_plain: bool) -> Iterator[Callable[[Demo], None]]:
    if is_plain or not console.is_terminal:
        yield PlainDisplay(console)
        return
    with Live(console=console, refresh_per_second=20) as live:
        yield lambda demo: live.update(render_progress(demo))


class PlainDisplay:
    """For logs: a line when something happens, and one every 40 steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._shown_step = 0

    def __call__(self, demo: Demo) -> None:
        number = demo.metrics.steps[-1].number if demo.metrics.steps else 0
        if number // 40 > self._shown_step // 40 or (number == demo.num_steps and number > self._shown_step):
            self._shown_step = number
            last = demo.metrics.steps[-1]
            alive = f"{demo.metrics.num_alive()} of {NUM_WORKERS} workers alive"
            self._print(demo, f"step {number}/{demo.num_steps}, loss {last.loss:.3f}, {alive}")
        stage = demo.stage()
        if stage != self._stage:
            self._stage = stage
            self._print(demo, stage)

    def _print(self, demo: Demo, text: str) -> None:
        self._console.print(f"{time.monotonic() - demo.began_at:6.2f} s  {text}")


def render_progress(demo: Demo) -> Panel:
    metrics = demo.metrics
    number = metrics.steps[-1].number if metrics.steps else 0
    num_alive = metrics.num_alive()
    grid = Table.grid(padding=(0, 2))
    grid.add_row("step", f"{number} / {demo.num_steps}")
    grid.add_row("loss", f"{metrics.steps[-1].loss:.3f}" if metrics.steps else "-")
    is_well = num_alive == NUM_WORKERS or number == demo.num_steps  # after the last step they leave as they should
    style = "green" if is_well else "bold red"
    grid.add_row("workers alive", Text(f"{num_alive} of {NUM_WORKERS}", style=style))
    grid.add_row("restarts", str(metrics.num_restarts))
    grid.add_row("time", f"{time.monotonic() - demo.began_at:.1f} s")
    bar = Table.grid(expand=True)  # a bar by itself ends without a line break
    bar.add_row(ProgressBar(total=demo.num_steps, completed=number))
    return Panel(Group(grid, bar, Text(demo.stage(), style="bold")), title="a small GPT on 2 workers", width=76)


def render_report(report: Report, exit_code: int | None) -> Table:
    table = Table(title="Report", show_header=False, title_justify="left")
    table.add_row("steps", f"{report.num_steps}")
    table.add_row("restarts", f"{report.num_restarts}")
    lost = "-" if report.recovery is None else f"{report.recovery:.2f} s from the kill to the next new step"
    table.add_row("recovery", lost)
    table.add_row("steps lost", f"{report.num_redone_steps} ({report.redone:.2f} s of work done again)")
    table.add_row("checkpoints", f"{report.saving:.2f} s in all, {report.median_saving * 1000:.1f} ms each (median)")
    if report.torch_save is not None and report.saved is not None:
        more = "more" if report.saved >= 0 else "less"
        table.add_row(
            "torch.save", f"{report.torch_save * 1000:.1f} ms for the same state, measured after the last step:"
        )
        table.add_row("", f"{abs(report.saved):.2f} s {more} for {report.num_steps} checkpoints")
    table.add_row("goodput", f"{report.goodput:.1%} of {report.wall:.1f} s from the first step to the last")
    with_start_up = f"{report.goodput_with_start_up:.1%} with the {report.start_up:.1f} s to the first step"
    table.add_row("", with_start_up)
    table.add_row("exit code", "none: stopped after the time limit" if exit_code is None else str(exit_code))
    return table


def find_problem(report: Report, exit_code: int | None, num_steps: int, *, may_lose_steps: bool = False) -> str | None:
    """Why this was not a successful recovery; None if it was."""
    if exit_code is None:
        return f"the job was not done in time, {report.num_steps} of {num_steps} steps"
    if exit_code != 0:
        return f"the job ended with exit code {exit_code}"
    if report.recovery is None:
        return "no new step was seen after the kill"
    if report.num_restarts == 0:
        return "the workers were never restarted"
    if report.num_steps != num_steps:
        return f"{report.num_steps} of {num_steps} steps were trained"
    if report.num_redone_steps and not may_lose_steps:
        return f"{report.num_redone_steps} steps had to be done again, although each had been saved into memory"
    return None


if __name__ == "__main__":
    sys.exit(main())
