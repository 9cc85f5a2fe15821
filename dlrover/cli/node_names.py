"""
How people name a node of a job: by type and rank, as `worker-3`, `standby-1` or `ps-0`. A number alone is a worker's.

The same names stand in `dlrover status`, in `dlrover top` and on the page. A replacement has the name of the node that it replaces.
"""

from __future__ import annotations

from dlrover.cli.node_types import node_type_of
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import FleetNodeStatus, NodeType
from dlrover.protocol.messages.job import STANDBY, JobStatus, NodeStatus

MOST_LISTED = 50


def find_platform_node(status: JobStatus, name: str) -> FleetNodeStatus:
    """The newest node of that name which the job wants. Raises `ConfigError` with the names that there are."""
    kind, rank = _parse(status, name)
    found = [node for node in status.fleet if not node.is_released and (node.node_type, node.rank) == (kind, rank)]
    if not found:
        raise _unknown(status, name)
    return max(found, key=lambda node: node.id)


def find_node(status: JobStatus, name: str) -> NodeStatus:
    """A worker or standby that has come. Raises `ConfigError` with the names that there are."""
    kind, rank = _parse(status, name)
    slot = f"{kind.value}-{rank}"
    found = [
        node
        for node in status.nodes
        if (node.slot == slot if node.slot else kind is NodeType.WORKER and node.node_rank == rank)
    ]
    if not found:
        raise _unknown(status, name)
    return found[-1]


def _parse(status: JobStatus, name: str) -> tuple[NodeType, int]:
    kind, _, rank = name.rpartition("-") if "-" in name else (NodeType.WORKER.value, "", name)
    if not (rank.isascii() and rank.isdigit() and len(rank) < 10):
        raise _unknown(status, name)
    if kind == STANDBY:
        if not any(node.label == f"{STANDBY}-{int(rank)}" for node in status.nodes):
            raise _unknown(status, name)
        return NodeType.WORKER, int(rank)
    try:
        return node_type_of(kind), int(rank)
    except ValueError:
        raise _unknown(status, name) from None


def _unknown(status: JobStatus, name: str) -> ConfigError:
    come = {
        (NodeType.WORKER, node.node_rank): node.label
        for node in status.nodes
        if node.status not in ("gone", "left") and not node.slot
    }
    wanted = {(node.node_type, node.rank): node.label for node in status.fleet if not node.is_released}
    names = list((wanted | come).values())
    listed = ", ".join(names[:MOST_LISTED]) or "none"
    hidden = max(0, len(names) - MOST_LISTED) + sum(status.left_out.nodes.values())
    more = f" and {hidden} more" if hidden else ""
    return ConfigError(
        f"--node {name}: this job has no such node. Give the type and rank of one of its nodes: {listed}{more}."
    )
