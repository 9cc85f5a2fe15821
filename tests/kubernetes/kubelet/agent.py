"""
The kubelet's loop: pods that are bound to this node come and go, and each has a task of its own.
"""

from __future__ import annotations

import asyncio
import logging

from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.kubelet.environment import parse_quantity
from tests.kubernetes.kubelet.faults import Faults
from tests.kubernetes.kubelet.host import Host, requests_of
from tests.kubernetes.kubelet.lives import kill_all
from tests.kubernetes.kubelet.node import NodeKeeper
from tests.kubernetes.kubelet.pod import PodRun
from tests.kubernetes.kubelet.status import Verdict

_log = logging.getLogger("kubelet")


class Kubelet:
    """`run` ends only when it is cancelled; the pods run on then, as they do when a real kubelet stops."""

    def __init__(self, host: Host, keeper: NodeKeeper) -> None:
        self._host = host
        self._keeper = keeper
        self._runs: dict[str, PodRun] = {}
        self._let_go: set[str] = set()
        """Deleted by us, and not seen as gone yet."""
        self.faults = Faults(host, keeper, self._runs)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keeper.run())
            group.create_task(self._follow(group))

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        fields = f"spec.nodeName={self._host.name}"
        async for kind, seen in self._host.cluster.follow("/api/v1/pods", fields=fields):
            if kind == "LISTED":
                await self._listed(seen.get("items") or [], group)
            elif kind == "DELETED":
                self._vanished(seen["metadata"]["uid"])
            elif kind in ("ADDED", "MODIFIED"):
                self._seen(seen, group)

    async def _listed(self, pods: list[Body], group: asyncio.TaskGroup) -> None:
        uids = {pod["metadata"]["uid"] for pod in pods}
        for uid in list(self._runs):
            if uid not in uids:
                self._vanished(uid)
        self._let_go &= uids
        folder = self._host.folder / "pods"
        for orphan in sorted(folder.glob("*")) if folder.is_dir() else []:
            # What a kubelet before us ran, and what was deleted while no kubelet looked.
            if orphan.name not in uids and orphan.name not in self._runs:
                await asyncio.to_thread(kill_all, orphan)
        for pod in pods:
            self._seen(pod, group)

    def _seen(self, pod: Body, group: asyncio.TaskGroup) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self._let_go:
            return  # an event from before
        run = self._runs.get(uid)
        if run is None:
            run = PodRun(pod, self._host)
            phase = (pod.get("status") or {}).get("phase")
            if phase not in ("Succeeded", "Failed") and not (self._host.folder / "pods" / uid).exists():
                verdict = self._lack(pod)
                if verdict is not None:
                    run.reject(verdict)
            self._runs[uid] = run
            group.create_task(self._care_for(run))
        if "deletionTimestamp" in pod["metadata"]:
            run.delete(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))

    async def _care_for(self, run: PodRun) -> None:
        _log.info("pod=%s/%s uid=%s began", run.namespace, run.name, run.uid)
        try:
            await run.run()
        finally:
            self._runs.pop(run.uid, None)
            self._let_go.add(run.uid)
        _log.info("pod=%s/%s uid=%s is gone", run.namespace, run.name, run.uid)

    def _vanished(self, uid: str) -> None:
        self._let_go.discard(uid)
        if uid in self._runs:
            self._runs[uid].vanish()

    def _lack(self, pod: Body) -> Verdict | None:
        """What a kubelet checks again after the scheduler: does the pod fit?"""
        used: dict[str, float] = {}
        for run in self._runs.values():
            if not run.is_ended:
                for key, amount in requests_of(run.pod).items():
                    used[key] = used.get(key, 0.0) + amount
        for key, amount in requests_of(pod).items():
            capacity = parse_quantity(self._host.capacity.get(key, "0"))
            if key != "ephemeral-storage" and used.get(key, 0.0) + amount > capacity:
                scale = 1000 if key == "cpu" else 1
                counts = f"requested: {amount * scale:.0f}, used: {used.get(key, 0.0) * scale:.0f}"
                message = f"Pod was rejected: Node didn't have enough resource: {key}, {counts}, capacity: {capacity * scale:.0f}"
                return Verdict(reason=f"OutOf{key}", message=message)
        return None
