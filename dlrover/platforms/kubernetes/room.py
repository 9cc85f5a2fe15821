"""
How many more pods of one size a cluster can take: what quotas leave, and what machines leave.

Quotas are read with a right that every master has. Machines need the rights to list nodes and all pods, which are off by
default; without them the answer is "unknown", unless a quota already says that there is no room. A job that waits in a
queue of Kueue has no room of its own: the queue admits it.

The scheduler decides in the end. This is an estimate: selectors, taints, names in affinities and requests are looked
at, spread and pod affinities are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import cast

import msgspec
from msgspec import Struct, field

from dlrover.platforms.base import NodeRoom, check_size
from dlrover.platforms.kubernetes.answers import NODES, PODS, RESOURCE_QUOTAS, ApiResource, Page
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.elastic_job import JsonObject
from dlrover.platforms.kubernetes.objects import (
    ClusterNode,
    Metadata,
    Pod,
    QuotaStatus,
    ResourceNeeds,
    Taint,
    decode,
)
from dlrover.platforms.kubernetes.pods import PodJob, pod_of
from dlrover.platforms.kubernetes.quantities import quantity
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.fleet import LaunchNode, NodeType, Resource
from dlrover.protocol.messages.identity import PlatformId

_PODS = "pods"


class QuotaScopes(Struct, frozen=True, rename="camel"):
    scopes: tuple[str, ...] = ()
    scope_selector: JsonObject | None = None


class ScopedQuota(Struct, frozen=True):
    metadata: Metadata
    spec: QuotaScopes = QuotaScopes()
    status: QuotaStatus = QuotaStatus()


class _Toleration(Struct, frozen=True):
    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class _Requirement(Struct, frozen=True):
    key: str = ""
    operator: str = ""
    values: tuple[str, ...] = ()


class _Term(Struct, frozen=True, rename="camel"):
    match_expressions: tuple[_Requirement, ...] = ()
    match_fields: tuple[_Requirement, ...] = ()


class _Terms(Struct, frozen=True, rename="camel"):
    node_selector_terms: tuple[_Term, ...] = ()


class _NodeAffinity(Struct, frozen=True):
    required: _Terms | None = field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class _Affinity(Struct, frozen=True, rename="camel"):
    node_affinity: _NodeAffinity | None = None


class _WrittenNeeds(Struct, frozen=True):
    """As people write them: a quantity may be a number."""

    requests: JsonObject = {}
    limits: JsonObject = {}


class _Needs(Struct, frozen=True):
    resources: _WrittenNeeds = _WrittenNeeds()


class _PlacedSpec(Struct, frozen=True, rename="camel"):
    """What decides where a pod may run."""

    node_selector: dict[str, str] = {}
    tolerations: tuple[_Toleration, ...] = ()
    affinity: _Affinity | None = None
    containers: tuple[_Needs, ...] = ()


class WantedPod(Struct, frozen=True):
    spec: _PlacedSpec


async def find_room(api: ClusterApi, job: PodJob, resource: Resource) -> NodeRoom:
    """Raises `Unavailable`, and `Rejected` for a size that makes no sense."""
    check_size(resource, "a question for room")
    wanted = _wanted(job, resource)
    if wanted is None:
        return NodeRoom(None, "the job has no template for workers")
    if job.queue:
        return NodeRoom(None, f"the queue {job.queue} admits the job's pods")
    quotas = await _all(api, RESOURCE_QUOTAS, job.namespace)
    by_quota = NodeRoom(None) if quotas is None else quota_room(wanted, [decode(ScopedQuota, each) for each in quotas])
    if by_quota.free == 0:
        return by_quota
    nodes = await _all(api, NODES, None)
    pods = None if nodes is None else await _all(api, PODS, None)
    if nodes is None or pods is None:
        left = "" if by_quota.free is None else f"quotas leave room for {by_quota.free}, and "
        return NodeRoom(None, f"{left}the master may not list nodes and pods of the cluster")
    by_machines = machine_room(
        wanted, [decode(ClusterNode, each) for each in nodes], [decode(Pod, each) for each in pods]
    )
    rooms = [room for room in (by_quota, by_machines) if room.free is not None]
    return min(rooms, key=lambda room: cast(int, room.free))


def quota_room(wanted: WantedPod, quotas: Iterable[ScopedQuota]) -> NodeRoom:
    """What quotas leave. Those that hold for some pods only (scopes) are left out: which ones is the server's business."""
    needs = _quota_needs(wanted)
    tightest = NodeRoom(None, "no quota limits the job's pods")
    for quota in quotas:
        if quota.spec.scopes or quota.spec.scope_selector:
            continue
        for name, limit in quota.status.hard.items():
            each = needs.get(name, 0.0)
            if not each:
                continue
            used = quota.status.used.get(name, "0")
            free = math.floor((quantity(limit) - quantity(used)) / each)
            if tightest.free is None or free < tightest.free:
                tightest = NodeRoom(free, f"{used} of at most {limit} {name} are in use (quota {quota.metadata.name})")
    return tightest


