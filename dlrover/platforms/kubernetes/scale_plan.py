"""
The `ScalePlan` of a cluster: one change of a job's size, written by a person or by a master of mode `k8s`.

Same fields as the original's, so that its published plans still work. `deploy/crds/scaleplans.yaml` states the same.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from dlrover.platforms.kubernetes.objects import Metadata

Quantities = dict[str, str | int]
"""Resource name to quantity: `{"cpu": 4, "memory": "8Gi"}`."""


class PlanPhase(enum.StrEnum):
    CREATED = "Created"
    PENDING = "Pending"
    SCALING = "Scaling"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class PlannedReplicas(Struct, frozen=True, kw_only=True, rename="camel"):
    replicas: int | None = None
    """Absolute. None: as it is; 0 removes all."""
    resource: Quantities = {}
    """For nodes that are made later. Names that are absent stay as they are."""


class PlannedPod(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str = ""
    id: int | None = None
    type: str = ""
    rank_index: int | None = None
    service: str = ""
    resource: Quantities = {}


class ScalePlanSpec(Struct, frozen=True, kw_only=True, rename="camel"):
    owner_job: str = ""
    replica_resource_specs: dict[str, PlannedReplicas] = {}
    create_pods: tuple[PlannedPod, ...] = ()
    remove_pods: tuple[PlannedPod, ...] = ()
    migrate_pods: tuple[PlannedPod, ...] = ()
    ps_hosts: tuple[str, ...] = ()
    """Addresses of the parameter servers in rank order."""


class PlanResult(Struct, frozen=True, kw_only=True, rename="camel"):
    """Of a plan of a master: what the API server refused."""

    name: str
    """Of the pod."""
    reason: str = ""
    message: str = ""


class ScalePlanStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    phase: str = ""
    """A `PlanPhase`; empty: no master has seen the plan."""
    message: str = ""
    create_time: str = ""
    finish_time: str = ""
    results: tuple[PlanResult, ...] = ()
    """Pods that were refused; the others were created or deleted as the plan says."""


class PlanObject(Struct, frozen=True, kw_only=True, rename="camel"):
    """A `ScalePlan` of the cluster. In the core a scale plan is another thing."""

    metadata: Metadata
    spec: ScalePlanSpec = ScalePlanSpec()
    status: ScalePlanStatus = ScalePlanStatus()
