"""
What people write into a job's objects while it trains: another number, a plan, a pause, its end.

Real operator, master, agents and torch processes; the test only writes objects, as kubectl does.
"""

from __future__ import annotations

import pytest

from dlrover.operator.actions import ObjectKind
from dlrover.operator.cluster_view import RESOURCES
from dlrover.platforms.kubernetes.names import JOB_NAME
from tests.kubernetes.jobs.conftest import QUICK
from tests.kubernetes.jobs.stage import JOBS, TrainingJob
from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.machine import LocalCluster
from tests.kubernetes.servers import Server

PLANS = "/apis/elastic.iml.github.io/v1alpha1/namespaces/default/scaleplans"
pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]


async def edit(job: TrainingJob, patch: Body) -> None:
    await job.cluster.api.patch(f"{JOBS}/{job.name}", patch)


async def write_plan(job: TrainingJob, name: str, **spec: object) -> None:
    labels = {"elasticjob.dlrover/name": job.name, "scale-type": "manual"}
    body = {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ScalePlan",
        "metadata": {"name": name, "labels": labels},
        "spec": {"ownerJob": job.name, **spec},
    }
    await job.cluster.api.create(PLANS, body)


async def until_plan_ended(job: TrainingJob, name: str) -> Body:
    async def look() -> Body:
        plan = await job.cluster.api.get(f"{PLANS}/{name}")
        status = plan.get("status") or {}
        return plan if status.get("phase") in ("Succeeded", "Failed") else {}

    return await job.cluster.until(look, f"the plan {name} ends")


async def until_world(job: TrainingJob, size: int) -> None:
    def look() -> bool:
        steps = job.events("step")
        return bool(steps) and int(steps[-1]["world_size"]) == size

    await job.cluster.until(look, f"{job.name} trains with {size} workers", 180.0)


async def test_numbers_and_plans_change_the_world_and_run_once(cluster: LocalCluster) -> None:
    job = TrainingJob(cluster, "numbers", workers=2, options=(*QUICK, "--pace=2"))
    await job.submit()
    await job.until_step(2)
    # As `kubectl scale` does it.
    await cluster.api.patch(f"{JOBS}/{job.name}/scale", {"spec": {"replicas": 3}})
    await until_world(job, 3)
    await write_plan(job, "smaller", replicaResourceSpecs={"worker": {"replicas": 2}})
    plan = await until_plan_ended(job, "smaller")
    assert plan["status"]["phase"] == "Succeeded", plan
    assert [each["uid"] for each in plan["metadata"]["ownerReferences"]] == [job.uid]
    await until_world(job, 2)
    await write_plan(job, "none", replicaResourceSpecs={"worker": {"replicas": 0}})
    plan = await until_plan_ended(job, "none")
    assert plan["status"]["phase"] == "Failed"
    assert "Give 1 to" in plan["status"]["message"], plan["status"]
    # Two masters later the job has the size of the last number that was carried out, and no plan has run again.
    await edit(job, {"spec": {"replicaSpecs": {"worker": {"replicas": 4}}}})
    await until_world(job, 4)
    for _ in range(2):
        [master] = (await job.running("dlrover-master")).values()
        await cluster.api.delete(f"/api/v1/namespaces/default/pods/{master['metadata']['name']}")
        await job.until_replaced_master(master)
    await job.until_step(job.step() + 3)
    assert len(await job.running()) == 4
    job.hurry()
    assert await job.until_ended() == "Succeeded", await job.status()


USES_ITS_GRACE = """
import signal

def end(number, frame):
    record(event="told", number=number)
    time.sleep(1.0)
    record(event="put away")
    raise SystemExit(1)

signal.signal(signal.SIGTERM, end)
"""
"""What a worker does that has something to put away. A worker that is killed writes none of it."""


