"""
What goes wrong, how often, and how.

`STANDARD_MIX` holds the rates per node-hour, `MASTER_MIX` those of what there is once per job, per hour. They are far
beyond what real clusters see (a large one reports one interruption per node in some thousand hours): a simulation shall meet
combinations, and a node that fails every few minutes meets them. A campaign multiplies them further.

The list of a seed's faults is drawn before the simulation begins, so that a shorter list can be tried when one fails.
Each kind is a function in `FAULTS` that returns whether there was anything to hit; only hits are counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from msgspec import Struct

from dlrover.agent.decisions.departure import preempted
from dlrover.protocol.messages.check import ExitClass
from dlrover.protocol.messages.job import FailureKind
from dlrover.simulator.masters.journal import CrashPoint
from dlrover.simulator.nodes.cloud import VirtualCloud
from dlrover.simulator.nodes.cluster import VirtualCluster
from dlrover.simulator.nodes.platform import VirtualPlatform
from dlrover.simulator.parts import AgentPart, SimulationPart, VirtualNode
from dlrover.simulator.virtual_time import micros

STANDARD_MIX: dict[str, float] = {
    "worker-crash": 0.30,
    "worker-out-of-memory": 0.05,
    "worker-bug": 0.05,
    "port-taken": 0.02,
    "agent-killed": 0.15,
    "machine-gone": 0.05,
    "power-loss": 0.05,
    "preemption": 0.10,
    "stall": 0.30,
    "freeze": 0.10,
    "connection-break": 0.40,
    "slow-link": 0.15,
    "partition": 0.15,
    "one-way-partition": 0.10,
    "duplicates": 0.10,
    "clock-jump": 0.05,
    "slow-node": 0.05,
    "new-node": 0.03,
}
"""Per node-hour."""

FLEET_MIX: dict[str, float] = {"eviction": 0.4, "node-fails": 0.1, "node-vanishes": 0.1, "exchange": 0.1}
"""Per node-hour, of jobs that ask for their nodes."""
CLOUD_MIX: dict[str, float] = {"watch-breaks": 1.0, "cloud-away": 0.3}
"""The same per hour."""
POD_MIX: dict[str, float] = {"eviction": 0.2, "node-fails": 0.05}
"""Per node-hour, of jobs whose nodes are pods, and beside the others: drawn apart from them."""
POD_MASTER_MIX: dict[str, float] = {
    "followed-in-a-launch": 2.0,
    "two-masters": 0.5,
    "master-crash": 0.5,
    "cloud-away": 0.3,
    "platform-refuses": 0.3,
}
"""The same per hour: the master's own pod moves, too."""
PEOPLE_MIX: dict[str, float] = {"suspension": 1.0}
"""The same: what people do to them. Drawn apart from all others."""
CHECK_MIX: dict[str, float] = {"node-breaks": 0.1}
"""Per node-hour, of jobs with a node check."""

MASTER_MIX: dict[str, float] = {
    "master-crash": 0.5,
    "master-power-loss": 0.1,
    "master-stall": 0.4,
    "master-partition": 0.2,
    "two-masters": 0.2,
    "disk-full": 0.2,
    "disk-slow": 0.2,
    "platform-refuses": 0.2,
    "scaling": 0.2,
    "journal-lost": 0.05,
}
"""Per hour of the job."""

PAUSES: dict[str, float] = {"stall": 2.0, "clock-jump": 0.05, "slow-link": 0.05, "duplicates": 0.02}
"""Per node-hour: what healthy nodes do all the time, and what must never be taken for a fault."""
MASTER_PAUSES: dict[str, float] = {"master-pause": 0.1, "disk-slow": 0.2}


class Fault(Struct, frozen=True):
    """One thing that goes wrong. All chance in it was drawn beforehand."""

    at: int
    kind: str
    pick: int
    """Which of those there are is hit, counted round."""
    amount: float
    """From 0 to 1: how bad, how long."""

    def between(self, low: float, high: float) -> int:
        """A duration between so many seconds; short ones are more frequent than long ones."""
        return micros(low * (high / low) ** self.amount)


