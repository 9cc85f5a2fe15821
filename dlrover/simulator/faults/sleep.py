"""
An agent that stands still: its process gets no time, for a moment or for minutes, and the machine does not say so.

What should have happened meanwhile happens when it wakes up, and only then it reads what arrived. One that wakes up too late
kills its workers before it talks to any other: others may have taken their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlrover.simulator.faults.network import KEEPALIVE
from dlrover.simulator.parts import AgentPart
from dlrover.simulator.truth import worlds
from dlrover.simulator.virtual_time import SECOND, micros


class Sleep:
    """Of one agent."""

    def __init__(self, agent: AgentPart) -> None:
        self._agent = agent
        self._sim = agent.sim
        self.since: int | None = None
        """None: it is awake."""
        self._put_off: list[tuple[Callable[..., None], Any]] = []
        """What should have happened meanwhile: an act and its argument."""

    def puts_off(self, act: Callable[..., None], argument: Any) -> bool:
        """Whether the agent sleeps. Then this happens when it wakes up."""
        if self.since is None:
            return False
        self._put_off.append((act, argument))
        return True

    def begin(self) -> bool:
        agent, sim = self._agent, self._sim
        if not agent.is_alive or self.since is not None:
            return False
        self.since = sim.events.now
        if agent.channel.connection is not None:
            sim.network.mute(agent.channel.connection)
        group = agent.workers.group
        if group is not None and group.is_up and not group.is_stopping:
            sim.training.froze(group.world.coordinator)
        return True

    def end(self) -> None:
        """It runs again. Too late: its workers are killed before it talks to any other."""
        agent, sim = self._agent, self._sim
        if not agent.is_alive or self.since is None:
            return
        away = sim.events.now - self.since
        self.since = None
        agent.node.disturbed_at = sim.events.now
        group = agent.workers.group
        if group is not None and group.is_up and not group.is_stopping:
            sim.training.thawed(group.world.coordinator)
        agent.do(agent.decisions.woke(away / SECOND))
        worlds.agent_woke(sim, agent, away)
        channel = agent.channel
        if channel.connection is not None and away > micros(KEEPALIVE[1]) and sim.chance.network.random() < 0.5:
            channel.drop()  # its own timer fired before the answer was read
        elif channel.connection is not None:
            channel.pulse()
            channel.keepalive_soon()
        put_off, self._put_off = self._put_off, []
        for act, argument in put_off:
            act(argument)
        channel.read_late()
