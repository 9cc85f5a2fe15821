"""
The optimisers of the original's master by their names, on the rules that this project's core uses (spec 07 §8 to §10). Samples in, a `ResourcePlan` out.

The master of this project asks none of these: `core/scaling` decides there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from dlrover.compat.scaling.job_statistics import RuntimeMetric
from dlrover.compat.scaling.resources import JobResource, NodeGroupResource, NodeResource, ResourceLimits, ResourcePlan
from dlrover.core.scaling import rules
from dlrover.core.scaling.rules import NodeSample, Sized, UseSample
from dlrover.protocol.messages.fleet import NodeType, Resource

SAMPLES = 5
_TRAINED = ("worker", "chief", "master")


class ResourceOptimizer(ABC):
    name = ""

    def __init__(self, job_uuid: str, resource_limits: ResourceLimits | None = None) -> None:
        self._job_uuid = job_uuid
        self._resource_limits = resource_limits or ResourceLimits()

    def update_job_uuid(self, job_uuid: str) -> None:
        self._job_uuid = job_uuid

    @abstractmethod
    def generate_opt_plan(self, stage: str, config: Mapping[str, str] | None = None) -> ResourcePlan: ...

    @abstractmethod
    def generate_oom_recovery_plan(
        self, oom_nodes: Sequence[Any], stage: str, config: Mapping[str, str] | None = None
    ) -> ResourcePlan: ...

    def generate_resource_plan_with_optimizer(self, config: Mapping[str, str]) -> ResourcePlan:
        return ResourcePlan()


class SimpleOptimizer(ResourceOptimizer):
    """Plans nothing: only people's numbers act."""

    name = "simple"

    def generate_opt_plan(self, stage: str, config: Mapping[str, str] | None = None) -> ResourcePlan:
        return ResourcePlan()

    def generate_oom_recovery_plan(
        self, oom_nodes: Sequence[Any], stage: str, config: Mapping[str, str] | None = None
    ) -> ResourcePlan:
        return ResourcePlan()


class PSLocalOptimizer(ResourceOptimizer):
    name = "local"

    def __init__(
        self, job_uuid: str, resource_limits: ResourceLimits | None = None, samples: Sequence[RuntimeMetric] = ()
    ) -> None:
        """`samples`: runtime statistics, the oldest first, as a `LocalStatsReporter` keeps them. Limits: cores and MiB."""
        super().__init__(job_uuid, resource_limits)
        self.samples: Sequence[RuntimeMetric] = samples

    def generate_opt_plan(self, stage: str, config: Mapping[str, str] | None = None) -> ResourcePlan:
        limits = Resource(cpu=self._resource_limits.cpu, memory_mb=int(self._resource_limits.memory))
        newest = [_sample(each) for each in reversed(self.samples)]
        window, plan = newest[:SAMPLES], ResourcePlan()
        match stage.removeprefix("job_stage_"):
            case "create":
                size = rules.create(limits)
                for kind in ("ps", "worker"):
                    _add(plan, kind, size)
            case "ps_initial":
                _add(plan, "ps", rules.first_servers(window, limits.cpu))
            case "worker_initial" | "worker_running":
                _add(plan, "worker", rules.workers(newest, limits))
            case "running" | "ps_running":
                names = {node.id: node.name for node in self._newest_nodes() if node.type == "ps"}
                for id_, cpu in rules.hot_servers(window, limits.cpu).items():
                    plan.node_resources[names[id_]] = NodeResource(cpu, 0)
                if plan.empty():
                    _add(plan, "worker", rules.workers(newest, limits))
        return plan

    def generate_oom_recovery_plan(
        self, oom_nodes: Sequence[Any], stage: str, config: Mapping[str, str] | None = None
    ) -> ResourcePlan:
        plan = ResourcePlan()
        for node in oom_nodes:
            size = node.config_resource
            plan.node_resources[node.name] = NodeResource(size.cpu, rules.after_oom(int(size.memory)))
        return plan

    def _newest_nodes(self) -> list[Any]:
        return list(self.samples[-1].running_nodes) if self.samples else []


class JobResourceOptimizer(ABC):
    @abstractmethod
    def get_job_resource_plan(self) -> ResourcePlan | None: ...

    @abstractmethod
    def adjust_oom_resource(self, node: Any) -> None: ...


