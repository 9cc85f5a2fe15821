"""
Each row of the table from pods to sights, with the status object that a cluster shows.

Statuses are as real clusters printed them or as Kubernetes documents them; the source stands above each. Fields that we
do not read (image ids, probe times) are left out.
"""

from __future__ import annotations

import msgspec
import pytest

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.exits import (
    GONE_LIMIT,
    SIDECAR_LIMIT,
    STUCK_LIMIT,
    gone_node_of,
    identity_of,
    is_left_by_main,
    node_of,
    wait_of,
)
from dlrover.platforms.kubernetes.objects import Pod, decode
from dlrover.platforms.kubernetes.pods import launch_note
from dlrover.protocol.messages.fleet import LaunchNode, NodeExit, NodePhase, NodeType, PlatformNode, RemoveNode
from dlrover.protocol.messages.identity import PlatformId

LAUNCH = LaunchNode(
    id=PlatformId(7), node_type=NodeType.WORKER, rank=3, name="job-worker-7", relaunch_count=1, service_address="a"
)
REMOVAL = RemoveNode(id=PlatformId(7), name="job-worker-7", reason="scaled down")


def pod(status: dict[str, object], *, metadata: dict[str, object] | None = None, spec: dict[str, object] | None = None):
    labels = {names.REPLICA_TYPE: "worker", names.REPLICA_INDEX: "7", names.RANK_INDEX: "3"}
    body = {
        "metadata": {
            "name": "job-edljob-worker-7",
            "labels": labels,
            "annotations": {names.LAUNCH: launch_note(LAUNCH)},
            **(metadata or {}),
        },
        "spec": {"nodeName": "machine-1", "containers": [{"name": "main"}], **(spec or {})},
        "status": status,
    }
    return decode(Pod, msgspec.json.encode(body))


def seen(shown: Pod, *, removal: RemoveNode | None = None, waited: float = 0.0) -> PlatformNode:
    node = node_of(shown, removal=removal, waited=waited)
    assert node is not None
    return node


def said(node: PlatformNode) -> tuple[NodePhase, NodeExit, str]:
    return node.phase, node.exit_reason, node.message


def status_of(state: dict[str, object], *, phase: str, name: str = "main", **more: object) -> dict[str, object]:
    return {"phase": phase, "containerStatuses": [{"name": name, "state": state, "restartCount": 0}], **more}


def ended(exit_code: int, reason: str, **more: object) -> dict[str, object]:
    return {"terminated": {"exitCode": exit_code, "reason": reason, **more}}


def test_a_pod_that_the_scheduler_cannot_place_waits_with_its_sentence():
    # Pod conditions: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-conditions; the sentence as
    # kube-scheduler 1.36 writes it.
    sentence = "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": sentence}
    node = seen(pod({"phase": "Pending", "qosClass": "BestEffort", "conditions": [condition]}, spec={"nodeName": ""}))
    assert said(node) == (NodePhase.PENDING, NodeExit.NONE, sentence)
    assert node.host == ""


def test_a_container_that_waits_tells_why():
    # https://kubernetes.io/docs/concepts/containers/images/#imagepullbackoff
    state = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "no-such-image"'}}
    shown = pod(status_of(state, phase="Pending"))
    assert said(seen(shown)) == (
        NodePhase.PENDING,
        NodeExit.NONE,
        'ImagePullBackOff: Back-off pulling image "no-such-image"',
    )
    assert wait_of(shown) is None, "an image may come to be at any time"


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        # https://github.com/tektoncd/pipeline/issues/1902
        ("CreateContainerConfigError", 'secret "github-secrets" not found'),
        # Reasons of pkg/kubelet/images/types.go of Kubernetes.
        ("InvalidImageName", 'Failed to apply default image tag "Bad Image": couldn\'t parse image name'),
        ("ErrImageNeverPull", 'Container image "trainer:1" is not present with pull policy of Never'),
    ],
)
def test_a_container_that_can_never_start_fails_after_a_minute(reason, message):
    shown = pod(status_of({"waiting": {"reason": reason, "message": message}}, phase="Pending"))
    wait = wait_of(shown)
    assert wait is not None
    assert wait.limit == STUCK_LIMIT
    assert said(seen(shown, waited=STUCK_LIMIT - 1)) == (NodePhase.PENDING, NodeExit.NONE, f"{reason}: {message}")
    assert said(seen(shown, waited=STUCK_LIMIT)) == (NodePhase.FAILED, NodeExit.FATAL, f"{reason}: {message}")