def draw_faults(
    chance: random.Random,
    *,
    hours: float,
    num_nodes: int,
    intensity: float = 1.0,
    mix: Mapping[str, float] = STANDARD_MIX,
    master_mix: Mapping[str, float] = MASTER_MIX,
) -> tuple[Fault, ...]:
    """The faults of one seed, in order of time."""
    rates = {kind: rate * num_nodes for kind, rate in mix.items()} | dict(master_mix)
    kinds, weights = list(rates), list(rates.values())
    per_micro = sum(weights) * intensity / 3600e6
    faults: list[Fault] = []
    if not per_micro:
        return ()
    at = chance.expovariate(per_micro)
    while at < hours * 3600e6:
        (kind,) = chance.choices(kinds, weights)
        faults.append(Fault(int(at), kind, chance.randrange(1 << 30), chance.random()))
        at += chance.expovariate(per_micro)
    return tuple(faults)


def _agent(sim: SimulationPart, fault: Fault) -> AgentPart | None:
    agents = [node.agent for node in sim.machines.nodes if node.agent is not None]
    return agents[fault.pick % len(agents)] if agents else None


def _node(sim: SimulationPart, fault: Fault) -> VirtualNode | None:
    nodes = [node for node in sim.machines.nodes if node.is_powered]
    return nodes[fault.pick % len(nodes)] if nodes else None


def _fail(sim: SimulationPart, fault: Fault, kind: FailureKind, traceback: str = "") -> bool:
    agent = _agent(sim, fault)
    if agent is None or agent.sleep.since is not None or not agent.workers.fail(kind, traceback):
        return False
    sim.ledger.charge(agent)
    return True


def _worker_crash(sim: SimulationPart, fault: Fault) -> bool:
    return _fail(sim, fault, FailureKind.SIGNAL if fault.amount < 0.5 else FailureKind.EXIT_CODE)


def _worker_out_of_memory(sim: SimulationPart, fault: Fault) -> bool:
    return _fail(sim, fault, FailureKind.OUT_OF_MEMORY if fault.amount < 0.5 else FailureKind.MEMORY_ERROR)


def _worker_bug(sim: SimulationPart, fault: Fault) -> bool:
    return _fail(sim, fault, FailureKind.EXCEPTION, f"Traceback: bug {fault.pick % 3}")


def _port_taken(sim: SimulationPart, fault: Fault) -> bool:
    sim.troubles.num_ports_taken += 1
    return True


def _agent_killed(sim: SimulationPart, fault: Fault) -> bool:
    agent = _agent(sim, fault)
    if agent is None:
        return False
    sim.ledger.charge(agent)
    sim.machines.kill_agent(agent)
    return True


def _machine_gone(sim: SimulationPart, fault: Fault) -> bool:
    node = _node(sim, fault)
    if node is None:
        return False
    sim.ledger.num_lost_nodes += 1
    sim.machines.lose(node, is_seen=True)
    return True


def _power_loss(sim: SimulationPart, fault: Fault) -> bool:
    node = _node(sim, fault)
    if node is None:
        return False
    sim.ledger.fail_node(node.fleet_rank, node.node_type)
    node.is_power_lost = True
    sim.machines.lose(node, is_seen=False)
    return True


def _preemption(sim: SimulationPart, fault: Fault) -> bool:
    agent = _agent(sim, fault)
    if agent is None or agent.me.is_leaving or agent.sleep.since is not None:
        return False
    agent.leave(preempted("the platform"))
    return True


def _stand_still(sim: SimulationPart, fault: Fault, duration: int) -> bool:
    agent = _agent(sim, fault)
    if agent is None or not agent.sleep.begin():
        return False
    sim.ledger.fail_node(agent.node.fleet_rank, agent.node.node_type)
    sim.troubles.pass_by(duration, agent.sleep.end)
    return True


def _stall(sim: SimulationPart, fault: Fault) -> bool:
    """A busy node: no reason to do anything."""
    return _stand_still(sim, fault, fault.between(0.5, 30.0))


def _freeze(sim: SimulationPart, fault: Fault) -> bool:
    return _stand_still(sim, fault, fault.between(25.0, 600.0))


def _connection_break(sim: SimulationPart, fault: Fault) -> bool:
    agent = _agent(sim, fault)
    if agent is None or agent.channel.connection is None or agent.sleep.since is not None:
        return False
    agent.channel.drop(is_lossy=fault.amount < 0.5)
    return True


def _slow_link(sim: SimulationPart, fault: Fault) -> bool:
    node = _node(sim, fault)
    if node is None or node.link.is_slow:
        return False
    node.link.is_slow = True
    sim.troubles.pass_by(fault.between(5.0, 600.0), lambda: setattr(node.link, "is_slow", False))
    return True


