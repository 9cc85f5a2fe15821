"""
Follows what people write into a job's objects, carries it out once, and says in the cluster what came of it.

A plan is claimed in its status with the version that was read, and noted in the ledger when the job has taken it: a master that
restarts carries out no plan twice. A plan that was claimed and not noted is carried out again: its numbers are absolute, and an
exchange that is under way counts as done. A refused plan is noted after its status says so.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.answers import (
    ELASTIC_JOBS,
    EVENTS,
    SCALE_PLANS,
    Conflict,
    FoundObject,
    NotFound,
    PatchKind,
)
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, JsonObject
from dlrover.platforms.kubernetes.informer import USUAL, Informer, InformerTiming, ObjectDeleted, ObjectsListed
from dlrover.platforms.kubernetes.ledger import JobLedger
from dlrover.platforms.kubernetes.objects import decode
from dlrover.platforms.kubernetes.orders import commands as orders
from dlrover.platforms.kubernetes.orders.commands import OrderCommand
from dlrover.platforms.kubernetes.pods import PodJob
from dlrover.platforms.kubernetes.scale_plan import PlanObject, PlanPhase
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.fleet import ResumeJob, SuspendJob

log = logging.getLogger(__name__)

Ask = Callable[[OrderCommand], Awaitable[object]]
"""The master's loop: raises `Rejected` and `Unavailable`."""
AGAIN = 2.0
"""Seconds until the next try: the API server is away, or no node has come yet."""
_NOT_YET = (ErrorCode.NOT_BEGUN, ErrorCode.NO_PLATFORM)


