"""
The status of a very large job, as one message can carry it.

A job may have more nodes than a message has room for. Then those that a person has to look at come first, and of the others as many as
fit; how many more there are, and in which state, is told in numbers.
"""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec.structs import replace

from dlrover.protocol.messages.fleet import FleetNodeStatus, NodePhase
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, JobStatus, LeftOut, NodeStatus

_UNREMARKABLE = ("alive", "standby", "finished", "left")
_UNREMARKABLE_PHASES = (NodePhase.RUNNING, NodePhase.SUCCEEDED)
_SPARE_BYTES = 4096
"""For the counts, and for what is around a status in a message."""


def fit_into_answer(status: JobStatus) -> JobStatus:
    """With as many nodes as there is room for, in their order. Still too large only if all the rest of it is."""
    room = MAX_MESSAGE_BYTES - _SPARE_BYTES - _size(replace(status, nodes=(), fleet=()))
    nodes: dict[int, NodeStatus] = {}
    fleet: dict[int, FleetNodeStatus] = {}
    entries: list[tuple[bool, int, NodeStatus | FleetNodeStatus]] = [
        *((_is_well(node), place, node) for place, node in enumerate(status.nodes)),
        *((_runs_well(each), place, each) for place, each in enumerate(status.fleet)),
    ]
    for _, place, node in sorted(entries, key=lambda entry: entry[:2]):
        room -= _size(node)
        if room < 0:
            break
        if isinstance(node, NodeStatus):
            nodes[place] = node
        else:
            fleet[place] = node
    return replace(
        status,
        nodes=tuple(nodes[place] for place in sorted(nodes)),
        fleet=tuple(fleet[place] for place in sorted(fleet)),
        left_out=LeftOut(
            nodes=dict(Counter(node.status for place, node in enumerate(status.nodes) if place not in nodes)),
            fleet=dict(Counter(node.phase.value for place, node in enumerate(status.fleet) if place not in fleet)),
        ),
    )


def _is_well(node: NodeStatus) -> bool:
    return node.status in _UNREMARKABLE and (node.check is None or not node.check.reason)


def _runs_well(node: FleetNodeStatus) -> bool:
    return node.is_released or node.phase in _UNREMARKABLE_PHASES


def _size(part: JobStatus | NodeStatus | FleetNodeStatus) -> int:
    return len(msgspec.msgpack.encode(part))
