"""
Starting jobs under dlrover-run or torchrun, and looking for what they leave behind.

Every job gets a mark in its environment. A process whose initial environment holds the mark belongs to the job, whatever
session or parent it has by now: so the scan of /proc finds setsid grandchildren and orphans as well, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE = 120.0
LAUNCHERS = {
    "dlrover-run": ("-m", "dlrover.trainer.torch.main"),
    "torchrun": ("-m", "torch.distributed.run"),
    "in-cgroup": (str(SCRIPTS / "in_cgroup.py"),),
    "dlrover-run without override": (str(SCRIPTS / "without_override.py"), "-m", "dlrover.trainer.torch.main"),
}


LIGHT_SCRIPTS = {
    "bad_end.py",
    "crash_cycles.py",
    "dump_env.py",
    "fail.py",
    "heard.py",
    "lost_peer.py",
    "recorded.py",
    "steps.py",
    "tail_steps.py",
    "wait_for_word.py",
}
"""Without optimizers and checkpoints: their jobs spare a quarter of their processor time when the zygote does not import what those need."""
LIGHT = "-torch._dynamo,-dlrover.trainer.torch.flash_checkpoint"


class Launched:
    """One launcher process with its output in files."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path, name: str, stdin: bytes = b"") -> None:
        self.out_path, self.err_path = cwd / f"{name}.out", cwd / f"{name}.err"
        source = subprocess.PIPE if stdin else subprocess.DEVNULL
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                argv, env=env, cwd=cwd, stdin=source, stdout=out, stderr=err, start_new_session=True
            )
        if self.process.stdin is not None:
            with self.process.stdin as pipe:
                pipe.write(stdin)
        self.pid = self.process.pid

    @property
    def out(self) -> str:
        return self.out_path.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.err_path.read_text(errors="replace")

    def wait(self, timeout: float = DEADLINE) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {timeout:g} s\n{self.out}\n{self.err}") from None

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


class JobFactory:
    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.runtime = Path(tempfile.mkdtemp(prefix="dlr-"))  # a unix socket's name must be short, `tmp_path` is not
        self.shared_memory = Path(tempfile.mkdtemp(prefix="dlr-", dir="/dev/shm"))  # other tests' segments are not ours
        self.mark = f"mark-{uuid.uuid4().hex}"
        self.launched: list[Launched] = []
        self._segments_before = set(os.listdir("/dev/shm"))

    def env(self, **extra: str) -> dict[str, str]:
        keep = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COVERAGE", "PET_"))
        }
        return {
            **keep,
            "TMPDIR": str(self.runtime),
            "DLROVER_SNAPSHOT_DIR": str(self.shared_memory),
            "DLROVER_TEST_MARK": self.mark,
            "OMP_NUM_THREADS": "1",
            **extra,
        }

    def start(
        self, launcher: str, *args: str | Path, cwd: Path | None = None, stdin: bytes = b"", **env: str
    ) -> Launched:
        argv = [sys.executable, *LAUNCHERS[launcher], *map(str, args)]
        if LIGHT_SCRIPTS & {Path(arg).name for arg in args}:
            env = {"PET_PRELOAD": LIGHT} | env
        job = Launched(argv, self.env(**env), cwd or self.tmp_path, f"{launcher}-{len(self.launched)}", stdin)
        self.launched.append(job)
        return job

    def run(self, *args: str | Path, timeout: float = DEADLINE, **env: str) -> Launched:
        job = self.start("dlrover-run", *args, **env)
        job.wait(timeout)
        return job

    def close(self) -> None:
        for job in self.launched:
            if job.process.poll() is None:
                job.process.kill()
                job.process.wait()

    def remove(self) -> None:
        shutil.rmtree(self.runtime, ignore_errors=True)
        shutil.rmtree(self.shared_memory, ignore_errors=True)

    def processes(self) -> dict[int, str]:
        """Living processes of the jobs of this test: pid -> command line."""
        found = {}
        needle = self.mark.encode()
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            try:
                if needle in Path(f"/proc/{entry}/environ").read_bytes():
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def pids(self, part: str) -> list[int]:
        """Pids of the job's processes whose command line contains `part`."""
        return [pid for pid, command in self.processes().items() if part in command]

    def zygote(self) -> int:
        """Workers and spares have its name and, adopted, its parent; it is the oldest. Pids tell nothing: they begin anew."""
        [agent] = self.pids("dlrover.agent")
        ages = []
        for pid in self.pids("dlrover zygote"):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                ages += [(process.create_time(), pid)] if process.ppid() == agent else []
        return min(ages)[1]

    def remains(self) -> list[str]:
        left = [f"process {pid}: {command}" for pid, command in self.processes().items()]
        # Ours only: the scripts have the same temporary directory, and a DataLoader that is ended leaves its sockets
        # there under torchrun, too.
        ours = [path for root in self.runtime.glob("dlrover-*") for path in paths_below(root)]
        left += [f"file {path}" for path in ours if path.is_socket() or path.is_fifo()]
        # Tests and jobs run beside this one; their directories have these names, and ours is told to be elsewhere.
        others = ("dlrover-test-", "dlrover-snapshots-")
        new = set(os.listdir("/dev/shm")) - self._segments_before
        left += [f"segment {name}" for name in new if "dlrover" in name and not name.startswith(others)]
        left += [f"segment {path}" for path in paths_below(self.shared_memory)]
        return left

    def assert_nothing_remains(self, within: float = 30.0) -> None:
        wait_until(lambda: not self.remains(), within, lambda: f"still there: {self.remains()}")


def paths_below(root: Path) -> list[Path]:
    """What is just being removed may be missing; pathlib's own search would fail then."""
    return [Path(parent) / name for parent, folders, files in os.walk(root) for name in (*folders, *files)]


def wait_until(
    condition: Callable[[], object], timeout: float = DEADLINE, explain: Callable[[], str] = lambda: "condition not met"
) -> None:
    """Tests look at processes from outside, where no event exists for most conditions: look often, with a deadline."""
    ends_at = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > ends_at:
            raise AssertionError(f"not within {timeout:g} s: {explain()}")
        select.select([], [], [], 0.01)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def kill_together(*pids: int) -> None:
    """As when a machine loses its power: none of them sees another one die, tidies up or starts a new one."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a spare worker that was about to end
                kill(pid, number)


def freeze(job: Launched) -> list[int]:
    """Stops a launcher and all that came from it, also what was born while we looked."""
    frozen: list[int] = []
    while new := {job.pid, *(each.pid for each in psutil.Process(job.pid).children(recursive=True))} - set(frozen):
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGSTOP)
        frozen += new
    return frozen
