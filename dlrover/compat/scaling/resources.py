"""
Resources as the original's classes describe them: of one node, of all nodes of a type, of a job, and a plan to change them. Memory is in MiB, 0 means "keep".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dlrover.core.scaling import rules
from dlrover.core.scaling.rules import Sized
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import ScaleTerms
from dlrover.protocol.units import MIB


class NodeResource:
    def __init__(
        self,
        cpu: float,
        memory: int,
        gpu_type: str = "",
        gpu_num: int = 0,
        gpu_stats: list[Any] | None = None,
        priority: str = "",
        image: str = "",
        **kwargs: Any,
    ) -> None:
        self.cpu, self.memory = cpu, memory
        self.gpu_type, self.gpu_num = gpu_type, gpu_num
        self.gpu_stats = gpu_stats or []
        self.priority, self.image = priority, image
        self.kwargs = kwargs

    def to_resource_dict(self) -> dict[str, Any]:
        """As a pod asks for it."""
        found: dict[str, Any] = {"cpu": self.cpu, "memory": f"{self.memory}Mi"}
        if self.gpu_num > 0:
            found[self.gpu_type] = self.gpu_num
        return found | self.kwargs

    @classmethod
    def resource_str_to_node_resource(cls, resource: str) -> NodeResource:
        """`memory=100Mi,cpu=5,nvidia.com/gpu=1`."""
        parts: dict[str, Any] = dict(part.strip().split("=", 1) for part in resource.split(",") if "=" in part)
        cpu, memory = _quantity(parts.pop("cpu", "0")), int(_quantity(parts.pop("memory", "0")) / MIB)
        gpu_type = next((name for name in parts if "gpu" in name or "npu" in name), "")
        gpu_num = int(_quantity(parts.pop(gpu_type))) if gpu_type else 0
        return cls(cpu, memory, gpu_type, gpu_num, **parts)


class NodeGroupResource:
    def __init__(self, count: int, node_resource: NodeResource) -> None:
        self.count, self.node_resource = count, node_resource

    def update(self, count: int = 0, cpu: float = 0, memory: int = 0) -> None:
        """0 keeps."""
        self.count = count or self.count
        self.node_resource.cpu = cpu or self.node_resource.cpu
        self.node_resource.memory = memory or self.node_resource.memory

    @classmethod
    def new_empty(cls) -> NodeGroupResource:
        return cls(0, NodeResource(0, 0))


class JobResource:
    def __init__(self) -> None:
        self.node_group_resources: dict[str, NodeGroupResource] = {}
        self.group_affinity: dict[int, int] = {}

    def get_node_types(self) -> list[str]:
        return list(self.node_group_resources)

    def get_node_group_resource(self, node_type: str) -> NodeGroupResource | None:
        return self.node_group_resources.get(node_type)

    @property
    def worker_num(self) -> int:
        return self._count("worker")

    @property
    def ps_num(self) -> int:
        return self._count("ps")

    @property
    def evaluator_num(self) -> int:
        return self._count("evaluator")

    @property
    def chief_num(self) -> int:
        return self._count("chief")

    def update_node_group_resource(self, node_type: str, num: int, cpu: float, memory: int) -> None:
        """0 keeps; a type that is not there is added."""
        group = self.node_group_resources.setdefault(node_type, NodeGroupResource.new_empty())
        group.update(num, cpu, memory)

    def to_json(self) -> str:
        return json.dumps(_plain(self.node_group_resources))

    def _count(self, node_type: str) -> int:
        group = self.node_group_resources.get(node_type)
        return 0 if group is None else group.count


class ResourceLimits:
    def __init__(self, cpu: float = 0, memory: int = 0, gpu_num: int = 0) -> None:
        self.cpu, self.memory, self.gpu_num = cpu, memory, gpu_num


class ResourcePlan:
    def __init__(self) -> None:
        self.node_group_resources: dict[str, NodeGroupResource] = {}
        self.node_resources: dict[str, NodeResource] = {}
        self.extended_config: dict[str, str] = {}

    def empty(self) -> bool:
        return not (self.node_group_resources or self.node_resources or self.extended_config)

    def add_group_resource(self, node_type: str, count: int, cpu: float, memory: int) -> None:
        self.node_group_resources[node_type] = NodeGroupResource(count, NodeResource(cpu, memory))

    def merge(self, plan: ResourcePlan) -> None:
        self.node_group_resources.update(plan.node_group_resources)
        self.node_resources.update(plan.node_resources)
        self.extended_config.update(plan.extended_config)

    def limit_resource_value(self) -> None:
        """Within what a node and a type may have (spec 07 §2.2)."""
        terms = ScaleTerms()
        for name, group in self.node_group_resources.items():
            size = Sized(group.count, group.node_resource.cpu, group.node_resource.memory)
            kind = NodeType(name) if name in list(NodeType) else NodeType.WORKER
            wanted = rules.clamped(kind, size, terms)
            group.count, group.node_resource.cpu, group.node_resource.memory = (
                wanted.count,
                wanted.cpu,
                wanted.memory_mb,
            )
        for node in self.node_resources.values():
            wanted = rules.clamped(NodeType.CHIEF, Sized(1, node.cpu, node.memory), terms)
            node.cpu, node.memory = wanted.cpu, wanted.memory_mb

    def to_json(self) -> str:
        return json.dumps({"groups": _plain(self.node_group_resources), "nodes": _plain(self.node_resources)})

    @classmethod
    def new_default_plan(cls) -> ResourcePlan:
        plan = cls()
        for kind, count in rules.DEFAULT_COUNTS.items():
            plan.add_group_resource(kind.value, count, rules.DEFAULT_SIZE.cpu, rules.DEFAULT_SIZE.memory_mb)
        return plan


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"count": each.count, **each.node_resource.to_resource_dict()}
        if isinstance(each, NodeGroupResource)
        else each.to_resource_dict()
        for name, each in found.items()
    }


def _quantity(text: str) -> float:
    """As in Kubernetes, with the suffixes that people write."""
    for suffix, factor in (("Ki", 1024), ("Mi", MIB), ("Gi", MIB * 1024), ("Ti", MIB * 1024 * 1024), ("m", 0.001)):
        if text.endswith(suffix):
            return float(text.removesuffix(suffix)) * factor
    return float(text)