async def test_a_suspended_job_has_no_pod_and_goes_on_without_a_record_twice(
    cluster: LocalCluster, undisturbed: TrainingJob
) -> None:
    options = (*QUICK, "--pace=0.3", "--checkpoint-every=50")  # the pause comes long before the first step in storage
    job = TrainingJob(cluster, "pause", workers=4, options=options)
    await job.submit(launcher=("--save-at-breakpoint",), prelude=USES_ITS_GRACE)
    await job.until_step(5)
    await edit(job, {"spec": {"suspend": True}})

    async def is_empty() -> bool:
        pods = [*await job.pods(), *await job.pods("dlrover-master")]
        return not pods and (await job.status()).get("phase") == "Suspended"

    await cluster.until(is_empty, "no pod of the suspended job is left", 180.0)
    step, num_starts = job.step(), len(job.events("start"))
    assert 5 <= step < 50
    for kind in ("told", "put away"):
        assert sorted(int(event["rank"]) for event in job.events(kind)) == [0, 1, 2, 3], (
            f"workers that came to {kind!r}"
        )
    await edit(job, {"spec": {"suspend": False}})
    await job.until_step(step + 3)
    went_on_at = {int(event["step"]) for event in job.events("start")[num_starts:]}
    assert len(went_on_at) == 1
    # The last step was in memory alone, or its save had just begun.
    assert step - 1 <= went_on_at.pop() <= step, "the agents had time to write what was in memory"
    status = await job.status()
    assert status["master"].get("restarts", 0) == 0, "a suspension costs no restart of the master"
    job.hurry()
    assert await job.until_ended() == "Succeeded", await job.status()
    assert job.losses() == pytest.approx(undisturbed.losses(), rel=1e-3)
    finding = await job.audit()
    assert (finding["num_seen"], finding["is_complete"]) == (6000, True)


async def test_the_annotation_stops_a_job_in_good_order(cluster: LocalCluster) -> None:
    job = TrainingJob(cluster, "stopped", workers=2, options=(*QUICK, "--pace=0.3"))
    await job.submit()
    await job.until_step(2)
    await edit(job, {"metadata": {"annotations": {"elasticjob.dlrover/stop": "enough of it"}}})
    assert await job.until_ended() == "Failed"
    [failed] = [each for each in (await job.status())["conditions"] if each["type"] == "Failed"]
    assert failed["reason"] == "StoppedByUser"
    assert "enough of it" in failed["message"]


async def test_a_master_without_the_right_to_create_pods_leaves_them_to_the_operator(
    cluster: LocalCluster, undisturbed: TrainingJob
) -> None:
    """Mode `k8s`: the same job, the same losses, and a pod that is lost on the way."""
    job = TrainingJob(cluster, "planned", workers=4, options=(*QUICK, "--pace=0.3"))
    await job.submit(mode="k8s")
    await job.until_step(3)
    pods = await job.until_running()
    before = job.mains({rank: pods[rank] for rank in (0, 2, 3)})
    await cluster.api.delete(f"/api/v1/namespaces/default/pods/{pods[1]['metadata']['name']}")
    await job.until_trained_by(await job.until_replaced(1, pods[1]))
    now = await job.until_running()
    assert job.mains({rank: now[rank] for rank in (0, 2, 3)}) == before
    plans = (await cluster.api.get(f"{PLANS}?labelSelector=scale-type=auto"))["items"]
    assert {each["type"] for plan in plans for each in plan["spec"].get("createPods", ())} == {"worker"}
    job.hurry()
    assert await job.until_ended() == "Succeeded", await job.status()
    assert job.losses() == pytest.approx(undisturbed.losses(), rel=1e-3)
    finding = await job.audit()
    assert (finding["num_seen"], finding["is_complete"]) == (6000, True)


NEED_A_SCHEDULER = (ObjectKind.VOLCANO_GROUP, ObjectKind.COSCHEDULING_GROUP)
"""Their definitions are not those of Kubernetes; tests/kubernetes/operator has them."""


async def test_nothing_is_left_of_a_job_that_is_deleted_while_it_trains(
    api_server: Server, cluster: LocalCluster
) -> None:
    if not api_server.has_controllers:
        pytest.skip("needs the collector of kube-controller-manager")
    job = TrainingJob(cluster, "removed", workers=2, options=("--records=60000", "--pace=0.3"))
    await job.submit()
    await edit(job, {"spec": {"network": {"policy": True}}})
    await job.until_step(2)
    await write_plan(job, "larger", replicaResourceSpecs={"worker": {"replicas": 3}})
    await until_plan_ended(job, "larger")
    kinds = [
        resource for kind, resource in RESOURCES.items() if kind not in (*NEED_A_SCHEDULER, ObjectKind.ELASTIC_JOB)
    ]

    async def left() -> set[str]:
        found = set()
        for each in kinds:
            base = f"/apis/{each.group}/{each.version}" if each.group else f"/api/{each.version}"
            path = f"{base}/namespaces/default/{each.plural}?labelSelector={JOB_NAME}={job.name}"
            if (await cluster.api.get(path))["items"]:
                found.add(each.kind)
        return found

    async def all_there() -> bool:
        return await left() == {each.kind for each in kinds}

    await cluster.until(all_there, "the job has an object of each kind")
    await job.delete()

    async def is_empty() -> bool:
        return not await left()

    await cluster.until(is_empty, "nothing of the job is left", 180.0)
