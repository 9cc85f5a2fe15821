"""
From a pod to a sight: in which phase a node is, why it ended, and what people should read about it.

Kubernetes tells one end in several places at once: an evicted pod has a reason of its own, a condition, a container that
ended by SIGKILL and often a deletion time. The rows below are tried in a fixed order, and the first that fits decides.
No I/O and no clock: `waited` comes from the caller.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.objects import ContainerStatus, ContainerTerminated, ContainerWaiting, Pod
from dlrover.protocol.messages.fleet import (
    LaunchNode,
    NodeExit,
    NodePhase,
    NodeType,
    PlatformNode,
    RemoveNode,
    exit_reason_of,
)
from dlrover.protocol.messages.identity import PlatformId

STUCK_LIMIT = 60.0
"""Seconds that a reason which does not go away by itself may last: a missing Secret may be created a moment later."""
GONE_LIMIT = 60.0
"""Seconds after its grace period that a pod's object may stay. Then its machine cannot confirm the end any more."""
SIDECAR_LIMIT = 30.0
"""Seconds that other containers have after the main one. Then the platform removes the pod."""

_STUCK = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")
_TAKEN_AWAY = ("Evicted", "Preempting", "Terminated", "NodeShutdown", "NodeLost", "Shutdown")
_NO_ROOM = "OutOf"
"""`OutOfcpu`, `OutOfmemory`, `OutOfpods`, `OutOfnvidia.com/gpu`: the kubelet refused the pod at its door."""
_PHASES = {
    "Pending": NodePhase.PENDING,
    "Running": NodePhase.RUNNING,
    "Succeeded": NodePhase.SUCCEEDED,
    "Failed": NodePhase.FAILED,
}


class PodWait(Struct, frozen=True):
    """A state that means something else when it has lasted for `limit` seconds."""

    kind: str
    limit: float


def identity_of(pod: Pod) -> LaunchNode | None:
    """Which launch made the pod; None: it is no node of the job (the master's pod, or labels that make no sense)."""
    labels = pod.metadata.labels
    if labels.get(names.REPLICA_TYPE) == names.MASTER_TYPE:
        return None
    note = pod.metadata.annotations.get(names.LAUNCH)
    if note is not None:
        try:
            return msgspec.json.decode(note, type=LaunchNode)
        except msgspec.MsgspecError:
            pass  # changed by hand: the labels say enough
    return _identity_by_labels(pod)


def node_of(pod: Pod, *, removal: RemoveNode | None = None, waited: float = 0.0) -> PlatformNode | None:
    """
    The node as the job shall see it; None: the pod is none of its nodes.

    `removal`: what the job asked for, if the platform itself deleted the pod. `waited`: seconds since `wait_of` has
    given the same answer for this pod.
    """
    launch = identity_of(pod)
    if launch is None:
        return None
    node = PlatformNode(
        id=launch.id,
        node_type=launch.node_type,
        rank=launch.rank,
        phase=_PHASES.get(pod.status.phase, NodePhase.UNKNOWN),
        host=pod.spec.node_name,
        name=launch.name,
        relaunch_count=launch.relaunch_count,
        group=_group(pod, launch),
        service_address=launch.service_address,
    )
    if _is_leaving(pod):
        return _leaving(pod, node, removal, waited)
    if pod.status.phase in ("Succeeded", "Failed") or _main_end(pod) is not None:
        return _ended(pod, node)
    if pod.status.phase == "Pending":
        return _pending(pod, node, waited)
    return replace(node, message=_sentence(pod.status.reason, pod.status.message))


def gone_node_of(node: PlatformNode, removal: RemoveNode | None) -> PlatformNode:
    """The last sight of a node whose object is gone, from the sight before."""
    otherwise = NodeExit.KILLED if removal is None else NodeExit.NONE
    message = node.message if removal is None else removal.reason
    return replace(
        node, phase=NodePhase.DELETED, exit_reason=node.exit_reason or otherwise, message=message or "deleted"
    )


