"""
A driver's way to jobs in a Ray cluster: submit one, find one, follow one, end one.

A driver holds nothing that the job needs. It talks to the job's host alone, and finds it again by its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dlrover.cli.ray.host import start_host
from dlrover.cli.ray.messages import ACCOUNT, HOST, NEWS, HostAccount, HostNews, JobOver
from dlrover.cli.ray.plan import RayRun, renamed
from dlrover.platforms.ray import cluster
from dlrover.platforms.ray.access import missing_module, namespace_of, say_missing
from dlrover.platforms.ray.placement import demand_of, describe, fits
from dlrover.platforms.ray.store import JobResult, JobStore, Registered, Registry
from dlrover.protocol.errors import ConfigError, JobError, Unavailable
from dlrover.protocol.messages.roles import REPORT, RolesReport

AWAY = 120.0
"""Seconds that a host may be away: Ray needs up to a minute to see that a silent machine is gone."""
CALL_TIMEOUT = 60.0
GONE = 20.0
"""Seconds for the host to be gone after it has told the end."""
NEWS_WAIT = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
_MAX_NAMES = 100


class SubmittedJob:
    """One job in the cluster that `ray` is connected to."""

    def __init__(self, ray: Any, name: str, job_uid: str, *, actor_name: str = HOST) -> None:
        self.actor_name = actor_name
        self._ray = ray
        self.name = name
        self.job_uid = job_uid
        self._me = os.urandom(4).hex()
        self._host_epoch, self._after = 0, 0
        """Which news we have: of which host, and how many."""

    def account(self, timeout: float = CALL_TIMEOUT) -> HostAccount:
        """Raises `Unavailable` if the host does not answer."""
        actor = self._actor()  # held: a call on a handle that is gone fails in older versions of Ray
        try:
            return ACCOUNT.decode(self._ray.get(actor.describe.remote(), timeout=timeout))
        except self._ray.exceptions.RayError as error:
            raise Unavailable(f"the host of job {self.name} does not answer: {type(error).__name__}") from error

    def roles(self, known: RolesReport | None = None, *, timeout: float = CALL_TIMEOUT) -> RolesReport:
        """Of a multi-role job: one that differs from `known`, or the same after a while. Raises `Unavailable` if its conductor does not answer."""
        actor = self._actor()
        data = b"" if known is None else msgspec.json.encode(known)
        try:
            return REPORT.decode(self._ray.get(actor.roles.remote(data), timeout=timeout))
        except (AttributeError, TypeError) as error:
            raise Unavailable(f"job {self.name} runs an older dlrover, which does not report its roles") from error
        except self._ray.exceptions.RayError as error:
            raise Unavailable(f"the conductor of job {self.name} does not answer: {type(error).__name__}") from error

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Until the host has heard of it, which may be about to be started again. Raises `Unavailable` if it stays away."""
        deadline = time.monotonic() + AWAY
        while not self.is_over():
            try:
                actor = self._actor()
                self._ray.get(actor.stop.remote(number), timeout=CALL_TIMEOUT)
                return
            except (self._ray.exceptions.RayError, Unavailable) as error:
                if time.monotonic() > deadline:
                    raise Unavailable(f"the host of job {self.name} does not answer: {type(error).__name__}") from error
                time.sleep(FIRST_PAUSE)

    async def follow(
        self, show: Callable[[HostNews], None], *, is_following: bool = True, takes_result: bool = True
    ) -> JobOver | None:
        """
        Have all news shown until the job is over, or, if not following, those that there are.

        `takes_result`: the host keeps it for no other driver then. A bystander leaves it to the one that submitted the job.
        A host that was started again begins to count anew. Raises `JobError` if it is gone without a result.
        """
        missed_since: float | None = None
        pause = FIRST_PAUSE
        while True:
            try:
                wait = NEWS_WAIT if is_following else 0.0
                actor = self._actor()
                call = actor.news.remote(self._me, self._host_epoch, self._after, wait)
                news = NEWS.decode(await asyncio.wait_for(asyncio.wrap_future(call.future()), CALL_TIMEOUT))
            except (self._ray.exceptions.RayError, Unavailable, TimeoutError) as error:
                if (result := Registry().result(self.name)) is not None and self._is_gone():
                    return JobOver(result.exit_code, result.report)
                now = time.monotonic()
                missed_since = now if missed_since is None else missed_since
                if now - missed_since > AWAY or self.is_over():
                    raise JobError(
                        f"The host of job {self.name} has ended or cannot be reached: {type(error).__name__}. See "
                        "`dlrover ray status`."
                    ) from error
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(LONGEST_PAUSE, 2 * pause)
                continue
            missed_since, pause = None, FIRST_PAUSE
            self._host_epoch, self._after = news.host_epoch, news.next
            show(news)
            if news.over is not None:
                if not takes_result:
                    return news.over
                with contextlib.suppress(self._ray.exceptions.RayError):  # it waits a moment only
                    await asyncio.wait_for(asyncio.wrap_future(actor.taken.remote(self._me).future()), CALL_TIMEOUT)
                return news.over
            if not is_following and not news.items:
                return None

    def await_gone(self, timeout: float = GONE) -> None:
        """After the end was told: until the host itself is gone."""
        deadline = time.monotonic() + timeout
        while not self._is_gone() and time.monotonic() < deadline:
            time.sleep(0.05)  # Ray tells nobody
        # A host that lost our answer left the result behind as well.
        Registry().forget_result(self.name)

    def _actor(self) -> Any:
        try:
            return self._ray.get_actor(self.actor_name, namespace=namespace_of(self.job_uid))
        except ValueError as error:
            raise Unavailable(f"job {self.name} has no host in this cluster") from error

    def _is_gone(self) -> bool:
        try:
            self._actor()
        except Unavailable:
            return True
        return False

    def is_over(self) -> bool:
        """Nothing of it is in the cluster any more."""
        return self._is_gone() and self._is_forgotten()

    def _is_forgotten(self) -> bool:
        known = Registry().find(self.name)
        return known is None or known.job_uid != self.job_uid


