"""
The fields of Kubernetes objects that we read, and no others.

Unknown fields are skipped while decoding, which is where the speed comes from, and every field but the name has a
default: an object of a newer or older server still reads. Objects that we write are plain JSON elsewhere; a struct here
is never sent back, because it would lose what it has not read.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

D = TypeVar("D")


class OwnerReference(Struct, frozen=True, kw_only=True, rename="camel"):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False
    block_owner_deletion: bool = False


class Metadata(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    """When the object shall be gone: the time of the request plus the grace period."""
    deletion_grace_period_seconds: int | None = None

    @property
    def controller(self) -> OwnerReference | None:
        """The owner that answers for this object, if there is one."""
        return next((owner for owner in self.owner_references if owner.controller), None)


class ObjectCondition(Struct, frozen=True, kw_only=True, rename="camel"):
    """Kubernetes' own form of a condition, of pods, nodes and others."""

    type: str = ""
    status: str = "Unknown"
    """`True`, `False` or `Unknown`."""
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class ResourceNeeds(Struct, frozen=True):
    """Quantities as text: `500m`, `4Gi`; see `quantities`."""

    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class Container(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str = ""
    image: str = ""
    resources: ResourceNeeds = ResourceNeeds()
    restart_policy: str = ""
    """`Always` on an init container makes it a sidecar."""


class PodSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    node_name: str = ""
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    restart_policy: str = ""
    priority_class_name: str = ""
    termination_grace_period_seconds: int | None = None


class ContainerWaiting(Struct, frozen=True):
    reason: str = ""
    message: str = ""


class ContainerRunning(Struct, frozen=True, rename="camel"):
    started_at: datetime | None = None


class ContainerTerminated(Struct, frozen=True, kw_only=True, rename="camel"):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    """The tail of the termination log."""
    started_at: datetime | None = None
    finished_at: datetime | None = None


class ContainerState(Struct, frozen=True):
    """At most one of the three; none means waiting."""

    waiting: ContainerWaiting | None = None
    running: ContainerRunning | None = None
    terminated: ContainerTerminated | None = None


class ContainerStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str = ""
    ready: bool = False
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    phase: str = "Unknown"
    reason: str = ""
    message: str = ""
    conditions: tuple[ObjectCondition, ...] = ()
    host_ip: str = field(default="", name="hostIP")
    pod_ip: str = field(default="", name="podIP")
    start_time: datetime | None = None
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()


class Pod(Struct, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @classmethod
    def unreadable(cls, metadata: Metadata, error: str) -> Pod:
        """What an informer shows of a pod that does not decode: it is there, in phase `Unknown`."""
        return cls(metadata, status=PodStatus(reason="Unreadable", message=error))


class Taint(Struct, frozen=True):
    key: str = ""
    value: str = ""
    effect: str = ""


class ClusterNodeSpec(Struct, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class ClusterNodeStatus(Struct, frozen=True):
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    conditions: tuple[ObjectCondition, ...] = ()


class ClusterNode(Struct, frozen=True):
    """A machine of the cluster. Our own word "node" means a member of the job, which is a pod here."""

    metadata: Metadata
    spec: ClusterNodeSpec = ClusterNodeSpec()
    status: ClusterNodeStatus = ClusterNodeStatus()

    @property
    def is_ready(self) -> bool:
        return any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)


class ConfigMap(Struct, frozen=True):
    metadata: Metadata
    data: dict[str, str] = {}


class QuotaStatus(Struct, frozen=True):
    hard: dict[str, str] = {}
    used: dict[str, str] = {}


class ResourceQuota(Struct, frozen=True):
    metadata: Metadata
    status: QuotaStatus = QuotaStatus()


class LeaseSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    holder_identity: str = ""
    lease_duration_seconds: int = 0
    acquire_time: datetime | None = None
    renew_time: datetime | None = None
    lease_transitions: int = 0


class Lease(Struct, frozen=True):
    metadata: Metadata
    spec: LeaseSpec = LeaseSpec()


class ObjectReference(Struct, frozen=True):
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""


class ClusterEvent(Struct, frozen=True, kw_only=True, rename="camel"):
    """An Event of Kubernetes: a sentence about another object, kept for an hour."""

    metadata: Metadata
    involved_object: ObjectReference = ObjectReference()
    type: str = ""
    reason: str = ""
    message: str = ""
    count: int = 0


class StatusCause(Struct, frozen=True):
    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str = ""
    kind: str = ""
    causes: tuple[StatusCause, ...] = ()
    retry_after_seconds: int = 0


class ErrorStatus(Struct, frozen=True):
    """The body of an answer that is no success, and of an ERROR event."""

    message: str = ""
    reason: str = ""
    code: int = 0
    details: StatusDetails | None = None


class ListMetadata(Struct, frozen=True, rename="camel"):
    resource_version: str
    next_page: str = field(default="", name="continue")


class ObjectList(Struct, frozen=True):
    """
    Items stay undecoded: one odd object must not spoil the list.

    Both fields are required, so that JSON of another kind is never read as an empty list. Go writes null for no items.
    """

    metadata: ListMetadata
    items: tuple[msgspec.Raw, ...] | None


class Stub(Struct, frozen=True):
    """What every object has, for those whose rest does not decode."""

    metadata: Metadata


def decode(kind: type[D], body: bytes | msgspec.Raw) -> D:
    """Raises `msgspec.DecodeError` (a `ValidationError` names the field that does not fit) or `UnicodeDecodeError`."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    read: D = decoder.decode(body)
    return read


_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}
