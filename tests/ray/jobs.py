"""Real jobs in a test cluster: started by `dlrover ray run`, looked at through their files and their processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from dlrover.cli.ray.driver import SubmittedJob
from dlrover.cli.ray.messages import HostAccount
from dlrover.platforms.ray.store import Registry
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.fleet import ScaleJob
from dlrover.protocol.messages.job import AskStatus, JobStatus
from dlrover.protocol.rpc.client import ask
from tests.ray.lab import RayLab, until

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
TRAINED_STEPS = str(SCRIPTS / "trained_steps.py")


@dataclass(frozen=True)
class Step:
    """One line of `trained_steps.py`: all ranks of that round were there."""

    round: int
    global_rank: int
    world_size: int
    step: int
    at: float
    pid: int


class RunningRayJob:
    """`dlrover ray run` in a process of its own. The folder is where the script writes."""

    def __init__(
        self,
        lab: RayLab,
        folder: Path,
        *options: str,
        script: str = TRAINED_STEPS,
        args: tuple[str, ...] = (),
        has_folder: bool = True,
        folder_option: str = "",
        launch: tuple[str, ...] = (),
    ) -> None:
        """`launch`: options of dlrover-run."""
        self.lab = lab
        self.folder = folder
        self.script = script
        self._log = (folder / "driver.log").open("wb")
        environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        self.process = subprocess.Popen(
            dlrover(
                "ray",
                "run",
                "--address",
                lab.address,
                *options,
                "--",
                *launch,
                script,
                *([folder_option] if folder_option else []),
                *([str(folder)] if has_folder else []),
                *args,
            ),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environ,
        )

    def output(self) -> str:
        return (self.folder / "driver.log").read_text(errors="replace")

    def wait(self, timeout: float = 180.0) -> int:
        return self.process.wait(timeout)

    def let_end(self) -> None:
        (self.folder / "stop").touch()

    def close(self) -> None:
        """Whatever a failed test left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()
        for name in Registry().names():
            with contextlib.suppress(DLRoverError):
                self.found(name).stop(signal.SIGTERM)
                self.found(name).stop(signal.SIGINT)
        until(lambda: not self.lab.actors(), lambda: f"{self.lab.actors()}\n{self.output()}")
        for name in Registry().results():
            Registry().forget_result(name)

    def found(self, name: str = "") -> SubmittedJob:
        name = name or until(lambda: Registry().names(), self.output)[0]
        known = until(lambda: Registry().find(name))
        return SubmittedJob(ray, name, known.job_uid)

    def account(self) -> HostAccount:
        def look() -> HostAccount | None:
            with contextlib.suppress(DLRoverError, ray.exceptions.RayError):
                return self.found().account(timeout=20.0)
            return None

        account = until(look, self.output)
        self.lab.note([account.pid, account.master_pid])
        return account

    def status(self) -> JobStatus:
        def look() -> JobStatus | None:
            with contextlib.suppress(DLRoverError):
                reply = self.ask(AskStatus())
                assert isinstance(reply, JobStatus)
                return reply
            return None

        return until(look, self.output)

    def ask(self, request: AskStatus | ScaleJob) -> object:
        """Of the master. Raises `DLRoverError`."""
        account = self.account()
        return asyncio.run(ask(account.address, request, token=account.token, tls=None, timeout=5.0))

    def steps(self) -> list[Step]:
        found = []
        for path in self.folder.glob("steps-*"):
            pid = int(path.name.partition("-")[2])
            for line in path.read_text().splitlines():
                words = line.split()
                if len(words) == 6:
                    round_number, _, rank, size, step, at = words
                    found.append(Step(int(round_number), int(rank), int(size), int(step), float(at), pid))
        return sorted(found, key=lambda step: step.at)

    def newest_step(self) -> int:
        return max((step.step for step in self.steps()), default=0)

    def await_steps(self, more: int = 5, *, world_size: int = 0, deadline: float = 240.0) -> Step:
        """So many steps beyond those that there are now, in a world of that size."""
        goal = self.newest_step() + more

        def look() -> Step | None:
            steps = [each for each in self.steps() if each.step >= goal and world_size in (0, each.world_size)]
            return steps[-1] if steps else None

        return until(look, lambda: f"no step {goal} of {world_size} workers\n{self.output()}", deadline=deadline)

    def workers(self) -> dict[int, int]:
        """pid by global rank, of the newest round. Each rank writes its own file, so the last one may still be missing."""

        def look() -> dict[int, int] | None:
            steps = self.steps()
            newest = max((step.round for step in steps), default=0)
            world = [step for step in steps if step.round == newest]
            found = {step.global_rank: step.pid for step in world}
            return found if world and len(found) == world[0].world_size else None

        found = until(look, lambda: f"not all workers of the newest round did a step\n{self.output()}")
        self.lab.note([*found.values(), *(parent.pid for pid in found.values() for parent in ours_above(pid))])
        return found


def dlrover(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "dlrover.cli.main", *words]


def run_dlrover(*words: str, timeout: float = 180.0, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        dlrover(*words), capture_output=True, text=True, timeout=timeout, env={**clean, **environ}, check=False
    )


def actor_above(pid: int) -> psutil.Process:
    """The node actor that a process of a node belongs to."""
    for parent in psutil.Process(pid).parents():
        with contextlib.suppress(psutil.Error):
            if Path(f"/proc/{parent.pid}/comm").read_text().startswith("ray::"):
                return parent
    raise AssertionError(f"process {pid} is below no actor")


def ours_above(pid: int) -> list[psutil.Process]:
    """Zygote, agent, launcher and actor: what is between a worker and its raylet."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for parent in psutil.Process(pid).parents():
            if parent.name() == "raylet":
                return found
            found.append(parent)
    return []


def raylet_above(pid: int) -> int:
    return next(parent.pid for parent in psutil.Process(pid).parents() if parent.name() == "raylet")


def below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def has_ray(pid: int) -> bool:
    """Whether Ray's library is loaded in the process."""
    return "_raylet" in Path(f"/proc/{pid}/maps").read_text()