def wait_of(pod: Pod) -> PodWait | None:
    """What the caller has to time for this pod; None: nothing."""
    if _is_leaving(pod):
        return PodWait("leaving", (pod.metadata.deletion_grace_period_seconds or 0) + GONE_LIMIT)
    if pod.status.phase == "Pending" and (stuck := _stuck(pod)) is not None:
        return PodWait(f"stuck {stuck}", STUCK_LIMIT)
    if pod.status.phase == "Running" and _main_end(pod) is not None:
        return PodWait("sidecar", SIDECAR_LIMIT)
    return None


def is_left_by_main(pod: Pod) -> bool:
    """Its main container has ended and others run on."""
    return pod.status.phase == "Running" and not _is_leaving(pod) and _main_end(pod) is not None


# Rows of the table, in its order.


def _pending(pod: Pod, node: PlatformNode, waited: float) -> PlatformNode:
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return replace(node, message=condition.message or condition.reason)
    waiting = _waiting(pod)
    message = _sentence(waiting.reason, waiting.message) if waiting is not None else ""
    if waited >= STUCK_LIMIT and _stuck(pod) is not None:
        return replace(node, phase=NodePhase.FAILED, exit_reason=NodeExit.FATAL, message=message)
    return replace(node, message=message)


def _is_leaving(pod: Pod) -> bool:
    """It is being deleted, and its main container did not end before that of its own."""
    deadline = pod.metadata.deletion_timestamp
    if deadline is None:
        return False
    end = _main_end(pod)
    if end is None or end.finished_at is None:
        return True
    asked_at = deadline - timedelta(seconds=pod.metadata.deletion_grace_period_seconds or 0)
    return end.finished_at >= asked_at


def _leaving(pod: Pod, node: PlatformNode, removal: RemoveNode | None, waited: float) -> PlatformNode:
    if removal is None:
        return replace(node, phase=NodePhase.DELETED, exit_reason=NodeExit.KILLED, message=_who_deletes(pod))
    if waited >= (pod.metadata.deletion_grace_period_seconds or 0) + GONE_LIMIT:
        message = f"{removal.reason}; its machine does not confirm the end, and Kubernetes deletes the pod"
        return replace(node, phase=NodePhase.DELETED, exit_reason=NodeExit.NONE, message=message)
    # Its end, if it has one by now, is ours: an exit code after SIGTERM says nothing about the program.
    is_over = node.phase in (NodePhase.SUCCEEDED, NodePhase.FAILED)
    return replace(node, phase=NodePhase.RUNNING if is_over else node.phase, message="being removed")


def _ended(pod: Pod, node: PlatformNode) -> PlatformNode:
    status = pod.status
    end = _main_end(pod)
    code = None if end is None else _exit_code(end)
    failed = replace(node, phase=NodePhase.FAILED, exit_code=code)
    if end is not None and end.reason == "OOMKilled":
        return replace(failed, exit_reason=NodeExit.OOM, message=_sentence("OOMKilled", _limit(pod)))
    if status.phase == "Failed":
        taken = _disruption(pod)
        if taken is not None:
            return replace(failed, exit_reason=NodeExit.KILLED, message=taken)
        told = _sentence(status.reason, status.message)
        if status.reason == "UnexpectedAdmissionError":
            return replace(failed, exit_reason=NodeExit.HARDWARE, message=told)
        if status.reason == "DeadlineExceeded":
            return replace(failed, exit_reason=NodeExit.FATAL, message=told)
        if end is not None and end.reason == "ContainerStatusUnknown":
            return replace(failed, exit_reason=NodeExit.KILLED, message=_sentence(end.reason, end.message))
        init = _failed_init(pod)
        if init is not None:
            return replace(failed, exit_reason=NodeExit.FATAL, exit_code=None, message=init)
        if end is None:
            return replace(failed, exit_reason=NodeExit.UNKNOWN, message=told or "it ended without a container status")
    if end is None or code is None:  # a pod that succeeded, and a status without its containers
        return replace(node, phase=NodePhase.SUCCEEDED, exit_code=0, exit_reason=NodeExit.SUCCEEDED)
    message = _sentence(end.reason, end.message) if code else ""
    if status.phase == "Running":
        message = f"{message}; " if message else ""
        message += f"other containers still run: {', '.join(_others_running(pod)) or 'a container that ends'}"
    phase = NodePhase.SUCCEEDED if code == 0 else NodePhase.FAILED
    return replace(node, phase=phase, exit_code=code, exit_reason=exit_reason_of(code), message=message)


