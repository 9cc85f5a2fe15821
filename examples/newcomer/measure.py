"""
Plays a newcomer, and prints how many seconds and commands each step took.

    python examples/newcomer/measure.py                  clone, demo, own script, a killed worker, the page, the report; then torchrun
    python examples/newcomer/measure.py --install        with the installation in the clone, as on a machine that never saw the project
    python examples/newcomer/measure.py --only script    one step, or several separated by commas

The same script, killed in the same way, runs under torchrun where torchrun has the step. Exit code 0 only if each step did what it should.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorials" / "first-elastic-job.md"
PLAIN = Path(__file__).with_name("plain.py")
NUM_STEPS = 400
"""About 20 seconds: long enough to look at the job after the kill, on a busy machine too."""
DEADLINE = 600.0
RESTART_LIMIT = 120.0
"""Seconds for a job from the kill to its end, six times what it needs. A restart under torchrun sometimes hangs: benchmarks.md says how often."""


class Played(NamedTuple):
    """One step of the newcomer."""

    what: str
    seconds: float
    num_commands: int
    outcome: str


class StepFailed(Exception):
    """A step did not do what it should; the text is for the newcomer."""


class Newcomer:
    """Types commands in a directory of its own, with the environment of this interpreter."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.clone = directory / "clone"
        self.num_commands = 0
        self._python_path = ROOT
        self._bin = Path(sys.executable).parent

    def environ(self) -> dict[str, str]:
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        return os.environ | {"PATH": path, "PYTHONPATH": str(self._python_path), "OMP_NUM_THREADS": "1"}

    def type(self, command: str, *, at: Path | None = None) -> str:
        """What it shows."""
        self.num_commands += 1
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=at or self._directory,
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        if done.returncode != 0:
            raise StepFailed(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def get_code(self) -> str:
        self.type(f"git clone --quiet --depth 1 file://{ROOT} {self.clone}")
        self._python_path = self.clone
        return "a checkout"

    def install(self) -> str:
        self.type("make setup", at=self.clone)
        self._bin = self.clone / ".venv" / "bin"
        return "an environment"

    def see_demo(self) -> str:
        code = self.clone if self.clone.exists() else ROOT
        # `make demo` without its set-up, which is a step of its own.
        self.type("python examples/gpt/demo.py", at=code)
        return "recovered"  # else its exit code is not 0

    def run_own_script(self) -> str:
        (script,) = re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)[:1]
        (self._directory / "train.py").write_text(script, encoding="utf-8")
        options = (
            "--standalone --nproc-per-node=2 --job-name=first --journal=journal --enable-dashboard --dashboard-port=0"
        )
        shown = self._killed(f"dlrover-run {options} train.py {NUM_STEPS}", while_it_runs=self._look)
        return _found(r"Training went on with step \d+, [\d.]+ s", shown)

    def _look(self) -> None:
        """The status in the terminal and the page in a browser."""
        self.type("dlrover status first")
        link = _found(r"http\S+", self.type("dlrover dashboard first"))
        with urllib.request.urlopen(link, timeout=30) as answer:
            if answer.status != 200:
                raise StepFailed(f"{link}: status {answer.status}")

    def read_report(self) -> str:
        self.type("dlrover report journal/*.sqlite -o job.html")
        text = (self._directory / "job.html").read_text(encoding="utf-8")
        return f"a page of {len(text) >> 10} KiB"

    def run_torchrun(self) -> str:
        shutil.copy(PLAIN, self._directory / "plain.py")
        for left in self._directory.glob("rank*.pid"):
            left.unlink()
        command = f"torchrun --standalone --nproc-per-node=2 --max-restarts=3 plain.py {NUM_STEPS}"
        try:
            shown = self._killed(command, while_it_runs=lambda: None)
        except subprocess.TimeoutExpired:
            return f"hung after the kill, stopped after {RESTART_LIMIT:g} s"
        starts = re.findall(r"starts at step (\d+)", shown)
        if len(starts) < 2:
            raise StepFailed(f"torchrun did not start the workers again:\n{shown}")
        return f"Training went on with step {starts[-1]}"

    def _killed(self, command: str, *, while_it_runs: Callable[[], None]) -> str:
        """The job loses rank 1 after step 40. What it shows; two commands more."""
        self.num_commands += 2
        log = self._directory / "job.log"
        with log.open("wb") as output:
            job = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self._directory, env=self.environ(), stdout=output, stderr=output
            )
        try:
            _wait_for("step 40:", log, job)
            os.kill(int((self._directory / "rank1.pid").read_text()), signal.SIGKILL)
            while_it_runs()
            if job.wait(RESTART_LIMIT) != 0:
                raise StepFailed(f"{command}: exit code {job.returncode}\n{log.read_text()}")
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGTERM)
                job.wait(DEADLINE)
        return log.read_text()


def _wait_for(text: str, log: Path, job: subprocess.Popen[bytes]) -> None:
    end_at = time.monotonic() + DEADLINE
    while text not in log.read_text():
        if job.poll() is not None or time.monotonic() > end_at:
            raise StepFailed(f"no {text!r} in:\n{log.read_text()}")
        time.sleep(0.02)


def _found(pattern: str, shown: str) -> str:
    match = re.search(pattern, shown)
    if match is None:
        raise StepFailed(f"no {pattern!r} in:\n{shown}")
    return match[0].strip()


def play(newcomer: Newcomer, steps: Sequence[tuple[str, Callable[[], str]]]) -> list[Played]:
    """Raises `StepFailed`."""
    played = []
    for what, act in steps:
        began_at, before = time.monotonic(), newcomer.num_commands
        outcome = act()
        played.append(Played(what, time.monotonic() - began_at, newcomer.num_commands - before, outcome))
    return played


def table(played: Sequence[Played]) -> str:
    rows = [(each.what, f"{each.seconds:.1f} s", str(each.num_commands), each.outcome) for each in played]
    total = (sum(each.seconds for each in played), sum(each.num_commands for each in played))
    rows = [("step", "time", "commands", "outcome"), *rows, ("all", f"{total[0]:.1f} s", str(total[1]), "")]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Play a newcomer and measure it.")
    parser.add_argument("--install", action="store_true", help="install in the clone, too (minutes)")
    parser.add_argument("--only", default="", help="clone, demo, script, report, torchrun; separated by commas")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="dlrover-newcomer-") as name:
        newcomer = Newcomer(Path(name))
        steps: dict[str, Callable[[], str]] = {"clone": newcomer.get_code}
        if options.install:
            steps["install"] = newcomer.install
        steps |= {"demo": newcomer.see_demo, "script": newcomer.run_own_script, "report": newcomer.read_report}
        steps["torchrun"] = newcomer.run_torchrun
        chosen = [each for each in options.only.split(",") if each] or list(steps)
        if unknown := [each for each in chosen if each not in steps]:
            parser.error(f"no step {', '.join(unknown)}; there are {', '.join(steps)}")
        try:
            print(table(play(newcomer, [(each, steps[each]) for each in chosen])))
        except StepFailed as error:
            print(f"A step failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
