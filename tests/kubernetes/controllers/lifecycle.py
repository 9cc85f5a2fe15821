"""
Nodes that fall silent or go, and the pods on them: what the controller-manager does.

A lease that is not renewed makes its node `Unknown` and unreachable, pods that do not bear that are deleted, and pods of a node
whose object is gone are collected at once. Whoever disrupts a pod writes the condition `DisruptionTarget` first.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime

from tests.kubernetes.controllers.following import Followed
from tests.kubernetes.controllers.placing import tolerance
from tests.kubernetes.kubelet.client import ApiError, Body, Cluster, pod_path
from tests.kubernetes.kubelet.status import timestamp

_LOOK_EVERY = 0.5
_UNREACHABLE = "node.kubernetes.io/unreachable"
_NOT_READY = "node.kubernetes.io/not-ready"


async def disrupt(cluster: Cluster, pod: Body, reason: str, message: str, *, phase: str = "") -> None:
    """Write the condition that says who ends the pod. A phase other than the pod's own is written with it."""
    meta = pod["metadata"]

    def change(before: Body) -> Body:
        others = [each for each in before.get("conditions") or () if each["type"] != "DisruptionTarget"]
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": reason,
            "message": message,
            "lastProbeTime": None,
            "lastTransitionTime": timestamp(time.time()),
        }
        status = {**before, "conditions": [*others, condition]}
        return {**status, "phase": phase} if phase and before.get("phase") not in ("Succeeded", "Failed") else status

    await cluster.change_status(pod_path(meta["namespace"], meta["name"]), meta["uid"], change)


async def preempt(cluster: Cluster, pod: Body) -> None:
    """What the scheduler does to a pod that makes room for one of a higher priority."""
    message = "default-scheduler: preempting to accommodate a higher priority pod"
    await disrupt(cluster, pod, "PreemptionByScheduler", message)
    await cluster.delete(pod_path(pod["metadata"]["namespace"], pod["metadata"]["name"]), uid=pod["metadata"]["uid"])


class NodeLifecycle:
    def __init__(self, cluster: Cluster, *, lease_grace: float, toleration_factor: float) -> None:
        self._cluster = cluster
        self._lease_grace = lease_grace
        """Seconds without a renewal after which a node counts as unreachable; a real one takes 50."""
        self._factor = toleration_factor
        """Shortens what pods bear, in tests."""
        self._changed = asyncio.Event()
        self._pods = Followed(cluster, "/api/v1/pods", self._changed)
        self._nodes = Followed(cluster, "/api/v1/nodes", self._changed)
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        self._leases = Followed(cluster, leases, self._changed)
        self._seen: dict[str, tuple[str, float]] = {}
        """Node to the renewal that we saw last, and when we saw it: clocks of nodes are not trusted."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for followed in (self._pods, self._nodes, self._leases):
                group.create_task(followed.run())
            while True:
                # A poll: what is looked for is that something does not happen.
                await asyncio.sleep(_LOOK_EVERY)
                if self._pods.is_listed and self._nodes.is_listed and self._leases.is_listed:
                    try:
                        await self._look()
                    except ApiError as error:
                        # Seen again at the next look. While the API server is away no lease can be renewed: a real
                        # controller-manager loses its own lease then, ends, and the next one begins to count anew.
                        if error.code == 0:
                            self._seen.clear()

    async def _look(self) -> None:
        names = set()
        for node in list(self._nodes.objects.values()):
            names.add(node["metadata"]["name"])
            await self._judge(node)
        for pod in list(self._pods.objects.values()):
            name = pod["spec"].get("nodeName")
            if name and name not in names:
                await self._collect(pod)

    async def _judge(self, node: Body) -> None:
        name = node["metadata"]["name"]
        lease = next((each for each in self._leases.objects.values() if each["metadata"]["name"] == name), None)
        renewed = str((lease or {}).get("spec", {}).get("renewTime", ""))
        known = self._seen.get(name)
        if known is None or known[0] != renewed:
            self._seen[name] = known = (renewed, time.monotonic())
        ready = _ready_of(node)
        if time.monotonic() - known[1] > self._lease_grace and ready != "Unknown":
            await self._lose(node)
            return
        wanted = {"Unknown": _UNREACHABLE, "False": _NOT_READY}.get(ready, "")
        await self._taint(node, wanted)
        if wanted:
            await self._evict(node, wanted)

    async def _lose(self, node: Body) -> None:
        def change(before: Body) -> Body:
            now = timestamp(time.time())
            unknown = {
                "status": "Unknown",
                "reason": "NodeStatusUnknown",
                "message": "Kubelet stopped posting node status.",
                "lastTransitionTime": now,
            }
            return {**before, "conditions": [{**each, **unknown} for each in before.get("conditions") or ()]}

        await self._cluster.change_status(f"/api/v1/nodes/{node['metadata']['name']}", node["metadata"]["uid"], change)
        for pod in self._on(node):
            await self._mark_not_ready(pod)

    async def _mark_not_ready(self, pod: Body) -> None:
        def change(before: Body) -> Body:
            conditions = [
                {**each, "status": "False", "lastTransitionTime": timestamp(time.time())}
                if each["type"] == "Ready"
                else each
                for each in before.get("conditions") or ()
            ]
            return {**before, "conditions": conditions}

        meta = pod["metadata"]
        await self._cluster.change_status(pod_path(meta["namespace"], meta["name"]), meta["uid"], change)

    async def _taint(self, node: Body, wanted: str) -> None:
        """Only the taints that say how the node is; others are people's."""
        taints = list((node.get("spec") or {}).get("taints") or ())
        ours = [each for each in taints if each["key"] in (_UNREACHABLE, _NOT_READY)]
        if {each["key"] for each in ours} == ({wanted} if wanted else set()):
            return
        kept = [each for each in taints if each not in ours]
        if wanted:
            now = timestamp(time.time())
            kept += [{"key": wanted, "effect": effect, "timeAdded": now} for effect in ("NoSchedule", "NoExecute")]
        await self._cluster.patch(f"/api/v1/nodes/{node['metadata']['name']}", {"spec": {"taints": kept}})

    async def _evict(self, node: Body, key: str) -> None:
        taint = {"key": key, "effect": "NoExecute"}
        found = next(
            (t for t in (node.get("spec") or {}).get("taints") or () if t["key"] == key and "timeAdded" in t), None
        )
        if found is None:
            return
        since = time.time() - datetime.fromisoformat(found["timeAdded"]).timestamp()
        for pod in self._on(node):
            limit = tolerance(pod, taint)
            if limit is not None and since >= limit * self._factor and "deletionTimestamp" not in pod["metadata"]:
                await disrupt(
                    self._cluster, pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"
                )
                await self._delete(pod, None)

    async def _collect(self, pod: Body) -> None:
        await disrupt(self._cluster, pod, "DeletionByPodGC", "PodGC: node no longer exists", phase="Failed")
        await self._delete(pod, 0)

    async def _delete(self, pod: Body, grace: int | None) -> None:
        meta = pod["metadata"]
        try:
            await self._cluster.delete(pod_path(meta["namespace"], meta["name"]), uid=meta["uid"], grace=grace)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def _on(self, node: Body) -> list[Body]:
        return [pod for pod in self._pods.objects.values() if pod["spec"].get("nodeName") == node["metadata"]["name"]]


def _ready_of(node: Body) -> str:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((str(each["status"]) for each in conditions if each["type"] == "Ready"), "")
