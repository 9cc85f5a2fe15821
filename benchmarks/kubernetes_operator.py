"""
What the operator costs a cluster with many jobs: its memory, its processor time when idle, and what one master's loss costs then.

    python benchmarks/kubernetes_operator.py [--jobs 200] [--pods 32] [--seconds 60] [--json FILE]

The API server and the operator are processes of their own. Each job has a master and its worker pods, all running, on one machine
for 32 pods; machines report each 300 s, as kubelets do. The bounds are 150 MB and 0.2 cores. The memory counted is all of the
process that is in memory (RSS), files that it shares with others included.

Each stage has a deadline. Lines on the standard error tell how far a stage is. If a stage does not end in time, or a process ends
early, the benchmark ends with 2 and shows the ends of both processes' logs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

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
PROGRESS_EVERY = 10.0
STAGE_TIMEOUT = 120.0
"""Seconds. A stage of few requests takes some seconds on a quiet machine."""
TIMEOUT_OF_POD = 0.2
"""Seconds more for each pod of a stage that makes pods: on a quiet machine one takes about 0.03 s."""
SETTLING = 60.0
"""Seconds that the operator may take to become idle. Then it is measured as it is."""
NUM_LOG_LINES = 15
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
        processes = Processes(Path(folder))
        try:
            found = asyncio.run(measure(processes, options.jobs, options.pods, options.seconds))
        except Stuck as error:
            processes.explain(error)
        finally:
            processes.stop_all()
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


class Stuck(Exception):
    """The benchmark cannot go on: the sentence says why."""


@dataclass
class Stage:
    """A part of the benchmark that must end in time."""

    name: str
    timeout: float
    count: int = 0
    done: int = 0

    def __str__(self) -> str:
        return f"{self.name}: {self.done} of {self.count}" if self.count else self.name


class Processes:
    """The API server and the operators, each with a log of its own in the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, *options: str) -> psutil.Process:
        environ = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"}
        with (self.folder / f"{name}.log").open("wb") as log:
            argv = [sys.executable, "-m", module, *options]
            process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log, env=environ)
        self._running[name] = process
        return psutil.Process(process.pid)

    def start_operator(self, name: str, kubeconfig: Path) -> psutil.Process:
        doors = ("--metrics-bind-address", "0", "--health-probe-bind-address", "0")
        return self.start(name, "dlrover.operator", "--kubeconfig", str(kubeconfig), *doors)

    def check(self) -> None:
        for name, process in self._running.items():
            if process.poll() is not None:
                raise Stuck(f"{name} has ended with {process.returncode}")

    def stop(self, name: str) -> None:
        process = self._running.pop(name)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def stop_all(self) -> None:
        for name in list(self._running)[::-1]:
            self.stop(name)

    def explain(self, error: Stuck) -> NoReturn:
        print(f"kubernetes_operator.py: {error}", file=sys.stderr)
        for log in sorted(self.folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
            print(f"--- {log.name} ends with:", *lines, sep="\n", file=sys.stderr)
        sys.exit(2)


@contextlib.asynccontextmanager
async def stage(
    processes: Processes, name: str, *, count: int = 0, timeout: float = STAGE_TIMEOUT
) -> AsyncIterator[Stage]:
    """Raises Stuck if the block does not end in time, or a process ends meanwhile."""
    begun_at = time.monotonic()
    here = Stage(name, timeout, count)
    body = asyncio.current_task()
    assert body is not None, "a stage is part of a task"
    troubles: list[Stuck] = []

    async def watch() -> None:
        told_at = begun_at
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            try:
                processes.check()
                if now - begun_at > timeout:
                    raise Stuck(f"not within {timeout:g} s: {here}")
            except Stuck as error:
                troubles.append(error)
                body.cancel()
                return
            if now - told_at > PROGRESS_EVERY:
                told_at = now
                _tell(f"{now - begun_at:6.1f} s  {here} ...")

    watching = asyncio.ensure_future(watch())
    try:
        yield here
        _tell(f"{time.monotonic() - begun_at:6.1f} s  {here}")
    except asyncio.CancelledError:
        if not troubles:
            raise
        body.uncancel()
        raise troubles[0] from None
    finally:
        watching.cancel()


async def measure(processes: Processes, num_jobs: int, num_pods: int, seconds: float) -> dict[str, float]:
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)  # its processes end, too
    ready = processes.folder / "ready"
    processes.start(
        "server", "tests.kubernetes.server", "--ready-file", str(ready), "--directory", str(processes.folder)
    )
    async with stage(processes, "the API server listens"):
        while not ready.exists():  # noqa: ASYNC110 - it is a file
            await asyncio.sleep(0.05)
    kubeconfig = Path(json.loads(ready.read_text())["kubeconfig"])
    async with Cluster(kubeconfig) as cluster:
        async with stage(processes, "machines", count=num_jobs) as here:
            await _prepare(cluster, here)
        operator = processes.start_operator("operator", kubeconfig)
        found = await _launch(processes, cluster, num_jobs, num_pods)
        reports = asyncio.ensure_future(_report_machines(cluster, num_jobs))
        await _settle(processes, operator)
        found["memory_mb"] = operator.memory_info().rss / MB
        async with stage(processes, f"the idle operator is watched for {seconds:g} s", timeout=seconds + STAGE_TIMEOUT):
            found["idle_cores"] = await _cores(operator, seconds)
        async with stage(processes, "a master is deleted, and the next one's pod is there"):
            found["replaced_s"] = await _lose_master(cluster)
        processes.stop("operator")
        operator = processes.start_operator("next-operator", kubeconfig)
        async with stage(processes, "another operator has started"):
            await asyncio.sleep(5.0)
        await _settle(processes, operator)
        found["restarted_mb"] = operator.memory_info().rss / MB
        reports.cancel()
        return found