class OrderBook:
    def __init__(
        self, api: ClusterApi, job: PodJob, ledger: JobLedger, *, master_epoch: int, timing: InformerTiming = USUAL
    ) -> None:
        self._api = api
        self._job = job
        self._ledger = ledger
        self._epoch = master_epoch
        self._object: ElasticJob | None = None
        """As last seen."""
        self._suspended: bool | None = None
        """As last told to the job. None: not yet."""
        self._is_stopping = False
        self._came = asyncio.Event()
        options = {"namespace": job.namespace, "timing": timing}
        fields = f"metadata.name={job.name}"
        self._jobs = Informer(api, ELASTIC_JOBS, ElasticJob, fields=fields, **options)  # type: ignore[arg-type]
        labels = f"{names.SCALE_TYPE}={orders.MANUAL}"
        self._plans = Informer(api, SCALE_PLANS, PlanObject, labels=labels, **options)  # type: ignore[arg-type]
        self._open: dict[str, PlanObject] = {}
        """Plans for this job that have not ended, by uid; oldest first."""
        self._done: set[str] = set()
        """Plans that this life has ended, by uid, as long as they exist: older sights of them come late."""

    async def begin(self, ask: Ask) -> None:
        """Before anything is launched: a job that starts suspended launches nothing. Raises `Unavailable`."""
        answer = await self._api.get(ELASTIC_JOBS, self._job.name, namespace=self._job.namespace)
        if not isinstance(answer, FoundObject):
            raise Unavailable(f"The job {self._job.name} cannot be read: {answer.message}")
        await self._hear_suspension(decode(ElasticJob, answer.body), ask)

    async def run(self, ask: Ask) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for work in (self._jobs.run(), self._plans.run(), self._see_job(), self._see_plans()):
                tasks.create_task(work)
            while True:
                await self._came.wait()
                self._came.clear()
                try:
                    is_open = await self._carry_out(ask)
                except Unavailable as error:
                    log.warning("orders wait: %s", error)
                    is_open = True
                if is_open:
                    asyncio.get_running_loop().call_later(AGAIN, self._came.set)

    async def _see_job(self) -> None:
        async for sight in self._jobs.subscribe():
            seen = sight.objects if isinstance(sight, ObjectsListed) else (sight.object,)
            for job in seen:
                if job.metadata.uid == self._job.uid and not isinstance(sight, ObjectDeleted):
                    self._object = job
                    self._came.set()

    async def _see_plans(self) -> None:
        async for sight in self._plans.subscribe():
            if isinstance(sight, ObjectsListed):
                self._open.clear()
            for plan in sight.objects if isinstance(sight, ObjectsListed) else (sight.object,):
                is_gone = isinstance(sight, ObjectDeleted) or plan.metadata.deletion_timestamp is not None
                if is_gone:
                    self._done.discard(plan.metadata.uid)
                if is_gone or plan.metadata.uid in self._done or not orders.is_for(plan, self._job.name):
                    self._open.pop(plan.metadata.uid, None)
                else:
                    self._open[plan.metadata.uid] = plan
            self._came.set()

    async def _carry_out(self, ask: Ask) -> bool:
        """Whether something is left to be tried again."""
        job = self._object
        if job is None:
            return False
        stop = orders.stop_of(job)
        if stop is not None and not self._is_stopping:
            await ask(stop)
            self._is_stopping = True
        await self._hear_suspension(job, ask)
        is_open = await self._hear_sizes(job, ask)
        for plan in sorted(self._open.values(), key=_age):
            if await self._hear_plan(plan, job, ask):
                return True
            if self._open.get(plan.metadata.uid) is plan:  # a newer sight of a plan that is not done stays
                del self._open[plan.metadata.uid]
        return is_open

    async def _hear_suspension(self, job: ElasticJob, ask: Ask) -> None:
        wanted = bool(job.spec.suspend)
        if wanted == self._suspended:
            return
        command = orders.suspension_of(job)
        try:
            await ask(command)
        except Rejected as error:
            is_so = "already" in str(error) or isinstance(command, ResumeJob)
            if not is_so:
                log.warning("suspension refused: %s", error)
                await self._tell(job, "SuspensionRefused", str(error))
        else:
            log.info("the job follows spec.suspend=%s", wanted)
        self._suspended = wanted
        assert isinstance(command, SuspendJob | ResumeJob)

    async def _hear_sizes(self, job: ElasticJob, ask: Ask) -> bool:
        """A number that changed while no master ran is told to the next one: the ledger keeps what was carried out last."""
        try:
            wanted = orders.sizes_of(job)
        except ConfigError:
            return False  # the operator says it in the job's status
        state = self._ledger.state or await self._ledger.read()
        known = dict(state.sizes)
        if wanted == known:
            return False
        for command in orders.resizes(job, known, self._job.strategy):
            try:
                await ask(command)
                log.info("replicas set command=%s", command)
            except Rejected as error:
                if error.code in _NOT_YET:
                    return True
                await self._tell(job, "ScalingRefused", str(error))
        await self._ledger.note_sizes(wanted, self._epoch)
        return False

    async def _hear_plan(self, plan: PlanObject, job: ElasticJob, ask: Ask) -> bool:
        """Whether it is to be tried again."""
        uid = plan.metadata.uid
        state = self._ledger.state or await self._ledger.read()
        if uid in state.plans:
            await self._finish(plan, PlanPhase.SUCCEEDED, "")
            return False
        was_begun = plan.status.phase == PlanPhase.SCALING.value
        if not was_begun and not await self._claim(plan):
            return False  # it has changed: the next event tells how
        try:
            wanted = orders.plan_of(plan, job, self._job.strategy)
            for command in wanted.commands:
                try:
                    await ask(command)
                except Rejected as error:
                    # It was asked before, and the answer did not come as far as the ledger.
                    if not (was_begun and orders.is_being_done(command, error)):
                        raise
        except (ConfigError, Rejected) as error:
            if isinstance(error, Rejected) and error.code in _NOT_YET:
                return True
            # The status first: a plan that the ledger has and that has not ended counts as carried out.
            await self._finish(plan, PlanPhase.FAILED, str(error))
            await self._ledger.note_plan(uid, self._epoch)
            await self._tell(job, "PlanRefused", f"{plan.metadata.name}: {error}")
            return False
        await self._ledger.note_plan(uid, self._epoch)
        await self._finish(plan, PlanPhase.SUCCEEDED, wanted.note)
        return False

    async def _claim(self, plan: PlanObject) -> bool:
        body: JsonObject = {
            "metadata": {"resourceVersion": plan.metadata.resource_version},
            "status": {"phase": PlanPhase.SCALING.value, "createTime": plan.status.create_time or _now()},
        }
        answer = await self._patch(plan, body, "status")
        if not isinstance(answer, FoundObject):
            return False
        owner: JsonObject = {"metadata": {"ownerReferences": [names.owner_reference(self._job.name, self._job.uid)]}}
        await self._patch(plan, owner, "")
        await self._show_plan(plan.metadata.name)
        return True

    async def _finish(self, plan: PlanObject, phase: PlanPhase, message: str) -> None:
        status = {"phase": phase.value, "message": message, "finishTime": _now()}
        await self._patch(plan, {"status": status}, "status")
        self._done.add(plan.metadata.uid)
        self._open.pop(plan.metadata.uid, None)
        await self._show_plan("")
        log.info("plan ended plan=%s phase=%s message=%s", plan.metadata.name, phase.value, message)

    async def _show_plan(self, name: str) -> None:
        """In the job's status, while it is carried out. One that cannot be shown holds up nothing."""
        body: JsonObject = {
            "apiVersion": ELASTIC_JOBS.api_version,
            "kind": ELASTIC_JOBS.kind,
            "metadata": {"name": self._job.name, "namespace": self._job.namespace, "uid": self._job.uid},
        }
        if name:
            body["status"] = {"scalePlan": name}
        # What an apply leaves out is removed. An empty status instead is refused by a real server where nothing else is left in it.
        try:
            answer = await self._api.patch(
                ELASTIC_JOBS,
                self._job.name,
                body,
                namespace=self._job.namespace,
                kind=PatchKind.APPLY,
                subresource="status",
                field_manager="dlrover-master-plans",
                force=True,
            )
        except Unavailable as error:
            log.warning("the state of a plan could not be written plan=%s reason=%s", name, error)
            return
        if not isinstance(answer, FoundObject):
            log.warning("the state of a plan could not be written plan=%s reason=%s", name, answer.message)

    async def _patch(self, plan: PlanObject, body: JsonObject, subresource: str) -> FoundObject | None:
        """None: the plan is gone or has changed."""
        answer = await self._api.patch(
            SCALE_PLANS,
            plan.metadata.name,
            body,
            namespace=self._job.namespace,
            kind=PatchKind.MERGE,
            subresource=subresource,
        )
        if isinstance(answer, FoundObject | NotFound | Conflict):
            return answer if isinstance(answer, FoundObject) else None
        raise Unavailable(f"The plan {plan.metadata.name} cannot be written: {answer.message}")

    async def _tell(self, job: ElasticJob, reason: str, message: str) -> None:
        """As an Event of the job. One that cannot be written holds up nothing."""
        at = _now()
        body: JsonObject = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{job.metadata.name}.{secrets.token_hex(8)}", "namespace": self._job.namespace},
            "involvedObject": {
                "apiVersion": ELASTIC_JOBS.api_version,
                "kind": ELASTIC_JOBS.kind,
                "namespace": self._job.namespace,
                "name": self._job.name,
                "uid": self._job.uid,
            },
            "type": "Warning",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "dlrover-master"},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            answer = await self._api.create(EVENTS, body, namespace=self._job.namespace)
        except Unavailable as error:
            log.warning("an event could not be written reason=%s: %s", reason, error)
            return
        if not isinstance(answer, FoundObject):
            log.warning("an event was rejected reason=%s: %s", reason, answer.message)


def _age(plan: PlanObject) -> tuple[float, str]:
    made = plan.metadata.creation_timestamp
    return (made.timestamp() if made else 0.0), plan.metadata.uid


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
