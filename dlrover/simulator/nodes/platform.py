"""
Where virtual nodes come from: a platform that replaces what was lost, in its own time, or refuses to.
"""

from __future__ import annotations

from dlrover.protocol.messages.check import ExitClass
from dlrover.simulator.nodes.agent import VirtualAgent
from dlrover.simulator.parts import NodeSource, SimulationPart, VirtualNode
from dlrover.simulator.virtual_time import span

REFUSAL_PAUSE = (10.0, 30.0)
"""Seconds until a refused launch is tried again."""
LONGEST_START = 2.0
"""Seconds over which the first nodes of a job come."""


class VirtualPlatform(NodeSource):
    """Keeps as many nodes as the job shall have, behind its back."""

    def __init__(self, simulation: SimulationPart) -> None:
        super().__init__(simulation)
        self._num_pending = 0
        """Launches that were asked for and have not happened."""
        self.target = simulation.shape.num_nodes

    @property
    def num_pending(self) -> int:
        return self._num_pending

    def begin(self) -> None:
        shape, chance = self.sim.shape, self.sim.chance.platform
        for number in range(shape.num_nodes):
            rank = number if shape.has_fixed_ranks else None
            self._num_pending += 1
            self.sim.events.after(span(chance, 0.0, LONGEST_START), self._launch_pending, rank)

    def scale(self, target: int) -> None:
        """The job wants so many nodes now; a node too many leaves by itself."""
        self.target = target
        for _ in range(target - len(self.sim.machines.nodes) - self._num_pending):
            self._num_pending += 1
            delay = span(self.sim.chance.platform, *self.sim.shape.costs.replacement)
            self.sim.events.after(delay, self._launch_pending, None)

    def replace(self, lost: VirtualNode) -> None:
        """A node is gone for good. It is replaced unless there are enough."""
        self._num_pending += 1
        delay = span(self.sim.chance.platform, *self.sim.shape.costs.replacement)
        self.sim.events.after(delay, self._launch_pending, lost.rank)

    def _launch_pending(self, rank: int | None) -> None:
        if self.sim.is_over:
            return
        if self.is_refusing:
            self.sim.events.after(span(self.sim.chance.platform, *REFUSAL_PAUSE), self._launch_pending, rank)
            return
        self._num_pending -= 1
        if len(self.sim.machines.nodes) < self.target:
            self.launch(rank)

    def launch(self, rank: int | None) -> None:
        node = VirtualNode(self.sim.machines.num_launches, rank)
        draw_health(self.sim, node)
        self.sim.machines.add(node)
        self.sim.note(f"{node.label} is launched")
        VirtualAgent(self.sim, node)


def draw_health(simulation: SimulationPart, node: VirtualNode) -> None:
    """Some machines are bad from the beginning; only a node check can tell."""
    if simulation.shape.check is None:
        return
    chance, odds = simulation.chance.platform, simulation.shape.bad_odds
    if chance.random() < odds:
        node.breakage = chance.choice([ExitClass.COMPUTE, ExitClass.COMMUNICATION])
    node.is_sluggish = chance.random() < odds
