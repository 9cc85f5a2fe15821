"""The ports that a virtual agent binds for its offers. Some turn out to be taken."""

from __future__ import annotations

from msgspec.structs import replace

from dlrover.protocol.messages.job import JoinRendezvous
from dlrover.simulator.parts import AgentPart
from dlrover.simulator.virtual_time import span

SAME_PORT_ODDS = 0.05
LOST_PORT_ODDS = 0.05
LOSING = (0.1, 20.0)
"""Seconds after a join until the offered port turns out to be taken."""


class VirtualPorts:
    """Of one agent. Its node counts them, because the kernel does not begin anew with another agent."""

    def __init__(self, agent: AgentPart) -> None:
        self._agent = agent
        self._sim = agent.sim

    def bind(self) -> str:
        """Ports are new, but now and then the kernel gives the last one again. Without its journal no master could tell."""
        node = self._agent.node
        is_same = self._sim.chance.nodes.random() < SAME_PORT_ODDS and not self._sim.ledger.has_lost_journal
        return self._last() if is_same and node.num_ports else self._next()

    def joined(self, join: JoinRendezvous) -> None:
        """The agent has offered its port."""
        if self._sim.chance.nodes.random() < LOST_PORT_ODDS:
            self._sim.events.after(span(self._sim.chance.nodes, *LOSING), self._lose, join)

    def _lose(self, join: JoinRendezvous) -> None:
        """As an agent of another version may do whose port was taken, it joins again: the master has to bear it."""
        agent = self._agent
        is_same_life = agent.is_alive and (agent.id, agent.incarnation) == (join.node, join.incarnation)
        if is_same_life and agent.decisions.joining.is_offered(join.offer) and not agent.me.is_leaving:
            agent.outbox.tell(replace(join, offer=self._next()))

    def _next(self) -> str:
        self._agent.node.num_ports += 1
        return self._last()

    def _last(self) -> str:
        node = self._agent.node
        return f"host-{node.number}:{node.num_ports}"