def _cut(sim: SimulationPart, fault: Fault, *, up: bool, down: bool) -> bool:
    node = _node(sim, fault)
    if node is None:
        return False
    sim.machines.cut_off(node, up=up, down=down, duration=fault.between(1.0, 400.0), is_deep=fault.pick % 2 == 0)
    return True


def _partition(sim: SimulationPart, fault: Fault) -> bool:
    return _cut(sim, fault, up=True, down=True)


def _one_way_partition(sim: SimulationPart, fault: Fault) -> bool:
    return _cut(sim, fault, up=fault.pick % 3 == 0, down=fault.pick % 3 != 0)


def _duplicates(sim: SimulationPart, fault: Fault) -> bool:
    node = _node(sim, fault)
    if node is None:
        return False
    node.link.duplicates += 1 + fault.pick % 5
    return True


def _clock_jump(sim: SimulationPart, fault: Fault) -> bool:
    agent = _agent(sim, fault)
    if agent is None:
        return False
    agent.clock_offset += micros((fault.amount - 0.5) * 20_000)
    return True


def _slow_node(sim: SimulationPart, fault: Fault) -> bool:
    node = _node(sim, fault)
    if node is None or node.is_slow:
        return False
    node.is_slow = True
    sim.troubles.pass_by(fault.between(10.0, 600.0), lambda: setattr(node, "is_slow", False))
    return True


def _new_node(sim: SimulationPart, fault: Fault) -> bool:
    if not isinstance(sim.platform, VirtualPlatform):
        return False
    sim.platform.launch(None)
    return True


def _master_crash(sim: SimulationPart, fault: Fault) -> bool:
    """At once, or between two lines of the next turn."""
    points = [None, *CrashPoint]
    return sim.masters.crash(points[fault.pick % len(points)], downtime=fault.between(0.1, 60.0))


def _master_power_loss(sim: SimulationPart, fault: Fault) -> bool:
    return sim.masters.crash(None, downtime=fault.between(1.0, 300.0), is_seen=False)


def _master_stall(sim: SimulationPart, fault: Fault) -> bool:
    return sim.masters.stall(fault.between(0.5, 60.0))


def _master_pause(sim: SimulationPart, fault: Fault) -> bool:
    return sim.masters.stall(fault.between(0.5, 30.0))


def _master_partition(sim: SimulationPart, fault: Fault) -> bool:
    duration = fault.between(1.0, 400.0)
    for node in [node for node in sim.machines.nodes if node.is_powered]:
        sim.machines.cut_off(node, up=True, down=True, duration=duration, is_deep=False)
    return True


def _two_masters(sim: SimulationPart, fault: Fault) -> bool:
    return sim.masters.replace(sleep=fault.between(5.0, 200.0))


def _disk_full(sim: SimulationPart, fault: Fault) -> bool:
    if sim.masters.journal.is_full:
        return False
    sim.masters.journal.is_full = True
    sim.troubles.pass_by(fault.between(1.0, 120.0), sim.masters.free_disk)
    return True


def _disk_slow(sim: SimulationPart, fault: Fault) -> bool:
    if sim.masters.is_disk_slow:
        return False
    sim.masters.is_disk_slow = True
    sim.troubles.pass_by(fault.between(1.0, 120.0), lambda: setattr(sim.masters, "is_disk_slow", False))
    return True


def _platform_refuses(sim: SimulationPart, fault: Fault) -> bool:
    if sim.platform.is_refusing:
        return False
    sim.platform.is_refusing = True
    sim.troubles.pass_by(fault.between(10.0, 900.0), lambda: setattr(sim.platform, "is_refusing", False))
    return True


