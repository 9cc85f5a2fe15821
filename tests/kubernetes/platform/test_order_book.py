"""Plans that people write: each is carried out once, whatever restarts, and shows what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dlrover.platforms.kubernetes.orders.commands import OrderCommand
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.scaling import ScaleTo
from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.platform.lab import ELASTIC_JOBS, PodLab
from tests.kubernetes.servers import Server
from tests.platforms.contract import DEADLINE, JOB

PLANS = "/apis/elastic.iml.github.io/v1alpha1/namespaces/{}/scaleplans"


class Master:
    """What the master's loop would do with the commands: it notes them."""

    def __init__(self, lab: PodLab) -> None:
        self.lab = lab
        self.told: list[OrderCommand] = []
        self.shown: list[object] = []
        """`status.scalePlan` of the job when a number was told."""

    @property
    def sizes(self) -> list[int]:
        return [command.nodes for command in self.told if isinstance(command, ScaleTo)]

    async def ask(self, command: OrderCommand) -> None:
        self.told.append(command)
        if isinstance(command, ScaleTo):
            job = await self.lab.cluster.get(f"{ELASTIC_JOBS.format(self.lab.namespace)}/{JOB}")
            self.shown.append((job.get("status") or {}).get("scalePlan"))
            if command.nodes > 100:
                raise Rejected("Give 1 to 100 nodes.")


@pytest.fixture
async def lab(api_server: Server) -> AsyncIterator[PodLab]:
    async with PodLab(api_server.kubeconfig) as built:
        yield built


async def write_plan(lab: PodLab, name: str, replicas: int) -> None:
    labels = {"elasticjob.dlrover/name": JOB, "scale-type": "manual"}
    spec: dict[str, Any] = {"replicaResourceSpecs": {"worker": {"replicas": replicas}}}
    body = {"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ScalePlan", "spec": spec}
    await lab.create(PLANS.format(lab.namespace), {**body, "metadata": {"name": name, "labels": labels}})


async def ended(lab: PodLab, name: str) -> Body:
    async with asyncio.timeout(DEADLINE):
        while True:
            plan = await lab.cluster.get(f"{PLANS.format(lab.namespace)}/{name}")
            if (plan.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
                return plan
            await asyncio.sleep(0.02)


async def test_a_plan_runs_once_through_two_restarts_of_the_master(lab: PodLab) -> None:
    await write_plan(lab, "first", 5)
    masters = []
    for epoch in (1, 2, 3):
        master = Master(lab)
        masters.append(master)
        orders = asyncio.ensure_future(lab.platform().take_orders(master.ask, epoch))
        await ended(lab, "first")
        # A plan of its own for each master: when it is done, the master has gone through those that were there.
        await write_plan(lab, f"of-{epoch}", 10 + epoch)
        plan = await ended(lab, f"of-{epoch}")
        assert plan["status"]["phase"] == "Succeeded"
        assert [owner["uid"] for owner in plan["metadata"]["ownerReferences"]] == [lab.uids[JOB]]
        orders.cancel()
        await asyncio.gather(orders, return_exceptions=True)
    assert [master.sizes for master in masters] == [[5, 11], [12], [13]]
    assert masters[0].shown == ["first", "of-1"], "the job's status names the plan that is carried out"
    job = await lab.cluster.get(f"{ELASTIC_JOBS.format(lab.namespace)}/{JOB}")
    assert "scalePlan" not in (job.get("status") or {})


async def test_zero_counts_and_a_plan_that_is_refused_says_why(lab: PodLab) -> None:
    master = Master(lab)
    orders = asyncio.ensure_future(lab.platform().take_orders(master.ask, 1))
    await write_plan(lab, "none", 0)
    assert (await ended(lab, "none"))["status"]["phase"] == "Succeeded"
    assert master.sizes == [0], "it was told, and not taken for a number that is absent"
    await write_plan(lab, "many", 1000)
    plan = await ended(lab, "many")
    assert (plan["status"]["phase"], plan["status"]["message"]) == ("Failed", "Give 1 to 100 nodes.")
    orders.cancel()
    await asyncio.gather(orders, return_exceptions=True)