def machine_room(wanted: WantedPod, nodes: Iterable[ClusterNode], pods: Iterable[Pod]) -> NodeRoom:
    """What machines leave to such a pod: each machine is filled on its own, because a pod cannot be cut in two."""
    taken: dict[str, dict[str, float]] = {}
    for pod in pods:
        if pod.spec.node_name and pod.status.phase not in ("Succeeded", "Failed"):
            on_machine = taken.setdefault(pod.spec.node_name, {})
            for name, amount in _requests(container.resources for container in pod.spec.containers).items():
                on_machine[name] = on_machine.get(name, 0.0) + amount
    each = _requests(container.resources for container in wanted.spec.containers)
    total, fitting = 0, 0
    for node in nodes:
        if not _accepts(node, wanted.spec):
            continue
        fitting += 1
        used = taken.get(node.metadata.name, {})
        left = (
            (quantity(node.status.allocatable.get(name, "0")) - used.get(name, 0.0)) // amount
            for name, amount in each.items()
            if amount
        )
        total += int(max(0.0, min(left, default=0.0)))
    return NodeRoom(total, f"{fitting} machines that accept such pods have room for {total} more")


def _requests(needs: Iterable[ResourceNeeds | _WrittenNeeds]) -> dict[str, float]:
    """Of one pod, which takes one place among the pods of a machine."""
    total = {_PODS: 1.0}
    for each in needs:
        for name, amount in (dict[str, object](each.limits) | dict[str, object](each.requests)).items():
            total[name] = total.get(name, 0.0) + quantity(amount)
    return total


def _quota_needs(wanted: WantedPod) -> dict[str, float]:
    """By the names that quotas use."""
    requests = _requests(container.resources for container in wanted.spec.containers)
    needs: dict[str, float] = {_PODS: 1.0, "count/pods": 1.0}
    for name, amount in requests.items():
        if name != _PODS:
            needs[name] = needs[f"requests.{name}"] = amount
    for container in wanted.spec.containers:
        for name, limit in container.resources.limits.items():
            needs[f"limits.{name}"] = needs.get(f"limits.{name}", 0.0) + quantity(limit)
    return needs


def _accepts(node: ClusterNode, spec: _PlacedSpec) -> bool:
    if not node.is_ready or node.spec.unschedulable:
        return False
    if any(_repels(taint, spec.tolerations) for taint in node.spec.taints):
        return False
    labels = node.metadata.labels
    if any(labels.get(key) != value for key, value in spec.node_selector.items()):
        return False
    affinity = spec.affinity.node_affinity if spec.affinity is not None else None
    if affinity is None or affinity.required is None:
        return True
    fields = {"metadata.name": node.metadata.name}
    return any(
        all(_meets(each, labels) for each in term.match_expressions)
        and all(_meets(each, fields) for each in term.match_fields)
        for term in affinity.required.node_selector_terms
    )


def _repels(taint: Taint, tolerations: Iterable[_Toleration]) -> bool:
    if taint.effect not in ("NoSchedule", "NoExecute"):
        return False
    return not any(
        (not each.key or each.key == taint.key)
        and (not each.effect or each.effect == taint.effect)
        and (each.operator == "Exists" or (bool(each.key) and each.value == taint.value))
        for each in tolerations
    )


def _meets(requirement: _Requirement, values: Mapping[str, str]) -> bool:
    found = values.get(requirement.key)
    match requirement.operator:
        case "In":
            return found in requirement.values
        case "NotIn":
            return found not in requirement.values
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case "Gt" | "Lt" if found is not None and found.isdecimal() and requirement.values:
            wanted = int(requirement.values[0])
            return int(found) > wanted if requirement.operator == "Gt" else int(found) < wanted
        case _:
            return False


def _wanted(job: PodJob, resource: Resource) -> WantedPod | None:
    """None: the job has no template to judge by."""
    node_type = NodeType.WORKER if NodeType.WORKER in job.types else next(iter(job.types), NodeType.WORKER)
    launch = LaunchNode(id=PlatformId(0), node_type=node_type, rank=0, name="room", resource=resource)
    try:
        return msgspec.convert(pod_of(launch, job), WantedPod)
    except (Rejected, ConfigError, msgspec.ValidationError):
        return None


async def _all(api: ClusterApi, resource: ApiResource, namespace: str | None) -> tuple[bytes, ...] | None:
    """None: we may not list them."""
    page = await api.list_all(resource, namespace=namespace)
    return tuple(bytes(item) for item in page.items) if isinstance(page, Page) else None
