"""The optimisers of the original by their historical names, with the vectors of its specification (07 §2, §8 to §10)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from dlrover.python.common.node import NodeGroupResource, NodeResource
from dlrover.python.master.resource.job import (
    AllreduceJobResourceOptimizer,
    JobResource,
    JobResourceOptimizer,
    PSJobResourceOptimizer,
)
from dlrover.python.master.resource.local_optimizer import PSLocalOptimizer
from dlrover.python.master.resource.optimizer import ResourceLimits, ResourceOptimizer, ResourcePlan, SimpleOptimizer
from dlrover.python.master.stats.training_metrics import RuntimeMetric


def node(type_: str, id_: int, used: float, cpu: float, memory: int = 2048) -> Any:
    return SimpleNamespace(
        type=type_,
        id=id_,
        name=f"job-{type_}-{id_}",
        used_resource=NodeResource(used, memory),
        config_resource=NodeResource(cpu, 4096),
    )


def local(*servers: float, limit: float = 100) -> PSLocalOptimizer:
    nodes = [node("ps", rank, used, 4) for rank, used in enumerate(servers)]
    nodes += [node("worker", rank, 1, 1) for rank in range(3)]
    return PSLocalOptimizer("uid", ResourceLimits(limit, 102_400), [RuntimeMetric(nodes, 10, 20.0, 1.0)])


def groups(plan: ResourcePlan) -> dict[str, tuple[int, float, int]]:
    found = plan.node_group_resources.items()
    return {name: (group.count, group.node_resource.cpu, group.node_resource.memory) for name, group in found}


def test_2_1_resources_read_and_write_texts() -> None:
    read = NodeResource.resource_str_to_node_resource("memory=100Mi,cpu=5,nvidia.com/gpu=1,rdma=2")
    assert (read.cpu, read.memory, read.gpu_type, read.gpu_num) == (5, 100, "nvidia.com/gpu", 1)
    assert read.to_resource_dict() == {"cpu": 5, "memory": "100Mi", "nvidia.com/gpu": 1, "rdma": "2"}
    job = JobResource()
    job.update_node_group_resource("worker", 3, 2, 4096)
    job.update_node_group_resource("worker", 0, 4, 0)
    assert (job.worker_num, job.ps_num, job.get_node_group_resource("worker").node_resource.memory) == (3, 0, 4096)
    assert ResourcePlan().empty()


def test_2_2_values_are_limited() -> None:
    plan = ResourcePlan()
    plan.add_group_resource("worker", 1, 1, 256)
    plan.add_group_resource("ps", 20, 64, 2_560_000)
    plan.limit_resource_value()
    assert groups(plan) == {"worker": (1, 4, 6144), "ps": (15, 32, 65_536)}


@pytest.mark.parametrize("stage", ["create", "job_stage_create"])
def test_8_1_create(stage: str) -> None:
    plan = PSLocalOptimizer("uid", ResourceLimits(10, 8192)).generate_opt_plan(stage)
    assert groups(plan) == {"worker": (1, 2, 1639), "ps": (1, 2, 1639)}


def test_8_2_and_8_3_the_stages_that_follow() -> None:
    assert groups(local(1.4, 1.0, limit=10).generate_opt_plan("job_stage_ps_initial")) == {"ps": (2, 4, 2457)}
    assert groups(local(1.0, 1.0).generate_opt_plan("job_stage_worker_initial")) == {"worker": (10, 1, 3072)}
    assert groups(local(1.0, 1.0).generate_opt_plan("job_stage_worker_running")) == {"worker": (10, 1, 3072)}


def test_8_4_and_8_5_a_hot_server_and_one_without_memory() -> None:
    hot = local(3.6, 0.3).generate_opt_plan("job_stage_running")
    assert {name: (each.cpu, each.memory) for name, each in hot.node_resources.items()} == {"job-ps-0": (32, 0)}
    plan = local(1.0).generate_oom_recovery_plan([node("ps", 1, 1, 4)], "job_stage_running")
    assert plan.node_resources["job-ps-1"].memory == 8192


def test_9_the_users_values_count() -> None:
    users = NodeGroupResource(3, NodeResource(1, 512)), NodeGroupResource(0, NodeResource(8, 512))
    optimizer = PSJobResourceOptimizer(*users, PSLocalOptimizer("uid", ResourceLimits(100, 102_400)))
    assert isinstance(optimizer, JobResourceOptimizer)
    job = JobResource()
    job.update_node_group_resource("evaluator", 1, 1, 512)
    optimizer.init_job_resource(job)
    sizes = {name: groups(job)[name] for name in ("worker", "ps", "evaluator")}
    assert sizes == {"worker": (3, 16, 8192), "ps": (1, 8, 8192), "evaluator": (1, 16, 8192)}
    assert optimizer.get_job_resource_plan() is None, "nothing was measured"


@pytest.mark.parametrize(("unit", "free", "count"), [(4, 4, 8), (4, 3, 4), (1, 3, 7)])
def test_10_workers_of_a_world(unit: int, free: int, count: int) -> None:
    optimizer = AllreduceJobResourceOptimizer(NodeGroupResource(8, NodeResource(4, 4096)), free_nodes=lambda: free)
    optimizer.set_node_unit(unit)
    optimizer.set_alive_node_num(4)
    plan = optimizer.get_job_resource_plan()
    assert plan is not None
    assert groups(plan) == {"worker": (count, 4, 4096)}


def test_7_2_the_simple_one_plans_nothing() -> None:
    optimizer = SimpleOptimizer("uid")
    assert isinstance(optimizer, ResourceOptimizer)
    assert optimizer.generate_opt_plan("job_stage_create").empty()
