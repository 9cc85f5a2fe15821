"""
Where virtual nodes come from: a platform that replaces what was lost, in its own time, or refuses to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover.simulator.agents import VirtualAgent, VirtualNode
from dlrover.simulator.events import span

if TYPE_CHECKING:
    from dlrover.simulator.simulation import Simulation

REFUSAL_PAUSE = (10.0, 30.0)
"""Seconds until a refused launch is tried again."""
LONGEST_START = 2.0
"""Seconds over which the first nodes of a job come."""


class VirtualPlatform:
    """Keeps as many nodes as the job shall have."""

    def __init__(self, simulation: Simulation) -> None:
        self.sim = simulation
        self.is_refusing = False
        self.num_pending = 0
        """Launches that were asked for and have not happened."""
        self.target = simulation.shape.num_nodes

    def begin(self) -> None:
        shape, chance = self.sim.shape, self.sim.chance.platform
        for number in range(shape.num_nodes):
            rank = number if shape.has_fixed_ranks else None
            self.num_pending += 1
            self.sim.events.after(span(chance, 0.0, LONGEST_START), self._launch_pending, rank)

    def scale(self, target: int) -> None:
        """The job wants so many nodes now; whoever is too many leaves by itself."""
        self.target = target
        for _ in range(target - len(self.sim.nodes) - self.num_pending):
            self.num_pending += 1
            delay = span(self.sim.chance.platform, *self.sim.shape.costs.replacement)
            self.sim.events.after(delay, self._launch_pending, None)

    def replace(self, lost: VirtualNode) -> None:
        """A node is gone for good. It is replaced unless there are enough."""
        self.num_pending += 1
        delay = span(self.sim.chance.platform, *self.sim.shape.costs.replacement)
        self.sim.events.after(delay, self._launch_pending, lost.rank)

    def _launch_pending(self, rank: int | None) -> None:
        if self.sim.is_over:
            return
        if self.is_refusing:
            self.sim.events.after(span(self.sim.chance.platform, *REFUSAL_PAUSE), self._launch_pending, rank)
            return
        self.num_pending -= 1
        if len(self.sim.nodes) < self.target:
            self.launch(rank)

    def launch(self, rank: int | None) -> None:
        node = VirtualNode(self.sim.num_launches, rank)
        self.sim.num_launches += 1
        self.sim.nodes.append(node)
        self.sim.trouble()
        self.sim.note(f"{node.label} is launched")
        VirtualAgent(self.sim, node)
