"""
A pod's life as text: one line per status that the API server showed, to be compared with what Kubernetes documents.

`Running; main running ready; PodScheduled … Ready` is phase (and reason), containers, and the conditions that are true. Lines that
repeat the one before are left out: real kubelets repeat themselves, too.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from tests.kubernetes.kubelet.client import Body, Cluster

_ORDER = ("PodScheduled", "PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready", "DisruptionTarget")
ALL_TRUE = "PodScheduled PodReadyToStartContainers Initialized ContainersReady Ready"


class Stories:
    """Of all pods in the namespace. `run` is its task."""

    def __init__(self, cluster: Cluster, namespace: str = "default") -> None:
        self._cluster = cluster
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._lines: dict[str, list[str]] = defaultdict(list)
        self._newest: dict[str, Body] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async for kind, seen in self._cluster.follow(self._path):
            for pod in (seen.get("items") or ()) if kind == "LISTED" else (seen,):
                name = pod["metadata"].get("name", "")  # a bookmark has none
                self._newest[name] = pod.get("status") or {}
                line = "gone" if kind == "DELETED" else line_of(pod)
                if name and line and self._lines[name][-1:] != [line]:
                    self._lines[name].append(line)
            self._changed.set()

    async def until(self, name: str, beginning: str, timeout: float = 120.0) -> None:
        """Until the newest line of the pod begins so."""
        try:
            async with asyncio.timeout(timeout):
                while not any(line.startswith(beginning) for line in self._lines[name]):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(
                f"{name} never became {beginning!r}:\n{self.of(name)}\n{self._newest.get(name)}"
            ) from None

    def of(self, name: str) -> str:
        return "\n".join(self._lines[name])


def line_of(pod: Body) -> str:
    """Empty before the kubelet has seen the pod, unless it cannot be placed."""
    status = pod.get("status") or {}
    reason = f" {status['reason']}" if status.get("reason") else ""
    deleting = "deleting " if "deletionTimestamp" in pod["metadata"] else ""
    entries = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    placed = conditions.get("PodScheduled") or {}
    if placed.get("status") == "False":
        return f"{deleting}{status['phase']}; {placed['reason']}: {placed['message']}"
    if not entries and not reason:
        return ""
    true = [
        f"{name}({conditions[name]['reason']})" if name == "DisruptionTarget" else name
        for name in _ORDER
        if conditions.get(name, {}).get("status") == "True"
    ]
    containers = ", ".join(_container(each) for each in entries)
    return f"{deleting}{status['phase']}{reason}; {containers}; {' '.join(true)}"


def _container(entry: Body) -> str:
    ((kind, state),) = entry["state"].items()
    words = [entry["name"], kind]
    if kind == "waiting":
        words.append(state["reason"])
    elif kind == "terminated":
        words += [state["reason"], str(state["exitCode"])]
    if entry["ready"]:
        words.append("ready")
    if entry["restartCount"]:
        words.append(f"restarts={entry['restartCount']}")
    last = (entry.get("lastState") or {}).get("terminated")
    if last:
        words.append(f"last={last['reason']}/{last['exitCode']}")
    return " ".join(words)
