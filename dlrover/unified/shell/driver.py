"""
A driver's way to multi-role jobs: submit one, follow it, stop it. It holds nothing that the job needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from dlrover.cli.ray.driver import SubmittedJob, first_lines
from dlrover.cli.ray.messages import HostNews, JobOver, ShownLine
from dlrover.platforms.ray import cluster
from dlrover.platforms.ray.access import connect, load_ray, missing_module, namespace_of, say_missing
from dlrover.platforms.ray.store import ClusterKeyValues, JobStore, Registered, Registry
from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.unified.core.messages import EnsembleStatus
from dlrover.unified.layout import check_room
from dlrover.unified.plan import EnsemblePlan
from dlrover.unified.plan import pack as pack_plan
from dlrover.unified.shell.conductor_actor import ConductorActor, remove_actors
from dlrover.unified.shell.elastic_role import plan_key
from dlrover.unified.shell.messages import ACCOUNT, CONDUCTOR, EnsembleAccount
from dlrover.unified.shell.ray_cluster import MAX_CONCURRENCY
from dlrover.unified.shell.room import JobRoom

CALL_TIMEOUT = 60.0
CONDUCTOR_MEMORY = 128 << 20
"""Bytes. Ray ignores the wish for a machine of an actor that asks for nothing."""
PAUSE = 0.2


class EnsembleHandle:
    """A submitted job. It goes on without this object; `attach` finds it again."""

    def __init__(self, ray: Any, name: str, job_uid: str) -> None:
        self._ray = ray
        self.name = name
        self.job_uid = job_uid
        self._job = SubmittedJob(ray, name, job_uid, actor_name=CONDUCTOR)
        self._over: JobOver | None = None

    def status(self) -> EnsembleStatus:
        """Raises `Unavailable` while the conductor is away or after the end."""
        return self.account().status

    def account(self, timeout: float = CALL_TIMEOUT) -> EnsembleAccount:
        try:
            actor = self._actor()
            return ACCOUNT.decode(self._ray.get(actor.account.remote(), timeout=timeout))
        except self._ray.exceptions.RayError as error:
            raise Unavailable(f"the conductor of job {self.name} does not answer: {type(error).__name__}") from error

    def wait(self, timeout: float | None = None, *, show: bool = False) -> int:
        """The exit code. `show`: print what the job says. Raises TimeoutError, and `JobError` if the job is gone without a result."""
        if self._over is None:
            self._over = asyncio.run(self._follow(timeout, _print if show else lambda news: None))
            self._job.await_gone()
        return self._over.exit_code

    @property
    def report(self) -> str:
        """After the end: why it failed; empty if it did not."""
        return self._over.report if self._over is not None else ""

    def stop(self, reason: str = "stopped by its driver", exit_code: int = 1) -> bool:
        """False: it ends already, or has ended."""
        return bool(self._patiently(lambda: self._actor().end.remote(reason, exit_code)))

    def restart(self, reason: str = "restarted by its driver") -> bool:
        """Every instance starts again. False: the job does not run, or has ended."""
        return bool(self._patiently(lambda: self._actor().restart.remote(reason)))

    def logs(self) -> Iterator[str]:
        """Lines that elastic roles have printed and sentences of the conductor, as far as they are kept."""
        lines: list[str] = []

        def collect(news: HostNews) -> None:
            for item in news.items:
                if isinstance(item, ShownLine):
                    lines.append(f"[{item.node}] {item.line.decode(errors='replace').rstrip()}")
                elif text := getattr(item, "text", ""):
                    lines.append(text)

        self._over = asyncio.run(self._job.follow(collect, is_following=False)) or self._over
        yield from lines

    async def _follow(self, timeout: float | None, show: Callable[[HostNews], None]) -> JobOver:
        async with asyncio.timeout(timeout):
            over = await self._job.follow(show)
        assert over is not None, "it follows until the end"
        return over

    def _patiently(self, call: Callable[[], Any]) -> Any:
        """Over the restart of a conductor. None: the job has ended. Raises `Unavailable`."""
        deadline = time.monotonic() + CALL_TIMEOUT
        while True:
            try:
                return self._ray.get(call(), timeout=CALL_TIMEOUT)
            except (self._ray.exceptions.RayError, Unavailable) as error:
                if self._over is not None or self._job.is_over():
                    return None
                if time.monotonic() > deadline:
                    raise Unavailable(f"the conductor of job {self.name} does not answer: {error}") from error
                time.sleep(PAUSE)  # Ray starts it again

    def _actor(self) -> Any:
        return self._job._actor()


def attach(name: str, address: str = "auto") -> EnsembleHandle:
    """A job that runs in the cluster. Raises `ConfigError`."""
    ray = _connected(address, "")
    known = Registry().find(name)
    if known is None or known.actor != CONDUCTOR:
        raise ConfigError(
            f"No multi-role job {name} runs in this cluster. Running: {', '.join(Registry().names()) or 'none'}."
        )
    return EnsembleHandle(ray, name, known.job_uid)


def submit_plan(plan: EnsemblePlan, *, address: str = "auto", working_dir: str = "") -> EnsembleHandle:
    """Raises `ConfigError`; then nothing of the job is left."""
    ray = _connected(address, working_dir)
    if not cluster.has_autoscaler():
        check_room(plan.layout, [machine.total for machine in cluster.machines()])
    name, registry = plan.spec.name, Registry()
    known = Registered(job_uid=plan.job_uid, user=os.environ.get("USER", ""), submitted_at=time.time(), actor=CONDUCTOR)
    if not registry.add(name, known):
        raise ConfigError(f"A job {name} runs in this cluster already. Give another name, or end that job.")
    try:
        registry.forget_result(name)
        uploaded = ray.get_runtime_context().runtime_env.get("working_dir") if working_dir else None
        if working_dir and not uploaded:
            raise ConfigError(
                "working_dir cannot be sent, because this process is already connected to Ray. Connect with "
                "ray.init(runtime_env={'working_dir': DIR}) instead."
            )
        runtime_env = {"working_dir": uploaded} if uploaded else {}
        plan = msgspec.structs.replace(plan, runtime_env=runtime_env)
        ClusterKeyValues().put(plan_key(plan.job_uid), pack_plan(plan))
        actor = _start_conductor(ray, plan.job_uid)
        ray.get(actor.account.remote(), timeout=CALL_TIMEOUT)
    except BaseException as error:
        _remove(ray, plan)
        if isinstance(error, ray.exceptions.RayError):
            module = missing_module(error)
            why = say_missing(module, "the machine of the conductor") if module else first_lines(error)
            raise ConfigError(f"The conductor of the job cannot be started: {why}") from error
        raise
    return EnsembleHandle(ray, name, plan.job_uid)


def _start_conductor(ray: Any, job_uid: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    head = next(
        (each["NodeID"] for each in ray.nodes() if each["Alive"] and "node:__internal_head__" in each["Resources"]), ""
    )
    strategy: Any = NodeAffinitySchedulingStrategy(head, soft=True) if head else "DEFAULT"
    return (
        ray.remote(ConductorActor)
        .options(
            name=CONDUCTOR,
            namespace=namespace_of(job_uid),
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=MAX_CONCURRENCY,
            num_cpus=0,
            memory=CONDUCTOR_MEMORY,
            scheduling_strategy=strategy,
        )
        .remote(job_uid)
    )


def _remove(ray: Any, plan: EnsemblePlan) -> None:
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(CONDUCTOR, namespace=namespace_of(plan.job_uid)), no_restart=True)
    remove_actors(plan.job_uid)
    JobRoom(plan, lambda text: None).remove()
    JobStore(plan.job_uid).clear()
    known = Registry().find(plan.spec.name)
    if known is not None and known.job_uid == plan.job_uid:
        Registry().remove(plan.spec.name)


def _connected(address: str, working_dir: str) -> Any:
    ray = load_ray()
    if not ray.is_initialized():
        connect(ray, "" if address == "auto" else address, working_dir=working_dir)
    return ray


def _print(news: HostNews) -> None:
    for item in news.items:
        if isinstance(item, ShownLine):
            stream = sys.stderr if item.is_error else sys.stdout
            print(f"[{item.node}] {item.line.decode(errors='replace').rstrip()}", file=stream, flush=True)
        elif text := getattr(item, "text", ""):
            print(text, file=sys.stderr, flush=True)
