"""
Actions become requests, and answers become observations.

What the API server has already (a name that is taken by the same job, a pod that is gone) is success. What it refuses
becomes a `FailedAction`: the runner tries again later, and the status says why.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import secrets
import time

import msgspec
from msgspec import Struct

from dlrover.operator.actions import (
    Action,
    AdjustObject,
    ApplyStatus,
    CarryOutPlan,
    CheckTemplates,
    CordonMachine,
    CreateObject,
    CreateToken,
    DeleteObject,
    EmitEvent,
    ObjectKind,
)
from dlrover.operator.cluster_view import RESOURCES, ClusterView, Seen
from dlrover.operator.master_state import is_master
from dlrover.operator.observations import TemplateCheck
from dlrover.operator.status import FIELD_MANAGER, status_body
from dlrover.operator.timestamps import text_of
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.api import (
    CONFIG_MAPS,
    ELASTIC_JOBS,
    EVENTS,
    NODES,
    PODS,
    SCALE_PLANS,
    ApiRefusal,
    ClusterApi,
    Conflict,
    ConflictReason,
    Forbidden,
    FoundObject,
    Invalid,
    NotFound,
    ObjectAnswer,
    PatchKind,
)
from dlrover.platforms.kubernetes.elastic_job import ElasticJob, JsonObject
from dlrover.platforms.kubernetes.job.fleet import fleet_of, pod_job_of
from dlrover.platforms.kubernetes.job.ledger_state import decode_state
from dlrover.platforms.kubernetes.objects import ConfigMap, Pod, Stub, decode
from dlrover.platforms.kubernetes.orders.outgoing import PodCreation, PodWork, result_of, work_of
from dlrover.platforms.kubernetes.pods import PodJob, pod_of
from dlrover.platforms.kubernetes.scale_plan import PlanObject, PlanPhase, PlanResult
from dlrover.protocol.errors import Rejected, Unavailable

log = logging.getLogger(__name__)

TOKEN_BYTES = 32
AT_ONCE = 16
"""Pods of one plan that are created or deleted at the same time."""
SHORTLY = 0.5
"""Seconds until the next try of what passes by itself: an API server that is away, a former job that is deleted."""
LATER = 5.0
"""Seconds until the next try of what people change: quotas, rights, a template."""


class Denied(Struct, frozen=True):
    """The API server did not take an action."""

    reason: str
    message: str
    delay: float
    """Seconds to wait for the first further try."""


class ActionCarrier:
    def __init__(self, api: ClusterApi, view: ClusterView) -> None:
        self._api = api
        self._view = view

    async def carry_out(self, job: ElasticJob, action: Action) -> TemplateCheck | Denied | None:
        """None: it is done."""
        try:
            match action:
                case CheckTemplates():
                    return await self._check(job, action)
                case CreateObject():
                    return await self._create(job, action.kind, action.name, action.body)
                case AdjustObject():
                    return await self._adjust(job, action)
                case CordonMachine():
                    return await self._cordon(job, action)
                case CarryOutPlan():
                    return await self._carry_out_plan(job, action.plan)
                case CreateToken():
                    return await self._create(job, ObjectKind.SECRET, action.name, _with_token(action.body))
                case DeleteObject():
                    return await self._delete(job, action)
                case EmitEvent():
                    await self._emit(job, action)
                    return None
                case ApplyStatus():
                    return await self._apply(job, action)
        except Unavailable as error:
            return Denied("Unavailable", str(error), max(SHORTLY, error.retry_after or 0.0))

    async def _check(self, job: ElasticJob, action: CheckTemplates) -> TemplateCheck | Denied:
        for pod in action.pods:
            answer = await self._api.create(PODS, pod, namespace=job.metadata.namespace, dry_run=True)
            match answer:
                case FoundObject() | Conflict():  # a pod of that name exists: it was accepted once
                    continue
                case Forbidden(is_quota=True):  # for the master to wait for
                    continue
                case Forbidden(is_terminating=True) | NotFound():
                    return _denied(answer)
                case _:
                    problem = f"{_type_of(pod)}: {answer.message}"
                    return TemplateCheck(generation=action.generation, problem=problem, at=time.time())
        return TemplateCheck(generation=action.generation, at=time.time())

    async def _create(self, job: ElasticJob, kind: ObjectKind, name: str, body: JsonObject) -> Denied | None:
        namespace = job.metadata.namespace
        answer = await self._api.create(RESOURCES[kind], body, namespace=namespace, field_manager=FIELD_MANAGER)
        if isinstance(answer, Conflict) and answer.reason is ConflictReason.ALREADY_EXISTS:
            answer = await self._api.get(RESOURCES[kind], name, namespace=namespace)
            if isinstance(answer, NotFound):
                return Denied("NameTaken", f"{kind.value} {name} was being deleted", SHORTLY)
        if not isinstance(answer, FoundObject):
            return _denied(answer)
        seen: Seen = decode(Pod, answer.body) if kind is ObjectKind.POD else decode(Stub, answer.body)
        owner = seen.metadata.controller
        if kind is ObjectKind.POD and (owner is None or owner.uid != job.metadata.uid):
            return Denied(
                "NameTaken", f"another pod has the name {name}. The operator waits until that pod is gone", SHORTLY
            )
        self._view.note(kind, seen)
        return None

    async def _adjust(self, job: ElasticJob, action: AdjustObject) -> Denied | None:
        answer = await self._api.patch(
            RESOURCES[action.kind],
            action.name,
            action.patch,
            namespace=job.metadata.namespace,
            kind=PatchKind.MERGE,
            field_manager=FIELD_MANAGER,
        )
        if not isinstance(answer, FoundObject):
            return _denied(answer)
        self._view.note(action.kind, decode(Stub, answer.body))
        return None

    async def _carry_out_plan(self, job: ElasticJob, plan: PlanObject) -> Denied | None:
        """The ledger says which master is the newest: plans of another one are refused, as its requests would be."""
        ledger = await self._api.get(
            CONFIG_MAPS, names.ledger_name(job.metadata.name), namespace=job.metadata.namespace
        )
        if not isinstance(ledger, FoundObject):
            return Denied("NoLedger", f"the ledger cannot be read: {ledger.message}", SHORTLY)
        newest = decode_state(decode(ConfigMap, ledger.body).data).epoch
        try:
            epoch, work = work_of(plan)
        except ValueError as error:
            return await self._end_plan(job, plan, PlanPhase.FAILED, str(error), ())
        if epoch < newest:
            stale = f"The plan is of master epoch {epoch}; a newer master ({newest}) runs the job. Nothing was done."
            return await self._end_plan(job, plan, PlanPhase.FAILED, stale, ())
        pods = pod_job_of(job, fleet_of(job), token_secret=names.token_secret(job.metadata.name))
        turns = asyncio.Semaphore(AT_ONCE)

        async def sent(each: PodWork) -> PlanResult | None:
            async with turns:
                return await self._send(each, pods)

        results = await asyncio.gather(*(sent(each) for each in work))
        return await self._end_plan(job, plan, PlanPhase.SUCCEEDED, "", tuple(each for each in results if each))

    async def _send(self, work: PodWork, pods: PodJob) -> PlanResult | None:
        """What the API server refused; None: it is done."""
        answer: ObjectAnswer
        if isinstance(work, PodCreation):
            try:
                body = pod_of(work.intent, pods)
            except Rejected as error:
                return PlanResult(name=work.pod, reason="Invalid", message=str(error))
            answer = await self._api.create(PODS, body, namespace=pods.namespace)
        else:
            found = await self._api.get(PODS, work.pod, namespace=pods.namespace)
            if not isinstance(found, FoundObject):
                return result_of(work.pod, found)
            pod = decode(Pod, found.body)
            if pod.metadata.labels.get(names.JOB_UID) != pods.uid or is_master(pod):
                return PlanResult(name=work.pod, reason="NotFound", message="that pod is not a node of this job")
            answer = await self._api.delete(
                PODS, work.pod, namespace=pods.namespace, uid=work.uid, grace=max(1, work.grace)
            )
        return None if isinstance(answer, FoundObject) else result_of(work.pod, answer)

    async def _end_plan(
        self, job: ElasticJob, plan: PlanObject, phase: PlanPhase, message: str, results: tuple[PlanResult, ...]
    ) -> Denied | None:
        status: JsonObject = {"phase": phase.value, "message": message, "finishTime": text_of(time.time())}
        if results:
            status["results"] = [msgspec.to_builtins(each) for each in results]
        answer = await self._api.patch(
            SCALE_PLANS,
            plan.metadata.name,
            {"metadata": {"uid": plan.metadata.uid}, "status": status},
            namespace=job.metadata.namespace,
            kind=PatchKind.MERGE,
            subresource="status",
            field_manager=FIELD_MANAGER,
        )
        if not isinstance(answer, FoundObject | NotFound | Conflict):
            return _denied(answer)
        self._view.note_ended_plan(plan.metadata.uid)
        return None

    async def _cordon(self, job: ElasticJob, action: CordonMachine) -> Denied | None:
        patch = {
            "metadata": {"annotations": {names.CORDONED_FOR: job.metadata.uid}},
            "spec": {"unschedulable": True},
        }
        answer = await self._api.patch(NODES, action.name, patch, namespace=None, kind=PatchKind.MERGE)
        if not isinstance(answer, FoundObject | NotFound):
            return _denied(answer)
        self._view.note_cordoned(action.name, job.metadata.uid)
        log.warning("machine cordoned machine=%s job=%s", action.name, job.key)
        return None

    async def _delete(self, job: ElasticJob, action: DeleteObject) -> Denied | None:
        answer = await self._api.delete(
            RESOURCES[action.kind],
            action.name,
            namespace=job.metadata.namespace,
            uid=action.uid,
            grace=action.grace,
        )
        match answer:
            case FoundObject():
                return None
            case NotFound() | Conflict():  # a conflict: the name belongs to another object by now
                self._view.note_gone(action.uid)
                return None
            case _:
                return _denied(answer)

    async def _emit(self, job: ElasticJob, action: EmitEvent) -> None:
        """An Event that cannot be written holds up nothing."""
        try:
            answer = await self._api.create(EVENTS, _event_body(job, action), namespace=job.metadata.namespace)
        except Unavailable as error:
            log.warning("an event could not be written job=%s reason=%s: %s", job.key, action.reason, error)
            return
        if not isinstance(answer, FoundObject | Conflict):
            log.warning("an event was rejected job=%s reason=%s: %s", job.key, action.reason, answer.message)

    async def _apply(self, job: ElasticJob, action: ApplyStatus) -> Denied | None:
        answer = await self._api.patch(
            ELASTIC_JOBS,
            job.metadata.name,
            status_body(job, action.status),
            namespace=job.metadata.namespace,
            kind=PatchKind.APPLY,
            subresource="status",
            field_manager=FIELD_MANAGER,
            force=True,
        )
        match answer:
            case FoundObject(body=body):
                self._view.note(ObjectKind.ELASTIC_JOB, decode(ElasticJob, body))
                return None
            case NotFound() | Conflict():
                self._view.note_gone(job.metadata.uid)
                return Denied("JobGone", f"the job {job.key} was deleted", SHORTLY)
            case _:
                return _denied(answer)


def describe(action: Action) -> str:
    match action:
        case CheckTemplates():
            return "check the templates"
        case CreateObject(kind=kind, name=name):
            return f"create {kind.value} {name}"
        case AdjustObject(kind=kind, name=name):
            return f"adjust {kind.value} {name}"
        case CordonMachine(name=name):
            return f"cordon the machine {name}"
        case CarryOutPlan(plan=plan):
            return f"carry out the plan {plan.metadata.name}"
        case CreateToken(name=name):
            return f"create Secret {name}"
        case DeleteObject(kind=kind, name=name):
            return f"delete {kind.value} {name}"
        case EmitEvent(reason=reason):
            return f"write the event {reason}"
        case ApplyStatus():
            return "write the status"


def backed_off(delay: float, failures: int, *, longest: float = 60.0) -> float:
    """Doubles with each failure in a row. The spread keeps many jobs from asking at the same moment."""
    return min(delay * 2.0 ** min(failures, 16), longest) * random.uniform(0.8, 1.2)


def _denied(answer: ApiRefusal | ObjectAnswer) -> Denied:
    match answer:
        case Forbidden(is_quota=True):
            return Denied("QuotaExceeded", answer.message, LATER)
        case Forbidden(is_terminating=True):
            return Denied("NamespaceIsDeleted", answer.message, LATER)
        case Forbidden():
            return Denied("Forbidden", answer.message, LATER)
        case Invalid():
            return Denied("Invalid", answer.message, LATER)
        case Conflict():
            return Denied("Conflict", answer.message, SHORTLY)
        case FoundObject():
            raise AssertionError("an object that was found is no refusal")
        case _:
            return Denied(type(answer).__name__, answer.message, LATER)


def _with_token(body: JsonObject) -> JsonObject:
    token = base64.b64encode(secrets.token_hex(TOKEN_BYTES).encode()).decode()
    return {**body, "data": {names.TOKEN_KEY: token}}


def _event_body(job: ElasticJob, action: EmitEvent) -> JsonObject:
    at = text_of(time.time())
    involved = {
        "apiVersion": ELASTIC_JOBS.api_version,
        "kind": ELASTIC_JOBS.kind,
        "namespace": job.metadata.namespace,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": action.name, "namespace": job.metadata.namespace},
        "involvedObject": involved,
        "type": "Warning" if action.is_warning else "Normal",
        "reason": action.reason,
        "message": action.message[:1024],
        "source": {"component": FIELD_MANAGER},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }


def _type_of(pod: JsonObject) -> str:
    metadata = pod.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    return str(labels.get(names.REPLICA_TYPE)) if isinstance(labels, dict) else "pod"
