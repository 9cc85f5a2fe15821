"""
On which machine a node goes, and what is missing where it fits on none. Decides from values alone.

Elastic jobs use no placement group, which can neither grow nor shrink. Each node has its own resources, and the host chooses among the
machines that have them free. Where none has, the node waits in Ray's queue: there the autoscaler sees it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from dlrover.platforms.base import NodeRoom
from dlrover.protocol.messages.fleet import Resource
from dlrover.protocol.units import MIB

CPU, GPU, MEMORY = "CPU", "GPU", "memory"
Demand = Mapping[str, float]
"""By Ray's names; memory in bytes."""
_EPSILON = 1e-6


class Placement(enum.StrEnum):
    SPREAD = "spread"
    """At most one node per machine while machines are free."""
    STRICT_SPREAD = "strict-spread"
    """Never two nodes of the job on one machine."""
    PACK = "pack"
    """As few machines as possible."""


class ClusterMachine(Struct, frozen=True, kw_only=True):
    id: str
    """Ray's node id."""
    host: str
    """For people, unique in the cluster."""
    total: Mapping[str, float]
    free: Mapping[str, float]
    drained_at: float | None = None
    """Seconds since 1970 when it will be taken away; None: it stays. 0: soon."""


class AutoscalerState(Struct, frozen=True, kw_only=True):
    num_pending: int
    """Machines that it is adding."""
    num_failed: int
    """Recent launches that failed."""


class MachineChoice(Struct, frozen=True):
    machine: str
    """Ray's node id; empty: none has room."""
    sentence: str
    may_queue: bool = True
    """Ray may put the node on any machine that gets room. False: only a machine of our choice will do."""


def demand_of(resource: Resource, extra: Mapping[str, float]) -> dict[str, float]:
    """A node without a size gets one core, as on a laptop."""
    demand = {CPU: resource.cpu or (0.0 if resource.gpus or extra else 1.0)}
    if resource.gpus:
        demand[GPU] = float(resource.gpus)
    if resource.memory_mb:
        demand[MEMORY] = float(resource.memory_mb * MIB)
    if resource.gpu_type:
        demand[f"accelerator_type:{resource.gpu_type}"] = 0.001
    demand.update(extra)
    return {name: amount for name, amount in demand.items() if amount}


def choose(
    machines: Sequence[ClusterMachine],
    demand: Demand,
    *,
    num_nodes_on: Mapping[str, int],
    avoid: Collection[str],
    placement: Placement,
    outlook: str = "",
) -> MachineChoice:
    """`num_nodes_on`: nodes of this job by machine. `outlook`: what is known of machines to come."""
    is_strict = placement is Placement.STRICT_SPREAD
    allowed = [
        machine
        for machine in machines
        if machine.drained_at is None
        and machine.host not in avoid
        and not (is_strict and num_nodes_on.get(machine.id, 0))
    ]
    fitting = [machine for machine in allowed if fits(machine.free, demand)]
    may_queue = not is_strict and not avoid
    if not fitting:
        return MachineChoice("", _why_not(machines, allowed, demand, is_strict=is_strict, outlook=outlook), may_queue)
    sign = -1 if placement is Placement.PACK else 1
    best = min(fitting, key=lambda machine: (sign * num_nodes_on.get(machine.id, 0), machine.host, machine.id))
    return MachineChoice(best.id, f"It starts on {best.host}.", may_queue)


def room_for(machines: Sequence[ClusterMachine], demand: Demand, *, num_living: int, capacity: int) -> NodeRoom:
    """How many nodes of this size the cluster could take now."""
    free = sum(_times(machine.free, demand) for machine in machines if machine.drained_at is None)
    reason = f"{len(machines)} machines have room for {free} nodes of {describe(demand)}"
    if capacity and capacity - num_living < free:
        return NodeRoom(capacity - num_living, f"{num_living} of at most {capacity} nodes run")
    if capacity and num_living >= capacity:
        reason = f"{num_living} of at most {capacity} nodes run"
    return NodeRoom(free, reason)


def fits(amounts: Mapping[str, float], demand: Demand) -> bool:
    return all(amounts.get(name, 0.0) + _EPSILON >= amount for name, amount in demand.items())


def describe(demand: Demand) -> str:
    return ", ".join(_amount(name, amount) for name, amount in demand.items()) or "no resources"


def _times(free: Mapping[str, float], demand: Demand) -> int:
    if not demand:
        return 0
    return min(int((free.get(name, 0.0) + _EPSILON) // amount) for name, amount in demand.items())


def _why_not(
    machines: Sequence[ClusterMachine],
    allowed: Sequence[ClusterMachine],
    demand: Demand,
    *,
    is_strict: bool,
    outlook: str,
) -> str:
    asks = f"It asks for {describe(demand)}."
    if not machines:
        return f"{asks} The cluster has no machine. {outlook}".strip()
    if not allowed:
        why = (
            "already runs a node of this job, is excluded for this node, or is being drained"
            if is_strict
            else "is excluded for this node or is being drained"
        )
        return f"{asks} Each of the {len(machines)} machines {why}. {outlook}".strip()
    best = max(allowed, key=lambda machine: [min(machine.free.get(name, 0.0) / demand[name], 1.0) for name in demand])
    missing = [name for name in demand if best.free.get(name, 0.0) + _EPSILON < demand[name]]
    has = ", ".join(_amount(name, best.free.get(name, 0.0)) for name in missing)
    text = f"{asks} The most that a machine has free is {has} ({best.host})."
    if not any(fits(machine.total, demand) for machine in allowed):
        most = ", ".join(_amount(name, max(machine.total.get(name, 0.0) for machine in allowed)) for name in missing)
        text += f" No machine is large enough even when idle: at most {most}."
    return f"{text} {outlook}".strip()


def _amount(name: str, amount: float) -> str:
    return f"{amount / MIB:.0f} MiB memory" if name == MEMORY else f"{amount:g} {name}"


def outlook_of(autoscaler: AutoscalerState | None) -> str:
    """Whether machines are being added, in a sentence. None: the cluster has no autoscaler."""
    if autoscaler is None:
        return "The cluster has no autoscaler: the node waits until another job ends or a machine joins."
    adding = f"{autoscaler.num_pending} {_machines(autoscaler.num_pending)}" if autoscaler.num_pending else "no machine"
    failed = f" {autoscaler.num_failed} of its recent launches failed." if autoscaler.num_failed else ""
    return f"The autoscaler is adding {adding} now.{failed}"


def _machines(number: int) -> str:
    return "machine" if number == 1 else "machines"
