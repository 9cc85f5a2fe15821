"""PodDisruptionBudgets: their status, and evictions that respect them."""

from __future__ import annotations

import math

from tests.kubernetes.server.answers import Json, Refused, too_many
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.registry import Options, Registry
from tests.kubernetes.server.routes import Routes
from tests.kubernetes.server.selectors import from_object, value_at
from tests.kubernetes.server.store import Record

_PODS = ("", "pods")
_BUDGETS = ("policy", "poddisruptionbudgets")


class Budgets:
    def __init__(self, registry: Registry, routes: Routes) -> None:
        self._registry = registry
        self._routes = routes
        registry.after.append(self.note)

    def note(self, kind: Kind, before: Record | None, after: Record | None) -> None:
        record = after or before
        if record is not None and kind.resource in (_PODS, _BUDGETS):
            for budget in self._registry.store.every(_BUDGETS, record.key[0]):
                self._write(budget)

    def check(self, pod: Record) -> None:
        """Refuses an eviction that a budget forbids. Pods that do not run are never protected."""
        phase = pod.body.get("status", {}).get("phase")
        if phase != "Running" or "deletionTimestamp" in pod.body["metadata"]:
            return
        covering = [one for one in self._registry.store.every(_BUDGETS, pod.key[0]) if _covers(one.body, pod.body)]
        if len(covering) > 1:
            message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
            raise Refused(500, "", message)
        if not covering:
            return
        status = covering[0].body["status"]
        if not _is_ready(pod.body) and status["currentHealthy"] >= status["desiredHealthy"] > 0:
            return
        if status["disruptionsAllowed"] < 1:
            name = covering[0].body["metadata"]["name"]
            refused = too_many("Cannot evict pod as it would violate the pod's disruption budget.", 0)
            needs = f"The disruption budget {name} needs {status['desiredHealthy']} healthy pods and has {status['currentHealthy']} currently"
            refused.body["details"] = {"causes": [{"reason": "DisruptionBudget", "message": needs}]}
            raise refused

    def _write(self, budget: Record) -> None:
        pods = [one.body for one in self._registry.store.every(_PODS, budget.key[0]) if _covers(budget.body, one.body)]
        pods = [one for one in pods if one.get("status", {}).get("phase") not in ("Failed", "Succeeded")]
        healthy = sum(1 for one in pods if _is_ready(one) and "deletionTimestamp" not in one["metadata"])
        spec = budget.body["spec"]
        expected = len(pods)
        if "maxUnavailable" in spec:
            expected = self._wanted(pods)
            desired = max(0, expected - _part_of(spec["maxUnavailable"], expected))
        else:
            desired = _part_of(spec.get("minAvailable", 1), expected)
        allowed = max(0, healthy - desired)
        status = {
            "observedGeneration": budget.body["metadata"]["generation"],
            "expectedPods": expected,
            "desiredHealthy": desired,
            "currentHealthy": healthy,
            "disruptionsAllowed": allowed if expected else 0,
        }
        if budget.body.get("status") != status:
            kind = self._routes.named(*_BUDGETS)
            assert kind is not None, "budgets are built in"
            options = Options(manager="control-plane", subresource="status")
            self._registry.change(kind, budget.key, lambda body: {**body, "status": status}, options)

    def _wanted(self, pods: list[Json]) -> int:
        """The replicas that the pods' controllers want, through their scale sub-resource."""
        wanted: dict[str, int] = {}
        for pod in pods:
            reference = next(
                (one for one in pod["metadata"].get("ownerReferences") or [] if one.get("controller")), None
            )
            kind = self._routes.of_object(reference["apiVersion"], reference["kind"]) if reference else None
            if reference is None or kind is None or kind.scale is None:
                continue
            owner = self._registry.store.get(kind.resource, (pod["metadata"]["namespace"], reference["name"]))
            if owner is not None:
                wanted[reference["uid"]] = value_at(owner.body, kind.scale["specReplicasPath"]) or 0
        return sum(wanted.values())


def _covers(budget: Json, pod: Json) -> bool:
    selector = budget["spec"].get("selector")
    return selector is not None and from_object(selector)(pod["metadata"].get("labels") or {})


def _is_ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def _part_of(value: int | str, whole: int) -> int:
    return math.ceil(whole * int(value.rstrip("%")) / 100) if isinstance(value, str) else value
