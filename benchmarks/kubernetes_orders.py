"""
How long people wait for what they write into a job on Kubernetes: another number, a pause, its end, its deletion.

    python benchmarks/kubernetes_orders.py [--runs 3] [--json FILE]

API server, controllers, kubelets, operator, master and two workers are processes of this machine (needs root). Figures of one run:

* scale: from a `kubectl scale` (the scale sub-resource) from two to three to the first step with three workers. A new pod must start
  Python and torch; so it is also shown from 3 to 2, which needs no pod.
* suspend: from `spec.suspend: true` until no pod of the job is left.
* end: from the end of the last worker's process to the condition `Succeeded`.
* delete: from the end of the last container to no object with the job's label, while no operator runs.

Ends with 1 if a run took longer than its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from figures import summarise, table

sys.path.insert(0, str(Path(__file__).parents[1]))  # the cluster of the tests

from dlrover.operator.actions import ObjectKind
from dlrover.operator.cluster_view import RESOURCES
from tests.kubernetes.jobs.stage import JOBS, UID, TrainingJob, start_operator
from tests.kubernetes.kubelet.network import available
from tests.kubernetes.machine import LocalCluster

MACHINES = ("red", "green", "blue")
LIMITS = {"scale to 3": 5.0, "scale to 2": 5.0, "suspend": None, "end": 5.0, "delete": 10.0}
LABELLED = [resource for kind, resource in RESOURCES.items() if kind is not ObjectKind.ELASTIC_JOB]
"""Every kind of object that a job may own."""
_DEADLINE = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    found = asyncio.run(measure(options.runs))
    rows, late = [], []
    for what, limit in LIMITS.items():
        summary = summarise(found[what])
        assert summary is not None, "at least one run"
        figures = (f"{figure:.2f}" for figure in (summary.median, summary.lowest, summary.highest))
        rows.append([what, *figures, "-" if limit is None else f"{limit:g}"])
        if limit is not None and summary.highest > limit:
            late.append(f"{what}: {summary.highest:.2f} s, at most {limit:g} s")
    print(table(["order", "median s", "least", "most", "limit"], rows))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if late:
        sys.exit(f"Over the limit: {'; '.join(late)}.")


async def measure(num_runs: int) -> dict[str, list[float]]:
    folder = Path(tempfile.mkdtemp(prefix="k8s", dir="/tmp"))  # sockets live below it, so its name is short
    found: dict[str, list[float]] = {what: [] for what in LIMITS}
    try:
        async with LocalCluster(folder) as cluster:
            for name in MACHINES:
                await cluster.add_node(name)
            await start_operator(cluster)
            for number in range(num_runs):
                for what, seconds in (await give_orders(cluster, f"o{number}")).items():
                    print(f"{what}: {seconds:.2f} s", flush=True)
                    found[what].append(seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


async def give_orders(cluster: LocalCluster, name: str) -> dict[str, float]:
    job = TrainingJob(cluster, name, workers=2, options=("--records=60000", "--pace=0.1"))
    await job.submit()
    await job.until_step(3)
    found = {}
    for count in (3, 2):
        begun_at = time.time()
        await cluster.api.patch(f"{JOBS}/{name}/scale", {"spec": {"replicas": count}})
        found[f"scale to {count}"] = await _first_step(job, count, begun_at) - begun_at
    begun_at = time.time()
    await cluster.api.patch(f"{JOBS}/{name}", {"spec": {"suspend": True}})

    async def is_empty() -> bool:
        return not await cluster.pods(f"{UID}={job.uid}")

    await cluster.until(is_empty, "no pod is left", _DEADLINE)
    found["suspend"] = time.time() - begun_at
    await cluster.api.patch(f"{JOBS}/{name}", {"spec": {"suspend": False}})
    await job.until_step(job.step() + 3)
    await job.delete()
    await cluster.until(is_empty, "no pod is left", _DEADLINE)
    short = TrainingJob(cluster, f"{name}-end", workers=2, options=("--records=1200",))
    await short.submit()
    await cluster.api.patch(f"{JOBS}/{short.name}", {"spec": {"network": {"policy": True}}})
    await short.until_ended()
    ended_at = max(float(event["at"]) for event in short.events("end"))
    status = await short.status()
    [succeeded] = [each for each in status["conditions"] if each["type"] == "Succeeded"]
    found["end"] = max(0.0, _instant(succeeded["lastTransitionTime"]) - ended_at)
    found["delete"] = await _delete_alone(cluster, short)
    return found


async def _first_step(job: TrainingJob, size: int, since: float) -> float:
    def steps() -> list[float]:
        events = job.events("step")
        return [float(each["at"]) for each in events if int(each["world_size"]) == size and float(each["at"]) > since]

    return min(await job.cluster.until(steps, f"a step with {size} workers", _DEADLINE))


async def _delete_alone(cluster: LocalCluster, job: TrainingJob) -> float:
    """While no operator runs: the cluster alone deletes what the job owned."""
    cluster.stop("operator")
    begun_at = time.time()
    await job.delete()

    async def is_gone() -> bool:
        for kind in LABELLED:
            listed = await cluster.find(f"{kind.path('default')}?labelSelector={UID}={job.uid}")
            if (
                listed is not None and listed["items"]
            ):  # None: the cluster has no such kind, as PodGroups of a gang scheduler
                return False
        return True

    await cluster.until(is_gone, "no object of the job is left", _DEADLINE)
    seconds = time.time() - begun_at  # its containers had ended before
    await start_operator(cluster)
    return seconds


def _instant(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    main()