# Where a pod says what.


def _who_deletes(pod: Pod) -> str:
    """The reason of the disruption, else that the pod was deleted."""
    for condition in pod.status.conditions:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return _sentence(condition.reason, condition.message)
    return "deleted"


def _disruption(pod: Pod) -> str | None:
    """Who took the pod away, if its status says that it was taken away."""
    reason = pod.status.reason
    if reason in _TAKEN_AWAY or reason.startswith(_NO_ROOM):
        return _sentence(reason, pod.status.message)
    for condition in pod.status.conditions:
        if condition.type == "DisruptionTarget" and condition.status == "True":
            return _sentence(condition.reason, condition.message)
    return None


def _failed_init(pod: Pod) -> str | None:
    for status in pod.status.init_container_statuses:
        end = status.state.terminated
        if end is not None and end.exit_code != 0:
            return f"the init container {status.name} ended with code {end.exit_code}"
    return None


def _main_status(pod: Pod) -> ContainerStatus | None:
    """Of the only container, else of `main`."""
    statuses = pod.status.container_statuses
    if len(pod.spec.containers) <= 1 and len(statuses) == 1:
        return statuses[0]
    return next((status for status in statuses if status.name == names.MAIN_CONTAINER), None)


def _main_end(pod: Pod) -> ContainerTerminated | None:
    status = _main_status(pod)
    if status is None:
        return None
    if status.state.terminated is not None:
        return status.state.terminated
    is_waiting_for_good = pod.status.phase in ("Succeeded", "Failed") and status.state.running is None
    return status.last_state.terminated if is_waiting_for_good else None


def _exit_code(end: ContainerTerminated) -> int:
    return 128 + end.signal if end.signal and not end.exit_code else end.exit_code


def _waiting(pod: Pod) -> ContainerWaiting | None:
    """Of the first init container that waits, else of the main container, else of any."""
    main = _main_status(pod)
    candidates = (*pod.status.init_container_statuses, *([main] if main else []), *pod.status.container_statuses)
    for status in candidates:
        waiting = status.state.waiting
        if waiting is not None and waiting.reason != "PodInitializing":
            return waiting
    return None


def _stuck(pod: Pod) -> str | None:
    waiting = _waiting(pod)
    return waiting.reason if waiting is not None and waiting.reason in _STUCK else None


def _others_running(pod: Pod) -> tuple[str, ...]:
    main = _main_status(pod)
    statuses = (*pod.status.container_statuses, *pod.status.init_container_statuses)
    return tuple(each.name for each in statuses if each is not main and each.state.running is not None)


def _limit(pod: Pod) -> str:
    main = _main_status(pod)
    for container in pod.spec.containers:
        if main is not None and container.name == main.name and "memory" in container.resources.limits:
            return f"the memory limit of {container.name} is {container.resources.limits['memory']}"
    return "it has no memory limit of its own, so its machine ran out of memory"


def _group(pod: Pod, launch: LaunchNode) -> int:
    """The label wins: a scheduler may put the pod into another group later."""
    return _number(pod.metadata.labels.get(names.GROUP_INDEX, ""), otherwise=launch.group)


def _identity_by_labels(pod: Pod) -> LaunchNode | None:
    labels = pod.metadata.labels
    node_type = {"master": NodeType.CHIEF.value}.get(labels.get(names.REPLICA_TYPE, ""), labels.get(names.REPLICA_TYPE))
    node_id = _number(labels.get(names.REPLICA_INDEX, ""), otherwise=-1)
    if node_type not in tuple(NodeType) or node_id < 0:
        return None
    return LaunchNode(
        id=PlatformId(node_id),
        node_type=NodeType(node_type),
        rank=_number(labels.get(names.RANK_INDEX, ""), otherwise=node_id),
        name=pod.metadata.name,
        relaunch_count=_number(labels.get(names.RELAUNCH_COUNT, ""), otherwise=0),
        group=_number(labels.get(names.GROUP_INDEX, ""), otherwise=-1),
    )


def _number(text: str, *, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else otherwise


def _sentence(reason: str, message: str) -> str:
    return ": ".join(part.strip() for part in (reason, message) if part.strip())
