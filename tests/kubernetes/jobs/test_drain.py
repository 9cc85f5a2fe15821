"""
A machine is drained: with workers on it and with the master, by the eviction API, as `kubectl drain` uses it.

Where there is a kubectl it does it; else the test sends what kubectl sends, and asks again as long as a budget refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kubernetes.jobs.conftest import NODES, QUICK
from tests.kubernetes.jobs.stage import TYPE, UID, TrainingJob
from tests.kubernetes.kubelet.client import ApiError, Body, pod_path
from tests.kubernetes.machine import LocalCluster

DEADLINE = 300.0

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]


def kubectl(cluster: LocalCluster) -> str:
    """Empty: there is none, or it cannot be used: it sends a token only to a server with TLS."""
    if not cluster.api.server.startswith("https"):
        return ""
    beside = Path(os.environ.get("KUBEBUILDER_ASSETS", "")) / "kubectl"
    return str(beside) if beside.is_file() else shutil.which("kubectl") or ""


async def machine_of(cluster: LocalCluster) -> str:
    """One that no other test has switched off."""
    for name in NODES:
        if await cluster.find(f"/api/v1/nodes/{name}"):
            return name
    raise AssertionError("no machine is left")


async def mark(cluster: LocalCluster, machine: str, *, is_closed: bool) -> None:
    await cluster.api.patch(f"/api/v1/nodes/{machine}", {"spec": {"unschedulable": is_closed or None}})


async def on_machine(job: TrainingJob, machine: str) -> list[Body]:
    """Pods of the job there that have not ended."""
    pods = await job.cluster.pods(f"{UID}={job.uid}")
    return [
        pod
        for pod in pods
        if pod["spec"].get("nodeName") == machine and pod["status"].get("phase") not in ("Succeeded", "Failed")
    ]


async def drain(job: TrainingJob, machine: str) -> None:
    if program := kubectl(job.cluster):
        command = [program, "--kubeconfig", str(job.cluster.kubeconfig), "drain", machine, "--timeout=280s"]
        command += ["--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={UID}={job.uid}"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        return
    await mark(job.cluster, machine, is_closed=True)
    async with asyncio.timeout(DEADLINE):
        while pods := await on_machine(job, machine):
            for pod in pods:
                if "deletionTimestamp" not in pod["metadata"]:
                    await evict(job.cluster, pod)
            await asyncio.sleep(0.5)


async def evict(cluster: LocalCluster, pod: Body) -> None:
    name = pod["metadata"]["name"]
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": "default"}}
    try:
        await cluster.api.create(f"{pod_path('default', name)}/eviction", body)
    except ApiError as error:
        if error.code not in (404, 429):  # gone, or a budget refuses for now
            raise


class Lows:
    """The smallest number of workers that were ready at once."""

    def __init__(self) -> None:
        self.ready = 1_000_000
        self._pods: dict[str, Body] = {}

    async def follow(self, job: TrainingJob) -> None:
        labels = f"{UID}={job.uid},{TYPE}=worker"
        async for kind, seen in job.cluster.api.follow("/api/v1/namespaces/default/pods", labels=labels):
            if kind == "LISTED":
                self._pods = {pod["metadata"]["uid"]: pod for pod in seen["items"]}
            elif kind == "DELETED":
                self._pods.pop(seen["metadata"]["uid"], None)
            else:
                self._pods[seen["metadata"]["uid"]] = seen
            self.ready = min(self.ready, sum(map(_is_ready, self._pods.values())))


def _is_ready(pod: Body) -> bool:
    conditions = pod["status"].get("conditions") or ()
    is_up = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    return is_up and "deletionTimestamp" not in pod["metadata"]


@contextlib.asynccontextmanager
async def only_on(cluster: LocalCluster, machine: str) -> AsyncIterator[None]:
    """Meanwhile pods can go nowhere else."""
    others = [name for name in NODES if name != machine and await cluster.find(f"/api/v1/nodes/{name}")]
    for name in others:
        await mark(cluster, name, is_closed=True)
    try:
        yield
    finally:
        for name in others:
            await mark(cluster, name, is_closed=False)


async def test_a_drained_machine_costs_the_job_no_record_and_never_its_minimum(cluster: LocalCluster) -> None:
    job = TrainingJob(cluster, "drained", workers=4, options=(*QUICK, "--pace=0.3"))
    machine = await machine_of(cluster)
    async with only_on(cluster, machine):
        await job.submit(least=2)
        await job.until_step(5)
        await job.until_running()
    assert len(await on_machine(job, machine)) == 5, "four workers and the master"
    lows = Lows()
    following = asyncio.ensure_future(lows.follow(job))
    try:
        await drain(job, machine)
        assert await on_machine(job, machine) == []
        pods = await job.until_running()
        assert {pod["spec"]["nodeName"] for pod in pods.values()} & {machine} == set()
        for pod in pods.values():
            await job.until_trained_by(pod)
    finally:
        following.cancel()
        await mark(cluster, machine, is_closed=False)
    assert 2 <= lows.ready < 4, "the budget held, and the drain went on"
    job.hurry()
    assert await job.until_ended() == "Succeeded", await job.status()
    assert min(int(event["world_size"]) for event in job.events("step")) >= 2
    finding = await job.audit()
    assert (finding["num_seen"], finding["is_complete"]) == (6000, True)
