"""
Binds pods to nodes, and says why a pod cannot be placed.
"""

from __future__ import annotations

import asyncio
import time

from tests.kubernetes.controllers.following import Followed
from tests.kubernetes.controllers.placing import NoRoom, Placed, place
from tests.kubernetes.kubelet.client import ApiError, Body, Cluster, pod_path
from tests.kubernetes.kubelet.status import timestamp

_RETRY = 0.2


class Scheduler:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._changed = asyncio.Event()
        self._pods = Followed(cluster, "/api/v1/pods", self._changed)
        self._nodes = Followed(cluster, "/api/v1/nodes", self._changed)
        self._assumed: dict[str, str] = {}
        """Bound by us and not seen so yet: uid to node."""
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pods.run())
            group.create_task(self._nodes.run())
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._pods.is_listed and self._nodes.is_listed:
                    await self._place_all()

    async def _place_all(self) -> None:
        for uid in list(self._assumed):
            if uid not in self._pods.objects or self._pods.objects[uid]["spec"].get("nodeName"):
                del self._assumed[uid]
        waiting = [pod for pod in self._pods.objects.values() if self._is_waiting(pod)]
        for pod in sorted(waiting, key=lambda pod: (-int(pod["spec"].get("priority") or 0), pod["metadata"]["name"])):
            decision = place(pod, list(self._nodes.objects.values()), self._bound())
            try:
                if isinstance(decision, Placed):
                    await self._bind(pod, decision.node)
                else:
                    await self._tell(pod, decision)
            except ApiError as error:
                if error.code not in (404, 409):
                    await asyncio.sleep(_RETRY)
                    self._changed.set()

    def _is_waiting(self, pod: Body) -> bool:
        meta, spec = pod["metadata"], pod["spec"]
        is_free = not spec.get("nodeName") and not spec.get("schedulingGates") and "deletionTimestamp" not in meta
        is_ours = spec.get("schedulerName", "default-scheduler") == "default-scheduler"
        return is_free and is_ours and meta["uid"] not in self._assumed

    def _bound(self) -> list[Body]:
        bound = []
        for uid, pod in self._pods.objects.items():
            node = self._assumed.get(uid) or pod["spec"].get("nodeName")
            if node:
                bound.append({**pod, "spec": {**pod["spec"], "nodeName": node}})
        return bound

    async def _bind(self, pod: Body, node: str) -> None:
        meta = pod["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._cluster.create(f"{pod_path(meta['namespace'], meta['name'])}/binding", body)
        self._assumed[meta["uid"]] = node

    async def _tell(self, pod: Body, reason: NoRoom) -> None:
        meta = pod["metadata"]
        if self._told.get(meta["uid"]) == reason.message:
            return

        def change(before: Body) -> Body:
            others = [each for each in before.get("conditions") or () if each["type"] != "PodScheduled"]
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": reason.message,
                "lastProbeTime": None,
                "lastTransitionTime": timestamp(time.time()),
            }
            return {**before, "phase": "Pending", "conditions": [*others, condition]}

        await self._cluster.change_status(pod_path(meta["namespace"], meta["name"]), meta["uid"], change)
        self._told[meta["uid"]] = reason.message
