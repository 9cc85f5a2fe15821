"""Plans of a master of mode `k8s`: few, of the newest master alone, and for nodes of its own job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from dlrover.platforms.base import LaunchNotTaken
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.answers import FoundObject
from dlrover.platforms.kubernetes.orders.outgoing import KEPT, PodDeletion, answer_of
from dlrover.platforms.kubernetes.orders.writer import PlanPlatform
from dlrover.protocol.errors import DLRoverError
from tests.kubernetes.platform.plan_lab import PlanLab
from tests.kubernetes.servers import Server
from tests.platforms.contract import DEADLINE, launch, remove


@pytest.fixture
async def lab(api_server: Server) -> AsyncIterator[PlanLab]:
    async with PlanLab(api_server.kubeconfig, capacity=0) as built:
        yield built


async def test_what_comes_together_goes_into_one_plan_and_none_is_empty(lab: PlanLab) -> None:
    platform = lab.platform()
    await asyncio.gather(*(platform.apply(launch(number)) for number in range(40)))
    plans = await lab.plans()
    assert len(plans) <= 10, "a plan for each gathering, not for each pod"
    assert sum(len(plan["spec"]["createPods"]) for plan in plans) == 40
    assert all(plan["spec"]["createPods"] for plan in plans)
    [first] = [each for plan in plans for each in plan["spec"]["createPods"] if each["id"] == 0]
    assert (first["name"], first["type"], first["rankIndex"]) == ("job-a-edljob-worker-0", "worker", 0)
    assert {plan["metadata"]["labels"]["scale-type"] for plan in plans} == {"auto"}
    assert len(await lab.pods()) == 40


async def test_plans_that_were_carried_out_go_but_for_the_newest(lab: PlanLab) -> None:
    platform = lab.platform()
    for number in range(KEPT + 5):
        await platform.apply(launch(number))
    async with asyncio.timeout(DEADLINE):
        while len(await lab.plans()) > KEPT + 1:  # noqa: ASYNC110 - the deletion follows the last answer
            await asyncio.sleep(0.05)
    assert len(lab.carried_out) == KEPT + 5


async def test_a_plan_of_a_master_that_was_followed_changes_nothing(lab: PlanLab) -> None:
    """It was written and lay there; then the next master came."""
    old, new = lab.platform(), lab.platform()
    await old.apply(launch(0))
    lab.is_operator_there.clear()
    waiting = asyncio.ensure_future(old.apply(launch(1)))
    async with asyncio.timeout(DEADLINE):
        while not any(plan["spec"].get("createPods", [{}])[0].get("id") == 1 for plan in await lab.plans()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    following = asyncio.ensure_future(new.apply(launch(2, master_epoch=2)))
    async with asyncio.timeout(DEADLINE):
        while (await lab.ledger()).get("epoch") != "2":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    lab.is_operator_there.set()
    await following
    with pytest.raises(DLRoverError, match="The plan is of master epoch 1"):
        await waiting
    assert sorted(await lab.pods()) == ["job-a-edljob-worker-0", "job-a-edljob-worker-2"]


async def test_a_plan_deletes_no_pod_but_a_node_of_its_job(lab: PlanLab) -> None:
    """A master that was given more than it needs to know: a pod of another job, and the master's own."""
    ours, other = lab.platform(), lab.platform("job-b")
    await ours.apply(launch(0))
    await other.apply(launch(1))
    pods = await lab.pods()
    labels = {names.JOB_UID: lab.uids["job-a"], names.REPLICA_TYPE: names.MASTER_TYPE}
    body = {"metadata": {"name": "a-master", "labels": labels}, "spec": {"containers": [{"name": "m", "image": "x"}]}}
    master = await lab.cluster.create(f"/api/v1/namespaces/{lab.namespace}/pods", body)
    for pod in (pods["job-b-edljob-worker-1"], master):
        answer = await writer_of(ours).ask(PodDeletion(pod["metadata"]["name"], pod["metadata"]["uid"], 1))
        assert "not a node of this job" in answer.message, answer  # type: ignore[union-attr]
    await ours.apply(remove(0))
    left = await lab.pods()
    assert {"job-b-edljob-worker-1", "a-master"} <= set(left)
    assert all("deletionTimestamp" not in left[name]["metadata"] for name in ("job-b-edljob-worker-1", "a-master"))


def writer_of(platform: PlanPlatform):  # type: ignore[no-untyped-def]
    return platform._writer


async def test_a_quota_is_told_as_if_the_master_itself_had_asked(api_server: Server) -> None:
    async with PlanLab(api_server.kubeconfig, capacity=1) as lab:
        platform = lab.platform()
        await platform.apply(launch(0))
        with pytest.raises(LaunchNotTaken, match="1 of at most 1 pods"):
            await platform.apply(launch(1))


def test_each_answer_survives_the_way_through_a_plan() -> None:
    from dlrover.platforms.kubernetes.answers import Conflict, ConflictReason, Forbidden, Gone, Invalid, NotFound
    from dlrover.platforms.kubernetes.orders.outgoing import result_of

    for answer in (
        NotFound("a"),
        Conflict(ConflictReason.ALREADY_EXISTS, "b"),
        Conflict(ConflictReason.OLD_VERSION, "c"),
        Forbidden("d", is_quota=True),
        Forbidden("e"),
        Invalid("f"),
        Gone("g"),
    ):
        assert answer_of(result_of("pod", answer)) == answer
    assert not isinstance(answer_of(result_of("pod", Invalid(json.dumps("x")))), FoundObject)
