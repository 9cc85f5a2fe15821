"""
Three elastic workers train on a table; one is killed, one is added, and at the end the audit counts what the model has seen.

    python examples/tabular/demo.py                      a CSV file
    python examples/tabular/demo.py --format parquet

Exit code 0 only if the job went through all of it, and its model contains every record exactly once per epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TRAINER = Path(__file__).resolve().with_name("train.py")
NUM_FEATURES = 6
LOOK_EVERY = 0.05
"""Seconds between two looks at the file into which the trainer writes."""


def main() -> int:
    options = parse_options()
    folder = Path(tempfile.mkdtemp(prefix="dlrover-tabular-"))
    try:
        return Demo(folder, options).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="csv", choices=["csv", "parquet"])
    parser.add_argument("--records", type=int, default=9000, help="of the table (default %(default)s)")
    parser.add_argument("--pace", type=float, default=0.3, help="seconds added to a step until all has happened")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for everything (default %(default)s)")
    return parser.parse_args()


def write_table(path: Path, num_records: int) -> None:
    """Records of two kinds that a line separates, with some noise."""
    chance = random.Random(7)
    names = [f"x{number}" for number in range(NUM_FEATURES)]
    rows = []
    for _ in range(num_records):
        values = [round(chance.gauss(0.0, 1.0), 4) for _ in names]
        rows.append([*values, int(sum(values[::2]) - sum(values[1::2]) + chance.gauss(0.0, 0.5) > 0)])
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        columns = dict(zip([*names, "label"], zip(*rows, strict=True), strict=True))
        pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=max(1, num_records // 15))
    else:
        lines = [",".join([*names, "label"]), *(",".join(map(str, row)) for row in rows)]
        path.write_text("\n".join(lines) + "\n")


class Demo:
    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._metrics = folder / "metrics.jsonl"
        self._checkpoints = folder / "checkpoints"
        self._job = f"tabular-{os.getpid()}"
        self._ends_at = time.monotonic() + options.timeout
        self._began_at = time.monotonic()

    def run(self) -> int:
        table = self._folder / f"table.{self._options.format}"
        write_table(table, self._options.records)
        command = [
            sys.executable,
            "-m",
            "dlrover.cli.main",
            "local",
            "--nodes=3",
            "--netns=off",
            f"--job-name={self._job}",
        ]
        command += [
            "--",
            f"--journal={self._folder}",
            str(TRAINER),
            str(table),
            f"--dir={self._checkpoints}",
        ]
        command += [f"--metrics={self._metrics}", f"--pace={self._options.pace}"]
        log = self._folder / "output.log"
        with log.open("wb") as output:
            job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            problem = self._direct(job)
        except TimeoutError as error:
            problem = str(error)
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(30)
        if not problem:
            problem = self._audit()
        if problem:
            print(f"The demonstration failed: {problem}\n{log.read_text(errors='replace')[-4000:]}", file=sys.stderr)
        return 1 if problem else 0

    def _direct(self, job: subprocess.Popen[bytes]) -> str:
        """What happens to the job. The problem, if there is one."""
        num_steps = -(-self._options.records // 60) * 2
        self._wait(job, lambda: self._step() >= 10, "the tenth step")
        victim = [each for each in self._events("start") if each["rank"] == 1][-1]["pid"]
        self._say(f"three workers train; worker 1 (pid {victim}) is killed with SIGKILL")
        os.kill(victim, signal.SIGKILL)
        killed_at = self._step()
        self._wait(job, lambda: len(self._lives()) > 1 and self._step() > killed_at, "steps after the kill")
        self._say(f"they go on after step {self._lives()[1]['step']}; a fourth worker is asked for")
        scale = [sys.executable, "-m", "dlrover.cli.main", "scale", self._job, "--nodes", "4"]
        subprocess.run(scale, check=True, stdout=subprocess.DEVNULL, timeout=60)
        self._wait(job, lambda: self._lives()[-1]["world_size"] == 4, "the fourth worker")
        self._say(f"four workers train from step {self._lives()[-1]['step'] + 1} on")
        self._checkpoints.mkdir(exist_ok=True)
        (self._checkpoints / "hurry").touch()
        self._wait(job, lambda: job.poll() is not None, "the end")
        for life in self._lives():
            print(f"    {life['world_size']} workers from step {life['step'] + 1}")
        if job.returncode:
            return f"the job ended with exit code {job.returncode}"
        return "" if self._step() == num_steps else f"{self._step()} of {num_steps} steps were trained"

    def _audit(self) -> str:
        [journal] = self._folder.glob("*.sqlite")
        told = subprocess.run(
            [sys.executable, "-m", "dlrover.cli.main", "data", "audit", "--json", str(journal)],
            stdout=subprocess.PIPE, text=True, check=False, timeout=60,
        )  # fmt: skip
        [finding] = json.loads(told.stdout)
        losses = {each["step"]: each["loss"] for each in self._events("step")}
        self._say(f"{len(losses)} steps, loss {losses[1]:.3f} to {losses[max(losses)]:.3f}")
        self._say(f"audit: the model contains {finding['num_seen']} records, 2 epochs of {self._options.records}")
        for word in ("repeated", "missing"):
            print(f"    {word}: {', '.join(finding[word]) or 'none'}")
        is_whole = told.returncode == 0 and finding["is_complete"] and finding["num_seen"] == 2 * self._options.records
        return "" if is_whole else f"the audit is not clean: {finding}"

    def _events(self, name: str) -> list[dict[str, float]]:
        if not self._metrics.exists():
            return []
        whole = self._metrics.read_text().rpartition("\n")[0]
        return [event for event in map(json.loads, whole.splitlines()) if event["event"] == name]

    def _lives(self) -> list[dict[str, float]]:
        """Starts of the first worker."""
        return [event for event in self._events("start") if event["rank"] == 0]

    def _step(self) -> int:
        return max((int(event["step"]) for event in self._events("step")), default=0)

    def _wait(self, job: subprocess.Popen[bytes], condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if time.monotonic() > self._ends_at:
                raise TimeoutError(f"{what} did not come in time")
            if job.poll() not in (None, 0):
                raise TimeoutError(f"the job ended with exit code {job.returncode} before {what}")
            time.sleep(LOOK_EVERY)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_at:6.2f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
