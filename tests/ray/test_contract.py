"""The contract of a platform, kept by nodes that are actors of a real Ray with several raylets."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import ray

from dlrover.cli.ray.host import start_host
from dlrover.cli.ray.messages import ACCOUNT, RayJobPlan
from dlrover.platforms.hosted.client import LocalOptions, LocalPlatform
from dlrover.platforms.local.memory_limits import MemoryLimits
from dlrover.platforms.ray.access import namespace_of
from dlrover.platforms.ray.messages import JobSecrets
from dlrover.platforms.ray.starter import RayNodes
from dlrover.platforms.ray.store import JobStore, Registry
from tests.platforms.contract import JOB, PlatformContract
from tests.ray.lab import RayLab, until

OBEDIENT = Path(__file__).parents[1] / "platforms" / "obedient.py"


class HostLab:
    """Hosts without a master, one per job, whose nodes do what a test tells them."""

    def __init__(self, lab: RayLab, directory: Path) -> None:
        self._lab = lab
        self.directory = directory
        self.hosts: dict[str, object] = {}
        self._pipes: list[int] = []

    def platform(self, job_uid: str = JOB) -> LocalPlatform:
        if job_uid not in self.hosts:
            nodes = RayNodes(
                job_uid=job_uid,
                job_name=job_uid,
                argv=("-I", "-S", str(OBEDIENT), str(self.directory)),
                environ={},
                orphan_grace=0.2,
            )
            plan = RayJobPlan(job_uid=job_uid, job_name=job_uid, nodes=nodes, master=None, capacity=3, grace=2.0)
            JobStore(job_uid).write_plan(msgspec.json.encode(plan))
            self.hosts[job_uid] = start_host(ray, plan, JobSecrets(token="t"), namespace=namespace_of(job_uid))
        account = ACCOUNT.decode(ray.get(self.hosts[job_uid].describe.remote(), timeout=60))
        options = LocalOptions(socket=account.socket, can_limit_memory=MemoryLimits.available(), can_cordon=True)
        return LocalPlatform(options, job_uid)

    def end(self, node: int, exit_code: int, job_uid: str = JOB) -> None:
        is_signal = 128 <= exit_code <= 192
        self._order(node, f"signal {exit_code - 128}" if is_signal else f"exit {exit_code}", job_uid)

    def exhaust_memory(self, node: int) -> None:
        self._order(node, "exhaust", JOB)

    def _order(self, node: int, text: str, job_uid: str) -> None:
        path = self.directory / f"{job_uid}.{node}"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(path)
        pipe = os.open(path, os.O_RDWR)
        self._pipes.append(pipe)
        os.write(pipe, f"{text}\n".encode())

    def close(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        for host in self.hosts.values():
            with contextlib.suppress(ray.exceptions.RayError):  # it may be gone before it can answer
                ray.get(host.stop.remote(signal.SIGTERM), timeout=60)
        for name in self.hosts:
            until(lambda name=name: Registry().result(name) is not None)
            Registry().forget_result(name)
        self._lab.await_nothing_left(str(self.directory))


class TestRayPlatform(PlatformContract):
    @pytest.fixture
    def lab(self, lab: RayLab, tmp_path: Path) -> Iterator[HostLab]:
        hosts = HostLab(lab, tmp_path)
        yield hosts
        hosts.close()