class PSJobResourceOptimizer(JobResourceOptimizer):
    """Steps through the stages, and lets the user's values count (§9)."""

    def __init__(
        self,
        worker_resource: NodeGroupResource,
        ps_resource: NodeGroupResource,
        optimizer: ResourceOptimizer,
    ) -> None:
        self._users = {"worker": worker_resource, "ps": ps_resource}
        self._optimizer = optimizer
        self._stages = ["job_stage_create", "job_stage_worker_initial", "job_stage_ps_initial"]

    def init_job_resource(self, job_resource: JobResource) -> None:
        plan = self._optimizer.generate_opt_plan(self._stages.pop(0)) if len(self._stages) == 3 else ResourcePlan()
        if plan.empty():
            plan = ResourcePlan.new_default_plan()
        for name, group in self._overridden(plan).node_group_resources.items():
            size = group.node_resource
            job_resource.update_node_group_resource(name, group.count, size.cpu, size.memory)
        evaluator, worker = (job_resource.get_node_group_resource(name) for name in ("evaluator", "worker"))
        if evaluator is not None and worker is not None:
            found = rules.evaluator_size(_sized(evaluator), _sized(worker))
            evaluator.update(0, found.cpu, found.memory_mb)

    def get_job_resource_plan(self) -> ResourcePlan | None:
        stage = self._stages.pop(0) if self._stages else "job_stage_running"
        plan = self._optimizer.generate_opt_plan(stage, {"optimizer.worker.optimize-phase": "initial"})
        return None if plan.empty() else self._overridden(plan)

    def adjust_oom_resource(self, node: Any) -> None:
        group, size = self._users.get(node.type), node.config_resource
        user = 0 if group is None else int(group.node_resource.memory)
        size.memory = rules.after_oom(int(size.memory), user_mb=user)

    def _overridden(self, plan: ResourcePlan) -> ResourcePlan:
        for name, group in plan.node_group_resources.items():
            user = self._users.get(name, NodeGroupResource.new_empty())
            found = rules.overridden(NodeType(name), _sized(group), _sized(user))
            plan.add_group_resource(name, found.count, found.cpu, found.memory_mb)
        return plan


class AllreduceJobResourceOptimizer(JobResourceOptimizer):
    """As many workers as nodes are free, in whole units (§10)."""

    def __init__(self, worker_resource: NodeGroupResource, job_uuid: str = "", *, free_nodes: Any = None) -> None:
        """`free_nodes`: called without arguments; without it no node is free, as in the original."""
        self._worker, self._job_uuid = worker_resource, job_uuid
        self._free_nodes = free_nodes or (lambda: 0)
        self._unit, self._alive = 1, 0

    def set_node_unit(self, node_unit: int) -> None:
        self._unit = node_unit

    def set_alive_node_num(self, node_num: int) -> None:
        self._alive = node_num

    def get_job_resource_plan(self) -> ResourcePlan | None:
        plan, size = ResourcePlan(), self._worker.node_resource
        count = rules.world_size(self._worker.count, self._alive, int(self._free_nodes()), self._unit)
        plan.add_group_resource("worker", count, size.cpu, size.memory)
        return plan

    def adjust_oom_resource(self, node: Any) -> None:
        """Twice as much; a device that ran out of memory is no matter of the host's."""
        node.config_resource.memory = rules.after_oom(int(node.config_resource.memory))


def _sample(metric: RuntimeMetric) -> UseSample:
    groups: dict[bool, list[NodeSample]] = {True: [], False: []}
    for node in metric.running_nodes:
        if node.type == "ps" or node.type in _TRAINED:
            used, size = node.used_resource, node.config_resource
            sample = NodeSample(node.id, used.cpu, size.cpu, used.memory, int(size.memory))
            groups[node.type == "ps"].append(sample)
    num_chiefs = sum(node.type != "worker" for node in metric.running_nodes if node.type in _TRAINED)
    return UseSample(tuple(groups[True]), tuple(groups[False]), metric.speed, num_chiefs)


def _sized(group: NodeGroupResource) -> Sized:
    return Sized(group.count, group.node_resource.cpu, int(group.node_resource.memory))


def _add(plan: ResourcePlan, node_type: str, size: Sized | None) -> None:
    if size is not None and size.count:
        plan.add_group_resource(node_type, size.count, size.cpu, size.memory_mb)
