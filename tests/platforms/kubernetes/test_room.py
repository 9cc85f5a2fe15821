"""What quotas and machines leave to one more pod."""

from __future__ import annotations

import msgspec
import pytest

from dlrover.platforms.kubernetes.objects import ClusterNode, Pod, decode
from dlrover.platforms.kubernetes.room import ScopedQuota, WantedPod, machine_room, quota_room


def wanted(**spec: object) -> WantedPod:
    containers = [{"resources": {"requests": {"cpu": 2, "memory": "4Gi"}, "limits": {"nvidia.com/gpu": "1"}}}, {}]
    return msgspec.convert({"spec": {"containers": containers, **spec}}, WantedPod)


def quota(hard: dict[str, str], used: dict[str, str], **spec: object) -> ScopedQuota:
    body = {"metadata": {"name": "q"}, "spec": spec, "status": {"hard": hard, "used": used}}
    return decode(ScopedQuota, msgspec.json.encode(body))


def machine(name: str = "m", *, ready: str = "True", labels=None, **spec: object) -> ClusterNode:
    body = {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "16", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": "8"},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }
    return decode(ClusterNode, msgspec.json.encode(body))


def running(host: str, *, phase: str = "Running", **requests: str) -> Pod:
    body = {
        "metadata": {"name": "p"},
        "spec": {"nodeName": host, "containers": [{"name": "c", "resources": {"requests": requests}}]},
        "status": {"phase": phase},
    }
    return decode(Pod, msgspec.json.encode(body))


def test_the_tightest_quota_counts():
    quotas = [
        quota({"pods": "10"}, {"pods": "3"}),
        quota({"requests.cpu": "12", "limits.memory": "1"}, {"requests.cpu": "4500m"}),
        quota({"requests.nvidia.com/gpu": "20"}, {}),
    ]
    room = quota_room(wanted(), quotas)
    assert room.free == 3, "of 7.5 cores each pod takes 2; limits of memory do not bound a pod without"
    assert room.reason == "4500m of at most 12 requests.cpu are in use (quota q)"


def test_quotas_of_some_pods_only_say_nothing():
    scoped = [
        quota({"pods": "0"}, {}, scopes=["BestEffort"]),
        quota({"pods": "0"}, {}, scopeSelector={"matchExpressions": []}),
    ]
    assert quota_room(wanted(), scoped).free is None
    assert quota_room(wanted(), []).free is None


def test_a_quota_that_is_overdrawn_says_how_many_have_to_go():
    assert quota_room(wanted(), [quota({"pods": "2"}, {"pods": "5"})]).free == -3
    assert quota_room(wanted(), [quota({"pods": "5"}, {"pods": "5"})]).free == 0


def test_each_machine_is_filled_on_its_own():
    pods = [running("a", cpu="3"), running("b", cpu="1", memory="50Gi"), running("a", phase="Failed", cpu="13")]
    room = machine_room(wanted(), [machine("a"), machine("b")], pods)
    assert room.free == 6 + 3, "13 cores and 14 GiB are left"


@pytest.mark.parametrize(
    ("node", "spec", "accepts"),
    [
        (machine(ready="False"), {}, False),
        (machine(unschedulable=True), {}, False),
        (machine(taints=[{"key": "gpu", "value": "x", "effect": "NoSchedule"}]), {}, False),
        (machine(taints=[{"key": "gpu", "value": "x", "effect": "PreferNoSchedule"}]), {}, True),
        (
            machine(taints=[{"key": "gpu", "value": "x", "effect": "NoSchedule"}]),
            {"tolerations": [{"key": "gpu", "value": "x"}]},
            True,
        ),
        (
            machine(taints=[{"key": "gpu", "value": "x", "effect": "NoExecute"}]),
            {"tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]},
            False,
        ),
        (machine(labels={"zone": "a"}), {"nodeSelector": {"zone": "a"}}, True),
        (machine(labels={"zone": "b"}), {"nodeSelector": {"zone": "a"}}, False),
    ],
)
def test_machines_that_do_not_accept_the_pod_do_not_count(node, spec, accepts):
    assert machine_room(wanted(**spec), [node], []).free == (8 if accepts else 0)


@pytest.mark.parametrize(
    ("term", "accepts"),
    [
        ({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}, True),
        ({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "cores", "operator": "Gt", "values": ["8"]}]}, True),
        ({"matchExpressions": [{"key": "cores", "operator": "Lt", "values": ["8"]}]}, False),
        ({"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["m"]}]}, False),
    ],
)
def test_affinities_by_labels_and_names_are_looked_at(term, accepts):
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    pod = wanted(affinity={"nodeAffinity": required})
    node = machine(labels={"zone": "a", "cores": "16"})
    assert machine_room(pod, [node], []).free == (8 if accepts else 0)
