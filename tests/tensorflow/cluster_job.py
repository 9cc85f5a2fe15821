"""A real parameter-server job, what its models and its logs tell of it, and the ways to disturb it. Under `dlrover local` unless a test starts it elsewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

PATIENCE = 240.0
"""Seconds for anything that takes a second or ten on a quiet machine."""
_TASK = re.compile(r"(\w+-\d+) (?:serves|trains in) version (\d+) .*\(pid (\d+)\)")
_JOB = Path(__file__).with_name("job")
_OF_NODES = ("--no-warm", "--framework=tensorflow")


class Step(NamedTuple):
    at: float
    version: int
    step: int


class ShownJob:
    """What the models of `job/` write into the directory, and what the processes print."""

    def __init__(self, directory: Path, output: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process`: of the job; None: none of this machine's says when it ends."""
        self.directory = directory
        self.model_dir = directory / "model"
        self._output = output
        self.process = process

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def verdicts(self) -> list[str]:
        """What the master decided, in its own words; empty where its log is not at hand."""
        return []

    def wait_until(self, what: str, is_met: Callable[[], bool], timeout: float = PATIENCE) -> None:
        end_at = time.monotonic() + timeout
        while not is_met():
            if self.process is not None and self.process.poll() is not None and not is_met():
                raise AssertionError(f"the job ended ({self.process.returncode}) before {what}:\n{self.output[-4000:]}")
            if time.monotonic() > end_at:
                raise AssertionError(
                    f"not within {timeout:g} s: {what}\n" + "\n".join(self.verdicts) + self.output[-4000:]
                )
            time.sleep(0.02)  # the log of another process has no event to wait for

    def wait_for_steps(self, who: str, count: int, *, version: int) -> None:
        self.wait_until(
            f"{count} steps of {who} in version {version}",
            lambda: sum(step.version == version for step in self.steps(who)) >= count,
        )

    def steps(self, who: str) -> list[Step]:
        path = self.directory / f"steps-{who}.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [line.split() for line in lines]
        return [
            Step(float(at), int(version), int(step)) for at, version, step in (each for each in whole if len(each) == 3)
        ]

    def steps_of(self, who: str, version: int) -> list[Step]:
        return [step for step in self.steps(who) if step.version == version]

    def pid_of(self, who: str) -> int:
        """Of the newest process of that task."""
        found = [(int(version), int(pid)) for name, version, pid in _TASK.findall(self.output) if name == who]
        assert found, f"{who} has not begun"
        return found[-1][1]

    def kill(self, who: str, number: int = signal.SIGKILL) -> float:
        at = time.time()
        os.kill(self.pid_of(who), number)
        return at

    def hold(self, where: str) -> None:
        """Processes that come there stay: saving, restoring, stepping."""
        self._marker("reached", where).unlink(missing_ok=True)
        self._marker("hold", where).touch()

    def wait_for_held(self, where: str) -> None:
        self.wait_until(f"somebody is {where}", self._marker("reached", where).exists)

    def let_go(self, where: str) -> None:
        self._marker("hold", where).unlink()

    def _marker(self, what: str, where: str) -> Path:
        return self.directory / f"{what}-{where}"


class ClusterJob(ShownJob):
    def __init__(
        self,
        directory: Path,
        *options: str,
        conf: str = "counting_conf.Conf",
        script: str = "",
        cwd: Path = _JOB,
        **environ: object,
    ) -> None:
        """
        `options` of `dlrover local`; `--no-warm` and `--framework=tensorflow` among them go to the nodes. `script`: runs in place of a conf class. `environ`: for the
        conf class or the script.
        """
        self.name = f"tf-{os.getpid()}-{directory.name}"[:40]  # another process may run such a job at the same time
        self._log_dir = directory / "logs"
        of_nodes = [option for option in options if option in _OF_NODES]
        command = [
            sys.executable, "-m", "dlrover.cli.main", "local", *(option for option in options if option not in of_nodes),
            "--netns", "off", "--job-name", self.name, "--log-dir", str(self._log_dir),
            "--", *of_nodes, *([script] if script else ["-m", "dlrover.trainer.entry.local_entry", f"--conf={conf}"]),
        ]  # fmt: skip
        prefix = (script or conf).partition("_")[0].upper() if "_" in (script or conf) else "CTR"
        own = {f"{prefix}_{name.upper()}": str(value) for name, value in {"dir": directory, **environ}.items()}
        with open(directory / "output.txt", "wb") as output:
            process = subprocess.Popen(
                command,
                cwd=cwd,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **own},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        super().__init__(directory, directory / "output.txt", process)
        self.process: subprocess.Popen[bytes] = process

    @property
    def master_log(self) -> str:
        path = self._log_dir / "master.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def verdicts(self) -> list[str]:
        """What the master decided, in its own words."""
        lines = self.master_log.splitlines()
        return [line.split(" verdict ", 1)[1] for line in lines if " verdict " in line]

    def decided_at(self, text: str, count: int = 1) -> float:
        """When the master decided that, in seconds since 1970."""
        lines = [line for line in self.master_log.splitlines() if " verdict " in line]
        found = [line for line in lines if re.search(text, line)][count - 1]
        return datetime.strptime(found[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()

    def wait_for_verdict(self, text: str, count: int = 1) -> str:
        self.wait_until(f"{text!r} x {count}", lambda: len(self.matching(text)) >= count)
        return self.matching(text)[count - 1]

    def matching(self, text: str) -> list[str]:
        return [verdict for verdict in self.verdicts if re.search(text, verdict)]

    def kill_master(self) -> None:
        [master] = [
            child
            for child in psutil.Process(self.process.pid).children()
            if "dlrover.master" in " ".join(child.cmdline())
        ]
        master.kill()

    def command(self, *words: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "dlrover.cli.main", words[0], self.name, *words[1:]],
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def finish(self, timeout: float = PATIENCE) -> int:
        """Its exit code. What is left of the data is read without pauses: how long a test looks on must not depend on the machine."""
        (self.directory / "hurry").touch()
        code = self.process.wait(timeout)
        assert not self.left_behind(), "processes of the job are left"
        return code

    def left_behind(self) -> list[str]:
        return [
            " ".join(process.info["cmdline"] or ())
            for process in psutil.process_iter(["cmdline"])
            if self.name in " ".join(process.info["cmdline"] or ()) and process.pid != os.getpid()
        ]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def checkpoint_values(prefix: str | Path) -> Mapping[str, np.ndarray]:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(prefix))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


def newest_checkpoint(model_dir: Path) -> str:
    import tensorflow as tf

    found = tf.train.latest_checkpoint(str(model_dir))
    assert found is not None, f"no checkpoint in {model_dir}"
    return str(found)
