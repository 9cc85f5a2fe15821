"""PodDisruptionBudgets: their status, and evictions that respect them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tests.kubernetes.server.answers import Json, Refused, too_many
from tests.kubernetes.server.kinds import Kind
from tests.kubernetes.server.registry import Options, Registry
from tests.kubernetes.server.routes import Routes
from tests.kubernetes.server.selectors import Test, from_object, value_at
from tests.kubernetes.server.store import ObjectKey, Record

_PODS = ("", "pods")
_BUDGETS = ("policy", "poddisruptionbudgets")


@dataclass
class _Cover:
    """The pods of one budget. A look at all pods for each write of one would take hours with 200 jobs."""

    selector: Any
    test: Test
    pods: set[ObjectKey] = field(default_factory=set)


class Budgets:
    def __init__(self, registry: Registry, routes: Routes) -> None:
        self._registry = registry
        self._routes = routes
        self._covers: dict[ObjectKey, _Cover] = {}
        registry.after.append(self.note)

    def note(self, kind: Kind, before: Record | None, after: Record | None) -> None:
        record = after or before
        if record is None:
            return
        if kind.resource == _BUDGETS:
            if after is None:
                self._covers.pop(record.key, None)
            else:
                self._write(after)
        elif kind.resource == _PODS:
            for budget in self._registry.store.every(_BUDGETS, record.key[0]):
                cover = self._cover(budget)
                was_covered = record.key in cover.pods
                cover.pods.discard(record.key)
                if after is not None and cover.test(_labels(after)):
                    cover.pods.add(record.key)
                if was_covered or record.key in cover.pods:
                    self._write(budget)

    def _cover(self, budget: Record) -> _Cover:
        selector = budget.body["spec"].get("selector")
        cover = self._covers.get(budget.key)
        if cover is None or cover.selector != selector:
            cover = _Cover(selector, (lambda labels: False) if selector is None else from_object(selector))
            pods = self._registry.store.every(_PODS, budget.key[0])
            cover.pods.update(pod.key for pod in pods if cover.test(_labels(pod)))
            self._covers[budget.key] = cover
        return cover

    def check(self, pod: Record) -> None:
        """Refuses an eviction that a budget forbids. Pods that do not run are never protected."""
        phase = pod.body.get("status", {}).get("phase")
        if phase != "Running" or "deletionTimestamp" in pod.body["metadata"]:
            return
        covering = [one for one in self._registry.store.every(_BUDGETS, pod.key[0]) if pod.key in self._cover(one).pods]
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
        found = [self._registry.store.get(_PODS, key) for key in sorted(self._cover(budget).pods)]
        pods = [one.body for one in found if one is not None]
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


def _labels(pod: Record) -> dict[str, str]:
    return pod.body["metadata"].get("labels") or {}


def _is_ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions") or []
    return any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)


def _part_of(value: int | str, whole: int) -> int:
    return math.ceil(whole * int(value.rstrip("%")) / 100) if isinstance(value, str) else value
