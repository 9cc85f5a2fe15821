"""
Machines and what becomes of them: networks that are cut, machines that are lost, agents that are killed and come again.
"""

from __future__ import annotations

from dlrover.protocol.messages.job import NodeId
from dlrover.simulator.nodes.agent import VirtualAgent
from dlrover.simulator.parts import AgentPart, SimulationPart, VirtualNode
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import SECOND, span

STEADY = 120 * SECOND
"""A node and a master that nothing has troubled for so long have found each other."""


class Machines:
    """Owned by the simulation."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self.nodes: list[VirtualNode] = []
        self.num_launches = 0
        self._agents: dict[NodeId, AgentPart] = {}
        """By what the master calls them."""
        self.node_micros = 0
        self._counted_at = 0

    def add(self, node: VirtualNode) -> None:
        self.num_launches += 1
        self.nodes.append(node)
        self._sim.troubles.add()

    # What there is.

    def count(self) -> None:
        """Before their number changes, and whenever their time shall be known."""
        now = self._sim.events.now
        if now > self._counted_at:
            self.node_micros += (now - self._counted_at) * len(self.nodes)
            self._counted_at = now

    def has_enough(self) -> bool:
        limits = self._sim.limits
        num_there = sum(1 for node in self.nodes if node.agent is not None and not node.agent.me.is_leaving)
        return num_there - num_there % limits.node_unit >= limits.min_nodes

    def has_bad(self) -> bool:
        return any(node.breakage is not None for node in self.nodes)

    def num_steady(self) -> int:
        """Nodes that nothing has kept from joining for a while. None while the master itself is in trouble."""
        since = self._sim.events.now - STEADY
        if self._sim.masters.were_disturbed_since(since):
            return 0
        return sum(
            1
            for node in self.nodes
            if node.agent is not None
            and node.agent.sleep.since is None
            and not node.agent.me.is_leaving
            and not node.link.is_cut
            and not node.link.is_slow
            and node.disturbed_at < since
        )

    # Agents.

    def attached(self, agent: AgentPart) -> None:
        self._agents[agent.id] = agent
        life = self._sim.ledger.lives.setdefault((agent.rank, agent.incarnation), agent.life)
        if life != agent.life:
            raise Violation("I6", f"incarnation {agent.incarnation} of rank {agent.rank} is given to two processes")

    def agent_of(self, node: NodeId) -> AgentPart | None:
        agent = self._agents.get(node)
        return agent if agent is not None and agent.is_alive else None

    def journal_lost(self) -> None:
        """The next master will call them otherwise."""
        self._agents.clear()

    def kill_agent(self, agent: AgentPart) -> None:
        """Its launcher starts another one."""
        sim, node = self._sim, agent.node
        agent.die(is_seen=True)
        sim.events.after(span(sim.chance.nodes, *sim.shape.costs.agent_restart), self._restart_agent, node)

    def _restart_agent(self, node: VirtualNode) -> None:
        if node.is_powered and node.agent is None and not self._sim.is_over:
            self._sim.troubles.add()
            VirtualAgent(self._sim, node)

    # Cuts.

    def cut_off(self, node: VirtualNode, *, up: bool, down: bool, duration: int, is_deep: bool) -> None:
        """Hold what the node and the master say to each other. Deep: its workers are cut off from their peers, too."""
        sim, link, agent = self._sim, node.link, node.agent
        sim.ledger.fail_node(node.fleet_rank, node.node_type)
        node.num_deep_cuts += is_deep
        link.num_cuts_up += up
        link.num_cuts_down += down
        coordinator = None
        if agent is not None:
            if up and agent.channel.connection is not None and agent.sleep.since is None:
                sim.network.mute(agent.channel.connection)
            agent.channel.keepalive_soon()
            group = agent.workers.group
            if is_deep and group is not None and group.is_up and not group.is_stopping:
                coordinator = group.world.coordinator
                sim.training.froze(coordinator)
                sim.events.after(span(sim.chance.nodes, 10.0, 120.0), self._time_out, node, coordinator)

        def heal() -> None:
            node.num_deep_cuts -= is_deep
            link.num_cuts_up -= up
            link.num_cuts_down -= down
            node.disturbed_at = sim.events.now
            if coordinator is not None:
                sim.training.thawed(coordinator)
            if not link.is_cut:
                self._reconnect(node)

        sim.troubles.pass_by(duration, heal)

    def _reconnect(self, node: VirtualNode) -> None:
        sim, agent = self._sim, node.agent
        for connection in node.link.connections:
            sim.network.healed(connection)
        if agent is not None and agent.channel.connection is not None and agent.sleep.since is None:
            agent.channel.pulse()
        if agent is not None and agent in sim.masters.seekers:
            del sim.masters.seekers[agent]
            sim.events.after(span(sim.chance.network, 0.0, 5.0), agent.channel.attempt)

    def _time_out(self, node: VirtualNode, coordinator: str) -> None:
        """Collectives with an unreachable node give up after a while, on all its peers."""
        sim = self._sim
        world = sim.training.worlds.get(coordinator)
        if world is not None and not world.is_over and node.link.is_cut:
            for peer in self.nodes:
                agent = peer.agent
                if agent is not None and agent.workers.runs(coordinator):
                    sim.ledger.charge(agent)
                    sim.events.after(span(sim.chance.nodes, 0.0, 2.0), agent.workers.lose_peer, coordinator)

    # The last of a machine.

    def lose(self, node: VirtualNode, *, is_seen: bool) -> None:
        if node.agent is not None:
            node.agent.die(is_seen=is_seen)
        self._remove(node)

    def exited(self, agent: AgentPart) -> None:
        self._sim.note(f"{agent.node.label} leaves")
        agent.node.exit_code = agent.leaving.exit_code
        self._remove(agent.node)

    def _remove(self, node: VirtualNode) -> None:
        sim = self._sim
        if not node.is_powered:
            return
        self.count()
        node.is_powered = False
        self.nodes.remove(node)
        if sim.ended_at is None or sim.shape.fleet is not None:
            sim.troubles.add()
            sim.platform.replace(node)
