"""
What a kubelet writes into a pod's status, computed from what its containers do.

Pure: the containers' states and the pod's specification come in, the status comes out. The rules are those of the page
"Pod Lifecycle" of Kubernetes' documentation, and of its kubelet where the page is silent.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

from msgspec import Struct

from tests.kubernetes.kubelet.client import Body

KUBELETS = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
"""Conditions that the kubelet owns. It keeps all others as they are."""


class Stage(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


class Ended(Struct, frozen=True, kw_only=True):
    """How one life of a container ended."""

    code: int
    reason: str
    message: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def is_success(self) -> bool:
        return self.code == 0 and self.reason != "ContainerStatusUnknown"


class ContainerState(Struct, kw_only=True):
    """One container now, and how its life before ended."""

    name: str
    image: str
    stage: Stage = Stage.WAITING
    reason: str = "ContainerCreating"
    """While it waits."""
    message: str = ""
    started_at: float = 0.0
    ended: Ended | None = None
    """Its end, while it is terminated."""
    before: Ended | None = None
    restarts: int = 0
    is_ready: bool = False
    container_id: str = ""


class Verdict(Struct, frozen=True, kw_only=True):
    """Why the kubelet itself ended a pod; it then decides the phase."""

    reason: str
    message: str
    disruption: str = ""
    """Reason of the condition DisruptionTarget; empty: none is set."""


class PodFacts(Struct, kw_only=True):
    """What the status is computed from."""

    restart_policy: str
    host_ip: str
    pod_ip: str = ""
    start_time: str = ""
    containers: list[ContainerState]
    init_containers: list[ContainerState]
    has_sandbox: bool = False
    is_terminated: bool = False
    """All containers have ended and none will start again."""
    verdict: Verdict | None = None


def pod_status(facts: PodFacts, before: Body, now: float) -> Body:
    """The whole status. `before` is what the server holds: foreign conditions and times of unchanged ones are kept."""
    phase = _phase(facts)
    if before.get("phase") in ("Succeeded", "Failed"):
        phase = before["phase"]  # a pod that has ended stays so
    status: Body = {key: value for key, value in before.items() if key not in ("reason", "message")}
    status["phase"] = phase
    status["hostIP"] = facts.host_ip
    status["hostIPs"] = [{"ip": facts.host_ip}]
    status["startTime"] = before.get("startTime") or facts.start_time or timestamp(now)
    if facts.pod_ip:
        status["podIP"] = facts.pod_ip
        status["podIPs"] = [{"ip": facts.pod_ip}]
    status["conditions"] = _conditions(facts, phase, list(before.get("conditions") or ()), now)
    status["containerStatuses"] = [_container(state) for state in facts.containers]
    if facts.init_containers:
        status["initContainerStatuses"] = [_container(state) for state in facts.init_containers]
    if facts.verdict is not None and phase == "Failed":
        status["reason"] = facts.verdict.reason
        status["message"] = facts.verdict.message
    return status


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _phase(facts: PodFacts) -> str:
    if facts.is_terminated:
        if facts.verdict is not None:
            return "Failed"
        ends = [state.ended for state in facts.containers]
        return "Succeeded" if all(end is not None and end.is_success for end in ends) else "Failed"
    if any(state.ended is None or not state.ended.is_success for state in facts.init_containers):
        return "Pending"
    if any(state.stage is Stage.WAITING and state.before is None for state in facts.containers):
        return "Pending"
    # Also while all containers have ended: the terminal phase comes when nothing is left to end or to start again.
    return "Running"


def _conditions(facts: PodFacts, phase: str, before: list[Body], now: float) -> list[Body]:
    names_not_ready = [state.name for state in facts.containers if not state.is_ready]
    is_ready = not names_not_ready and phase == "Running"
    not_ready: Body = {
        "reason": "ContainersNotReady",
        "message": f"containers with unready status: [{' '.join(names_not_ready)}]",
    }
    if phase == "Succeeded":
        not_ready = {"reason": "PodCompleted"}
    elif phase == "Failed":
        not_ready = {"reason": "PodFailed"}
    names_not_initialized = [s.name for s in facts.init_containers if s.ended is None or not s.ended.is_success]
    initialized: Body = {"status": "True"}
    if phase == "Succeeded":
        initialized = {"status": "True", "reason": "PodCompleted"}
    elif names_not_initialized:
        initialized = {
            "status": "False",
            "reason": "ContainersNotInitialized",
            "message": f"containers with incomplete status: [{' '.join(names_not_initialized)}]",
        }
    sandbox = "True" if facts.has_sandbox else "False"
    ready: Body = {"status": "True"} if is_ready else {"status": "False", **not_ready}
    ours: list[Body] = [
        {"type": "PodReadyToStartContainers", "status": sandbox},
        {"type": "Initialized", **initialized},
        {"type": "Ready", **ready},
        {"type": "ContainersReady", **ready},
        {"type": "PodScheduled", "status": "True"},
    ]
    if facts.verdict is not None and facts.verdict.disruption and phase == "Failed":
        target = {"type": "DisruptionTarget", "status": "True", "reason": facts.verdict.disruption}
        ours.insert(0, {**target, "message": facts.verdict.message})
    old = {condition["type"]: condition for condition in before}
    for condition in ours:
        known = old.pop(condition["type"], None)
        is_same = known is not None and known["status"] == condition["status"]
        condition["lastProbeTime"] = None
        condition["lastTransitionTime"] = known["lastTransitionTime"] if is_same and known else timestamp(now)
    return [*old.values(), *ours]


def _container(state: ContainerState) -> Body:
    body: Body = {
        "name": state.name,
        "image": state.image,
        "imageID": "" if state.stage is Stage.WAITING and state.before is None else f"process://{state.image}",
        "ready": state.is_ready,
        "started": state.stage is Stage.RUNNING,
        "restartCount": state.restarts,
        "state": _state(state),
        "lastState": {"terminated": _terminated(state.before, state.container_id)} if state.before is not None else {},
    }
    if state.container_id:
        body["containerID"] = state.container_id
    return body


def _state(state: ContainerState) -> Body:
    if state.stage is Stage.RUNNING:
        return {"running": {"startedAt": timestamp(state.started_at)}}
    if state.stage is Stage.TERMINATED and state.ended is not None:
        return {"terminated": _terminated(state.ended, state.container_id)}
    waiting = {"reason": state.reason}
    return {"waiting": {**waiting, "message": state.message} if state.message else waiting}


def _terminated(end: Ended, container_id: str) -> Body:
    body: Body = {
        "exitCode": end.code,
        "reason": end.reason,
        "startedAt": timestamp(end.started_at),
        "finishedAt": timestamp(end.finished_at),
        "containerID": container_id,
    }
    if end.message:
        body["message"] = end.message
    return body
