"""
The demonstration behind `make demo-scaling`: a job that finds its own size, and then loses half of its room.

    python examples/scaling/demo.py

A real job of `dlrover local --nodes 1:4 --auto-scale on` whose steps follow a law (`train.py`). It begins with one node, tries more, and rests at the size that is best
by the law. Then at most two nodes may run on this machine. Each decision is printed with its reason, and the fitted curve is written as a picture. Exit code 0
only if all of this was seen. Times of minutes (how long a size is watched) are seconds here.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from law import best_size, build_parser, step_seconds
from rich.console import Console

from dlrover.cli.connection import JobConnection
from dlrover.cli.show.scaling import draw, why_lines
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.job import AskStatus, JobStatus
from dlrover.protocol.messages.scaling import AskScaling, ScaleOutcome, ScalingStatus

HERE = Path(__file__).resolve().parent
LEAST, MOST, ROOM = 1, 4, 2
LAW = ["--constant=0.1", "--network=0.005", "--each=0.002", "--noise=0.05"]
SHORTENED = {
    "DLROVER_SECONDS_FOR_STABLE_WORKER_COUNT": "6",
    "DLROVER_GLOBAL_STEP_COUNT_TO_AUTO_WORKER": "20",
    "DLROVER_SECONDS_INTERVAL_TO_OPTIMIZE": "2",
}
"""How long a size is watched, and the pause between two changes: a minute and half a minute in a usual job."""
LIMIT = 170.0
"""Seconds for everything."""


class Demo:
    def __init__(self, directory: Path, console: Console) -> None:
        self.console = console
        self.directory = directory
        self.began_at = time.monotonic()
        self.name = f"scaling-demo-{os.getpid()}"
        self.log = directory / "job.log"
        self.connection = JobConnection(job=self.name)
        self.num_told = 0
        self.sizes: list[int] = []
        self.newest: ScalingStatus | None = None
        self.job: subprocess.Popen[bytes] | None = None

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.began_at:6.1f} s[/dim]  {text}", highlight=False)

    def start(self) -> None:
        command = [
            sys.executable, "-m", "dlrover.cli.main", "local", f"--nodes={LEAST}:{MOST}", "--auto-scale=on", "--netns=off",
            f"--job-name={self.name}", f"--log-dir={self.directory}", "--", "--heartbeat=1", "--node-silence=30",
            str(HERE / "train.py"), f"--end-file={self.directory / 'end'}", *LAW,
        ]  # fmt: skip
        environ = {**os.environ, **SHORTENED, "SCALING_CHECKPOINTS": str(self.directory), "DLROVER_LOG_LEVEL": "INFO"}
        with self.log.open("wb") as output:
            self.job = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)

    def scaling(self) -> ScalingStatus | None:
        """None: the master cannot be asked now. Tells each decision once."""
        assert self.job is not None
        if self.job.poll() is not None:
            raise SystemExit(f"The job ended with {self.job.returncode}:\n{self.log.read_text()[-4000:]}")
        if time.monotonic() - self.began_at > LIMIT:
            why = "\n".join(why_lines(self.newest)) if self.newest is not None else "nothing was decided"
            raise SystemExit(
                f"Not seen within {LIMIT:g} s.\n{why}\nThe job's log ends with:\n{self.log.read_text()[-3000:]}"
            )
        try:
            status = self.connection.ask(AskScaling(), ScalingStatus)
            job = self.connection.ask(AskStatus(), JobStatus)
        except DLRoverError:
            return None
        self.newest = status
        for decision in status.decisions:
            if decision.number > self.num_told:
                self.num_told = decision.number
                if decision.outcome not in (ScaleOutcome.HELD, ScaleOutcome.RESTED):
                    self.say(f"[bold]{decision.outcome.value}[/bold]: {decision.sentence}")
        nodes = job.world_size
        if nodes and (not self.sizes or self.sizes[-1] != nodes):
            self.sizes.append(nodes)
            self.say(f"[green]{nodes} nodes train[/green]")
        return status

    def wait_until(self, is_seen: object) -> ScalingStatus:
        while True:
            status = self.scaling()
            if status is not None and callable(is_seen) and is_seen(status):
                return status
            time.sleep(0.3)

    def run(self, picture: Path) -> None:
        law = build_parser().parse_args(LAW)
        best = best_size(law, LEAST, MOST)
        told = ", ".join(f"{nodes}: {nodes / step_seconds(law, nodes):.1f}" for nodes in range(LEAST, MOST + 1))
        self.say(f"The law gives these steps of workers per second, by nodes: {told}. Best for `balanced`: {best}.")
        self.start()
        rested = self.wait_until(
            lambda status: (
                bool(self.sizes)
                and self.sizes[-1] == best == status.target
                and not status.on_probation
                and status.speed
            )
        )
        self.say(f"It rests at {best} nodes: {rested.sentence}")
        picture.write_text(draw(rested), encoding="utf-8")
        for line in why_lines(rested):
            self.console.print(f"    {line}", highlight=False, markup=False)
        self.say(f"The room shrinks from {MOST} to {ROOM} nodes.")
        shrunk_at = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "dlrover.cli.main", "scale", f"--room={ROOM}", self.name],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self.wait_until(lambda status: self.sizes[-1] == ROOM)
        self.say(f"{ROOM} nodes train {time.monotonic() - shrunk_at:.1f} s after that.")
        (self.directory / "end").touch()
        assert self.job is not None
        exit_code = self.job.wait(timeout=40)
        if exit_code:
            raise SystemExit(f"The job ended with {exit_code}:\n{self.log.read_text()[-3000:]}")
        if max(self.sizes) > MOST or min(self.sizes) < LEAST:
            raise SystemExit(f"The job left its bounds: {self.sizes}")

    def close(self) -> None:
        if self.job is not None and self.job.poll() is None:
            self.job.send_signal(signal.SIGTERM)
            try:
                self.job.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.job.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--picture", default="scaling.svg", help="where the fitted curve goes (scaling.svg)")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    directory = Path(tempfile.mkdtemp(prefix="dlrover-scaling-"))
    demo = Demo(directory, console)
    try:
        demo.run(Path(options.picture))
    finally:
        demo.close()
        shutil.rmtree(directory, ignore_errors=True)
    sizes = " → ".join(map(str, demo.sizes))
    console.print(
        f"\nSizes in order: {sizes}. The fitted curve: {options.picture}. {time.monotonic() - demo.began_at:.0f} s in all."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
