"""
An ElasticJob of four workers trains a small torch model, and pods and a machine are lost under it in every way a cluster has.

After each loss a pod of the same rank trains, the processes of the other pods are those from before, and in the end the losses are those
of a job that nothing happened to, and each record was used once.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime

import psutil
import pytest
import pytest_asyncio

from tests.kubernetes.controllers.lifecycle import preempt
from tests.kubernetes.jobs.conftest import QUICK
from tests.kubernetes.jobs.stage import TrainingJob
from tests.kubernetes.kubelet.client import Body, pod_path
from tests.kubernetes.machine import LocalCluster

_numbers = itertools.count()

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]


async def test_a_job_of_four_workers_trains_to_its_end(undisturbed: TrainingJob) -> None:
    losses = undisturbed.losses()
    assert sorted(losses) == list(range(1, 101))
    assert losses[100] < 0.5 < losses[1]
    assert {int(event["world_size"]) for event in undisturbed.events("step")} == {4}
    finding = await undisturbed.audit()
    assert (finding["num_seen"], finding["is_complete"]) == (6000, True)
    status = await undisturbed.status()
    assert (status["round"], status["lastStep"]) == (1, 100), "the master's own part of the status"
    assert 0 < float(status["goodput"]) <= 1

    async def all_ended() -> bool:
        return not await undisturbed.running() and not await undisturbed.running("dlrover-master")

    await undisturbed.cluster.until(all_ended, "no pod of the finished job runs")


async def test_losses_of_pods_and_of_a_machine_cost_no_record_and_no_other_pod(
    cluster: LocalCluster, undisturbed: TrainingJob
) -> None:
    job = TrainingJob(cluster, "losses", workers=4, options=(*QUICK, "--pace=0.3"))
    await job.submit(memory="1000Mi")
    await job.until_step(3)

    async def delete(pod: Body) -> None:
        await cluster.api.delete(pod_path("default", pod["metadata"]["name"]))

    async def evict(pod: Body) -> None:
        cluster.tell(pod["spec"]["nodeName"], "evict", pod=f"default/{pod['metadata']['name']}")

    async def preempt_pod(pod: Body) -> None:
        await preempt(cluster.api, pod)

    async def exceed_memory(pod: Body) -> None:
        cluster.eat_memory(pod)

    async def lose_machine(pod: Body) -> None:
        cluster.power_off(pod["spec"]["nodeName"])
        await cluster.api.delete(f"/api/v1/nodes/{pod['spec']['nodeName']}")

    ends: list[tuple[int, Callable[[Body], Awaitable[None]]]] = [
        (1, delete),
        (0, evict),
        (3, preempt_pod),
        (2, exceed_memory),
        (1, lose_machine),
    ]
    for rank, end in ends:
        pods = await job.until_running()
        machine = pods[rank]["spec"]["nodeName"]
        # On the machine that is lost there may be another pod of the job; it is lost, too.
        others = {
            each: pod
            for each, pod in pods.items()
            if each != rank and (end is not lose_machine or pod["spec"]["nodeName"] != machine)
        }
        before = job.mains(others)
        await end(pods[rank])
        await job.until_lost(pods[rank])
        replacement = await job.until_replaced(rank, pods[rank])
        await job.until_trained_by(replacement)
        now = await job.until_running()
        assert job.mains({each: now[each] for each in others}) == before, f"after {end.__name__}"
        assert all(now[each]["metadata"]["uid"] == pod["metadata"]["uid"] for each, pod in others.items())

    job.hurry()
    assert await job.until_ended() == "Succeeded", await job.status()
    assert job.losses() == pytest.approx(undisturbed.losses(), rel=1e-3)
    finding = await job.audit()
    assert (finding["num_seen"], finding["is_complete"]) == (6000, True)


async def test_a_job_whose_pods_exceed_their_memory_ends_when_the_budget_is_used_up(cluster: LocalCluster) -> None:
    job = TrainingJob(cluster, "memory", workers=2, options=(*QUICK, "--pace=0.3"))
    await job.submit(memory="1000Mi", restarts=0)
    await job.until_step(3)
    pods = await job.until_running()
    cluster.eat_memory(pods[1])
    assert await job.until_ended() == "Failed"
    status = await job.status()
    [failed] = [each for each in status["conditions"] if each["type"] == "Failed"]
    assert "OOMKilled: the memory limit of main is 1000Mi" in failed["message"]


@pytest_asyncio.fixture(loop_scope="package")
async def running(cluster: LocalCluster) -> AsyncIterator[TrainingJob]:
    """A job of two workers in the middle of its training."""
    job = TrainingJob(cluster, f"masters-{next(_numbers)}", workers=2, options=(*QUICK, "--pace=0.3"))
    await job.submit()
    await job.until_step(3)
    yield job
    await job.delete()

    async def is_gone() -> bool:
        return not await job.pods() and not await job.pods("dlrover-master")

    await cluster.until(is_gone, "the pods of the deleted job are gone")


async def the_master(job: TrainingJob) -> Body:
    async def one() -> Body | None:
        return (await job.running("dlrover-master")).get(0)

    found = await job.cluster.until(one, "a master runs")
    assert found is not None
    return found


async def assert_trains_on(job: TrainingJob, mains: dict[int, int], num_lives: int) -> None:
    """New steps, by the processes from before: no worker has started again."""
    await job.until_step(job.step() + 5)
    assert job.mains(await job.until_running()) == mains
    assert len(job.events("start")) == num_lives


@pytest.mark.parametrize("has_claim", [True, False], ids=["claim", "no-claim"])
async def test_a_killed_master_is_back_in_its_pod_with_its_journal(
    cluster: LocalCluster, undisturbed: TrainingJob, has_claim: bool
) -> None:
    """The container is another one, the pod and its volumes are the same. No worker notices, and nothing is forgotten."""
    name = "killed" if has_claim else "killed-no-claim"
    job = TrainingJob(cluster, name, workers=2, options=(*QUICK, "--pace=0.3"))
    await job.submit(has_journal=has_claim)
    await job.until_step(3)
    pods = await job.until_running()
    mains, num_lives = job.mains(pods), len(job.events("start"))
    master = await the_master(job)
    cluster.tell(master["spec"]["nodeName"], "signal", pod=f"default/{master['metadata']['name']}", number=9)

    async def is_back() -> bool:
        pod = await cluster.pod(master["metadata"]["name"])
        assert pod is not None
        state = pod["status"]["containerStatuses"][0]
        return state["restartCount"] == 1 and "running" in state["state"]

    await cluster.until(is_back, "the master runs again in its pod")
    await assert_trains_on(job, mains, num_lives)
    await cluster.api.delete(pod_path("default", pods[1]["metadata"]["name"]))
    replacement = await job.until_replaced(1, pods[1])
    await job.until_trained_by(replacement)
    assert job.mains({0: (await job.until_running())[0]}) == {0: mains[0]}
    assert len(await job.pods()) <= 3, "no pod is made twice"
    finding = await job.audit()
    assert finding["num_seen"] > 0
    assert (finding["repeated"], finding["missing"], finding["num_trusted"]) == ([], [], 0), "it begins with the job"
    job.hurry()
    assert await job.until_ended() == "Succeeded", await job.status()
    assert job.losses() == pytest.approx(undisturbed.losses(), rel=1e-3)
    if has_claim:
        finding = await job.audit()
        assert (finding["num_seen"], finding["is_complete"]) == (6000, True)
    await job.delete()


async def test_a_deleted_master_is_followed_by_one_that_replaces_pods(running: TrainingJob) -> None:
    """The next master has the journal of the last one: it decides about the pod that is lost after it came."""
    pods = await running.until_running()
    mains, num_lives = running.mains(pods), len(running.events("start"))
    master = await the_master(running)
    await running.cluster.api.delete(pod_path("default", master["metadata"]["name"]))

    async def is_followed() -> bool:
        found = await running.running("dlrover-master")
        return bool(found) and found[0]["metadata"]["uid"] != master["metadata"]["uid"]

    await running.cluster.until(is_followed, "the next master runs")
    await assert_trains_on(running, mains, num_lives)
    await running.cluster.api.delete(pod_path("default", pods[1]["metadata"]["name"]))
    replacement = await running.until_replaced(1, pods[1])
    await running.until_trained_by(replacement)
    assert len(await running.pods()) <= 3, "no pod is made twice"


async def test_a_master_without_a_claim_decides_when_the_token_of_the_former_has_lapsed(cluster: LocalCluster) -> None:
    """It knows ranks and budgets from the pods, worlds from the agents, and it says what was lost."""
    job = TrainingJob(cluster, "no-claim", workers=2, options=(*QUICK, "--pace=0.3"))
    await job.submit(has_journal=False)
    await job.until_step(3)
    pods = await job.until_running()
    others, num_lives = job.mains({0: pods[0]}), len(job.events("start"))
    master = await the_master(job)
    await cluster.api.delete(pod_path("default", master["metadata"]["name"]))

    async def is_gone() -> bool:
        return await cluster.pod(master["metadata"]["name"]) is None

    await cluster.until(is_gone, "the former master's pod is gone")  # until then it decides itself
    await cluster.api.delete(pod_path("default", pods[1]["metadata"]["name"]))
    replacement = await job.until_replaced(1, pods[1])
    status = await job.status()
    gone_at = datetime.fromisoformat(status["master"]["goneAt"])
    made_at = datetime.fromisoformat(replacement["metadata"]["creationTimestamp"])
    assert (made_at - gone_at).total_seconds() >= 10, "the former master's token was still accepted"
    await job.until_trained_by(replacement)
    assert job.mains({0: pods[0]}) == others
    assert len(await job.pods()) <= 3, "no pod is made twice"
    assert len(job.events("start")) > num_lives
    [kept] = [each for each in (await job.status())["conditions"] if each["type"] == "JournalKept"]
    assert kept["status"] == "False"
    await job.delete()


def processes_of(cluster: LocalCluster, pod: Body) -> list[psutil.Process]:
    """All of its container: a master is a process below the first one."""
    first = psutil.Process(cluster.life(pod).pid)
    return [first, *first.children(recursive=True)]


async def test_a_master_that_goes_on_beside_the_next_one_doubles_no_rank(cluster: LocalCluster) -> None:
    """
    Its pod's object is gone while it stands still on a machine that hears of nothing.

    Each has a journal of its own: a claim is taken by one pod at a time.
    """
    job = TrainingJob(cluster, "two-masters", workers=2, options=(*QUICK, "--pace=0.3"))
    await job.submit(has_journal=False)
    await job.until_step(3)
    pods = await job.until_running()
    master = await the_master(job)
    name, machine = master["metadata"]["name"], master["spec"]["nodeName"]
    old = processes_of(cluster, master)
    assert len(old) > 1
    rank = next(rank for rank, pod in pods.items() if pod["spec"]["nodeName"] != machine)
    cluster.tell(machine, "silence")
    await cluster.api.patch(f"/api/v1/nodes/{machine}", {"spec": {"unschedulable": True}})
    for process in old:
        process.suspend()
    try:
        await cluster.api.delete(pod_path("default", name), grace=0)
        await job.until_replaced_master(master)
        [follower] = (await job.running("dlrover-master")).values()
        await cluster.until(lambda: "serving job=" in cluster.output(follower), "the next master serves")
        await job.until_step(job.step() + 3)  # the agents have gone over to it
        for process in old:
            assert process.status() == psutil.STATUS_STOPPED
            process.resume()
        # Both masters learn that a worker is lost: the old one's watch was open when it was stopped.
        await cluster.api.delete(pod_path("default", pods[rank]["metadata"]["name"]))
        replacement = await job.until_replaced(rank, pods[rank])
        await job.until_trained_by(replacement)
        assert all(process.is_running() and process.status() != psutil.STATUS_STOPPED for process in old)
        said = cluster.output(master)
        assert "does not carry out intent=LaunchNode" in said or "newer master of epoch" in said, said
        assert said.count("the platform accepted intent=LaunchNode") == len(pods), "it has launched nobody any more"
    finally:
        cluster.tell(machine, "speak")
        await cluster.api.patch(f"/api/v1/nodes/{machine}", {"spec": {"unschedulable": None}})
    job.hurry()
    assert await job.until_ended() == "Succeeded", await job.status()
    for each in pods:
        steps = [event for event in job.events("step") if event["rank"] == each]
        lives = [life for life, _ in itertools.groupby((event["pod"], event["pid"]) for event in steps)]
        assert len(lives) == len(set(lives)), f"two agents of rank {each} trained at once: {lives}"
    assert {int(event["world_size"]) for event in job.events("step")} == {2}
    assert set(range(1, 101)) <= set(job.losses()), "without a claim some records are read again"
    await job.delete()


async def test_a_master_on_a_silent_machine_is_followed(running: TrainingJob) -> None:
    master = await the_master(running)
    machine = master["spec"]["nodeName"]
    pods = {rank: pod for rank, pod in (await running.until_running()).items() if pod["spec"]["nodeName"] != machine}
    mains = running.mains(pods)
    running.cluster.tell(machine, "silence")
    try:

        async def is_followed() -> bool:
            found = [pod for pod in await running.pods("dlrover-master") if pod["spec"].get("nodeName") != machine]
            return any(pod["status"].get("phase") == "Running" for pod in found)

        await running.cluster.until(is_followed, "the next master runs on another machine")
        await running.until_step(running.step() + 5)
        now = await running.running()
        assert running.mains({rank: now[rank] for rank in pods}) == mains
    finally:
        running.cluster.tell(machine, "speak")


async def test_a_job_made_anew_under_its_name_takes_no_pod_of_the_old_one(cluster: LocalCluster) -> None:
    old = TrainingJob(cluster, "again", workers=2, options=(*QUICK, "--pace=0.3"))
    await old.submit()
    await old.until_step(2)
    uids = {pod["metadata"]["uid"] for pod in await old.pods()}
    await old.delete()
    new = TrainingJob(cluster, "again", workers=2, options=QUICK)
    await new.submit()
    assert new.uid != old.uid
    assert await new.until_ended() == "Succeeded", await new.status()
    assert not uids & {pod["metadata"]["uid"] for pod in await new.pods()}
