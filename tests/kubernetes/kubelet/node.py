"""
The node's own objects: `Node` with capacity and conditions, and a Lease that is renewed while the kubelet lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from tests.kubernetes.kubelet.client import ApiError, Body
from tests.kubernetes.kubelet.host import Host
from tests.kubernetes.kubelet.status import timestamp

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_RETRY = 0.5
LEASE_DURATION = 40


class NodeKeeper:
    """`run` registers the node and keeps it alive; `is_ready` decides what it says of itself."""

    def __init__(self, host: Host, *, renew_every: float, labels: dict[str, str], taints: list[Body]) -> None:
        self._host = host
        self._renew_every = renew_every
        self._labels = labels
        self._taints = taints
        self.not_ready = ""
        """Why the node is not ready; empty: it is."""
        self._changed = asyncio.Event()

    def say(self, not_ready: str) -> None:
        self.not_ready = not_ready
        self._changed.set()

    async def run(self) -> None:
        await self._until_done(self._register)
        while True:
            await self._until_done(self._post_status)
            await self._until_done(self._renew)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._renew_every)
            except TimeoutError:
                continue

    @staticmethod
    async def _until_done(step: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await step()
                return
            except ApiError:
                await asyncio.sleep(_RETRY)

    async def _register(self) -> None:
        name = self._host.name
        labels = {
            "kubernetes.io/hostname": name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self._labels,
        }
        body: Body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": self._taints} if self._taints else {},
        }
        try:
            await self._host.cluster.create("/api/v1/nodes", body)
        except ApiError as error:
            if error.code != 409:
                raise

    async def _post_status(self) -> None:
        path = f"/api/v1/nodes/{self._host.name}"
        try:
            node = await self._host.cluster.get(path)
        except ApiError as error:
            if error.code == 404:
                await self._register()
                node = await self._host.cluster.get(path)
            else:
                raise
        await self._host.cluster.change_status(path, node["metadata"]["uid"], self._status)

    def _status(self, before: Body) -> Body:
        now = timestamp(self._host.now())
        wanted: list[Body] = [
            {
                "type": f"{what}Pressure",
                "status": "False",
                "reason": f"KubeletHas{'SufficientPID' if what == 'PID' else 'Sufficient' + what}",
            }
            for what in ("Memory", "Disk", "PID")
        ]
        if self.not_ready:
            ready = {"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": self.not_ready}
        else:
            ready = {
                "type": "Ready",
                "status": "True",
                "reason": "KubeletReady",
                "message": "kubelet is posting ready status",
            }
        wanted.append(ready)
        old = {condition["type"]: condition for condition in before.get("conditions") or ()}
        for condition in wanted:
            known = old.pop(condition["type"], None)
            is_same = known is not None and known["status"] == condition["status"]
            condition["lastHeartbeatTime"] = now
            condition["lastTransitionTime"] = known["lastTransitionTime"] if is_same and known else now
        return {
            **before,
            "capacity": self._host.capacity,
            "allocatable": self._host.capacity,
            "conditions": [*old.values(), *wanted],
            "addresses": [
                {"type": "InternalIP", "address": self._host.address},
                {"type": "Hostname", "address": self._host.name},
            ],
            "nodeInfo": {
                "kubeletVersion": "v1.33.0-process",
                "kubeProxyVersion": "",
                "containerRuntimeVersion": "process://1",
                "operatingSystem": "linux",
                "architecture": "amd64",
                "kernelVersion": "",
                "osImage": "",
                "machineID": self._host.name,
                "systemUUID": self._host.name,
                "bootID": self._host.name,
            },
        }

    async def _renew(self) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        name = self._host.name
        spec = {"holderIdentity": name, "leaseDurationSeconds": LEASE_DURATION, "renewTime": now}
        body: Body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec}
        try:
            await self._host.cluster.patch(f"{_LEASES}/{name}", {"spec": spec})
        except ApiError as error:
            if error.code != 404:
                raise
            await self._create_lease(body)

    async def _create_lease(self, body: Body) -> None:
        try:
            await self._host.cluster.create(_LEASES, body)
        except ApiError as error:
            if error.code != 404:
                raise
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-node-lease"}}
            await self._host.cluster.create("/api/v1/namespaces", namespace)
            await self._host.cluster.create(_LEASES, body)
