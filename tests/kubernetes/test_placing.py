"""Where the scheduler of the tests puts a pod, and what it says where it cannot."""

from __future__ import annotations

import pytest

from tests.kubernetes.controllers.placing import NoRoom, Placed, place, tolerance
from tests.kubernetes.kubelet.client import Body


def node(name: str, cpu: str = "4", **spec: object) -> Body:
    labels = {"kubernetes.io/hostname": name, "zone": name[0]}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": {"allocatable": {"cpu": cpu, "pods": "3"}},
    }


def pod(cpu: str = "1", phase: str = "Pending", **spec: object) -> Body:
    containers = [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]
    return {"metadata": {"name": "p"}, "spec": {"containers": containers, **spec}, "status": {"phase": phase}}


def test_the_emptier_node_takes_the_pod() -> None:
    assert place(pod(), [node("a"), node("b")], [pod(nodeName="a")]) == Placed("b")


def test_pods_that_have_ended_take_no_room() -> None:
    assert place(pod("4"), [node("a")], [pod("4", "Succeeded", nodeName="a")]) == Placed("a")
    assert place(pod("4"), [node("a")], [pod("4", "Running", nodeName="a")]) == NoRoom(
        "0/1 nodes are available: 1 Insufficient cpu."
    )


def test_a_node_has_a_number_of_pods() -> None:
    bound = [pod("0", nodeName="a") for _ in range(3)]
    assert place(pod("0"), [node("a")], bound) == NoRoom("0/1 nodes are available: 1 Too many pods.")


@pytest.mark.parametrize(
    ("operator", "values", "expected"), [("NotIn", ["a"], "b"), ("In", ["a"], "a"), ("NotIn", ["a", "b"], None)]
)
def test_affinity_names_nodes(operator: str, values: list[str], expected: str | None) -> None:
    fields = [{"key": "metadata.name", "operator": operator, "values": values}]
    terms = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": fields}]}}
    placed = place(pod(affinity={"nodeAffinity": terms}), [node("a"), node("b")], [])
    told = NoRoom("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.")
    assert placed == (Placed(expected) if expected else told)


def test_terms_of_an_affinity_are_alternatives() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("x", "b")]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    assert place(pod(affinity=affinity), [node("a"), node("b")], []) == Placed("b")


def test_a_taint_keeps_pods_away_that_do_not_tolerate_it() -> None:
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    tainted = node("a", taints=[taint])
    assert place(pod(), [tainted], []) == NoRoom("0/1 nodes are available: 1 node(s) had untolerated taint {gpu: yes}.")
    assert place(pod(tolerations=[{"key": "gpu", "operator": "Exists"}]), [tainted], []) == Placed("a")
    assert place(pod(tolerations=[{"key": "gpu", "value": "no"}]), [tainted], []) != Placed("a")


def test_a_cordoned_node_takes_nothing() -> None:
    assert place(pod(), [node("a", unschedulable=True)], []) == NoRoom(
        "0/1 nodes are available: 1 node(s) were unschedulable."
    )


@pytest.mark.parametrize(
    ("tolerations", "seconds"),
    [
        ([], 0.0),
        ([{"operator": "Exists"}], None),
        ([{"key": "lost", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}], 30.0),
        ([{"key": "other", "operator": "Exists", "tolerationSeconds": 30}], 0.0),
    ],
)
def test_a_pod_bears_a_taint_as_long_as_it_says(tolerations: list[Body], seconds: float | None) -> None:
    assert tolerance(pod(tolerations=tolerations), {"key": "lost", "effect": "NoExecute"}) == seconds
