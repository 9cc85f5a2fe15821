"""
The demonstration behind `make demo-kubernetes`: an ElasticJob of three workers on a cluster that is made of processes of this machine.

    python examples/kubernetes/demo.py

An API server, three kubelets and the operator start as processes, the job of job.yaml is applied, and then a pod is deleted, another is evicted, and the
master's pod is deleted. Ends with a report of what each of these cost, computed from the API server's events and from what the workers wrote. Exit code 0
only if the job recovered from all of it, no other pod was touched, and the model has seen each record once. Needs Linux and root, for the
namespaces of the pods; nothing is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from msgspec import Struct

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.kubernetes.jobs.stage import RANK, TrainingJob, start_operator  # noqa: E402
from tests.kubernetes.kubelet.client import Body, pod_path  # noqa: E402
from tests.kubernetes.kubelet.network import available  # noqa: E402
from tests.kubernetes.machine import LocalCluster  # noqa: E402

MACHINES = ("red", "green", "blue")
NUM_WORKERS = 3
NUM_RECORDS = 6000


class Sighting(Struct, frozen=True):
    """One event of the API server about a pod, and when it came."""

    at: float
    kind: str
    pod: Body


class Loss(Struct, frozen=True, kw_only=True):
    """What the loss of one pod cost."""

    what: str
    rank: int
    lost: str
    follower: str
    to_create: float
    """Seconds from the end of the pod to the creation of the next one of its rank."""
    to_step: float
    """Seconds from the end of the pod to a step of the job beyond the last one before."""
    num_redone: int
    """Steps that were done again."""
    num_touched: int
    """Other pods whose process is another one than before, or that started again."""


class Watcher:
    """All pods of the cluster, as the API server tells it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.sightings: list[Sighting] = []

    async def run(self) -> None:
        async for kind, seen in self._cluster.api.follow("/api/v1/namespaces/default/pods"):
            for pod in (seen.get("items") or ()) if kind == "LISTED" else (seen,):
                self.sightings.append(Sighting(time.time(), kind, pod))

    def ended_at(self, uid: str) -> float:
        """When the end of the pod was first to be seen: a deletion time, or a terminal phase."""
        for each in self.sightings:
            is_over = "deletionTimestamp" in each.pod["metadata"] or each.pod["status"].get("phase") in (
                "Failed",
                "Succeeded",
            )
            if each.pod["metadata"].get("uid") == uid and (is_over or each.kind == "DELETED"):
                return each.at
        raise LookupError(f"the pod {uid} never ended")

    def created_at(self, uid: str) -> float:
        return next(each.at for each in self.sightings if each.pod["metadata"].get("uid") == uid)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    options = parser.parse_args()
    reason = available()
    if reason:
        print(f"This machine cannot run the demonstration: {reason}.", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="dk-"))
    try:
        return asyncio.run(Demo(folder).run())
    finally:
        if options.keep:
            print(f"Logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Demo:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began_at = time.time()
        self._losses: list[Loss] = []
        self._move = ""

    async def run(self) -> int:
        async with LocalCluster(self._folder) as cluster:
            watcher = Watcher(cluster)
            watching = asyncio.ensure_future(watcher.run())
            try:
                problem = await self._direct(cluster, watcher)
            except AssertionError as error:
                problem = str(error)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if problem:
                print(f"The demonstration failed: {problem}\n{cluster.log('operator')[-3000:]}", file=sys.stderr)
        return 1 if problem else 0

    async def _direct(self, cluster: LocalCluster, watcher: Watcher) -> str:
        """What happens to the job. The problem, if there is one."""
        await asyncio.gather(*(cluster.add_node(name, "--renew-every", "1") for name in MACHINES))
        await start_operator(cluster)
        self._say(f"an API server, {len(MACHINES)} kubelets and the operator run; the job is applied")
        options = (f"--records={NUM_RECORDS}", "--pace=0.2")
        job = TrainingJob(cluster, "points", workers=NUM_WORKERS, options=options)
        await job.submit()
        await job.until_step(5)
        self._say(f"{NUM_WORKERS} pods train")

        async def delete(pod: Body) -> None:
            await cluster.api.delete(pod_path("default", pod["metadata"]["name"]))

        async def evict(pod: Body) -> None:
            cluster.tell(pod["spec"]["nodeName"], "evict", pod=f"default/{pod['metadata']['name']}")

        for what, rank, action in (("deleted", 1, delete), ("evicted", 2, evict)):
            pods = await job.until_running()
            mains, last_step = job.mains(pods), job.step()
            self._say(f"{pods[rank]['metadata']['name']} (rank {rank}) is {what} at step {last_step}")
            await action(pods[rank])
            follower = await job.until_replaced(rank, pods[rank])
            await job.until_trained_by(follower)
            await job.until_step(last_step + 5)
            self._note(job, watcher, what, pods, rank, follower, mains, await job.until_running(), last_step)
        problem = await self._move_master(job, watcher)
        if problem:
            return problem
        job.hurry()
        phase = await job.until_ended()
        return await self._report(job, phase)

    def _note(
        self,
        job: TrainingJob,
        watcher: Watcher,
        what: str,
        before: dict[int, Body],
        rank: int,
        follower: Body,
        mains: dict[int, int],
        after: dict[int, Body],
        last_step: int,
    ) -> None:
        lost = before[rank]
        ended_at = watcher.ended_at(lost["metadata"]["uid"])
        steps = [event for event in job.events("step") if event["rank"] == 0]
        done = [int(event["step"]) for event in steps if float(event["at"]) <= ended_at]
        newest = max([*done, last_step])
        first_new = min(
            float(event["at"]) for event in steps if int(event["step"]) > newest and float(event["at"]) > ended_at
        )
        redone = {
            int(event["step"]) for event in steps if float(event["at"]) > ended_at and int(event["step"]) <= newest
        }
        others = [other for other in before if other != rank]
        now = job.mains({other: after[other] for other in others})
        touched = [
            other
            for other in others
            if now[other] != mains[other] or after[other]["metadata"]["uid"] != before[other]["metadata"]["uid"]
        ]
        loss = Loss(
            what=what,
            rank=rank,
            lost=lost["metadata"]["name"],
            follower=follower["metadata"]["name"],
            to_create=watcher.created_at(follower["metadata"]["uid"]) - ended_at,
            to_step=first_new - ended_at,
            num_redone=len(redone),
            num_touched=len(touched),
        )
        self._losses.append(loss)
        assert int(follower["metadata"]["labels"][RANK]) == rank, f"the next pod has another rank than {rank}"
        self._say(f"{loss.follower} trains in its place")

    async def _move_master(self, job: TrainingJob, watcher: Watcher) -> str:
        pods = await job.until_running()
        mains, lives = job.mains(pods), len(job.events("start"))
        old = (await job.running("dlrover-master"))[0]
        self._say(f"{old['metadata']['name']} is deleted at step {job.step()}")
        await job.cluster.api.delete(pod_path("default", old["metadata"]["name"]))

        async def is_followed() -> Body | None:
            master = (await job.running("dlrover-master")).get(0)
            return master if master is not None and master["metadata"]["uid"] != old["metadata"]["uid"] else None

        new = await job.cluster.until(is_followed, "the next master runs", 120.0)
        assert new is not None
        seconds = time.time() - watcher.ended_at(old["metadata"]["uid"])
        await job.until_step(job.step() + 5)
        self._say(f"{new['metadata']['name']} runs; training went on")
        self._move = f"{old['metadata']['name']} was followed by {new['metadata']['name']} after {seconds:.2f} s"
        if job.mains(await job.until_running()) != mains or len(job.events("start")) != lives:
            return "the move of the master restarted a worker"
        return ""

    async def _report(self, job: TrainingJob, phase: str) -> str:
        steps = job.losses()
        num_steps = -(-NUM_RECORDS // 60)
        finding = await job.audit()
        print()
        print(
            f"  {'pod':28} {'':8} {'next pod':28} {'created':>9} {'new step':>9} {'redone':>7} {'others restarted':>17}"
        )
        for loss in self._losses:
            print(
                f"  {loss.lost:28} {loss.what:8} {loss.follower:28} {loss.to_create:7.2f} s {loss.to_step:7.2f} s "
                f"{loss.num_redone:7} {loss.num_touched:17}"
            )
        print(f"  {self._move}; no worker restarted")
        print(f"  {len(steps)} steps, loss {steps[1]:.3f} to {steps[max(steps)]:.3f}; the job is {phase}")
        print(f"  audit: the model contains {finding['num_seen']} of {NUM_RECORDS} records, each once")
        print(f"  {time.time() - self._began_at:.0f} s in all")
        if phase != "Succeeded":
            return f"the job is {phase}: {await job.status()}"
        if len(steps) != num_steps:
            return f"{len(steps)} of {num_steps} steps were trained"
        if any(loss.num_touched for loss in self._losses):
            return "the loss of a pod touched another pod"
        is_clean = finding["is_complete"] and finding["num_seen"] == NUM_RECORDS
        return "" if is_clean else f"the audit is not clean: {finding}"

    def _say(self, what: str) -> None:
        print(f"[{time.time() - self._began_at:5.1f} s] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