def submit(ray: Any, run: RayRun) -> SubmittedJob:
    """Raises `ConfigError`; then nothing of the job is left."""
    if not run.waits_for_machines:
        _check_size(run)
    environment = _runtime_env(ray, run)
    registry, run = Registry(), _claim_name(run)
    plan = msgspec.structs.replace(run.plan, nodes=msgspec.structs.replace(run.plan.nodes, runtime_env=environment))
    store = JobStore(plan.job_uid)
    try:
        registry.forget_result(plan.job_name)
        store.write_plan(msgspec.json.encode(plan))
        start_host(ray, plan, run.secrets(), namespace=namespace_of(plan.job_uid))
    except ray.exceptions.RayError as error:
        if registry.result(plan.job_name) is None:
            remove_job(ray, plan.job_name, plan.job_uid)
            module = missing_module(error)
            why = say_missing(module, "the machine of the job's host") if module else first_lines(error)
            raise ConfigError(f"The host of the job cannot be started: {why}") from error
        # It began, and was over before it could answer: followers find the result.
    except BaseException:
        remove_job(ray, plan.job_name, plan.job_uid)
        raise
    return SubmittedJob(ray, plan.job_name, plan.job_uid)


def find_job(ray: Any, name: str) -> SubmittedJob:
    """By its name or the beginning of it; without one, the only job. Raises `ConfigError`."""
    registry = Registry()
    names = registry.names()
    fitting = [name] if name in names else [each for each in names if each.startswith(name)]
    if len(fitting) == 1 and (known := registry.find(fitting[0])) is not None:
        return SubmittedJob(ray, fitting[0], known.job_uid, actor_name=known.actor)
    running = ", ".join(names) or "none"
    if not name:
        raise ConfigError(f"Name a job. Running in this cluster: {running}.")
    raise ConfigError(f"{len(fitting) or 'No'} jobs in this cluster have the name {name}. Running: {running}.")


def take_result(name: str) -> JobResult | None:
    """Of a job that ended while no driver was there; it is forgotten with this."""
    registry = Registry()
    result = registry.result(name)
    if result is not None:
        registry.forget_result(name)
    return result


def clean(ray: Any) -> list[str]:
    """Remove what killed jobs left in the cluster: those whose host is not there any more. Tells what was removed."""
    registry, removed = Registry(), []
    for name in registry.names():
        known = registry.find(name)
        if known is not None and SubmittedJob(ray, name, known.job_uid, actor_name=known.actor)._is_gone():
            remove_job(ray, name, known.job_uid)
            removed.append(f"job {name}")
    for name in registry.results():
        registry.forget_result(name)
        removed.append(f"result of job {name}")
    return removed


def remove_job(ray: Any, name: str, job_uid: str) -> None:
    namespace = namespace_of(job_uid)
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == namespace:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(each["name"], namespace=namespace), no_restart=True)
    JobStore(job_uid).clear()
    known = Registry().find(name)
    if known is not None and known.job_uid == job_uid:
        Registry().remove(name)


def first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4])


def _claim_name(run: RayRun) -> RayRun:
    """A name that the user gave is kept or refused; one that we chose gets a number."""
    registry = Registry()
    known = Registered(job_uid=run.plan.job_uid, user=run.settings.environment.user, submitted_at=time.time())
    base = run.plan.job_name
    for number in range(1, _MAX_NAMES):
        name = base if number == 1 else f"{base.removesuffix('-1')}-{number}"
        if registry.add(name, known):
            return run if number == 1 else renamed(run, name)
        if run.has_given_name:
            raise ConfigError(
                f"A job {base} runs in this cluster already. Give another --job-name, or end that job: dlrover "
                f"ray stop {base}"
            )
    raise ConfigError(f"This cluster has {_MAX_NAMES} jobs that are named after this script. Give a --job-name.")


def _runtime_env(ray: Any, run: RayRun) -> dict[str, object]:
    """Of the nodes. Ray uploads a directory for a whole connection only; nodes name it by the address that it got."""
    if not run.working_dir:
        return {}
    uploaded = ray.get_runtime_context().runtime_env.get("working_dir")
    if not uploaded:
        raise ConfigError(
            "The working directory cannot be sent, because this process is already connected to Ray. Connect "
            "with ray.init(runtime_env={'working_dir': DIR}) instead."
        )
    return {"working_dir": uploaded}


def _check_size(run: RayRun) -> None:
    """Where nothing adds machines, a node that is larger than each of them would wait for ever."""
    demand = demand_of(run.resource, run.plan.nodes.resources)
    machines = cluster.machines()
    if any(fits(machine.total, demand) for machine in machines) or cluster.has_autoscaler():
        return
    missing = {name: max((machine.total.get(name, 0.0) for machine in machines), default=0.0) for name in demand}
    raise ConfigError(
        f"No machine of this cluster is large enough: a node asks for {describe(demand)}, and the most that a machine has is "
        f"{describe({name: amount for name, amount in missing.items() if amount < demand[name]})}. Ask for less, or give "
        "--wait-for-machines if such a machine will join."
    )
