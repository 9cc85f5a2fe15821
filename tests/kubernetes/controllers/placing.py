"""
Where a pod goes: selectors, taints, affinity, capacity. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.kubelet.environment import parse_quantity
from tests.kubernetes.kubelet.host import requests_of


class Placed(Struct, frozen=True):
    node: str


class NoRoom(Struct, frozen=True):
    """In the scheduler's words."""

    message: str


def place(pod: Body, nodes: Sequence[Body], bound: Sequence[Body]) -> Placed | NoRoom:
    """The node with the fewest pods among those that fit."""
    reasons: Counter[str] = Counter()
    fitting: list[tuple[int, str]] = []
    for node in nodes:
        name = node["metadata"]["name"]
        here = [other for other in bound if other["spec"].get("nodeName") == name and not _is_over(other)]
        lacks = _lacks(pod, node, here)
        if lacks:
            reasons.update(lacks)
        else:
            fitting.append((len(here), name))
    if fitting:
        return Placed(min(fitting)[1])
    if not nodes:
        return NoRoom("no nodes available to schedule pods")
    told = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
    return NoRoom(f"0/{len(nodes)} nodes are available: {told}.")


def _lacks(pod: Body, node: Body, here: Sequence[Body]) -> list[str]:
    """Why the node cannot take the pod; the first kind of reason that applies, as the scheduler's filters do."""
    spec = node.get("spec") or {}
    if spec.get("unschedulable") and not _tolerates(pod, _UNSCHEDULABLE):
        return ["node(s) were unschedulable"]
    for taint in spec.get("taints") or ():
        if taint["effect"] in ("NoSchedule", "NoExecute") and not _tolerates(pod, taint):
            return [f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"]
    if not _is_selected(pod, node):
        return ["node(s) didn't match Pod's node affinity/selector"]
    used: Counter[str] = Counter()
    for other in here:
        used.update(requests_of(other))
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    lacks = []
    for key, amount in requests_of(pod).items():
        room = parse_quantity(allocatable.get(key, "0")) - used[key]
        if key != "ephemeral-storage" and amount > room + 1e-9:
            lacks.append("Too many pods" if key == "pods" else f"Insufficient {key}")
    return lacks


_UNSCHEDULABLE: Body = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}


def tolerance(pod: Body, taint: Body) -> float | None:
    """Seconds that the pod bears the taint; None: for ever; 0: not at all."""
    seconds: list[float | None] = []
    for toleration in pod["spec"].get("tolerations") or ():
        if _fits(toleration, taint):
            limit = toleration.get("tolerationSeconds")
            seconds.append(None if limit is None else max(0.0, float(limit)))
    if not seconds:
        return 0.0
    limits = [limit for limit in seconds if limit is not None]
    return min(limits) if limits else None


def _tolerates(pod: Body, taint: Body) -> bool:
    return any(_fits(toleration, taint) for toleration in pod["spec"].get("tolerations") or ())


def _fits(toleration: Body, taint: Body) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    return toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")


def _is_selected(pod: Body, node: Body) -> bool:
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
        return False
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not affinity:
        return True
    return any(_holds(term, node) for term in affinity.get("nodeSelectorTerms") or ())


def _holds(term: Body, node: Body) -> bool:
    """All requirements of one term; terms are alternatives."""
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    wanted = [(labels, each) for each in term.get("matchExpressions") or ()]
    wanted += [(fields, each) for each in term.get("matchFields") or ()]
    return bool(wanted) and all(_matches(values, each) for values, each in wanted)


def _matches(values: Body, requirement: Body) -> bool:
    value = values.get(requirement["key"])
    match requirement["operator"]:
        case "In":
            return value in requirement["values"]
        case "NotIn":
            return value not in requirement["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"this scheduler does not know the operator {requirement['operator']!r}")


def _is_over(pod: Body) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
