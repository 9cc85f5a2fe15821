"""
`RayJob`: an elastic job on a Ray cluster, from Python. The same as `dlrover ray run`, with a handle instead of a terminal.

    job = RayJob("train.py", args=["--lr", "1e-4"], nodes=(2, 4), nproc_per_node=8, gpus=8, standby=1).submit()
    job.wait()
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from dlrover.cli.ray.driver import SubmittedJob, submit
from dlrover.cli.ray.messages import HostNews, JobOver, ShownLine
from dlrover.cli.ray.plan import read_run
from dlrover.platforms.ray.access import connect, load_ray
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.job import AskStatus, JobStatus

ASK_TIMEOUT = 10.0


class RayJob(Struct, frozen=True):
    script: str
    args: Sequence[str] = ()
    """Of the script."""
    nodes: int | tuple[int, int] = 1
    """How many; (min, max) for an elastic job."""
    nproc_per_node: int | str = 1
    cpus: float = 1.0
    gpus: int = 0
    memory_mb: int = 0
    resources: Mapping[str, float] = {}
    standby: int = 0
    placement: str = "spread"
    name: str = ""
    """Empty: it is called after the script."""
    working_dir: str = ""
    env: Mapping[str, str] = {}
    options: Sequence[str] = ()
    """Further options of `dlrover-run`, such as --max-restarts=3."""

    def submit(self, address: str = "auto") -> RayJobHandle:
        """Raises `ConfigError`; then nothing of the job is left. A connection to Ray that is there is used."""
        run = read_run(self._argv(), os.environ)
        ray = load_ray()
        if not ray.is_initialized():
            connect(ray, "" if address == "auto" else address, working_dir=run.working_dir)
        return RayJobHandle(ray, submit(ray, run))

    def _argv(self) -> list[str]:
        nodes = f"{self.nodes[0]}:{self.nodes[1]}" if isinstance(self.nodes, tuple) else str(self.nodes)
        own = [f"--nodes={nodes}", f"--cpus={self.cpus}", f"--gpus={self.gpus}", f"--memory={self.memory_mb}"]
        own += [f"--standby={self.standby}", f"--placement={self.placement}"]
        own += [f"--resource={name}={amount}" for name, amount in self.resources.items()]
        own += [f"--env={name}={value}" for name, value in self.env.items()]
        own += [f"--job-name={self.name}"] if self.name else []
        own += [f"--working-dir={self.working_dir}"] if self.working_dir else []
        return [*own, "--", f"--nproc-per-node={self.nproc_per_node}", *self.options, self.script, *self.args]


class RayJobHandle:
    """A submitted job. It goes on without this object, and `dlrover ray attach` finds it, too."""

    def __init__(self, ray: Any, job: SubmittedJob) -> None:
        self._ray = ray
        self._job = job
        self._over: JobOver | None = None

    @property
    def name(self) -> str:
        return self._job.name

    def status(self) -> JobStatus:
        """What the master says. Raises `Unavailable` while it is away or after the end."""
        from dlrover.protocol.rpc.client import ask

        account = self._job.account()
        reply = asyncio.run(
            ask(account.address, AskStatus(), token=account.token, tls=account.tls, timeout=ASK_TIMEOUT)
        )
        assert isinstance(reply, JobStatus), f"the master answered AskStatus with {type(reply).__name__}"
        return reply

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as of `dlrover ray run`. Raises TimeoutError."""
        if self._over is None:
            self._over = asyncio.run(self._follow(timeout))
            self._job.await_gone()
        return self._over.exit_code

    def stop(self) -> None:
        """In good order, on all nodes."""
        self._job.stop(signal.SIGTERM)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Lines of the nodes' output, each with the node's name; with `follow` until the job is over."""
        lines: list[str] = []

        def collect(news: HostNews) -> None:
            shown = (item for item in news.items if isinstance(item, ShownLine))
            lines.extend(f"[{item.node}] {item.line.decode(errors='replace')}" for item in shown)

        with asyncio.Runner() as runner:
            while True:
                over = runner.run(self._job.follow(collect, is_following=False))
                yield from lines
                lines.clear()
                if over is not None:
                    self._over = over
                if over is not None or not follow:
                    return
                time.sleep(LOGS_PAUSE)

    async def _follow(self, timeout: float | None) -> JobOver:
        async with asyncio.timeout(timeout):
            over = await self._job.follow(lambda news: None)
        if over is None:
            raise ConfigError(f"Job {self.name} ended without a result.")
        return over


LOGS_PAUSE = 0.2
"""Seconds between two looks for output. A poll: a generator cannot be woken."""
