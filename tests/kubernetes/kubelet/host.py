"""
What all pods of one kubelet share: the node's name and address, its network, its limits, and the faults in force.
"""

from __future__ import annotations

import time
from pathlib import Path

from msgspec import Struct, field

from dlrover.platforms.local.memory_limits import MemoryLimits
from tests.kubernetes.kubelet.client import Body, Cluster
from tests.kubernetes.kubelet.environment import parse_quantity
from tests.kubernetes.kubelet.network import PodNetwork


class Host(Struct, kw_only=True):
    name: str
    address: str
    folder: Path
    claims: Path
    """Where persistent volume claims live, for all nodes."""
    cluster: Cluster
    network: PodNetwork
    limits: MemoryLimits | None
    """None where cgroups cannot be made: memory is not limited then."""
    capacity: dict[str, str]
    dns: str = ""
    """Address of the cluster's name server; empty: none."""
    cluster_environ: dict[str, str] = field(default_factory=dict)
    """KUBERNETES_SERVICE_HOST and _PORT."""
    back_off: float = 10.0
    """Seconds before the second restart of a container; doubles up to thirty times that."""
    pull_back_off: float = 10.0
    image_paths: tuple[str, ...] = ()
    broken_images: set[str] = field(default_factory=set)
    """Cannot be pulled, and are not on this node."""
    lateness: float = 0.0
    """Seconds by which statuses are late."""

    def now(self) -> float:
        return time.time()


def requests_of(pod: Body) -> dict[str, float]:
    """What the scheduler and the kubelet count: the sum over containers, or one init container if it asks for more."""
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        for key, amount in _requests(container).items():
            total[key] = total.get(key, 0.0) + amount
    for container in pod["spec"].get("initContainers") or ():
        for key, amount in _requests(container).items():
            total[key] = max(total.get(key, 0.0), amount)
    return total | {"pods": 1.0}


def _requests(container: Body) -> dict[str, float]:
    resources = container.get("resources") or {}
    amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {key: parse_quantity(amount) for key, amount in amounts.items()}
