"""
What the master wants of an agent, and how far it has followed: only the newest wish counts, and none is followed twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover.protocol.messages.job import (
    NODE_CHECK_RENDEZVOUS,
    TRAINING_RENDEZVOUS,
    Check,
    Desired,
    End,
    Idle,
    Join,
    JoinCheck,
    JoinRendezvous,
    Leave,
    Round,
    Run,
    StopCause,
    Wait,
)
from dlrover.simulator.virtual_time import span

if TYPE_CHECKING:
    from dlrover.simulator.nodes.agent import VirtualAgent


SAME_PORT_ODDS = 0.05
LOST_PORT_ODDS = 0.05
LOSING = (0.1, 20.0)
"""Seconds after a join until the offered port turns out to be taken."""


class Wishes:
    """Of the master, as one agent knows them."""

    def __init__(self, agent: VirtualAgent) -> None:
        self._agent = agent
        self._sim = agent.sim
        self._newest: Desired | None = None
        self._joined_name = ""
        self._joined_round = Round(0)
        self._has_offer = False
        """A port that no world has used yet."""
        self._checked_round = Round(0)
        self._started_round = Round(0)

    def take(self, desired: Desired) -> None:
        if not self._agent.incarnation:
            return
        newest = self._newest
        if newest is None or (desired.master_epoch, desired.number) >= (newest.master_epoch, newest.number):
            self._newest = desired
            if not self._agent.departure.has_begun:
                self._obey(desired)

    def forget(self) -> None:
        """They were wishes to a former life."""
        self._has_offer = False
        self._newest = None
        self._joined_round = self._started_round = self._checked_round = Round(0)

    def _obey(self, desired: Desired) -> None:
        agent = self._agent
        if not isinstance(desired.wish, Check):
            self._sim.checks.leave(agent)
        match desired.wish:
            case Join() | JoinCheck() as join:
                self._enter_round(join)
            case Check(world=world):
                if world.round > self._checked_round:
                    self._checked_round = world.round
                    self._has_offer = False
                    self._sim.checks.enter(agent, world)
            case Run(world=world):
                if world.round > self._started_round:
                    self._started_round = world.round
                    self._has_offer = False
                    agent.workers.want(world)
            case Wait() | Idle():
                if agent.workers.is_wanted:
                    agent.workers.want_none(StopCause.MEMBERSHIP)
            case Leave(exit_code=exit_code):
                agent.departure.dismiss(exit_code)
            case End(end=end):
                agent.departure.end(end.exit_code)

    def _enter_round(self, join: Join | JoinCheck) -> None:
        agent = self._agent
        name = NODE_CHECK_RENDEZVOUS if isinstance(join, JoinCheck) else TRAINING_RENDEZVOUS
        if (self._joined_name, self._joined_round) == (name, join.round) and self._has_offer:
            return
        if agent.workers.is_wanted:
            agent.workers.want_none(join.cause)
        self._has_offer = True
        self._joined_name, self._joined_round = name, join.round
        if isinstance(join, JoinCheck) and join.round <= self._checked_round:
            self._checked_round = Round(join.round - 1)
        command = JoinRendezvous(
            node=agent.id,
            incarnation=agent.incarnation,
            round=join.round,
            local_world_size=self._sim.shape.local_world_size,
            offer=self._bind(),
            name=name,
        )
        agent.outbox.tell(command)
        if self._sim.chance.nodes.random() < LOST_PORT_ODDS:
            self._sim.events.after(span(self._sim.chance.nodes, *LOSING), self.offer_another, command)

    def offer_another(self, join: JoinRendezvous) -> None:
        """The port served a former round, or was taken by another process. Another one does, if the round is still wanted."""
        agent = self._agent
        is_same_life = agent.is_alive and (agent.id, agent.incarnation) == (join.node, join.incarnation)
        is_wanted = self._has_offer and (self._joined_name, self._joined_round) == (join.name, join.round)
        if is_same_life and is_wanted and not agent.departure.has_begun:
            agent.node.num_ports += 1
            agent.outbox.tell(replace(join, offer=self._offer))

    def _bind(self) -> str:
        """Ports are new, but now and then the kernel gives the last one again. Without its journal no master could tell."""
        is_same = self._sim.chance.nodes.random() < SAME_PORT_ODDS and not self._sim.ledger.has_lost_journal
        if not is_same or not self._agent.node.num_ports:
            self._agent.node.num_ports += 1
        return self._offer

    @property
    def _offer(self) -> str:
        return f"host-{self._agent.node.number}:{self._agent.node.num_ports}"
