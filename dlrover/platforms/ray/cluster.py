"""
The cluster as Ray tells of it: machines, what they have free, which are being drained, what its autoscaler is up to.

Each question is answered by the head in about a millisecond. Ray has no public stream of these facts, so the host asks once a second
while a node waits for room, and once a second for drained machines. Names that Ray calls private are in this module and `store`.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from dlrover.platforms.ray.placement import AutoscalerState, ClusterMachine, outlook_of

_AUTOSCALER_REPORT = b"__autoscaling_status"


def machines() -> list[ClusterMachine]:
    import ray
    from ray._private import state

    free: dict[str, dict[str, float]] = state.available_resources_per_node()
    draining: dict[str, int] = getattr(state.state, "get_draining_nodes", dict)()
    living = [node for node in ray.nodes() if node["Alive"]]
    times = Counter(node["NodeManagerAddress"] for node in living)
    found = []
    for node in living:
        machine_id, host = node["NodeID"], node["NodeManagerAddress"]
        deadline = draining.get(machine_id)
        found.append(
            ClusterMachine(
                id=machine_id,
                host=host if times[host] == 1 else f"{host}#{machine_id[:6]}",
                total=_shown(node["Resources"]),
                free=_shown(free.get(machine_id, {})),
                drained_at=None if deadline is None else deadline / 1000,
            )
        )
    return found


def has_autoscaler() -> bool:
    return autoscaler() is not None


def outlook() -> str:
    """Whether machines are being added, in a sentence."""
    return outlook_of(autoscaler())


def autoscaler() -> AutoscalerState | None:
    """None: the cluster has none."""
    status = _v2_status()
    if status is not None:
        num_pending = len(status.pending_nodes) + len(status.pending_launches)
        return AutoscalerState(num_pending=num_pending, num_failed=len(status.failed_launches))
    report = _v1_report()
    if report is not None:
        num_pending = len(report.get("pending_nodes", ())) + sum((report.get("pending_launches") or {}).values())
        return AutoscalerState(num_pending=num_pending, num_failed=len(report.get("failed_nodes", ())))
    return None


def _shown(resources: dict[str, float]) -> dict[str, float]:
    return {name: float(amount) for name, amount in resources.items() if not name.startswith(("node:", "object_store"))}


def _v1_report() -> dict[str, Any] | None:
    from ray.experimental import internal_kv

    data = internal_kv._internal_kv_get(_AUTOSCALER_REPORT)
    try:
        report = json.loads(data).get("autoscaler_report") if data else None
    except ValueError:
        return None
    if not isinstance(report, dict):
        return None
    # Each head reports, also one that can add nothing. Its machines are all of a type of their own then.
    types = report.get("node_type_mapping") or {}
    can_add = not types or any(node_type != f"node_{machine}" for machine, node_type in types.items())
    return report if can_add else None


def _v2_status() -> Any:
    """None: the cluster has no autoscaler of the second kind."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.autoscaler.v2.utils import is_autoscaler_v2

    return get_cluster_status(ray.get_runtime_context().gcs_address) if is_autoscaler_v2() else None