def _scaling(sim: SimulationPart, fault: Fault) -> bool:
    """A person wants more nodes, or fewer."""
    kinds = sim.shape.kinds_to_scale
    if kinds and (not sim.shape.is_one_world or fault.amount < 0.5):
        return sim.people.scale_replicas(kinds[fault.pick % len(kinds)], fault.pick // len(kinds))
    unit = sim.shape.node_unit
    most = 1 + fault.pick % (sim.shape.max_nodes // unit)
    least = 1 + int(fault.amount * most)
    return sim.people.scale(min(least, most) * unit, most * unit)


def _journal_lost(sim: SimulationPart, fault: Fault) -> bool:
    """The disk of the master is gone with it; the next one knows nothing but what the agents tell."""
    return sim.masters.lose_journal(downtime=fault.between(0.5, 30.0))


def _cloud(sim: SimulationPart) -> VirtualCloud | None:
    return sim.platform if isinstance(sim.platform, VirtualCloud) else None


def _eviction(sim: SimulationPart, fault: Fault) -> bool:
    """A node is taken away by a job that needs it more."""
    cloud = _cloud(sim)
    return cloud is not None and cloud.evict(fault.pick, is_seen=True)


def _node_vanishes(sim: SimulationPart, fault: Fault) -> bool:
    """The same, and it is not shown before the next list."""
    cloud = _cloud(sim)
    return cloud is not None and cloud.evict(fault.pick, is_seen=False)


def _node_fails(sim: SimulationPart, fault: Fault) -> bool:
    cloud = _cloud(sim)
    return cloud is not None and cloud.fail(fault.pick, (201, 1, 247)[int(fault.amount * 3)])


def _exchange(sim: SimulationPart, fault: Fault) -> bool:
    """A person wants another machine for a node."""
    return sim.people.exchange(fault.pick)


def _suspension(sim: SimulationPart, fault: Fault) -> bool:
    """A person wants no more nodes to be launched for a while, and sometimes those that run, too."""
    is_releasing = fault.pick % 2 == 0
    return _cloud(sim) is not None and sim.people.suspend(fault.between(5.0, 1500.0), is_releasing=is_releasing)


def _watch_breaks(sim: SimulationPart, fault: Fault) -> bool:
    cloud = _cloud(sim)
    return cloud is not None and cloud.break_watch()


def _cloud_away(sim: SimulationPart, fault: Fault) -> bool:
    cloud = _cloud(sim)
    if cloud is None or cloud.is_away:
        return False
    cloud.is_away = True
    cloud.break_watch()
    sim.troubles.pass_by(fault.between(5.0, 200.0), lambda: setattr(cloud, "is_away", False))
    return True


def _followed_in_a_launch(sim: SimulationPart, fault: Fault) -> bool:
    """The master sleeps between the next entry in its ledger and the request that follows, and another takes over."""
    if not isinstance(sim.platform, VirtualCluster) or sim.platform.interruption is not None:
        return False
    sim.platform.interruption = fault.between(5.0, 400.0)
    return True


def _node_breaks(sim: SimulationPart, fault: Fault) -> bool:
    """It trains on; the next check will find it."""
    node = _node(sim, fault)
    if node is None or node.breakage is not None or sim.shape.check is None:
        return False
    node.breakage = ExitClass.COMPUTE if fault.amount < 0.5 else ExitClass.COMMUNICATION
    sim.troubles.pass_by(fault.between(60.0, 1200.0), lambda: setattr(node, "breakage", None))
    return True


FAULTS: dict[str, Callable[[SimulationPart, Fault], bool]] = {
    "worker-crash": _worker_crash,
    "worker-out-of-memory": _worker_out_of_memory,
    "worker-bug": _worker_bug,
    "port-taken": _port_taken,
    "agent-killed": _agent_killed,
    "machine-gone": _machine_gone,
    "power-loss": _power_loss,
    "preemption": _preemption,
    "stall": _stall,
    "freeze": _freeze,
    "connection-break": _connection_break,
    "slow-link": _slow_link,
    "partition": _partition,
    "one-way-partition": _one_way_partition,
    "duplicates": _duplicates,
    "clock-jump": _clock_jump,
    "slow-node": _slow_node,
    "new-node": _new_node,
    "master-crash": _master_crash,
    "master-power-loss": _master_power_loss,
    "master-stall": _master_stall,
    "master-pause": _master_pause,
    "master-partition": _master_partition,
    "two-masters": _two_masters,
    "disk-full": _disk_full,
    "disk-slow": _disk_slow,
    "platform-refuses": _platform_refuses,
    "scaling": _scaling,
    "journal-lost": _journal_lost,
    "eviction": _eviction,
    "node-vanishes": _node_vanishes,
    "node-fails": _node_fails,
    "exchange": _exchange,
    "suspension": _suspension,
    "watch-breaks": _watch_breaks,
    "cloud-away": _cloud_away,
    "followed-in-a-launch": _followed_in_a_launch,
    "node-breaks": _node_breaks,
}
