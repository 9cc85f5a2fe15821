"""
A cluster for tests of the platform: an API server, one machine, and a kubelet that only writes statuses.

No process is started: the tests say when a pod's program ends. Pods are bound, run and deleted in the order of a real
kubelet, as `tests/kubernetes/kubelet` documents it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Any

import yaml

from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.informer import USUAL, InformerTiming
from dlrover.platforms.kubernetes.platform import PodPlatform
from dlrover.platforms.kubernetes.pods import PodJob, PodType
from dlrover.protocol.messages.fleet import NodeType
from tests.kubernetes.kubelet.client import ApiError, Body, Cluster
from tests.platforms.contract import DEADLINE, JOB

MACHINE = "machine-1"
CRDS = Path(__file__).parents[3] / "deploy" / "crds"
TEMPLATE: dict[str, object] = {"spec": {"containers": [{"name": "main", "image": "trainer:1"}]}}
TEMPLATES = {NodeType.WORKER: PodType(template=TEMPLATE, count=3), NodeType.PS: PodType(template=TEMPLATE)}
ELASTIC_JOBS = "/apis/elastic.iml.github.io/v1alpha1/namespaces/{}/elasticjobs"
READY = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
STARTED = "2026-01-01T00:00:00Z"


class PodLab:
    """`async with PodLab(kubeconfig) as lab`. Platforms that it builds are closed at its end."""

    def __init__(self, kubeconfig: Path, *, capacity: int = 3) -> None:
        self.kubeconfig = kubeconfig
        self.cluster = Cluster(kubeconfig)
        self.namespace = f"lab-{secrets.token_hex(4)}"
        self.capacity = capacity
        """Pods that its quota allows; 0: no quota."""
        self.uids: dict[str, str] = {}
        self.is_awake = asyncio.Event()
        """Cleared: the kubelet writes nothing."""
        self.is_awake.set()
        self._platforms: list[PodPlatform] = []
        self._tasks: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> PodLab:
        await self.cluster.__aenter__()
        await self.create("/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        with contextlib.suppress(AlreadyThere):  # where no controller makes it, pods are refused without it
            accounts = f"/api/v1/namespaces/{self.namespace}/serviceaccounts"
            await self.create(accounts, {"metadata": {"name": "default"}})
        for file in sorted(CRDS.glob("*.yaml")):
            with contextlib.suppress(AlreadyThere):
                await self.create(
                    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(file.read_text())
                )
        await self._add_machine()
        if self.capacity:
            await self._add_quota()
        for job in (JOB, "job-b"):
            await self.add_job(job)
        self._tasks.append(asyncio.ensure_future(self._run_pods()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for platform in self._platforms:
            await platform.close()
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(ApiError):
            await self.cluster.delete(f"/api/v1/namespaces/{self.namespace}")
        await self.cluster.__aexit__()
        for error in ended:
            if isinstance(error, Exception):
                raise error

    # The hand inside, as the contract wants it.

    def platform(self, job_uid: str = JOB, *, timing: InformerTiming = USUAL) -> PodPlatform:
        job = PodJob(name=job_uid, uid=self.uids[job_uid], namespace=self.namespace, types=TEMPLATES)
        platform = PodPlatform(ClusterApi(find_access({}, kubeconfig=self.kubeconfig)), job, timing=timing)
        self._platforms.append(platform)
        return platform

    def end(self, node: int, exit_code: int, job_uid: str = JOB) -> None:
        phase = "Succeeded" if exit_code == 0 else "Failed"
        reason = "Completed" if exit_code == 0 else "Error"
        self.soon(self._end(names.pod_name(job_uid, "worker", node), phase, exit_code, reason))

    def exhaust_memory(self, node: int) -> None:
        self.soon(self._end(names.pod_name(JOB, "worker", node), "Failed", 137, "OOMKilled"))

    # What else tests do.

    def soon(self, work: Any) -> None:
        self._tasks.append(asyncio.ensure_future(work))

    async def add_job(self, job: str) -> None:
        """An ElasticJob and its ledger, as the operator makes them."""
        body = {
            "apiVersion": "elastic.iml.github.io/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": job},
            "spec": {
                "distributionStrategy": "AllreduceStrategy",
                "replicaSpecs": {"worker": {"replicas": 3, "template": TEMPLATE}},
            },
        }
        made = await self._create_soon(ELASTIC_JOBS.format(self.namespace), body)
        self.uids[job] = made["metadata"]["uid"]
        await self.create(
            f"/api/v1/namespaces/{self.namespace}/configmaps",
            {
                "metadata": {
                    "name": names.ledger_name(job),
                    "labels": {names.JOB_NAME: job},
                    "ownerReferences": [names.owner_reference(job, self.uids[job])],
                }
            },
        )

    async def create(self, path: str, body: Body) -> Body:
        try:
            return await self.cluster.create(path, body)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                raise AlreadyThere(path) from error
            raise

    async def _create_soon(self, path: str, body: Body) -> Body:
        """A server serves a new kind a moment after it has taken its definition."""
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    return await self.create(path, body)
                except ApiError as error:
                    if error.code != 404:
                        raise
                await asyncio.sleep(0.1)

    def path(self, pod: str) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{pod}"

    async def pods(self) -> dict[str, Body]:
        listed = await self.cluster.get(f"/api/v1/namespaces/{self.namespace}/pods")
        return {pod["metadata"]["name"]: pod for pod in listed["items"]}

    async def ledger(self, job: str = JOB) -> dict[str, str]:
        found = await self.cluster.get(f"/api/v1/namespaces/{self.namespace}/configmaps/{names.ledger_name(job)}")
        return dict(found.get("data") or {})

    # The machine.

    async def _add_machine(self) -> None:
        amounts = {"cpu": "64", "memory": "256Gi", "pods": "1100"}
        with contextlib.suppress(AlreadyThere):
            await self.create("/api/v1/nodes", {"metadata": {"name": MACHINE}})
        await self.cluster.patch(
            f"/api/v1/nodes/{MACHINE}/status",
            {"status": {"capacity": amounts, "allocatable": amounts, "conditions": [READY]}},
        )
        with contextlib.suppress(ApiError):
            # A control plane taints new machines until their kubelet reports.
            await self.cluster.patch(f"/api/v1/nodes/{MACHINE}", {"spec": {"taints": None}})

    async def _add_quota(self) -> None:
        hard = {"pods": str(self.capacity)}
        path = f"/api/v1/namespaces/{self.namespace}/resourcequotas"
        await self.create(path, {"metadata": {"name": "few"}, "spec": {"hard": hard}})
        # Without a controller manager nothing else writes the status, and the server admits by it.
        await self.cluster.patch(f"{path}/few/status", {"status": {"hard": hard, "used": {"pods": "0"}}})

    async def _recount(self) -> None:
        if not self.capacity:
            return
        pods = (await self.pods()).values()
        used = sum(pod["status"].get("phase") not in ("Succeeded", "Failed") for pod in pods)
        path = f"/api/v1/namespaces/{self.namespace}/resourcequotas/few/status"
        await self.cluster.patch(path, {"status": {"used": {"pods": str(used)}}})

    async def _run_pods(self) -> None:
        async for kind, seen in self.cluster.follow(f"/api/v1/namespaces/{self.namespace}/pods"):
            await self.is_awake.wait()
            if kind == "DELETED":
                await self._recount()
            elif kind == "LISTED":
                for pod in seen["items"]:
                    await self._care(pod)
            else:
                await self._care(seen)

    async def _care(self, pod: Body) -> None:
        """One step of a pod's life; the watch shows the next."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        try:
            if pod["metadata"].get("deletionTimestamp"):
                if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                    await self.cluster.change_status(
                        self.path(name), uid, lambda old: _over(old, "Failed", 143, "Error")
                    )
                await self.cluster.delete(self.path(name), grace=0, uid=uid)
            elif not pod["spec"].get("nodeName"):
                target = {"apiVersion": "v1", "kind": "Node", "name": MACHINE}
                await self.create(f"{self.path(name)}/binding", {"metadata": {"name": name}, "target": target})
            elif pod["status"].get("phase", "Pending") == "Pending":
                await self.cluster.change_status(self.path(name), uid, _running)
        except (ApiError, AlreadyThere) as error:
            if isinstance(error, ApiError) and error.code not in (404, 409):
                raise

    async def _end(self, pod: str, phase: str, exit_code: int, reason: str) -> None:
        found = await self.cluster.get(self.path(pod))
        uid = found["metadata"]["uid"]
        await self.cluster.change_status(self.path(pod), uid, lambda old: _over(old, phase, exit_code, reason))
        await self._recount()


class AlreadyThere(Exception):
    """The object exists."""


def _running(status: Body) -> Body:
    state = {"running": {"startedAt": STARTED}}
    return {**status, "phase": "Running", "startTime": STARTED, "containerStatuses": [_container(state, ready=True)]}


def _over(status: Body, phase: str, exit_code: int, reason: str) -> Body:
    ended = {"exitCode": exit_code, "reason": reason, "startedAt": STARTED, "finishedAt": STARTED}
    if phase == "Failed" and exit_code == 143:
        ended.pop("finishedAt")
    return {**status, "phase": phase, "containerStatuses": [_container({"terminated": ended}, ready=False)]}


def _container(state: Body, *, ready: bool) -> Body:
    return {
        "name": "main",
        "image": "trainer:1",
        "imageID": "",
        "ready": ready,
        "restartCount": 0,
        "state": state,
        "lastState": {},
    }
