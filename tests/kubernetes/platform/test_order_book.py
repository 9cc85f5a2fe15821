"""Plans that people write: each is carried out once, whatever restarts, and shows what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from dlrover.platforms.kubernetes.orders.commands import OrderCommand
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import MigrateNode
from dlrover.protocol.messages.scaling import ScaleTo
from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.platform.lab import ELASTIC_JOBS, PodLab
from tests.kubernetes.server import ApiServer
from tests.kubernetes.server.faults import Fault
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
    await write_spec(lab, name, {"replicaResourceSpecs": {"worker": {"replicas": replicas}}})


async def write_spec(lab: PodLab, name: str, spec: dict[str, Any]) -> None:
    labels = {"elasticjob.dlrover/name": JOB, "scale-type": "manual"}
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
    begun_at = datetime.now(UTC).replace(microsecond=0)
    await write_plan(lab, "none", 0)
    status = (await ended(lab, "none"))["status"]
    assert status["phase"] == "Succeeded"
    created_at, finished_at = (datetime.fromisoformat(status[each]) for each in ("createTime", "finishTime"))
    assert begun_at <= created_at <= finished_at <= datetime.now(UTC)
    assert master.sizes == [0], "it was told, and not taken for a number that is absent"
    await write_plan(lab, "many", 1000)
    plan = await ended(lab, "many")
    assert (plan["status"]["phase"], plan["status"]["message"]) == ("Failed", "Give 1 to 100 nodes.")
    orders.cancel()
    await asyncio.gather(orders, return_exceptions=True)


async def test_a_plan_that_changes_while_it_is_claimed_is_carried_out_as_it_is_then(server: ApiServer) -> None:
    """The operator gives each plan its owner at the same moment; the sight of that came before the claim was refused."""
    async with PodLab(server.kubeconfig) as lab:
        master = Master(lab)
        claim = server.faults.inject(Fault(effect="hang", verb="patch", plural="scaleplans", times=1))
        orders = asyncio.ensure_future(lab.platform().take_orders(master.ask, 1))
        await write_plan(lab, "changing", 5)
        async with asyncio.timeout(DEADLINE):
            while claim.times:  # noqa: ASYNC110 (there is no event for it)
                await asyncio.sleep(0.01)
        changed = {"spec": {"replicaResourceSpecs": {"worker": {"replicas": 6}}}}
        await lab.cluster.patch(f"{PLANS.format(lab.namespace)}/changing", changed)
        await asyncio.sleep(0.3)  # the master's watch brings it meanwhile; if it comes later, this test shows less
        server.faults.withdraw()
        assert (await ended(lab, "changing"))["status"]["phase"] == "Succeeded"
        assert master.sizes == [6]
        orders.cancel()
        await asyncio.gather(orders, return_exceptions=True)


class DyingMaster(Master):
    """As soon as a plan is told to it, its server refuses what comes next to one kind of object; then the test ends it."""

    def __init__(self, lab: PodLab, server: ApiServer, exchanged: set[int], plural: str = "") -> None:
        super().__init__(lab)
        self.server = server
        self.exchanged = exchanged
        """Nodes that the job exchanges: its journal keeps them for the next master."""
        self.fault = Fault(effect="status", code=503, plural=plural, times=_MANY)
        self._is_armed = bool(plural)

    async def ask(self, command: OrderCommand) -> None:
        if isinstance(command, ScaleTo | MigrateNode) and self._is_armed:
            self.server.faults.inject(self.fault)
            self._is_armed = False
        if isinstance(command, MigrateNode):
            if command.node in self.exchanged:  # the core's own sentence
                raise Rejected(f"worker {command.node} is being exchanged already.", code=ErrorCode.BAD_MIGRATION)
            self.exchanged.add(command.node)
        await super().ask(command)

    async def run_until_struck(self) -> None:
        orders = asyncio.ensure_future(self.lab.platform().take_orders(self.ask, 1))
        async with asyncio.timeout(DEADLINE):
            while self.fault.times == _MANY:  # noqa: ASYNC110 (there is no event for it)
                await asyncio.sleep(0.01)
        orders.cancel()
        await asyncio.gather(orders, return_exceptions=True)
        self.server.faults.withdraw()


_MANY = 1_000_000
AT_THE_NOTE, AT_THE_STATUS = "configmaps", "scaleplans"


@pytest.mark.parametrize("plural", [AT_THE_NOTE, AT_THE_STATUS])
@pytest.mark.parametrize(
    ("spec", "phase", "message"),
    [
        pytest.param({"replicaResourceSpecs": {"worker": {"replicas": 1000}}}, "Failed", "Give 1 to 100", id="refused"),
        pytest.param({"replicaResourceSpecs": {"worker": {"replicas": 7}}}, "Succeeded", "", id="taken"),
        pytest.param({"migratePods": [{"id": 1}]}, "Succeeded", "", id="exchange"),
    ],
)
async def test_a_master_that_dies_before_a_plan_has_ended_leaves_its_true_end_to_the_next(
    server: ApiServer, spec: dict[str, Any], phase: str, message: str, plural: str
) -> None:
    exchanged: set[int] = set()
    async with PodLab(server.kubeconfig) as lab:
        await write_spec(lab, "half-done", spec)
        await DyingMaster(lab, server, exchanged, plural).run_until_struck()
        claimed = (await lab.cluster.get(f"{PLANS.format(lab.namespace)}/half-done"))["status"]
        orders = asyncio.ensure_future(lab.platform().take_orders(DyingMaster(lab, server, exchanged).ask, 2))
        status = (await ended(lab, "half-done"))["status"]
        await write_plan(lab, "later", 3)  # when it is done, the second master has gone through the first plan
        await ended(lab, "later")
        assert (await lab.cluster.get(f"{PLANS.format(lab.namespace)}/half-done"))["status"] == status
        assert (status["phase"], message in status["message"]) == (phase, True), status
        assert status["createTime"] == claimed["createTime"], "of the master that began with it"
        orders.cancel()
        await asyncio.gather(orders, return_exceptions=True)


async def test_an_exchange_of_a_node_that_is_being_exchanged_already_is_refused(server: ApiServer) -> None:
    """Not a repetition: another plan wanted it."""
    async with PodLab(server.kubeconfig) as lab:
        orders = asyncio.ensure_future(lab.platform().take_orders(DyingMaster(lab, server, set()).ask, 1))
        for name, phase in (("first", "Succeeded"), ("second", "Failed")):
            await write_spec(lab, name, {"migratePods": [{"id": 1}]})
            assert (await ended(lab, name))["status"]["phase"] == phase
        orders.cancel()
        await asyncio.gather(orders, return_exceptions=True)
