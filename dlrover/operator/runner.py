"""
The loop around `decide`: informers wake jobs, each job decides and acts by itself, one pass at a time.

A pass decides from what is seen now and carries the actions out in order. The first that fails ends the pass. A pass
that changed something is followed by another one at once, until there is nothing left to do; then the job sleeps until
an informer reports a change or the time comes that `decide` named.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dlrover.host.edges import logged
from dlrover.operator.actions import (
    Action,
    AdjustObject,
    ApplyStatus,
    CarryOutPlan,
    CheckTemplates,
    CordonMachine,
    CreateObject,
    CreateToken,
    EmitEvent,
)
from dlrover.operator.carry_out import SHORTLY, ActionCarrier, Denied, backed_off, describe
from dlrover.operator.cluster_view import ClusterView, JobKey
from dlrover.operator.decide import decide
from dlrover.operator.observations import FailedAction, OperatorSettings, TemplateCheck
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.informer import Informer

log = logging.getLogger(__name__)

NUM_AT_ONCE = 16
"""Jobs in a pass at the same time, as many as the client has connections."""
RESYNC = 300.0
"""Seconds. A job is looked at again even if nothing changes: a safety net for an event that was never sent."""
MAX_PASSES = 20
"""In a row, without a pause. More means that a decision does not see its own effect."""

_CHANGES = (CheckTemplates, CreateObject, AdjustObject, CordonMachine, CarryOutPlan, CreateToken, ApplyStatus)
"""After these the next decision may see more."""

Report = Callable[[str, str], None]
"""Called with the name of an action and its result (`done`, or the reason of a failure)."""


class Runner:
    def __init__(
        self, api: ClusterApi, view: ClusterView, settings: OperatorSettings, *, report: Report | None = None
    ) -> None:
        self._carrier = ActionCarrier(api, view)
        self._view = view
        self._settings = settings
        self._report = report or (lambda action, result: None)
        self._turns = asyncio.Semaphore(NUM_AT_ONCE)
        self._jobs: dict[JobKey, _JobLoop] = {}

    async def run(self) -> None:
        """For ever: cancel it to stop. The informers of the view run elsewhere."""
        for informer in self._view.informers:
            await informer.listed()
        async with asyncio.TaskGroup() as tasks:
            for informer in self._view.informers:
                tasks.create_task(self._follow(informer, tasks))

    async def _follow(self, informer: Informer[Any], tasks: asyncio.TaskGroup) -> None:
        async for keys in self._view.changes(informer):
            for key in keys:
                self._wake(key, tasks)

    def _wake(self, key: JobKey, tasks: asyncio.TaskGroup) -> None:
        loop = self._jobs.get(key)
        if loop is None:
            if self._view.job(key) is None:
                return
            loop = self._jobs[key] = _JobLoop(key, self._view, self._carrier, self._settings, self._report, self._turns)
            tasks.create_task(self._keep(loop))
        loop.news.set()

    async def _keep(self, loop: _JobLoop) -> None:
        """A job whose state we cannot handle must not stop the others: it is tried again, ever more rarely."""
        num_errors = 0
        while True:
            with logged(log, "pass broken job=%s/%s", *loop.key):
                await loop.run()
                del self._jobs[loop.key]
                return
            self._report("decide", "broken")
            await asyncio.sleep(backed_off(SHORTLY, num_errors))
            num_errors += 1


class _JobLoop:
    """One job: its passes, and what only this process knows of it."""

    def __init__(
        self,
        key: JobKey,
        view: ClusterView,
        carrier: ActionCarrier,
        settings: OperatorSettings,
        report: Report,
        turns: asyncio.Semaphore,
    ) -> None:
        self.key = key
        self.news = asyncio.Event()
        self._view = view
        self._carrier = carrier
        self._settings = settings
        self._report = report
        self._turns = turns
        self._uid = ""
        self._check: TemplateCheck | None = None
        self._failure: FailedAction | None = None
        self._failed_action: Action | None = None
        self._num_failures = 0

    async def run(self) -> None:
        """Until the job is gone."""
        while (job := self._view.job(self.key)) is not None:
            if job.metadata.uid != self._uid:  # made anew under this name
                self._uid, self._check, self._failure, self._num_failures = job.metadata.uid, None, None, 0
            self.news.clear()
            async with self._turns:
                wake_at = await self._passes()
            await self._sleep(wake_at)

    async def _passes(self) -> float | None:
        """Until there is nothing to do; the time to look again."""
        wake_at: float | None = None
        for _ in range(MAX_PASSES):
            job = self._view.job(self.key)
            if job is None or job.metadata.uid != self._uid:
                return time.time()
            now = time.time()
            seen = replace(self._view.objects(job, now), check=self._check, failure=self._failure)
            decision = decide(job, seen, now, self._settings)
            wake_at = decision.wake_at
            failed_before = self._failure
            has_changed = await self._carry_out(job, decision.actions)
            if self._failure is not None and self._failure is failed_before and now >= self._failure.retry_at:
                self._failure, self._num_failures, has_changed = None, 0, True
            if self._failure is not None and self._failure is not failed_before:
                if isinstance(self._failed_action, ApplyStatus):
                    return self._failure.retry_at
                has_changed = True  # the status shall say it
            if not has_changed:
                return wake_at
        log.error(
            "the job still needs changes after %d passes; the operator tries again later job=%s/%s",
            MAX_PASSES,
            *self.key,
        )
        return time.time() + RESYNC / 10

    async def _carry_out(self, job: ElasticJob, actions: tuple[Action, ...]) -> bool:
        """True: the next decision may see more than this one did."""
        has_changed = False
        for action in actions:
            result = await self._carrier.carry_out(job, action)
            name = type(action).__name__
            if isinstance(result, Denied):
                self._report(name, result.reason)
                self._fail(job, action, result)
                return False
            self._report(name, "done")
            if not isinstance(action, EmitEvent):
                log.info("done job=%s: %s", job.key, describe(action))
            if isinstance(result, TemplateCheck):
                self._check = result
            has_changed |= isinstance(action, _CHANGES)
        return has_changed

    def _fail(self, job: ElasticJob, action: Action, denied: Denied) -> None:
        delay = backed_off(denied.delay, self._num_failures)
        self._num_failures += 1
        self._failed_action = action
        what = describe(action)
        if self._failure is None or (self._failure.what, self._failure.message) != (what, denied.message):
            log.warning("an action failed job=%s: could not %s: %s", job.key, what, denied.message)
        self._failure = FailedAction(
            what=what, reason=denied.reason, message=denied.message, retry_at=time.time() + delay
        )

    async def _sleep(self, wake_at: float | None) -> None:
        delay = RESYNC if wake_at is None else max(0.0, min(wake_at - time.time(), RESYNC))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self.news.wait()
