"""What the monitor reports of a cluster, from the objects as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from dlrover.brain.cluster_sight import gone, is_news, machines_seen, pod_seen
from dlrover.platforms.kubernetes.objects import ClusterNode, Pod
from dlrover.protocol.messages.brain import MachinesSeen, PodPhase
from dlrover.protocol.messages.fleet import NodeType, Resource

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LABELS = {
    "elasticjob.dlrover/uid": "job-uid",
    "elasticjob.dlrover/name": "train",
    "elasticjob.dlrover/replica-type": "ps",
    "elasticjob.dlrover/replica-index": "3",
}
GIB = 1024


def pod(name: str = "train-edljob-ps-3", node: str = "", *, labels: dict[str, str] | None = None, **more: Any) -> Pod:
    needs = {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "5Gi", "nvidia.com/gpu": "1"}}
    body = {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "labels": LABELS if labels is None else labels,
            "creationTimestamp": "2029-12-31T23:59:00Z",
        },
        "spec": {"nodeName": node, "containers": [{"name": "side"}, {"name": "main", "resources": needs}]},
        "status": {"phase": "Running"},
    }
    for key, value in more.items():
        body[key] = {**body[key], **value}
    return msgspec.convert(body, Pod)


def machine(name: str, *, cpu: str = "8", ready: str = "True", **spec: Any) -> ClusterNode:
    body = {
        "metadata": {"name": name},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": cpu, "memory": "32Gi", "nvidia.com/gpu": "4", "pods": "110"},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }
    return msgspec.convert(body, ClusterNode)


def test_a_pod_of_a_job_is_told_with_its_role_and_size() -> None:
    seen = pod_seen(pod(), NOW)
    assert seen is not None
    assert (seen.job_uid, seen.job_name, seen.node_type) == ("job-uid", "train", NodeType.PS)
    assert (seen.phase, seen.is_oom, seen.age) == (PodPhase.RUNNING, False, 60.0)
    assert seen.resource == Resource(cpu=2, memory_mb=5 * GIB, gpus=1, gpu_type="nvidia.com/gpu")


def test_a_pod_that_is_of_no_job_is_not_told() -> None:
    assert pod_seen(pod(labels={"app": "web"}), NOW) is None


def test_a_pod_that_ran_out_of_memory_says_so() -> None:
    ended = {"name": "main", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    seen = pod_seen(pod(status={"phase": "Failed", "containerStatuses": [ended]}), NOW)
    assert seen is not None
    assert seen.is_oom
    assert seen.phase is PodPhase.FAILED


def test_what_kubernetes_does_not_name_yet_is_unknown() -> None:
    seen = pod_seen(pod(status={"phase": "Dreaming"}), NOW)
    assert seen is not None
    assert seen.phase is PodPhase.UNKNOWN


def test_time_alone_is_no_news() -> None:
    before, later = pod_seen(pod(), NOW), pod_seen(pod(), NOW + timedelta(hours=1))
    assert before is not None
    assert later is not None
    assert is_news(before, None)
    assert not is_news(later, before)
    assert is_news(gone(later), before)


def test_machines_are_summed_with_what_pods_claim_of_them() -> None:
    pods = [
        pod("one", "a"),
        pod("two", "b"),
        pod("over", "a", status={"phase": "Succeeded"}),
        pod("waits", ""),
        pod("other", "a", labels={"app": "web"}),
    ]
    found = machines_seen([machine("a"), machine("b", cpu="7500m")], pods)
    assert found == MachinesSeen(
        count=2,
        cpu=15.5,
        memory_mb=64 * GIB,
        gpus=8,
        claimed_cpu=6.0,
        claimed_memory_mb=12 * GIB,
        claimed_gpus=3,
        largest=Resource(cpu=5.5, memory_mb=28 * GIB, gpus=3),
    )


def test_init_containers_count_as_the_scheduler_counts_them() -> None:
    def needs(cpu: str) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}}

    inits = [{"name": "first", **needs("5")}, {"name": "log", "restartPolicy": "Always", **needs("1")}]
    found = machines_seen([machine("a")], [pod("one", "a", spec={"initContainers": inits})])
    assert found.claimed_cpu == 5.0, "the largest init container is more than 2 + 1"


def test_machines_that_take_no_pods_are_left_out_together_with_what_runs_there() -> None:
    away = [
        machine("cordoned", unschedulable=True),
        machine("dead", ready="False"),
        machine("control", taints=[{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]),
        machine("pressed", taints=[{"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}]),
    ]
    for_training = machine("gpu", taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}])
    found = machines_seen([*away, for_training], [pod("one", "dead"), pod("two", "gpu")])
    assert (found.count, found.cpu, found.claimed_cpu) == (1, 8.0, 2.0)


def test_a_cluster_without_machines_has_nothing() -> None:
    assert machines_seen([], [pod("one", "lost")]) == MachinesSeen()


def test_a_quantity_that_is_none_counts_as_nothing() -> None:
    found = machines_seen([machine("a", cpu="many")], [pod("one", "a")])
    assert (found.cpu, found.memory_mb) == (0.0, 32 * GIB)
