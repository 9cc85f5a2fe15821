"""
What the operator costs a cluster with many jobs: its memory, its processor time when idle, and what one master's loss costs then.

    python benchmarks/kubernetes_operator.py [--jobs 200] [--pods 32] [--seconds 60] [--json FILE]

The API server and the operator are processes of their own. Each job has a master and its worker pods, all running, on one machine
for 32 pods; machines report each 300 s, as kubelets do. The bounds are 150 MB and 0.2 cores. The memory counted is all of the
process that is in memory (RSS), files that it shares with others included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # the API server of the tests

from dlrover.platforms.kubernetes import names
from tests.kubernetes.kubelet.client import ApiError, Body, Cluster, pod_path

ROOT = Path(__file__).parents[1]
MB = 1e6
LIMIT_MB, LIMIT_CORES = 150.0, 0.2
JOBS = "/apis/elastic.iml.github.io/v1alpha1/namespaces/default/elasticjobs"
PODS = "/api/v1/namespaces/default/pods"
AT_ONCE = 16
REPORTS_EVERY = 300.0
"""Seconds between two reports of a machine that has nothing new to tell."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--pods", type=int, default=32, help="of each job, beside its master")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the idle operator is watched")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), options.jobs, options.pods, options.seconds))
    num_pods = options.jobs * (options.pods + 1)
    print(f"{options.jobs} jobs, {num_pods} pods")
    print(f"  from the first job to the last master's pod  {found['launch_s']:8.2f} s")
    print(f"  memory, all masters up                       {found['memory_mb']:8.1f} MB  (limit {LIMIT_MB:g})")
    print(f"  processor, idle                              {found['idle_cores']:8.4f} cores  (limit {LIMIT_CORES:g})")
    print(f"  a master is deleted, to the next one's pod   {found['replaced_s']:8.3f} s")
    print(f"  memory of an operator that starts with them  {found['restarted_mb']:8.1f} MB")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if found["memory_mb"] > LIMIT_MB or found["restarted_mb"] > LIMIT_MB or found["idle_cores"] > LIMIT_CORES:
        sys.exit(1)


async def measure(folder: Path, num_jobs: int, num_pods: int, seconds: float) -> dict[str, float]:
    ready = folder / "ready"
    server = _start(folder, "server", "tests.kubernetes.server", "--ready-file", str(ready), "--directory", str(folder))
    operators: list[subprocess.Popen[bytes]] = []
    try:
        await _until(ready.exists, "the API server listens")
        kubeconfig = Path(json.loads(ready.read_text())["kubeconfig"])
        async with Cluster(kubeconfig) as cluster:
            await _prepare(cluster, num_jobs)
            operators.append(_start_operator(folder, kubeconfig))
            found = await _launch(cluster, num_jobs, num_pods)
            reports = asyncio.ensure_future(_report_machines(cluster, num_jobs))
            process = psutil.Process(operators[-1].pid)
            await _is_quiet(process)
            found["memory_mb"] = process.memory_info().rss / MB
            found["idle_cores"] = await _cores(process, seconds)
            found["replaced_s"] = await _lose_master(cluster)
            _stop(operators.pop())
            operators.append(_start_operator(folder, kubeconfig))
            process = psutil.Process(operators[-1].pid)
            await asyncio.sleep(5.0)
            await _is_quiet(process)
            found["restarted_mb"] = process.memory_info().rss / MB
            reports.cancel()
            return found
    finally:
        for each in (*operators, server):
            _stop(each)


async def _prepare(cluster: Cluster, num_machines: int) -> None:
    import yaml

    for path in (*sorted((ROOT / "deploy" / "crds").glob("*.yaml")), ROOT / "deploy" / "roles" / "master.yaml"):
        body = yaml.safe_load(path.read_text())
        group = "apiextensions.k8s.io" if body["kind"] == "CustomResourceDefinition" else "rbac.authorization.k8s.io"
        plural = "customresourcedefinitions" if "apiext" in group else "clusterroles"
        await cluster.create(f"/apis/{group}/v1/{plural}", body)

    async def add(number: int) -> None:
        await cluster.create("/api/v1/nodes", {"metadata": {"name": f"machine-{number}"}})
        await _report_machine(cluster, number)

    await _all(add, num_machines)


async def _launch(cluster: Cluster, num_jobs: int, num_pods: int) -> dict[str, float]:
    """Jobs as people apply them, masters as the operator makes them, and pods as masters make them."""
    begun_at = time.monotonic()

    async def submit(number: int) -> None:
        await cluster.create(JOBS, _job(f"job-{number}", num_pods))

    async def run(number: int) -> None:
        name = f"job-{number}"
        job = await cluster.get(f"{JOBS}/{name}")
        master = names.master_pod(name, 0)
        await _until_found(cluster, pod_path("default", master), f"the master of {name}")
        await _bring_up(cluster, master, number)
        for index in range(num_pods):
            await cluster.create(PODS, _worker(job, index))
            await _bring_up(cluster, names.pod_name(name, "worker", index), number)

    await _all(submit, num_jobs)
    for number in range(num_jobs):
        await _until_found(cluster, pod_path("default", names.master_pod(f"job-{number}", 0)), "the masters")
    launch_s = time.monotonic() - begun_at
    await _all(run, num_jobs)
    for number in range(num_jobs):
        await _until_ready(cluster, f"job-{number}", num_pods)
    return {"launch_s": launch_s}


