"""
What a master's pod tells: is it in charge, has it ended, did it leave a verdict.

No exit code is a verdict. A master whose job has ended exits with 0 and leaves a message that says how the job ended;
every other end is a crash, and the next master goes on. So an evicted master is not a failed job.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.objects import ContainerStatus, ContainerTerminated, Pod

PATIENCE = 5.0
"""Seconds that a machine may be not ready: a kubelet that restarts is ready again within them."""


class JobVerdict(Struct, frozen=True, kw_only=True):
    """The termination message of a master whose job has ended."""

    stage: str
    reason: str = ""
    sentence: str = ""

    @property
    def is_success(self) -> bool:
        return self.stage.lower() == "succeeded"


def is_master(pod: Pod) -> bool:
    return pod.metadata.labels.get(names.REPLICA_TYPE) == names.MASTER_TYPE


def index_of(pod: Pod) -> int:
    text = pod.metadata.labels.get(names.REPLICA_INDEX, "")
    return int(text) if text.isascii() and text.isdigit() else -1


def main_status(pod: Pod) -> ContainerStatus | None:
    """None: the kubelet has not reported the container."""
    statuses = pod.status.container_statuses
    if len(pod.spec.containers) <= 1:
        return statuses[0] if statuses else None
    return next((each for each in statuses if each.name == names.MAIN_CONTAINER), None)


def verdict_of(pod: Pod) -> JobVerdict | None:
    """None: the master has not ended, or it ended without saying how its job ended."""
    status = main_status(pod)
    end = status.state.terminated if status else None
    if end is None or end.exit_code != 0:
        return None
    try:
        return msgspec.json.decode(end.message, type=JobVerdict)
    except msgspec.MsgspecError:
        return None


def is_over(pod: Pod) -> bool:
    """No process of it can run any more, so its object may stay for its logs."""
    if pod.status.phase not in ("Succeeded", "Failed"):
        return False
    ends = [each.state.terminated for each in pod.status.container_statuses]
    return all(end is not None and end.reason != "ContainerStatusUnknown" for end in ends)


def is_leaving(pod: Pod, not_ready: dict[str, float], now: float) -> str:
    """Why the pod is no longer the master although a process of it may run. Empty: it is the master."""
    if pod.metadata.deletion_timestamp is not None:
        return "it is being deleted"
    if pod.status.phase in ("Succeeded", "Failed"):
        return (
            f"it is {pod.status.phase}, and Kubernetes does not know whether its process has ended"
            if not is_over(pod)
            else ""
        )
    since = not_ready.get(pod.spec.node_name) if pod.spec.node_name else None
    if since is not None and now >= since + PATIENCE:
        return f"its machine {pod.spec.node_name} is not ready"
    return ""


def is_ready(pod: Pod) -> bool:
    return pod.status.phase == "Running" and any(
        each.type == "Ready" and each.status == "True" for each in pod.status.conditions
    )


def num_crashes(pod: Pod) -> int:
    status = main_status(pod)
    return status.restart_count if status else 0


def last_end(pod: Pod) -> ContainerTerminated | None:
    status = main_status(pod)
    return (status.state.terminated or status.last_state.terminated) if status else None


def trouble_of(pod: Pod) -> tuple[str, str]:
    """Reason and sentence for a master that is not ready."""
    if pod.status.phase == "Failed":
        reason = pod.status.reason or "PodFailed"
        return reason, _sentence(f"Pod {pod.metadata.name} failed", pod.status.message or _end(pod))
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return condition.reason or "Unschedulable", condition.message
    status = main_status(pod)
    waiting = status.state.waiting if status else None
    if waiting is not None and waiting.reason:
        return waiting.reason, _sentence(waiting.message or waiting.reason, _end(pod))
    if pod.status.phase == "Running":
        return "NotReady", _sentence(f"Pod {pod.metadata.name} is running and not ready", _end(pod))
    return "Pending", f"Pod {pod.metadata.name} is starting."


def _end(pod: Pod) -> str:
    """How the container ended last, if it did."""
    end = last_end(pod)
    if end is None:
        return ""
    return _sentence(f"The master exited with code {end.exit_code} ({end.reason})", end.message.strip())


def _sentence(first: str, second: str) -> str:
    first = first.rstrip(".")
    return f"{first}: {second}" if second else f"{first}."
