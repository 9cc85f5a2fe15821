"""
The cluster of `lab`, with the operator's part of mode `k8s` in it: it carries out the plans that the platform writes.

The operator's own code does it, in this process and without its other decisions: the lab's jobs have no master's pod.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from dlrover.operator.actions import CarryOutPlan
from dlrover.operator.carry_out import ActionCarrier
from dlrover.operator.cluster_view import ClusterView
from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.answers import SCALE_PLANS, FoundObject
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.elastic_job import ElasticJob
from dlrover.platforms.kubernetes.informer import USUAL, Informer, InformerTiming, ObjectDeleted, ObjectsListed
from dlrover.platforms.kubernetes.objects import decode
from dlrover.platforms.kubernetes.orders.outgoing import is_open_for
from dlrover.platforms.kubernetes.orders.writer import PlanPlatform
from dlrover.platforms.kubernetes.pods import PodJob
from dlrover.platforms.kubernetes.scale_plan import PlanObject
from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.platform.lab import ELASTIC_JOBS, TEMPLATE, TEMPLATES, PodLab
from tests.platforms.contract import JOB


class PlanLab(PodLab):
    def __init__(self, kubeconfig: Path, *, capacity: int = 3) -> None:
        super().__init__(kubeconfig, capacity=capacity)
        self.carried_out: list[str] = []
        """Names of plans, in order."""
        self.is_operator_there = asyncio.Event()
        self.is_operator_there.set()

    async def __aenter__(self) -> PlanLab:
        await super().__aenter__()
        for name in self.uids:
            # Types as the contract launches them.
            specs = {kind.value: {"replicas": 1, "template": TEMPLATE} for kind in TEMPLATES}
            await self.cluster.patch(f"{ELASTIC_JOBS.format(self.namespace)}/{name}", {"spec": {"replicaSpecs": specs}})
        self._tasks.append(asyncio.ensure_future(self._carry_out_plans()))
        return self

    def platform(self, job_uid: str = JOB, *, timing: InformerTiming = USUAL) -> PlanPlatform:
        job = PodJob(name=job_uid, uid=self.uids[job_uid], namespace=self.namespace, types=TEMPLATES)
        platform = PlanPlatform(ClusterApi(find_access({}, kubeconfig=self.kubeconfig)), job, timing=timing)
        self._platforms.append(platform)
        return platform

    async def plans(self) -> list[Body]:
        path = f"/apis/{SCALE_PLANS.group}/{SCALE_PLANS.version}/namespaces/{self.namespace}/scaleplans"
        return list((await self.cluster.get(path)).get("items") or ())

    async def _carry_out_plans(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            api = await stack.enter_async_context(ClusterApi(find_access({}, kubeconfig=self.kubeconfig)))
            view = ClusterView(api, namespace=self.namespace, sees_machines=False)
            carrier = ActionCarrier(api, view)
            informer = Informer(api, SCALE_PLANS, PlanObject, namespace=self.namespace)
            running = asyncio.ensure_future(informer.run())
            stack.callback(running.cancel)
            async for sight in informer.subscribe():
                if isinstance(sight, ObjectDeleted):
                    continue
                for plan in sight.objects if isinstance(sight, ObjectsListed) else (sight.object,):
                    await self.is_operator_there.wait()
                    await self._carry_out(carrier, api, plan)

    async def _carry_out(self, carrier: ActionCarrier, api: ClusterApi, plan: PlanObject) -> None:
        from dlrover.platforms.kubernetes.answers import ELASTIC_JOBS as JOBS

        answer = await api.get(JOBS, plan.spec.owner_job, namespace=self.namespace)
        assert isinstance(answer, FoundObject), answer
        job = decode(ElasticJob, answer.body)
        if is_open_for(plan, job.metadata.uid):
            denied = await carrier.carry_out(job, CarryOutPlan(plan=plan))
            assert denied is None, denied
            self.carried_out.append(plan.metadata.name)
