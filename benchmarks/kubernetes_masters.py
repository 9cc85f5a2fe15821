"""
How long a job on Kubernetes is without a master that decides, after each way to lose one.

    python benchmarks/kubernetes_masters.py [--runs 3] [--ways killed deleted ...] [--json FILE]

API server, controllers, kubelets, operator, master and two workers are processes of this machine (needs root). In each run the master
is lost, and a worker's pod is deleted as soon as the old master cannot replace it any more. The next master decides when it creates the
replacement; so the figure is longer than the time until it serves.

* killed: SIGKILL of the master process. The kubelet restarts it in its pod.
* deleted: the master's pod is deleted; the journal is on a claim.
* deleted-without-claim: the same without a claim: the next master waits until the old one's token has lapsed.
* silent: the master's machine stops to answer. From when the API server shows it as not ready until the next master listens: the
  old one still runs there, and might replace a pod itself.

Beside each figure: how many worker processes were started again but the deleted one's, which must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from figures import summarise, table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the cluster of the tests

from dlrover.platforms.kubernetes import names
from tests.kubernetes.jobs.stage import RANK, TrainingJob, start_operator
from tests.kubernetes.kubelet.client import Body, pod_path
from tests.kubernetes.kubelet.network import available
from tests.kubernetes.machine import LocalCluster

MACHINES = ("red", "green", "blue", "white")
LIMITS = {"killed": 5.0, "deleted": 15.0, "deleted-without-claim": 30.0, "silent": 15.0}
_DEADLINE = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    found = asyncio.run(measure(arguments.ways, arguments.runs))
    rows = []
    for way, samples in found.items():
        summary = summarise([seconds for seconds, _ in samples])
        assert summary is not None, "at least one run"
        figures = (summary.median, summary.lowest, summary.highest, LIMITS[way])
        rows.append([way, *(f"{figure:.2f}" for figure in figures), str(sum(others for _, others in samples))])
    print(table(["master", "median s", "least", "most", "limit", "others restarted"], rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


async def measure(ways: list[str], num_runs: int) -> dict[str, list[tuple[float, int]]]:
    folder = Path(tempfile.mkdtemp(prefix="k8s", dir="/tmp"))  # sockets live below it, so its name is short
    options = ("--lease-grace", "4")  # tolerations as the pods have them: the operator notices first
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    try:
        async with LocalCluster(folder, controller_options=options) as cluster:
            for name in MACHINES:
                await cluster.add_node(name, "--renew-every", "1")
            await start_operator(cluster)
            for number in range(num_runs):
                for way in ways:
                    sample = await lose_master(cluster, way, f"m{number}-{ways.index(way)}")
                    print(f"{way}: {sample[0]:.2f} s", flush=True)
                    found[way].append(sample)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


async def lose_master(cluster: LocalCluster, way: str, name: str) -> tuple[float, int]:
    """Seconds to the next decision, and how many others' processes are new."""
    job = TrainingJob(cluster, name, workers=2, options=("--records=60000", "--pace=0.3"))
    await job.submit(has_journal=way != "deleted-without-claim")
    await job.until_step(3)
    pods = await job.until_running()
    [master] = (await job.running("dlrover-master")).values()
    machine = master["spec"]["nodeName"]
    # Of the workers one is deleted; on a machine that falls silent nothing can be.
    rank = next((each for each, pod in pods.items() if pod["spec"]["nodeName"] != machine), 0)
    others = {each: pod for each, pod in pods.items() if each != rank and pod["spec"]["nodeName"] != machine}
    before = job.mains(others)
    began_at = await _lose(cluster, way, master)
    if way != "silent":
        await cluster.api.delete(pod_path("default", pods[rank]["metadata"]["name"]))
    known = {pod["metadata"]["uid"] for pod in pods.values()}

    async def is_replaced() -> bool:
        if way == "silent":
            return await _is_serving(job, machine)
        made = await job.pods()
        return any(
            each["metadata"]["uid"] not in known and int(each["metadata"]["labels"][RANK]) == rank for each in made
        )

    await cluster.until(is_replaced, "the next master decides", _DEADLINE)
    seconds = time.monotonic() - began_at
    num_new = sum(job.mains(others)[each] != main for each, main in before.items())
    if way == "silent":
        cluster.tell(machine, "speak")
    await job.delete()

    async def is_gone() -> bool:
        return not await job.pods() and not await job.pods("dlrover-master")

    await cluster.until(is_gone, "the pods of the deleted job are gone", _DEADLINE)
    return seconds, num_new


async def _is_serving(job: TrainingJob, but_on: str) -> bool:
    """A master on another machine listens."""
    for pod in await job.pods("dlrover-master"):
        address = pod.get("status", {}).get("podIP", "")
        if address and pod["spec"]["nodeName"] != but_on:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    _, writer = await asyncio.open_connection(address, names.MASTER_PORT)
                writer.close()
                return True
    return False


async def _lose(cluster: LocalCluster, way: str, master: Body) -> float:
    """When the loss began to count."""
    name, machine = master["metadata"]["name"], master["spec"]["nodeName"]
    if way == "killed":
        cluster.tell(machine, "signal", pod=f"default/{name}", number=9)
        return time.monotonic()
    if way != "silent":
        began_at = time.monotonic()
        await cluster.api.delete(pod_path("default", name))

        async def is_gone() -> bool:
            return await cluster.pod(name) is None

        await cluster.until(is_gone, "the old master is gone", _DEADLINE)
        return began_at
    cluster.tell(machine, "silence")

    async def is_not_ready() -> bool:
        node = await cluster.find(f"/api/v1/nodes/{machine}")
        conditions = ((node or {}).get("status") or {}).get("conditions") or ()
        return any(each["type"] == "Ready" and each["status"] != "True" for each in conditions)

    await cluster.until(is_not_ready, f"{machine} is not ready", _DEADLINE)
    return time.monotonic()


if __name__ == "__main__":
    main()
