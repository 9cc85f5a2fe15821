"""
What a master measures of a job that scales itself, and what its platform says of its room.

The step time follows the law of the shape. A look every half minute tells of the world that trains now, as soon as it has trained for long enough; now and
then the room is another one. Words get lost with the master that hears them, as all words do.
"""

from __future__ import annotations

import random

from dlrover.protocol.messages.fleet import NodePhase, NodeType
from dlrover.protocol.messages.identity import NodeRank, PlatformId
from dlrover.protocol.messages.scaling import (
    MAX_RUN_NODES,
    Configuration,
    GroupSize,
    MemoryPoint,
    NodeUse,
    RoomSeen,
    RunMeasured,
    TypeUse,
)
from dlrover.simulator.parts import MasterPart, SimulationPart
from dlrover.simulator.virtual_time import SECOND

LOOK = 30 * SECOND
WARM_UP = 10.0
ROOM_ODDS = 0.05
"""Of each look, to see another room."""
SLOW_ODDS = 0.02
"""Of each look, to find a straggler."""
HOT_ODDS = 0.05
BATCH = 960


class Statistics:
    """Owned by the simulation."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._chance = random.Random(f"{simulation.plan.seed}/statistics")
        self._world = ""
        self._since = 0
        self._number = 0
        self._busy = 0.5
        """Share of their cores that servers use."""
        self.room: int | None = None

    def begin(self) -> None:
        self._sim.events.after(LOOK, self._look)

    def _look(self) -> None:
        sim = self._sim
        if sim.is_over or sim.ended_at is not None:
            return
        sim.events.after(LOOK, self._look)
        master = sim.masters.listening()
        if master is None or master.job.end is not None:
            return
        if sim.shape.has_tasks:
            self._look_at_cluster(master)
            return
        world = master.job.state.rendezvous.world
        key = "" if world is None else world.coordinator
        if world is None or not sim.training.is_training(key):
            self._world = ""
            return
        if key != self._world:
            self._world, self._since = key, sim.events.now
            self._number += 1
        terms = master.job.state.scaling.terms
        seconds = (sim.events.now - self._since) / SECOND - WARM_UP
        if seconds >= terms.stable_for:
            master.hear(self._run(len(world.members), seconds))
        if self._chance.random() < ROOM_ODDS:
            self._see_room()

    def _run(self, nodes: int, seconds: float) -> RunMeasured:
        shape = self._sim.shape
        step_time = shape.step_time(nodes) * max(0.1, self._chance.gauss(1.0, shape.law_noise))
        return RunMeasured(
            number=self._number,
            configuration=Configuration(groups=(GroupSize(NodeType.WORKER, nodes),), micro_batch=1, total_batch=BATCH),
            seconds=seconds,
            steps=max(20, int(seconds / step_time)),
            step_time=step_time,
            nodes=self._slow_node(step_time),
        )

    def _slow_node(self, step_time: float) -> tuple[NodeUse, ...]:
        """In some looks one node makes the others wait."""
        master = self._sim.masters.listening()
        if master is None or self._chance.random() >= SLOW_ODDS:
            return ()
        state = master.job.state
        placed = [
            node
            for member in (() if state.rendezvous.world is None else state.rendezvous.world.members)
            if state.fleet is not None and (node := state.fleet.of_agent(member.node)) is not None
        ]
        if not placed:
            return ()
        node = self._chance.choice(placed)
        return (
            NodeUse(platform_node=node.id, rank=NodeRank(node.rank), wait_per_step=step_time * self._chance.random()),
        )

    def _look_at_cluster(self, master: MasterPart) -> None:
        state = master.job.state
        cluster, fleet = state.cluster, state.fleet
        if cluster is None or fleet is None or not cluster.is_settled or cluster.finished_at is not None:
            self._world = ""
            return
        groups = [
            GroupSize(kind, len(running), running[0].resource.cpu, running[0].resource.memory_mb)
            for kind in (NodeType.CHIEF, NodeType.WORKER, NodeType.PS)
            if (running := [node for node in fleet.live_nodes(kind) if node.phase is NodePhase.RUNNING])
        ]
        key = f"{cluster.version} {groups}"
        if key != self._world:
            self._world, self._since = key, self._sim.events.now
            self._number += 1
            self._busy = self._chance.choice([0.1, 0.5, 0.95])
        seconds = (self._sim.events.now - self._since) / SECOND
        trained = sum(group.count for group in groups if group.node_type is not NodeType.PS)
        if seconds < state.scaling.terms.stable_for or not trained:
            return
        step_time = (0.2 + 0.1 * trained / max(1, fleet.replicas[NodeType.PS].target)) * self._chance.uniform(0.9, 1.1)
        memory = MemoryPoint(state.now, int(seconds), self._chance.uniform(500.0, 7000.0))
        servers = tuple(
            self._use_of(node.id, node.rank, node.resource.cpu, seconds) for node in fleet.live_nodes(NodeType.PS)
        )[:MAX_RUN_NODES]
        master.hear(
            RunMeasured(
                number=self._number,
                configuration=Configuration(groups=tuple(groups), micro_batch=32),
                seconds=seconds,
                steps=max(20, int(seconds / step_time)),
                step_time=step_time,
                types=(
                    TypeUse(node_type=NodeType.PS, cpu_max=max(each.cpu for each in servers), memory=(memory,)),
                    TypeUse(node_type=NodeType.WORKER, cpu=1.0, cpu_max=1.0, memory_mb=1000.0),
                ),
                nodes=servers,
            )
        )

    def _use_of(self, id_: PlatformId, rank: int, cores: float, seconds: float) -> NodeUse:
        """Now and then one is hotter than the others, as long as there are faults: each change costs the steps that do not end in time."""
        is_calm = self._sim.events.now >= self._sim.plan.hours * 3600 * SECOND
        share = 0.95 if not is_calm and self._chance.random() < HOT_ODDS else min(self._busy, 0.5 if is_calm else 1.0)
        return NodeUse(
            platform_node=id_,
            node_type=NodeType.PS,
            rank=NodeRank(rank),
            cpu=share * cores,
            cpu_max=share * cores,
            memory_mb=self._chance.uniform(500.0, 7000.0),
            seconds=min(180.0, seconds),
        )

    def _see_room(self) -> None:
        """Never below what the job needs: a job without room cannot go on, which is no matter of scaling."""
        sim = self._sim
        master = sim.masters.listening()
        least, most = sim.shape.min_nodes, sim.shape.max_nodes
        seen = self._chance.choice([None, *range(least, most + 2)])
        self.room = None if seen is None else seen + sim.shape.spares
        if master is not None:
            master.hear(RoomSeen(most=self.room, reason="a quota"))
