"""
Pods as nodes: the platform of a master that runs in, or beside, a Kubernetes cluster.

An intent is entered into the ledger first and carried out then, so that a crash between the two loses an id and nothing
else, and a master that another one has followed stops there. The platform keeps no queue and repeats nothing: the
keeper's lanes do that. Lists and watches show what the cluster has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from dlrover.platforms.base import (
    Capabilities,
    Intent,
    JobGlance,
    LaunchNotTaken,
    NodeRoom,
    Sight,
    check_intent,
    check_same,
)
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.answers import (
    CONFIG_MAPS,
    ELASTIC_JOBS,
    PODS,
    Conflict,
    ConflictReason,
    Forbidden,
    FoundObject,
    Invalid,
    NotFound,
    ObjectAnswer,
    Page,
    PatchKind,
)
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.elastic_job import JsonObject
from dlrover.platforms.kubernetes.exits import identity_of
from dlrover.platforms.kubernetes.informer import USUAL, Informer, InformerTiming, ObjectsListed
from dlrover.platforms.kubernetes.job.ledger_state import LedgerEntry, LedgerState
from dlrover.platforms.kubernetes.ledger import JobLedger
from dlrover.platforms.kubernetes.lookout import PodLookout
from dlrover.platforms.kubernetes.objects import ConfigMap, Pod, Stub, decode
from dlrover.platforms.kubernetes.orders.book import Ask, OrderBook
from dlrover.platforms.kubernetes.pods import PodJob, pod_of
from dlrover.platforms.kubernetes.room import find_room
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.fleet import LaunchNode, NodesListed, PlatformNode, RemoveNode, Resource
from dlrover.protocol.messages.identity import PlatformId

log = logging.getLogger(__name__)

FIELD_MANAGER = "dlrover-master"
LIST_TIMEOUT = 20.0
"""Seconds that a watch waits for the first list of all. The keeper begins another one then."""
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<requested>.*), used: (?P<used>.*), limited: (?P<limited>.*)"
)


class PodOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job: PodJob
    kubeconfig: str = ""
    """Path. Empty: `KUBECONFIG`, the pod's service account, or `~/.kube/config`, in this order."""
    can_cordon: bool = False
    """The master may mark machines as unschedulable."""


class _JobStatus:
    """What the master writes into the status of its ElasticJob, in fields that the operator leaves alone."""

    def __init__(self, api: ClusterApi, job: PodJob) -> None:
        self._api = api
        self._job = job
        self._cordoned: list[str] = []
        """Machines that this master has named."""

    async def show(self, glance: JobGlance) -> None:
        status: JsonObject = {"round": glance.round, "goodput": f"{glance.goodput:.2f}"}
        if glance.last_step is not None:
            status["lastStep"] = glance.last_step
        answer = await self._write(status, FIELD_MANAGER)
        if not isinstance(answer, FoundObject):
            raise Unavailable(f"The status of {self._job.name} cannot be written: {answer.message}")

    async def cordon(self, host: str) -> None:
        """
        A master has no right to machines: it names this one in the status of its job, and the operator marks it.

        A machine that cannot be named is only worth a line: the removal counts.
        """
        if host not in self._cordoned:
            self._cordoned.append(host)
        try:
            answer = await self._write({"cordonHosts": self._cordoned}, f"{FIELD_MANAGER}-hosts")
        except Unavailable as error:
            log.warning("a machine could not be cordoned host=%s reason=%s", host, error)
            return
        if not isinstance(answer, FoundObject):
            log.warning("a machine could not be cordoned host=%s reason=%s", host, answer.message)

    async def _write(self, status: JsonObject, manager: str) -> ObjectAnswer:
        """A manager owns what it wrote last, and what it leaves out then is removed: so each part has its own."""
        body = {
            "apiVersion": ELASTIC_JOBS.api_version,
            "kind": ELASTIC_JOBS.kind,
            # The uid makes the API server refuse it for a newer job of this name.
            "metadata": {"name": self._job.name, "namespace": self._job.namespace, "uid": self._job.uid},
            "status": status,
        }
        return await self._api.patch(
            ELASTIC_JOBS,
            self._job.name,
            body,
            namespace=self._job.namespace,
            kind=PatchKind.APPLY,
            subresource="status",
            field_manager=manager,
            force=True,
        )