def test_a_running_pod_is_a_running_node_with_all_that_was_asked_for():
    # https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#container-state-running
    shown = pod(
        status_of(
            {"running": {"startedAt": "2026-05-01T10:00:00Z"}},
            phase="Running",
            conditions=[{"type": "Ready", "status": "True"}],
        )
    )
    assert seen(shown) == PlatformNode(
        id=PlatformId(7),
        node_type=NodeType.WORKER,
        rank=3,
        phase=NodePhase.RUNNING,
        host="machine-1",
        name="job-worker-7",
        relaunch_count=1,
        service_address="a",
    )
    assert wait_of(shown) is None


DELETED = {"deletionTimestamp": "2026-05-01T10:01:00Z", "deletionGracePeriodSeconds": 60}
RUNNING = {"running": {"startedAt": "2026-05-01T09:00:00Z"}}


def test_a_pod_that_others_delete_is_gone_at_once():
    # https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination: the API server sets the time.
    node = seen(pod(status_of(RUNNING, phase="Running"), metadata=DELETED))
    assert said(node) == (NodePhase.DELETED, NodeExit.KILLED, "deleted")


def test_a_preempted_pod_tells_who_took_it():
    # The condition as in https://github.com/kubernetes/kubernetes/pull/114623, with the words of pull request 114914.
    message = 'Scheduler: preempting to accommodate a higher priority pod, scheduled by "default-scheduler"'
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": message,
        "lastTransitionTime": "2026-05-01T10:00:00Z",
    }
    node = seen(pod(status_of(RUNNING, phase="Running", conditions=[condition]), metadata=DELETED))
    assert said(node) == (NodePhase.DELETED, NodeExit.KILLED, f"PreemptionByScheduler: {message}")


def test_a_pod_that_ended_well_before_it_was_deleted_has_succeeded():
    # A pod that the pod garbage collector or a person clears away:
    # https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-garbage-collection
    state = ended(0, "Completed", finishedAt="2026-05-01T09:59:00Z")
    node = seen(pod(status_of(state, phase="Succeeded"), metadata=DELETED))
    assert (node.phase, node.exit_reason) == (NodePhase.SUCCEEDED, NodeExit.SUCCEEDED)


def test_a_pod_that_ends_because_it_is_deleted_was_killed_whatever_its_code():
    state = ended(143, "Error", finishedAt="2026-05-01T10:00:02Z")
    node = seen(pod(status_of(state, phase="Failed"), metadata=DELETED))
    assert (node.phase, node.exit_reason) == (NodePhase.DELETED, NodeExit.KILLED)


def test_our_own_removal_shows_until_the_object_is_gone():
    shown = pod(status_of(RUNNING, phase="Running"), metadata=DELETED)
    assert said(seen(shown, removal=REMOVAL)) == (NodePhase.RUNNING, NodeExit.NONE, "being removed")
    ending = pod(status_of(ended(143, "Error", finishedAt="2026-05-01T10:00:02Z"), phase="Failed"), metadata=DELETED)
    assert said(seen(ending, removal=REMOVAL)) == (NodePhase.RUNNING, NodeExit.NONE, "being removed")


def test_a_removal_that_a_dead_machine_cannot_confirm_ends_after_a_minute():
    # https://kubernetes.io/docs/tasks/run-application/force-delete-stateful-set-pod/: the object of a pod on a machine
    # that is unreachable stays in Terminating.
    shown = pod(status_of(RUNNING, phase="Running"), metadata=DELETED)
    wait = wait_of(shown)
    assert wait is not None
    assert wait.limit == 60 + GONE_LIMIT
    node = seen(shown, removal=REMOVAL, waited=wait.limit)
    assert (node.phase, node.exit_reason) == (NodePhase.DELETED, NodeExit.NONE)
    assert node.message.startswith("scaled down")


def test_a_container_beyond_its_memory_limit_ends_as_out_of_memory():
    # https://kubernetes.io/docs/tasks/configure-pod-container/assign-memory-resource/#exceed-a-container-s-memory-limit
    state = ended(137, "OOMKilled", finishedAt="2017-06-20T20:52:19Z", startedAt="2017-06-20T20:52:19Z")
    limits = {"containers": [{"name": "main", "resources": {"limits": {"memory": "100Mi"}}}]}
    node = seen(pod(status_of(state, phase="Failed"), spec=limits))
    assert said(node) == (NodePhase.FAILED, NodeExit.OOM, "OOMKilled: the memory limit of main is 100Mi")
    assert node.exit_code == 137


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        # https://github.com/kubernetes/kubernetes/issues/122932
        ("Evicted", "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 0."),
        # https://github.com/kubernetes/kubernetes/pull/104798 and 102840 (the second is what a kubelet says at its door)
        ("Terminated", "Pod was terminated in response to imminent node shutdown."),
        ("NodeShutdown", "Pod was rejected as the node is shutting down."),
        # pkg/kubelet/preemption/preemption.go of Kubernetes
        ("Preempting", "Preempted in order to admit critical pod"),
        # pkg/util/node/node.go of Kubernetes before 1.28
        ("NodeLost", "Node machine-1 which was running pod job-edljob-worker-7 is unresponsive"),
        # https://github.com/kubernetes/kubernetes/issues/44438
        (
            "OutOfnvidia.com/gpu",
            "Pod Node didn't have enough resource: nvidia.com/gpu, requested: 1, used: 8, capacity: 8",
        ),
    ],
)
def test_a_pod_that_its_machine_gives_up_was_killed(reason, message):
    node = seen(pod({"phase": "Failed", "reason": reason, "message": message, "startTime": "2024-01-22T16:57:07Z"}))
    assert said(node) == (NodePhase.FAILED, NodeExit.KILLED, f"{reason}: {message}")


