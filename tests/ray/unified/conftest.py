"""A cluster for multi-role jobs, and jobs that a failed test does not leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from dlrover.protocol.errors import DLRoverError
from dlrover.unified import Ensemble, EnsembleHandle, Role
from dlrover.unified.shell.messages import EnsembleAccount
from tests.ray.lab import RayLab, until

ROLES = "tests.ray.unified.roles"


@pytest.fixture(scope="session")
def ray_path() -> Iterator[None]:
    """Raylets hand it to the roles, whose entry points are in this folder."""
    former = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[3])
    yield
    os.environ.pop("PYTHONPATH")
    if former is not None:
        os.environ["PYTHONPATH"] = former


@pytest.fixture(scope="module")
def lab(ray_dir: str, ray_path: None) -> Iterator[RayLab]:
    lab = RayLab(ray_dir)
    try:
        for _ in range(2):
            lab.add_machine(num_cpus=2)
        yield lab
    finally:
        lab.close()


class RunningEnsemble:
    def __init__(self, lab: RayLab, ensemble: Ensemble, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.handle: EnsembleHandle = ensemble.submit()

    def account(self) -> EnsembleAccount:
        def look() -> EnsembleAccount | None:
            with contextlib.suppress(DLRoverError, ray.exceptions.RayError):
                return self.handle.account(timeout=20.0)
            return None

        found: EnsembleAccount = until(look)
        self.lab.note([found.pid, *found.pids.values()])
        return found

    def await_stage(self, stage: str) -> EnsembleAccount:
        found: EnsembleAccount = until(
            lambda: account if (account := self.account()).status.stage == stage else None, self.explain
        )
        return found

    def instances(self) -> dict[str, tuple[int, str]]:
        """Incarnation and state, by name."""
        roles = self.account().status.roles
        return {each.name: (each.incarnation, each.state) for role in roles for each in role.instances}

    def await_instance(self, name: str, incarnation: int, *states: str) -> None:
        wanted = states or ("running", "succeeded")

        def look() -> bool:
            life, state = self.instances()[name]
            return life == incarnation and state in wanted

        until(look, self.explain)

    def kill(self, name: str) -> int:
        """SIGKILL to the process of an instance, as `role-rank.incarnation`, or to the conductor."""
        account = self.account()
        pid = account.pid if name == "conductor" else account.pids[name]
        os.kill(pid, signal.SIGKILL)
        return pid

    def ask(self, method: str, *args: Any, name: str = "driver-0.1") -> Any:
        """A method of the `Driver` of this job, from outside."""
        from dlrover.platforms.ray.access import namespace_of
        from dlrover.unified.runtime.wire import CallHeader, freeze, thaw
        from dlrover.unified.shell.messages import pack

        actor = ray.get_actor(name, namespace=namespace_of(self.handle.job_uid))
        header = CallHeader(id=os.urandom(4).hex(), method=method)
        parts = freeze((args, {}))
        answer = ray.get(actor.answer.remote(pack(header), None, *parts), timeout=150)
        return thaw([answer] if not isinstance(answer, tuple | list) else answer)

    def notes(self, name: str) -> list[str]:
        """What the processes of an instance have written, the oldest process first."""
        paths = sorted(self.folder.glob(f"{name}-*"), key=lambda path: path.stat().st_ctime)
        return [line for path in paths for line in path.read_text().splitlines()]

    def let_end(self) -> None:
        (self.folder / "stop").touch()

    def explain(self) -> str:
        with contextlib.suppress(Exception):
            return f"{self.handle.status()}\n" + "\n".join(self.handle.logs())
        return "its conductor does not answer"

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.handle.stop("the test is over")
            self.handle.wait(60)


Start = Callable[..., RunningEnsemble]


@pytest.fixture
def start(lab: RayLab, tmp_path: Path) -> Iterator[Start]:
    jobs: list[RunningEnsemble] = []

    def start(*roles: Role, name: str = "", config: dict[str, Any] | None = None, **more: Any) -> RunningEnsemble:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        ensemble = Ensemble(
            name or f"job-{len(jobs)}", roles=list(roles), config={"folder": str(folder), **(config or {})}, **more
        )
        jobs.append(RunningEnsemble(lab, ensemble, folder))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()
    for actor in lab.actors():
        namespace, _, name = actor.rpartition(":")
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