class _Spares:
    """Pods that have ended, and that stand in the way or are one too many: each is being deleted once."""

    def __init__(self, delete: Callable[[Pod, float], Awaitable[None]]) -> None:
        """`delete` is given the seconds that the pod may take."""
        self._delete = delete
        self.tasks: dict[str, asyncio.Future[None]] = {}
        """By uid."""

    def delete(self, pod: Pod, reason: str) -> None:
        uid = pod.metadata.uid
        if uid in self.tasks:
            return
        log.info("deleting an ended pod pod=%s reason=%s", pod.metadata.name, reason)
        task = self.tasks[uid] = asyncio.ensure_future(self._try_to_delete(pod))
        task.add_done_callback(lambda _: self.tasks.pop(uid, None))

    async def _try_to_delete(self, pod: Pod) -> None:
        try:
            await self._delete(pod, pod.spec.termination_grace_period_seconds or 0)
        except (Rejected, Unavailable) as error:
            log.warning("an ended pod could not be deleted pod=%s reason=%s", pod.metadata.name, error)


class PodPlatform:
    """The nodes of one job as pods."""

    def __init__(
        self, api: ClusterApi, job: PodJob, *, can_cordon: bool = False, timing: InformerTiming = USUAL
    ) -> None:
        self._api = api
        self._job = job
        self.capabilities = Capabilities(
            own_addresses=True, can_limit_memory=True, can_cordon=can_cordon, knows_room=True
        )
        self._can_cordon = can_cordon
        self._status = _JobStatus(api, job)
        self._timing = timing
        self._orders: OrderBook | None = None
        self._ledger = JobLedger(api, namespace=job.namespace, name=names.ledger_name(job.name), job_uid=job.uid)
        self._spares = _Spares(self._delete)
        self._lookout = PodLookout(
            listing=lambda nodes: _listing(self._ledger.state or LedgerState(), nodes), on_spare=self._spares.delete
        )
        self._pods = Informer(
            api, PODS, Pod, namespace=job.namespace, labels=job.selector, unreadable=Pod.unreadable, timing=timing
        )
        fields = f"metadata.name={names.ledger_name(job.name)}"
        self._books = Informer(api, CONFIG_MAPS, ConfigMap, namespace=job.namespace, fields=fields, timing=timing)
        self._created: dict[PlatformId, Pod] = {}
        """Pods that the informer may not show yet."""
        self._tasks: list[asyncio.Future[None]] = []
        self._opening = asyncio.Lock()
        """Guards the start of session and informers, which the first call does, whichever it is."""

    @classmethod
    def from_options(cls, job_uid: str, options: Mapping[str, object]) -> PodPlatform:
        try:
            given = msgspec.convert(dict(options), PodOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"The options of the Kubernetes platform are not valid: {error}.") from error
        if given.job.uid != job_uid:
            raise ConfigError(
                f"The options of the platform are for the job {given.job.uid}, but the master runs {job_uid}."
            )
        access = find_access(os.environ, kubeconfig=Path(given.kubeconfig) if given.kubeconfig else None)
        return cls(ClusterApi(access), given.job, can_cordon=given.can_cordon)

    async def apply(self, intent: Intent) -> None:
        check_intent(intent)
        await self._open()
        if isinstance(intent, LaunchNode):
            await self._launch(intent)
        else:
            await self._remove(intent)

    async def list(self) -> tuple[PlatformNode, ...]:
        await self._open()
        pods = await _list_pods(self._api, self._job, self._job.selector)
        nodes = (self._lookout.judge(pod) for pod in pods)
        return tuple(sorted((node for node in nodes if node is not None), key=lambda node: node.id))

    async def watch(self) -> AsyncIterator[Sight]:
        await self._open()
        await self._pods.listed(LIST_TIMEOUT)
        if self._ledger.state is None:
            await self._ledger.read()
        async with contextlib.aclosing(self._lookout.sights()) as sights:  # type: ignore[type-var]
            async for sight in sights:
                yield sight

    async def room(self, resource: Resource) -> NodeRoom:
        await self._open()
        return await find_room(self._api, self._job, resource)

    async def show(self, glance: JobGlance) -> None:
        """In the status of the ElasticJob, in fields that the operator leaves alone."""
        await self._open()
        await self._status.show(glance)

    async def begin_orders(self, ask: Ask, master_epoch: int) -> None:
        await self._open()
        self._orders = OrderBook(self._api, self._job, self._ledger, master_epoch=master_epoch, timing=self._timing)
        await self._orders.begin(ask)

    async def take_orders(self, ask: Ask, master_epoch: int) -> None:
        await self._open()
        if self._orders is None:
            await self.begin_orders(ask, master_epoch)
        assert self._orders is not None
        await self._orders.run(ask)

    async def close(self) -> None:
        tasks = [*self._tasks, *self._spares.tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._lookout.close()
        await self._ledger.close()
        await self._api.close()

    # Launches.

    async def _launch(self, intent: LaunchNode) -> None:
        pod = pod_of(intent, self._job)
        entry = await self._ledger.enter(intent)
        if entry is LedgerEntry.CLOSED:
            created = self._created.get(intent.id)
            known = self._lookout.launch_of(intent.id) or (None if created is None else identity_of(created))
            if known is not None:
                check_same(known, intent)
            return
        with self._ledger.carrying_out():
            try:
                await self._create(intent, pod)
            except Rejected:
                self._ledger.close_launch(intent)
                raise
            self._ledger.close_launch(intent)

    async def _create(self, intent: LaunchNode, body: JsonObject) -> None:
        answer = await self._create_pod(intent, body)
        match answer:
            case FoundObject():
                self._created[intent.id] = decode(Pod, answer.body)
            case Conflict(reason=ConflictReason.ALREADY_EXISTS):
                await self._meet(intent)
            case Conflict():
                raise Unavailable(f"{intent.name}: {answer.message}")
            case Forbidden(is_quota=True):
                raise LaunchNotTaken(f"{intent.name}: {_quota_sentence(answer.message)}")
            case Forbidden() if "no PriorityClass" in answer.message:
                raise Rejected(f"{intent.name}: {answer.message}", code=ErrorCode.NO_PRIORITY_CLASS)
            case Forbidden():
                raise Unavailable(f"{intent.name}: {answer.message}", code=ErrorCode.FORBIDDEN)
            case Invalid():
                raise Rejected(f"{intent.name}: {answer.message}", code=ErrorCode.BAD_TEMPLATE)
            case _:
                raise Unavailable(f"{intent.name}: {answer.message}")

    async def _create_pod(self, intent: LaunchNode, body: JsonObject) -> ObjectAnswer:
        return await self._api.create(PODS, body, namespace=self._job.namespace)

    async def _delete_pod(self, name: str, uid: str, grace: int) -> ObjectAnswer:
        return await self._api.delete(PODS, name, namespace=self._job.namespace, uid=uid, grace=grace)

    async def _meet(self, intent: LaunchNode) -> None:
        """There is a pod of this name: ours, of an earlier attempt, or of a job that is gone."""
        name = names.pod_name(self._job.name, intent.node_type.value, intent.id)
        answer = await self._api.get(PODS, name, namespace=self._job.namespace)
        if isinstance(answer, NotFound):
            raise LaunchNotTaken(f"{intent.name}: the pod {name} was created and then deleted")
        if not isinstance(answer, FoundObject):
            raise Unavailable(f"{intent.name}: {answer.message}")
        pod = decode(Pod, answer.body)
        if pod.metadata.labels.get(names.JOB_UID) != self._job.uid:
            raise LaunchNotTaken(
                f"{intent.name}: the pod {name} belongs to another job. The master tries again when that pod is gone"
            )
        launch = identity_of(pod)
        if launch is not None:
            check_same(launch, intent)
        if pod.metadata.deletion_timestamp is not None:
            raise LaunchNotTaken(f"{intent.name}: the pod {name} is being deleted")
        self._created[intent.id] = pod

    # Removals.

    async def _remove(self, intent: RemoveNode) -> None:
        entry = await self._ledger.enter(intent)
        if intent.cordon_host and self._can_cordon:
            await self._status.cordon(
                intent.cordon_host
            )  # while the pod is there: the operator marks only what it saw us use
        if entry is LedgerEntry.NEW:
            return
        pod = self._lookout.pod_of(intent.id) or self._created.get(intent.id)
        with self._ledger.carrying_out():
            if pod is not None:
                pods: tuple[Pod, ...] = (pod,)
            else:  # one that no event has shown yet may have been made by a master before us, just now
                selector = f"{self._job.selector},{names.REPLICA_INDEX}={intent.id}"
                pods = await _list_pods(self._api, self._job, selector)
            for each in pods:
                self._lookout.expect(intent)
                await self._delete(each, intent.grace)
        self._created.pop(intent.id, None)

    async def _delete(self, pod: Pod, grace: float) -> None:
        """With a grace of 0 the server would forget the pod while its processes run on: at least one second."""
        answer = await self._delete_pod(pod.metadata.name, pod.metadata.uid, max(1, math.ceil(grace)))
        match answer:
            case FoundObject() | NotFound() | Conflict():
                return  # a conflict says that another pod has the name by now
            case Invalid():
                raise Rejected(f"{pod.metadata.name}: {answer.message}", code=ErrorCode.BAD_INTENT)
            case _:
                raise Unavailable(f"{pod.metadata.name}: {answer.message}")

    # Sights.

    async def _open(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()  # a bug: whoever calls must hear of it
        if self._tasks:
            return
        async with self._opening:
            if not self._tasks:
                await self._api.__aenter__()
                work = (self._pods.run(), self._books.run(), self._follow_pods(), self._follow_ledger())
                self._tasks = [asyncio.ensure_future(each) for each in work]
                for task in self._tasks:
                    task.add_done_callback(_look_at)

    async def _follow_pods(self) -> None:
        async for sight in self._pods.subscribe():
            if isinstance(sight, ObjectsListed):
                self._created.clear()  # whatever was created is in the list, or gone
            else:
                launch = identity_of(sight.object)
                if launch is not None:
                    self._created.pop(launch.id, None)
            self._lookout.take(sight)

    async def _follow_ledger(self) -> None:
        async for sight in self._books.subscribe():
            seen = sight.objects if isinstance(sight, ObjectsListed) else (sight.object,)
            for each in seen:
                try:
                    self._ledger.learn(each)
                except Unavailable as error:
                    log.error("%s", error)


async def _list_pods(api: ClusterApi, job: PodJob, labels: str) -> tuple[Pod, ...]:
    page = await api.list_all(PODS, namespace=job.namespace, labels=labels)
    if not isinstance(page, Page):
        raise Unavailable(f"The pods of {job.name} cannot be listed: {page.message}")
    return tuple(_readable(item) for item in page.items)


def _listing(state: LedgerState, nodes: tuple[PlatformNode, ...]) -> NodesListed:
    next_id = max(state.next_id, *(node.id + 1 for node in nodes), 0)
    return NodesListed(nodes=nodes, master_epoch=state.epoch, next_id=PlatformId(next_id))


def _readable(item: msgspec.Raw) -> Pod:
    try:
        return decode(Pod, item)
    except msgspec.MsgspecError as error:
        return Pod.unreadable(decode(Stub, item).metadata, str(error))


def _quota_sentence(message: str) -> str:
    """The server's sentence in fewer words; the whole one if it has another form."""
    found = _QUOTA.search(message)
    if found is None:
        return message
    requested, used, limited = (_amounts(found[part]) for part in ("requested", "used", "limited"))
    parts = [
        f"{used[name]} of at most {limited[name]} {name}" for name in requested if name in used and name in limited
    ]
    return f"{', '.join(parts)} are in use (quota {found['name']})" if parts else message


def _amounts(text: str) -> dict[str, str]:
    return {name.strip(): amount for name, _, amount in (part.partition("=") for part in text.split(","))}


def _look_at(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the view of the cluster ended because of a bug", exc_info=error)
