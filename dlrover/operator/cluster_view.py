"""
What the operator sees of a cluster: the copies of its informers, and the answers to its own writes.

An informer is some milliseconds behind. Without the answers the operator would decide once more from the state before
its own write. The newer version of an object wins, whichever way it came.

An answer can also be the last thing that is heard of an object: it is deleted, and the event overtakes the answer. So
an answer that no informer confirms counts for some seconds only. After that the operator asks the API server again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from dlrover.operator.actions import ObjectKind
from dlrover.operator.observations import JobObjects
from dlrover.operator.owned import ALLOWED_ACCOUNT, GROUP_KINDS, kind_of, owned_objects
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.api import (
    CLAIMS,
    CONFIG_MAPS,
    DISRUPTION_BUDGETS,
    ELASTIC_JOBS,
    NETWORK_POLICIES,
    NODES,
    PODS,
    ROLE_BINDINGS,
    SCALE_PLANS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    ApiResource,
    ClusterApi,
)
from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.informer import Informer, InformerTiming, ObjectDeleted, ObjectsListed
from dlrover.platforms.kubernetes.job.gangs import groups_of
from dlrover.platforms.kubernetes.objects import ClusterNode, Metadata, Pod, Stub
from dlrover.platforms.kubernetes.orders.outgoing import is_open_for
from dlrover.platforms.kubernetes.scale_plan import PlanObject

RESOURCES: dict[ObjectKind, ApiResource] = {
    ObjectKind.ELASTIC_JOB: ELASTIC_JOBS,
    ObjectKind.POD: PODS,
    ObjectKind.SERVICE: SERVICES,
    ObjectKind.SECRET: SECRETS,
    ObjectKind.CONFIG_MAP: CONFIG_MAPS,
    ObjectKind.SERVICE_ACCOUNT: SERVICE_ACCOUNTS,
    ObjectKind.ROLE: ApiResource(ROLE_BINDINGS.group, ROLE_BINDINGS.version, "roles", "Role"),
    ObjectKind.ROLE_BINDING: ROLE_BINDINGS,
    ObjectKind.CLAIM: CLAIMS,
    ObjectKind.DISRUPTION_BUDGET: DISRUPTION_BUDGETS,
    ObjectKind.NETWORK_POLICY: NETWORK_POLICIES,
    ObjectKind.SCALE_PLAN: SCALE_PLANS,
    **{kind: groups_of(scheduler) for scheduler, kind in GROUP_KINDS.items()},
}
OPTIONAL = frozenset(GROUP_KINDS.values())
"""Kinds that a cluster need not have."""
JobKey = tuple[str, str]
"""Namespace and name."""
Seen = ElasticJob | Pod | Stub | PlanObject
T = TypeVar("T", ElasticJob, Pod, Stub)

UNCONFIRMED = 10.0
"""Seconds that the answer to a create counts while no informer shows the object."""

_OURS = f"{names.APP_NAME}={names.APP_ELASTIC_JOB}"
_SELECTORS = {
    ObjectKind.ELASTIC_JOB: "",
    ObjectKind.POD: names.JOB_UID,
    ObjectKind.SERVICE_ACCOUNT: ALLOWED_ACCOUNT,
    ObjectKind.SCALE_PLAN: names.SCALE_TYPE,
}

_STRUCTS: dict[ObjectKind, Any] = {ObjectKind.SCALE_PLAN: PlanObject}
"""Of the others, those of which more than the metadata is read."""


class PodsByJob(dict[str, Pod]):
    """The informer's copy of the pods. It finds those of one job without a look at all the others."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, set[str]] = {}

    def of(self, job_uid: str) -> set[str]:
        """Their keys."""
        return set(self._keys.get(job_uid, ()))

    def __setitem__(self, key: str, pod: Pod) -> None:
        self._forget(key)
        super().__setitem__(key, pod)
        self._keys.setdefault(pod.metadata.labels.get(names.JOB_UID, ""), set()).add(key)

    def pop(self, key: str, default: Pod | None = None) -> Pod | None:  # type: ignore[override]
        self._forget(key)
        return super().pop(key, default)

    def clear(self) -> None:
        self._keys.clear()
        super().clear()

    def update(self, pods: Mapping[str, Pod]) -> None:  # type: ignore[override]
        for key, pod in pods.items():
            self[key] = pod

    def _forget(self, key: str) -> None:
        known = self.get(key)
        if known is None:
            return
        uid = known.metadata.labels.get(names.JOB_UID, "")
        keys = self._keys.get(uid, set())
        keys.discard(key)
        if not keys:
            self._keys.pop(uid, None)


