"""
How many more nodes one machine can take: by its cores, its memory, its accelerators and the limit that people set.

A node without a size does not say what it needs. The limit bounds such nodes, else they get one core each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from dlrover.platforms.base import NodeRoom, check_size
from dlrover.protocol.messages.fleet import Resource
from dlrover.protocol.units import in_mib


class Machine(Struct, frozen=True):
    cores: int
    memory_mb: int
    num_gpus: int


def this_machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_mb=int(in_mib(memory)),
        num_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
    )


def room_on(machine: Machine, resource: Resource, living: Sequence[Resource], *, capacity: int) -> NodeRoom:
    """
    `living`: sizes of the nodes that run. `capacity`: how many may run at a time, 0 for any number. Fewer than run: the others
    have to go. What else is short is no reason to end nodes that run.
    """
    check_size(resource, "a question for room")
    bounds: list[tuple[int, str]] = []
    if capacity and capacity < len(living):
        return NodeRoom(capacity - len(living), f"{len(living)} nodes run and at most {capacity} may")
    if capacity:
        bounds.append((capacity - len(living), f"{len(living)} of at most {capacity} nodes run"))
    for name, wanted, total, used in (
        ("cores", resource.cpu, machine.cores, sum(each.cpu for each in living)),
        ("MiB of memory", resource.memory_mb, machine.memory_mb, sum(each.memory_mb for each in living)),
        ("GPUs", resource.gpus, machine.num_gpus, sum(each.gpus for each in living)),
    ):
        if wanted:
            bounds.append((int((total - used) // wanted), f"{used:g} of {total} {name} are taken"))
    if not bounds:
        bounds.append((machine.cores - len(living), f"{len(living)} nodes run on {machine.cores} cores"))
    free, reason = min(bounds)
    return NodeRoom(max(0, free), reason)
