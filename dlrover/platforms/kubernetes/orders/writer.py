"""
The platform of a master of mode `k8s`: the same as that of any master in a cluster, but for who creates and deletes the pods.

What comes while a plan is under way goes into the next one, so a job of many pods needs few plans.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, field

from dlrover.platforms.base import Intent
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.answers import PODS, SCALE_PLANS, Conflict, FoundObject, NotFound, ObjectAnswer
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.elastic_job import JsonObject
from dlrover.platforms.kubernetes.informer import USUAL, Informer, InformerTiming, ObjectDeleted, ObjectsListed
from dlrover.platforms.kubernetes.orders.book import Ask
from dlrover.platforms.kubernetes.orders.outgoing import (
    AUTO,
    ENDED,
    KEPT,
    MOST_WORK,
    PodCreation,
    PodDeletion,
    PodWork,
    answer_of,
    plan_body,
)
from dlrover.platforms.kubernetes.platform import PodPlatform
from dlrover.platforms.kubernetes.pods import PodJob
from dlrover.platforms.kubernetes.scale_plan import PlanObject, PlanPhase
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.fleet import LaunchNode

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds that a plan may take. Then its intents are tried again, in another plan."""


@dataclass(eq=False)
class _Asked:
    work: PodWork
    done: asyncio.Future[ObjectAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PlanWriter:
    def __init__(self, api: ClusterApi, job: PodJob, timing: InformerTiming) -> None:
        self._api = api
        self._job = job
        labels = f"{names.selector_of(job.uid)},{names.SCALE_TYPE}={AUTO}"
        self._plans = Informer(api, SCALE_PLANS, PlanObject, namespace=job.namespace, labels=labels, timing=timing)
        self._queue: list[_Asked] = []
        self._writer: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._open: dict[str, asyncio.Future[PlanObject]] = {}
        """Plans that are under way, by name."""
        self.epoch = 0
        """Of the master; the newest that an intent named."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._plans.run())
            async for sight in self._plans.subscribe():
                if isinstance(sight, ObjectDeleted):
                    continue
                for plan in sight.objects if isinstance(sight, ObjectsListed) else (sight.object,):
                    waiting = self._open.get(plan.metadata.name)
                    if waiting is not None and not waiting.done() and plan.status.phase in ENDED:
                        waiting.set_result(plan)

    async def ask(self, work: PodWork) -> ObjectAnswer:
        """What the API server answered the operator. Raises `Unavailable` if no operator carried the plan out."""
        asked = _Asked(work)
        self._queue.append(asked)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write_all())
        return await asked.done

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)

    async def _write_all(self) -> None:
        await asyncio.sleep(0)  # for all that is asked for at the same moment
        while self._queue:
            batch, self._queue = self._queue[:MOST_WORK], self._queue[MOST_WORK:]
            batch = [each for each in batch if not each.done.done()]  # nobody waits for the others any more
            if not batch:
                continue
            try:
                self._answer(batch, await self._carry_out([each.work for each in batch]))
            except Unavailable as error:
                for each in batch:
                    if not each.done.done():
                        each.done.set_exception(Unavailable(str(error), error.retry_after, error.code))
            except BaseException as error:  # whoever waits must hear of a bug, too
                for each in batch:
                    if not each.done.done():
                        each.done.set_exception(Unavailable(f"The plan could not be written: {error!r}"))
                raise
            await self._tidy()

    def _answer(self, batch: list[_Asked], plan: PlanObject) -> None:
        if plan.status.phase == PlanPhase.FAILED.value:
            raise Unavailable(f"The operator refused the plan: {plan.status.message}")
        results = {result.name: answer_of(result) for result in plan.status.results}
        for each in batch:
            if not each.done.done():
                each.done.set_result(results.get(each.work.pod) or FoundObject(b"", ""))

    async def _carry_out(self, work: list[PodWork]) -> PlanObject:
        while True:
            number = next(self._numbers)
            body = plan_body(
                self._job.name, self._job.uid, self._job.namespace, epoch=self.epoch, number=number, work=work
            )
            name = names.plan_name(self._job.name, self.epoch, number)
            waiting: asyncio.Future[PlanObject] = asyncio.get_running_loop().create_future()
            self._open[name] = waiting
            try:
                answer = await self._api.create(SCALE_PLANS, body, namespace=self._job.namespace)
                if isinstance(answer, Conflict):
                    continue  # of a former life of this master
                if not isinstance(answer, FoundObject):
                    raise Unavailable(f"The plan {name} cannot be written: {answer.message}")
                async with asyncio.timeout(PATIENCE):
                    return await waiting
            except TimeoutError:
                raise Unavailable(
                    f"No operator has carried out the plan {name} within {PATIENCE:g} s. Check that the operator "
                    "runs: kubectl get pods -A"
                ) from None
            finally:
                del self._open[name]

    async def _tidy(self) -> None:
        """A courtesy: what cannot be deleted now is deleted after the next plan, or with the job."""
        ended = [plan for plan in self._plans.cache.values() if plan.status.phase in ENDED]
        ended.sort(key=lambda plan: (plan.metadata.creation_timestamp is not None, plan.metadata.creation_timestamp))
        for plan in ended[:-KEPT]:
            try:
                await self._api.delete(
                    SCALE_PLANS, plan.metadata.name, namespace=self._job.namespace, uid=plan.metadata.uid
                )
            except Unavailable as error:
                log.debug("plan stays plan=%s reason=%s", plan.metadata.name, error)
                return


class PlanPlatform(PodPlatform):
    """Pods by way of plans."""

    def __init__(
        self, api: ClusterApi, job: PodJob, *, can_cordon: bool = False, timing: InformerTiming = USUAL
    ) -> None:
        super().__init__(api, job, can_cordon=can_cordon, timing=timing)
        self._writer = PlanWriter(api, job, timing)
        self._writing: asyncio.Future[None] | None = None

    async def apply(self, intent: Intent) -> None:
        self._writer.epoch = max(self._writer.epoch, intent.master_epoch)
        await super().apply(intent)

    async def begin_orders(self, ask: Ask, master_epoch: int) -> None:
        self._writer.epoch = max(self._writer.epoch, master_epoch)
        await super().begin_orders(ask, master_epoch)

    async def _open(self) -> None:
        await super()._open()
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._writer.run())
        if self._writing.done():
            self._writing.result()  # a bug: whoever calls must hear of it

    async def close(self) -> None:
        await self._writer.close()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await super().close()

    async def _create_pod(self, intent: LaunchNode, body: JsonObject) -> ObjectAnswer:
        name = names.pod_name(self._job.name, intent.node_type.value, intent.id)
        answer = await self._writer.ask(PodCreation(intent, name))
        if not isinstance(answer, FoundObject):
            return answer
        found = await self._api.get(PODS, name, namespace=self._job.namespace)
        if isinstance(found, NotFound):
            raise Unavailable(f"{intent.name}: the pod {name} was created and then deleted")
        return found

    async def _delete_pod(self, name: str, uid: str, grace: int) -> ObjectAnswer:
        return await self._writer.ask(PodDeletion(name, uid, grace))
