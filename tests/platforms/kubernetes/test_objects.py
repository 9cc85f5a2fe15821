"""Objects decode whatever else a server of another version writes into them."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from dlrover.platforms.kubernetes.objects import (
    ClusterEvent,
    ClusterNode,
    ConfigMap,
    ErrorStatus,
    Lease,
    ObjectList,
    Pod,
    ResourceQuota,
    decode,
)

# As `kubectl get pod -o json` of a 1.36 server shows it, shortened, with three fields that no server has.
POD = b"""{
  "apiVersion": "v1", "kind": "Pod", "novelty": {"a": [1, 2]},
  "metadata": {
    "name": "j-edljob-worker-0", "namespace": "train", "uid": "u1", "resourceVersion": "812",
    "creationTimestamp": "2026-11-18T07:00:00Z", "deletionTimestamp": "2026-11-18T07:10:00Z",
    "deletionGracePeriodSeconds": 30, "labels": {"app": "dlrover"}, "managedFields": [{"manager": "kubelet"}],
    "ownerReferences": [{"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ElasticJob", "name": "j",
                         "uid": "u0", "controller": true, "blockOwnerDeletion": true}]},
  "spec": {
    "nodeName": "n7", "restartPolicy": "Never", "terminationGracePeriodSeconds": 60, "unheardOf": true,
    "containers": [{"name": "main", "image": "train:1", "resources": {"requests": {"cpu": "500m", "memory": "4Gi"}}}]},
  "status": {
    "phase": "Failed", "reason": "Evicted", "hostIP": "10.0.0.7", "podIP": "10.1.0.9",
    "podIPs": [{"ip": "10.1.0.9"}], "startTime": "2026-11-18T07:00:01Z",
    "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI",
                    "lastProbeTime": null, "lastTransitionTime": "2026-11-18T07:09:00Z"}],
    "containerStatuses": [{"name": "main", "ready": false, "restartCount": 2, "image": "train:1", "started": false,
      "lastState": {}, "state": {"terminated": {"exitCode": 137, "signal": 9, "reason": "OOMKilled",
                                               "finishedAt": "2026-11-18T07:09:30Z", "containerID": "c://1"}}}]}
}"""


def test_a_pod_with_unknown_fields_reads() -> None:
    pod = decode(Pod, POD)
    assert (pod.metadata.name, pod.metadata.uid, pod.metadata.resource_version) == ("j-edljob-worker-0", "u1", "812")
    assert pod.metadata.deletion_timestamp == datetime(2026, 11, 18, 7, 10, tzinfo=UTC)
    assert pod.metadata.controller is not None
    assert pod.metadata.controller.uid == "u0"
    assert pod.spec.node_name == "n7"
    assert pod.spec.containers[0].resources.requests == {"cpu": "500m", "memory": "4Gi"}
    assert (pod.status.phase, pod.status.reason) == ("Failed", "Evicted")
    assert (pod.status.host_ip, pod.status.pod_ip) == ("10.0.0.7", "10.1.0.9")
    assert pod.status.conditions[0].type == "DisruptionTarget"
    [container] = pod.status.container_statuses
    assert container.restart_count == 2
    assert container.state.terminated is not None
    assert (container.state.terminated.exit_code, container.state.terminated.reason) == (137, "OOMKilled")
    assert container.last_state.terminated is None


def test_a_pod_that_has_only_a_name_is_of_unknown_phase() -> None:
    pod = decode(Pod, b'{"metadata": {"name": "p"}}')
    assert pod.status.phase == "Unknown"
    assert pod.metadata.controller is None


def test_the_other_kinds_read() -> None:
    node = decode(
        ClusterNode,
        b'{"metadata": {"name": "n"}, "spec": {"taints": [{"key": "a", "effect": "NoSchedule"}], "podCIDR": "x"},'
        b' "status": {"allocatable": {"cpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]}}',
    )
    assert node.is_ready
    assert node.status.allocatable == {"cpu": "8"}
    assert not decode(ClusterNode, b'{"metadata": {"name": "n"}}').is_ready
    assert decode(ConfigMap, b'{"metadata": {"name": "c"}, "data": {"epoch": "3"}}').data == {"epoch": "3"}
    quota = decode(
        ResourceQuota, b'{"metadata": {"name": "q"}, "status": {"hard": {"pods": "4"}, "used": {"pods": "3"}}}'
    )
    assert (quota.status.hard, quota.status.used) == ({"pods": "4"}, {"pods": "3"})
    lease = decode(
        Lease,
        b'{"metadata": {"name": "l"}, "spec": {"holderIdentity": "me", "renewTime": "2026-11-18T07:00:00.123456Z"}}',
    )
    assert lease.spec.holder_identity == "me"
    assert lease.spec.renew_time == datetime(2026, 11, 18, 7, 0, 0, 123456, tzinfo=UTC)
    event = decode(ClusterEvent, b'{"metadata": {"name": "e"}, "involvedObject": {"kind": "Pod"}, "reason": "Killed"}')
    assert (event.involved_object.kind, event.reason) == ("Pod", "Killed")
    status = decode(ErrorStatus, b'{"reason": "TooManyRequests", "code": 429, "details": {"retryAfterSeconds": 3}}')
    assert status.details is not None
    assert status.details.retry_after_seconds == 3


def test_a_field_of_another_type_is_named() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.status\.phase"):
        decode(Pod, b'{"metadata": {"name": "p"}, "status": {"phase": 3}}')


@pytest.mark.parametrize("body", [b'{"error": "sign in"}', b'{"metadata": {"resourceVersion": "1"}}', b'{"items": []}'])
def test_json_of_another_kind_is_no_empty_list(body: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(ObjectList, body)


def test_no_items_may_be_written_as_null() -> None:
    assert decode(ObjectList, b'{"metadata": {"resourceVersion": "1"}, "items": null}').items is None