async def _lose_master(cluster: Cluster) -> float:
    begun_at = time.monotonic()
    await cluster.delete(pod_path("default", names.master_pod("job-0", 0)))
    await _until_found(cluster, pod_path("default", names.master_pod("job-0", 1)), "the next master")
    return time.monotonic() - begun_at


async def _report_machines(cluster: Cluster, num_machines: int) -> None:
    number = 0
    while True:
        await asyncio.sleep(REPORTS_EVERY / num_machines)
        await _report_machine(cluster, number % num_machines)
        number += 1


async def _report_machine(cluster: Cluster, number: int) -> None:
    condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": _now()}
    await cluster.patch(f"/api/v1/nodes/machine-{number}/status", {"status": {"conditions": [condition]}})


async def _bring_up(cluster: Cluster, name: str, machine: int) -> None:
    binding: Body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
    await cluster.create(f"{pod_path('default', name)}/binding", {**binding, "target": {"name": f"machine-{machine}"}})
    container = {"name": "main", "image": "x", "imageID": "", "ready": True, "restartCount": 0}
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{**container, "state": {"running": {"startedAt": _now()}}}],
    }
    await cluster.patch(f"{pod_path('default', name)}/status", {"status": status})


def _job(name: str, num_pods: int) -> Body:
    environ = [{"name": f"SETTING_{number}", "value": "x" * 40} for number in range(20)]
    container = {"name": "main", "image": "trainer:1", "command": ["dlrover-run", "train.py"], "env": environ}
    worker = {"replicas": num_pods, "template": {"spec": {"containers": [container]}}}
    spec = {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": {"worker": worker}}
    kind = {"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ElasticJob"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def _worker(job: Body, index: int) -> Body:
    meta = job["metadata"]
    labels = {names.JOB_NAME: meta["name"], names.JOB_UID: meta["uid"], names.REPLICA_TYPE: "worker"}
    labels |= {names.REPLICA_INDEX: str(index), names.RANK_INDEX: str(index)}
    environ = [{"name": f"SETTING_{number}", "value": "x" * 40} for number in range(20)]
    owners = [names.owner_reference(meta["name"], meta["uid"])]
    name = names.pod_name(meta["name"], "worker", index)
    return {
        "metadata": {"name": name, "labels": labels, "ownerReferences": owners},
        "spec": {"containers": [{"name": "main", "image": "trainer:1", "env": environ}], "restartPolicy": "Never"},
    }


# Processes and waiting.


def _start(folder: Path, name: str, module: str, *options: str) -> subprocess.Popen[bytes]:
    environ = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", module, *options], cwd=ROOT, stdout=log, stderr=log, env=environ)


def _start_operator(folder: Path, kubeconfig: Path) -> subprocess.Popen[bytes]:
    doors = ("--metrics-bind-address", "0", "--health-probe-bind-address", "0")
    return _start(folder, "operator", "dlrover.operator", "--kubeconfig", str(kubeconfig), *doors)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _all(work: Callable[[int], Awaitable[None]], count: int) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with turns:
            await work(number)

    await asyncio.gather(*(one(number) for number in range(count)))


async def _is_quiet(process: psutil.Process) -> None:
    for _ in range(60):
        if await _cores(process, 2.0) <= 0.05:
            return


async def _cores(process: psutil.Process, seconds: float) -> float:
    before, begun_at = sum(process.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun_at)


async def _until(is_so: Callable[[], Any], what: str, timeout: float = 240.0) -> None:
    try:
        async with asyncio.timeout(timeout):
            while not is_so():  # noqa: ASYNC110 - it is a file
                await asyncio.sleep(0.05)
    except TimeoutError:
        sys.exit(f"not within {timeout:g} s: {what}")


async def _until_found(cluster: Cluster, path: str, what: str) -> None:
    async with asyncio.timeout(240):
        while True:
            try:
                await cluster.get(path)
                return
            except ApiError as error:
                if error.code != 404:
                    sys.exit(f"{what}: {error}")
            await asyncio.sleep(0.02)


async def _until_ready(cluster: Cluster, name: str, num_pods: int) -> None:
    async with asyncio.timeout(240):
        while True:
            job = await cluster.get(f"{JOBS}/{name}")
            if job.get("status", {}).get("ready") == f"{num_pods}/{num_pods}":
                return
            await asyncio.sleep(0.1)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


if __name__ == "__main__":
    main()