def test_an_evicted_pod_was_killed_although_its_container_shows_a_code():
    # https://github.com/kubernetes/kubernetes/issues/122160 and 122932: one end, told three times.
    lost = {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": "The container could not be located when the pod was terminated",
        "finishedAt": None,
        "startedAt": None,
    }
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": "low"}
    status = status_of({"terminated": lost}, phase="Failed", reason="Evicted", message="low", conditions=[condition])
    node = seen(pod(status))
    assert said(node) == (NodePhase.FAILED, NodeExit.KILLED, "Evicted: low")
    assert node.exit_code == 137


def test_a_disruption_alone_says_that_a_failed_pod_was_killed():
    # https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "DeletionByTaintManager",
        "message": "Taint manager: deleting due to NoExecute taint",
    }
    node = seen(pod(status_of(ended(1, "Error"), phase="Failed", conditions=[condition])))
    assert said(node) == (
        NodePhase.FAILED,
        NodeExit.KILLED,
        "DeletionByTaintManager: Taint manager: deleting due to NoExecute taint",
    )


def test_a_device_that_cannot_be_given_is_a_fault_of_the_machine():
    # https://github.com/kubernetes/kubernetes/issues/97131
    message = "Pod Allocate failed due to device plugin GetPreferredAllocation rpc failed with err: nvml: GPU is lost"
    node = seen(pod({"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}))
    assert said(node) == (NodePhase.FAILED, NodeExit.HARDWARE, f"UnexpectedAdmissionError: {message}")
    assert node.host == "machine-1", "the host that the job avoids from now on"


def test_a_pod_beyond_its_deadline_failed_for_good():
    # `activeDeadlineSeconds` of a pod; reason and sentence of pkg/kubelet/active_deadline.go of Kubernetes.
    message = "Pod was active on the node longer than the specified deadline"
    node = seen(pod({"phase": "Failed", "reason": "DeadlineExceeded", "message": message}))
    assert said(node) == (NodePhase.FAILED, NodeExit.FATAL, f"DeadlineExceeded: {message}")


def test_a_container_whose_end_is_unknown_was_killed():
    # https://github.com/kubernetes/kubernetes/issues/122160
    lost = {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": "The container could not be located when the pod was terminated",
        "finishedAt": None,
    }
    node = seen(pod(status_of({"terminated": lost}, phase="Failed")))
    assert (node.phase, node.exit_reason) == (NodePhase.FAILED, NodeExit.KILLED)
    assert node.message.startswith("ContainerStatusUnknown")


def test_an_init_container_that_fails_is_named_with_its_code():
    # https://kubernetes.io/docs/tasks/debug/debug-application/debug-init-containers/
    init = {"name": "fetch-data", "state": ended(2, "Error"), "restartCount": 0}
    waiting = {"name": "main", "state": {"waiting": {"reason": "PodInitializing"}}}
    node = seen(pod({"phase": "Failed", "initContainerStatuses": [init], "containerStatuses": [waiting]}))
    assert said(node) == (NodePhase.FAILED, NodeExit.FATAL, "the init container fetch-data ended with code 2")
    assert node.exit_code is None


@pytest.mark.parametrize(
    ("exit_code", "reason", "phase", "exit_reason"),
    [
        # https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#container-state-terminated; the meaning of the
        # codes is ours (spec 08 §9.2).
        (0, "Completed", NodePhase.SUCCEEDED, NodeExit.SUCCEEDED),
        (1, "Error", NodePhase.FAILED, NodeExit.FATAL),
        (134, "Error", NodePhase.FAILED, NodeExit.FATAL),
        (137, "Error", NodePhase.FAILED, NodeExit.KILLED),
        (143, "Error", NodePhase.FAILED, NodeExit.KILLED),
        (201, "Error", NodePhase.FAILED, NodeExit.HARDWARE),
        (128, "StartError", NodePhase.FAILED, NodeExit.HARDWARE),
        (247, "Error", NodePhase.FAILED, NodeExit.OOM),
        (3, "Error", NodePhase.FAILED, NodeExit.UNKNOWN),
    ],
)
def test_a_container_that_ends_by_itself_is_judged_by_its_code(exit_code, reason, phase, exit_reason):
    node = seen(pod(status_of(ended(exit_code, reason), phase="Succeeded" if exit_code == 0 else "Failed")))
    assert (node.phase, node.exit_reason, node.exit_code) == (phase, exit_reason, exit_code)
    assert node.message == ("" if exit_code == 0 else reason)


@pytest.mark.parametrize(
    ("exit_code", "reason", "phase"), [(0, "Completed", NodePhase.SUCCEEDED), (1, "Error", NodePhase.FAILED)]
)
def test_the_main_container_decides_although_a_sidecar_runs_on(exit_code, reason, phase):
    # A pod with several containers stays Running as long as one of them runs:
    # https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-phase
    statuses = [{"name": "proxy", "state": RUNNING}, {"name": "main", "state": ended(exit_code, reason)}]
    spec = {"containers": [{"name": "proxy"}, {"name": "main"}]}
    shown = pod({"phase": "Running", "containerStatuses": statuses}, spec=spec)
    node = seen(shown)
    assert (node.phase, node.exit_code) == (phase, exit_code)
    assert node.message.endswith("other containers still run: proxy")
    assert is_left_by_main(shown)
    wait = wait_of(shown)
    assert wait is not None
    assert wait.limit == SIDECAR_LIMIT


def test_a_sidecar_that_ends_first_says_nothing_about_the_node():
    statuses = [{"name": "proxy", "state": ended(1, "Error")}, {"name": "main", "state": RUNNING}]
    spec = {"containers": [{"name": "proxy"}, {"name": "main"}]}
    shown = pod({"phase": "Running", "containerStatuses": statuses}, spec=spec)
    assert seen(shown).phase is NodePhase.RUNNING
    assert not is_left_by_main(shown)


def test_a_failed_pod_without_any_explanation_failed_for_an_unknown_reason():
    assert said(seen(pod({"phase": "Failed"}))) == (
        NodePhase.FAILED,
        NodeExit.UNKNOWN,
        "it ended without a container status",
    )


def test_an_object_that_is_gone_keeps_the_reason_that_was_known():
    running = seen(pod(status_of(RUNNING, phase="Running")))
    failed = seen(pod(status_of(ended(1, "Error"), phase="Failed")))
    assert said(gone_node_of(running, None)) == (NodePhase.DELETED, NodeExit.KILLED, "deleted")
    assert said(gone_node_of(running, REMOVAL)) == (NodePhase.DELETED, NodeExit.NONE, "scaled down")
    assert gone_node_of(failed, None).exit_reason is NodeExit.FATAL
    assert gone_node_of(failed, REMOVAL).exit_reason is NodeExit.FATAL


# Which node it is.


def test_a_pod_without_a_note_is_known_by_its_labels():
    labels = {
        names.REPLICA_TYPE: "master",
        names.REPLICA_INDEX: "4",
        names.RANK_INDEX: "0",
        names.RELAUNCH_COUNT: "2",
        names.GROUP_INDEX: "5",
    }
    for notes in ({}, {names.LAUNCH: "{"}):
        shown = pod({"phase": "Running"}, metadata={"labels": labels, "annotations": notes})
        node = seen(shown)
        assert (node.id, node.node_type, node.rank, node.relaunch_count, node.group) == (4, NodeType.CHIEF, 0, 2, 5)


def test_a_scheduler_may_move_a_node_to_another_group_later():
    labels = {names.REPLICA_TYPE: "worker", names.REPLICA_INDEX: "7", names.GROUP_INDEX: "12"}
    assert seen(pod({"phase": "Running"}, metadata={"labels": labels})).group == 12


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {names.REPLICA_TYPE: names.MASTER_TYPE, names.REPLICA_INDEX: "0"},
        {names.REPLICA_TYPE: "worker", names.REPLICA_INDEX: "x"},
        {names.REPLICA_TYPE: "gardener", names.REPLICA_INDEX: "1"},
    ],
)
def test_other_pods_are_no_nodes(labels):
    shown = pod({"phase": "Running"}, metadata={"labels": labels, "annotations": {}})
    assert identity_of(shown) is None
    assert node_of(shown) is None


def test_a_pod_that_cannot_be_read_is_there_in_an_unknown_phase():
    shown = pod({"phase": "Running"})
    node = seen(Pod.unreadable(shown.metadata, "status.phase: expected str"))
    assert (node.id, node.phase) == (7, NodePhase.UNKNOWN)
    assert "expected str" in node.message