async def _prepare(cluster: Cluster, here: Stage) -> None:
    import yaml

    for path in (*sorted((ROOT / "deploy" / "crds").glob("*.yaml")), ROOT / "deploy" / "roles" / "master.yaml"):
        body = yaml.safe_load(path.read_text())
        group = "apiextensions.k8s.io" if body["kind"] == "CustomResourceDefinition" else "rbac.authorization.k8s.io"
        plural = "customresourcedefinitions" if "apiext" in group else "clusterroles"
        await cluster.create(f"/apis/{group}/v1/{plural}", body)

    async def add(number: int) -> None:
        await cluster.create("/api/v1/nodes", {"metadata": {"name": f"machine-{number}"}})
        await _report_machine(cluster, number)

    await _all(add, here)


async def _launch(processes: Processes, cluster: Cluster, num_jobs: int, num_pods: int) -> dict[str, float]:
    """Jobs as people apply them, masters as the operator makes them, and pods as masters make them."""
    begun_at = time.monotonic()
    for_pods = STAGE_TIMEOUT + TIMEOUT_OF_POD * num_jobs * (num_pods + 1)

    async def submit(number: int) -> None:
        await cluster.create(JOBS, _job(f"job-{number}", num_pods))

    async def find(number: int) -> None:
        await _until_found(cluster, pod_path("default", names.master_pod(f"job-{number}", 0)))

    async def run(number: int) -> None:
        name = f"job-{number}"
        job = await cluster.get(f"{JOBS}/{name}")
        await _bring_up(cluster, names.master_pod(name, 0), number)
        for index in range(num_pods):
            await cluster.create(PODS, _worker(job, index))
            await _bring_up(cluster, names.pod_name(name, "worker", index), number)

    async def count(number: int) -> None:
        await _until_ready(cluster, f"job-{number}", num_pods)

    async with stage(processes, "jobs are submitted", count=num_jobs) as here:
        await _all(submit, here)
    async with stage(processes, "masters' pods are there", count=num_jobs) as here:
        await _all(find, here)
    launch_s = time.monotonic() - begun_at
    async with stage(processes, "jobs have all their pods", count=num_jobs, timeout=for_pods) as here:
        await _all(run, here)
    async with stage(processes, "jobs say that all pods are ready", count=num_jobs) as here:
        await _all(count, here)
    return {"launch_s": launch_s}


async def _lose_master(cluster: Cluster) -> float:
    begun_at = time.monotonic()
    await cluster.delete(pod_path("default", names.master_pod("job-0", 0)))
    await _until_found(cluster, pod_path("default", names.master_pod("job-0", 1)))
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


# Waiting.


async def _all(work: Callable[[int], Coroutine[Any, Any, None]], here: Stage) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with turns:
            await work(number)
            here.done += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(here.count):
            tasks.create_task(one(number))


async def _settle(processes: Processes, process: psutil.Process) -> None:
    async with stage(processes, "the operator is idle", timeout=SETTLING + STAGE_TIMEOUT) as here:
        ends_at = time.monotonic() + SETTLING
        while (cores := await _cores(process, 2.0)) > 0.05:
            if time.monotonic() > ends_at:
                here.name = (
                    f"the operator is not idle after {SETTLING:g} s, and is measured as it is ({cores:.2f} cores)"
                )
                return


async def _cores(process: psutil.Process, seconds: float) -> float:
    before, begun_at = sum(process.cpu_times()[:2]), time.monotonic()
    await asyncio.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun_at)


async def _until_found(cluster: Cluster, path: str) -> None:
    """The stage has the deadline."""
    while True:
        try:
            await cluster.get(path)
            return
        except ApiError as error:
            if error.code != 404:
                raise Stuck(f"{path}: {error}") from error
        await asyncio.sleep(0.02)


async def _until_ready(cluster: Cluster, name: str, num_pods: int) -> None:
    while True:
        job = await cluster.get(f"{JOBS}/{name}")
        if job.get("status", {}).get("ready") == f"{num_pods}/{num_pods}":
            return
        await asyncio.sleep(0.1)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


if __name__ == "__main__":
    main()
