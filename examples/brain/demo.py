"""
The demonstration behind `make demo-brain`: what one job learned, the next one starts with.

    python examples/brain/demo.py

A Brain serves on this machine, with an SQLite file. A job begins with one node, finds that two pay, and ends. The same script runs again and starts with two nodes. While it trains, Brain is
killed and later started again: the job goes on, and all that it measured meanwhile is in Brain's store afterwards. Exit code 0 only if all of this was seen. How long a size is watched is 21
seconds here instead of a minute.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from dlrover.cli.brain.shown import plan_text
from dlrover.cli.connection import JobConnection
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.brain import JobAsked, JobList, JobRecord, JobsAsked
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.job import AskStatus, JobStatus
from dlrover.protocol.rpc.brain import BrainChannel

T = TypeVar("T")

SCRIPT = Path(__file__).resolve().parent.parent / "scaling" / "train.py"
LAW = ["--constant=0.1", "--network=0.005", "--each=0.002", "--noise=0.05"]
MOST = 2
LEAST_SECONDS = 20.0
"""A shorter run is no evidence for another job."""
SHORTENED = {
    "DLROVER_SECONDS_FOR_STABLE_WORKER_COUNT": "21",
    "DLROVER_GLOBAL_STEP_COUNT_TO_AUTO_WORKER": "20",
    "DLROVER_SECONDS_INTERVAL_TO_OPTIMIZE": "2",
}
AWAY = 5.0
"""Seconds for which Brain is away."""
LIMIT = 175.0
"""Seconds for everything."""


class Demo:
    def __init__(self, directory: Path, console: Console) -> None:
        self.directory = directory
        self.console = console
        self.began_at = time.monotonic()
        self.brain: subprocess.Popen[bytes] | None = None
        self.job: subprocess.Popen[bytes] | None = None
        self.address = ""
        self.sizes: list[int] = []

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.monotonic() - self.began_at:6.1f} s[/dim]  {text}", highlight=False)

    def start_brain(self) -> None:
        """The second time on the same port."""
        log = self.directory / "brain.log"
        size = log.stat().st_size if log.exists() else 0
        port = self.address.rpartition(":")[2] or "0"
        options = [f"--sqlite={self.directory / 'brain.sqlite'}", f"--port={port}", "--http-port=none"]
        with log.open("ab") as output:
            command = [sys.executable, "-m", "dlrover.cli.main", "brain", "serve", *options]
            self.brain = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        brain = self.brain

        def address() -> str:
            if brain.poll() is not None:
                raise SystemExit(f"Brain ended with {brain.returncode}:\n{log.read_text()[-3000:]}")
            found = re.search(r"Brain serves .* on (127\.0\.0\.1:\d+)", log.read_bytes()[size:].decode())
            return found[1] if found else ""

        self.address = self.wait_for("an answer of Brain", address)
        self.say(f"Brain serves on {self.address}.")

    def ask(self, question: JobsAsked | JobAsked) -> object:
        """None: Brain cannot be asked now, or does not know the job yet."""

        async def asked() -> object:
            channel = BrainChannel(self.address, token="")
            try:
                return await channel.ask(question, timeout=5)
            except DLRoverError:
                return None
            finally:
                await channel.close()

        return asyncio.run(asked())

    def record_of(self, name: str) -> JobRecord | None:
        found = self.ask(JobsAsked(name=name, most=1))
        if not isinstance(found, JobList) or not found.jobs:
            return None
        record = self.ask(JobAsked(uid=found.jobs[0].uid))
        return record if isinstance(record, JobRecord) else None

    def wait_for(self, what: str, look: Callable[[], T | None]) -> T:
        while True:
            if found := look():
                return found
            if time.monotonic() - self.began_at > LIMIT:
                raise SystemExit(
                    f"Not seen within {LIMIT:g} s: {what}. The log of the job ends with:\n{self.last_words()}"
                )
            time.sleep(0.3)

    def last_words(self) -> str:
        logs = sorted(self.directory.glob("*.log"), key=lambda log: log.stat().st_mtime)
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in logs[-2:])

    def start_job(self, name: str) -> None:
        folder = self.directory / name
        folder.mkdir()
        self.sizes = []
        command = [
            sys.executable, "-m", "dlrover.cli.main", "local", f"--nodes=1:{MOST}", "--auto-scale=on", "--netns=off",
            f"--brain={self.address}", f"--job-name={name}", f"--log-dir={folder}", "--", "--heartbeat=1", "--node-silence=30",
            str(SCRIPT), f"--end-file={folder / 'end'}", *LAW,
        ]  # fmt: skip
        environ = {**os.environ, **SHORTENED, "SCALING_CHECKPOINTS": str(folder), "DLROVER_LOG_LEVEL": "INFO"}
        with (self.directory / f"{name}.log").open("wb") as output:
            self.job = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT)

    def watch(self, name: str) -> int:
        """Nodes that train now; each change is told."""
        assert self.job is not None, "a job was started"
        if self.job.poll() is not None:
            raise SystemExit(f"The job ended with {self.job.returncode}:\n{self.last_words()}")
        try:
            nodes = JobConnection(job=name).ask(AskStatus(), JobStatus).world_size
        except DLRoverError:
            return 0
        if nodes and (not self.sizes or self.sizes[-1] != nodes):
            self.sizes.append(nodes)
            self.say(f"[green]{name}: {nodes} node{'s' if nodes > 1 else ''} train{'' if nodes > 1 else 's'}[/green]")
        return nodes

    def end_job(self, name: str) -> JobRecord:
        assert self.job is not None, "a job was started"
        (self.directory / name / "end").touch()
        if exit_code := self.job.wait(timeout=60):
            raise SystemExit(f"{name} ended with {exit_code}:\n{self.last_words()}")
        ended = self.wait_for(f"the end of {name} in Brain", lambda: self._ended(name))
        self.say(f"{name} has ended as {ended.job.end_reason}: {ended.job.steps} steps, {ended.job.num_runs} runs.")
        return ended

    def _ended(self, name: str) -> JobRecord | None:
        record = self.record_of(name)
        return record if record is not None and record.job.end_reason else None

    def evidence(self, name: str, nodes: int) -> JobRecord | None:
        """Brain has a run with so many nodes that lasted long enough."""
        self.watch(name)
        record = self.record_of(name)
        if record is None:
            return None
        is_there = any(run.configuration.num_workers == nodes and run.seconds >= LEAST_SECONDS for run in record.runs)
        return record if is_there else None

    def run(self) -> None:
        self.start_brain()
        first, second = f"first-{os.getpid()}", f"second-{os.getpid()}"
        self.say("The first job knows nothing: it begins with one node and tries a second one.")
        self.start_job(first)
        self.wait_for("a run of two nodes in Brain", lambda: self.evidence(first, MOST))
        before = self.end_job(first)
        if self.sizes != [1, MOST]:
            raise SystemExit(f"The first job should have grown from 1 to {MOST} nodes: {self.sizes}")
        last = before.runs[-1]
        self.say("The same script again.")
        self.start_job(second)
        self.wait_for("the second job in training", lambda: self.watch(second))
        self.kill_brain_for_a_while(second)
        self.wait_for("a run of the second job in Brain", lambda: self.evidence(second, MOST))
        after = self.end_job(second)
        self.check(last.configuration.num_workers, after)
        self.console.print()
        show = [sys.executable, "-m", "dlrover.cli.main", "brain", "job", after.job.uid, f"--brain={self.address}"]
        subprocess.run(show, check=True)

    def kill_brain_for_a_while(self, name: str) -> None:
        assert self.brain is not None, "it serves"
        self.brain.kill()
        self.brain.wait()
        self.say(f"Brain is killed, and away for {AWAY:g} s.")
        until = time.monotonic() + AWAY
        while time.monotonic() < until:
            self.watch(name)  # raises if the job ends
            time.sleep(0.3)
        self.start_brain()

    def check(self, ended_with: int, after: JobRecord) -> None:
        proposals = [plan for plan in after.plans if plan.outcome == "proposed"]
        group = proposals[0].plan.group(NodeType.WORKER) if proposals else None
        if group is None or group.count != ended_with:
            raise SystemExit(f"Brain should have proposed {ended_with} nodes to the second job: {after.plans}")
        if self.sizes != [ended_with]:
            raise SystemExit(f"The second job should have had {ended_with} nodes from its start: {self.sizes}")
        numbers = [run.number for run in after.runs]
        if numbers != list(range(1, len(numbers) + 1)):
            raise SystemExit(f"Brain should have each run of the second job once: {numbers}")
        self.say(f"Brain proposed {plan_text(proposals[0].plan)}: {proposals[0].sentence}")
        self.say(f"The first job ended with {ended_with} nodes, and the second began with {self.sizes[0]}.")

    def close(self) -> None:
        for process in (self.job, self.brain):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    process.kill()


def main() -> int:
    console = Console(soft_wrap=True)
    directory = Path(tempfile.mkdtemp(prefix="dlrover-brain-"))
    demo = Demo(directory, console)
    try:
        demo.run()
    finally:
        demo.close()
        shutil.rmtree(directory, ignore_errors=True)
    console.print(f"\nAll of it was seen. {time.monotonic() - demo.began_at:.0f} s in all.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