class ClusterView:
    def __init__(
        self,
        api: ClusterApi,
        *,
        namespace: str | None,
        sees_machines: bool,
        absent: frozenset[ObjectKind] = OPTIONAL,
        timing: InformerTiming | None = None,
    ) -> None:
        """
        `namespace` None: of all namespaces. `sees_machines` False: the operator has no right to list nodes. `absent`: kinds
        that this cluster has not.
        """
        options: dict[str, Any] = {"namespace": namespace} | ({"timing": timing} if timing else {})
        self._namespace = namespace
        self.jobs = Informer(api, ELASTIC_JOBS, ElasticJob, **options)
        self.pods = Informer(api, PODS, Pod, labels=_SELECTORS[ObjectKind.POD], unreadable=Pod.unreadable, **options)
        self._pods_by_job = self.pods.cache = PodsByJob()
        self.others: dict[ObjectKind, Informer[Any]] = {
            kind: Informer(api, resource, _STRUCTS.get(kind, Stub), labels=_SELECTORS.get(kind, _OURS), **options)
            for kind, resource in RESOURCES.items()
            if kind not in (ObjectKind.ELASTIC_JOB, ObjectKind.POD, *absent)
        }
        self.machines: Informer[ClusterNode] | None = None
        if sees_machines:
            self.machines = Informer(api, NODES, ClusterNode, **{**options, "namespace": None})
        self._answers: dict[tuple[ObjectKind, str], tuple[Seen, float]] = {}
        """What our writes answered and when, by kind and key, while it is newer than the informer's copy."""
        self._gone: set[str] = set()
        """Uids of objects that the API server says are gone, while the informer still shows them."""
        self._missing_since: dict[str, float] = {}
        """Machines that pods name and that do not exist, and since when we know."""
        self._ended_plans: set[str] = set()
        """Uids of plans that we have ended, while the informer still shows them as open."""
        self._cordoned: set[tuple[str, str]] = set()
        """Machine and job's uid of marks that the informer does not show yet."""

    @property
    def informers(self) -> tuple[Informer[Any], ...]:
        machines = (self.machines,) if self.machines is not None else ()
        return (self.jobs, self.pods, *self.others.values(), *machines)

    async def changes(self, informer: Informer[Any]) -> AsyncIterator[set[JobKey]]:
        """The jobs that a change of one informer is about. Every job after a full list."""
        async for sight in informer.subscribe():
            if isinstance(sight, ObjectsListed):
                yield set(self.job_keys())
                continue
            if isinstance(sight, ObjectDeleted):
                self._drop(sight.object.metadata.uid)
                self._ended_plans.discard(sight.object.metadata.uid)
            yield set(self._jobs_of(sight.object))

    def job_keys(self) -> Iterator[JobKey]:
        for job in self.jobs.cache.values():
            yield job.metadata.namespace, job.metadata.name

    def job(self, key: JobKey) -> ElasticJob | None:
        cached = self.jobs.cache.get(self._key(*key))
        return None if cached is None else self._newest(ObjectKind.ELASTIC_JOB, self._key(*key), cached)

    def objects(self, job: ElasticJob, now: float) -> JobObjects:
        """Without the results of checks and failures, which the runner adds."""
        namespace = job.metadata.namespace
        others: dict[tuple[ObjectKind, str], Metadata] = {}
        for wanted in owned_objects(job):
            kind, key = kind_of(wanted), self._key(namespace, wanted.name)
            if kind not in self.others:
                continue  # a job that asks for it is not valid
            if found := self._newest(kind, key, self.others[kind].cache.get(key)):
                others[kind, wanted.name] = found.metadata
        pods = tuple(self._pods_of(job))
        machines = {pod.spec.node_name for pod in pods if pod.spec.node_name}
        return JobObjects(
            pods=pods,
            others=others,
            not_ready=dict(self._not_ready(machines, now)),
            plans=tuple(self._orphans(job)),
            open_plans=tuple(self._open_plans(job)),
            uncordoned=frozenset(self._uncordoned(machines, job.metadata.uid)),
            allowed_accounts=frozenset(
                account.metadata.name
                for account in self.others[ObjectKind.SERVICE_ACCOUNT].cache.values()
                if account.metadata.namespace == namespace and account.metadata.labels.get(ALLOWED_ACCOUNT) == "allowed"
            ),
        )

    def note(self, kind: ObjectKind, seen: Seen) -> None:
        """The API server answered one of our writes with this object."""
        self._answers[kind, self._key(seen.metadata.namespace, seen.metadata.name)] = seen, time.monotonic()

    def note_gone(self, uid: str) -> None:
        """The API server said that there is no object with this uid."""
        self._gone.add(uid)

    def _orphans(self, job: ElasticJob) -> Iterator[Metadata]:
        for key, cached in self.others[ObjectKind.SCALE_PLAN].cache.items():
            metadata = cached.metadata
            if metadata.namespace == job.metadata.namespace and _planned_job(metadata) == job.metadata.name:
                newest = self._newest(ObjectKind.SCALE_PLAN, key, cached)
                if newest is not None and not newest.metadata.owner_references:
                    yield newest.metadata

    def _open_plans(self, job: ElasticJob) -> Iterator[PlanObject]:
        cached = self.others[ObjectKind.SCALE_PLAN].cache.values()
        plans = [plan for plan in cached if isinstance(plan, PlanObject) and is_open_for(plan, job.metadata.uid)]
        for plan in sorted(plans, key=_version):
            if plan.metadata.uid not in self._ended_plans:
                yield plan

    def note_ended_plan(self, uid: str) -> None:
        self._ended_plans.add(uid)

    def note_cordoned(self, machine: str, job_uid: str) -> None:
        self._cordoned.add((machine, job_uid))

    def _uncordoned(self, machines: set[str], job_uid: str) -> Iterator[str]:
        for name in machines:
            machine = self.machines.cache.get(name) if self.machines is not None else None
            if machine is None or machine.metadata.annotations.get(names.CORDONED_FOR) == job_uid:
                self._cordoned.discard((name, job_uid))
            elif (name, job_uid) not in self._cordoned:
                yield name

    def _drop(self, uid: str) -> None:
        self._gone.discard(uid)
        for key in [key for key, (seen, _) in self._answers.items() if seen.metadata.uid == uid]:
            del self._answers[key]

    def _pods_of(self, job: ElasticJob) -> Iterator[Pod]:
        uid = job.metadata.uid
        keys = self._pods_by_job.of(uid)
        keys |= {
            key
            for (kind, key), (seen, _) in self._answers.items()
            if kind is ObjectKind.POD and seen.metadata.labels.get(names.JOB_UID) == uid
        }
        for key in sorted(keys):
            pod = self._newest(ObjectKind.POD, key, self.pods.cache.get(key))
            if pod is not None and pod.metadata.labels.get(names.JOB_UID) == uid:
                yield pod

    def _newest(self, kind: ObjectKind, key: str, cached: T | None) -> T | None:
        answer, noted_at = self._answers.get((kind, key), (None, 0.0))
        if answer is not None and (
            _version(cached) >= _version(answer) if cached is not None else time.monotonic() > noted_at + UNCONFIRMED
        ):
            del self._answers[kind, key]
            answer = None
        newest = cached if answer is None else answer
        if newest is None or newest.metadata.uid in self._gone:
            return None
        return newest  # type: ignore[return-value]  # the kind decides the class

    def _jobs_of(self, seen: Seen | ClusterNode) -> Iterable[JobKey]:
        if isinstance(seen, ElasticJob):
            return ((seen.metadata.namespace, seen.metadata.name),)
        if isinstance(seen, ClusterNode):
            on_it = (pod for pod in self.pods.cache.values() if pod.spec.node_name == seen.metadata.name)
            return (_job_key(pod) for pod in on_it)
        if names.JOB_NAME in seen.metadata.labels:
            return (_job_key(seen),)
        if names.OLD_JOB_NAME in seen.metadata.labels:
            return ((seen.metadata.namespace, seen.metadata.labels[names.OLD_JOB_NAME]),)
        return (key for key in self.job_keys() if key[0] == seen.metadata.namespace)  # an account that a job may name

    def _not_ready(self, machines: set[str], now: float) -> Iterator[tuple[str, float]]:
        if self.machines is None:
            return
        for name in machines:
            machine = self.machines.cache.get(name)
            if machine is None:
                yield name, self._missing_since.setdefault(name, now)
                continue
            self._missing_since.pop(name, None)
            if not machine.is_ready:
                yield name, _not_ready_since(machine, now)

    def _key(self, namespace: str, name: str) -> str:
        return name if self._namespace is not None else f"{namespace}/{name}"


def _job_key(seen: Seen) -> JobKey:
    return seen.metadata.namespace, seen.metadata.labels.get(names.JOB_NAME, "")


def _planned_job(plan: Metadata) -> str:
    return plan.labels.get(names.JOB_NAME) or plan.labels.get(names.OLD_JOB_NAME, "")


def _version(seen: Seen) -> int:
    text = seen.metadata.resource_version
    return int(text) if text.isascii() and text.isdigit() else 0


def _not_ready_since(machine: ClusterNode, now: float) -> float:
    for condition in machine.status.conditions:
        if condition.type == "Ready" and condition.last_transition_time is not None:
            return min(now, condition.last_transition_time.timestamp())
    return now
