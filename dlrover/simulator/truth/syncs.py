"""
Workers that meet by name: sync points and barriers, joined and opened while everything goes wrong.

When something is about to go wrong, some worker comes to a sync point, and its peers follow, each in its own time: all of
them run the same program. Who has come asks whether the others have, until they have or its workers end. So no worker may be let
through before the last worker of the world has come, except past those whom the job has given up; and none waits for ever.
A barrier is open as often as it was opened.
"""

from __future__ import annotations

import random

from dlrover.protocol.messages.job import AgentCommand, Query, Reply, Round
from dlrover.protocol.messages.sync import (
    BarrierOpen,
    JoinSync,
    NotifyBarrier,
    SyncCommand,
    SyncFinished,
    SyncJoined,
    SyncState,
)
from dlrover.simulator.parts import AgentPart, SimulationPart
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import SECOND, span

APART = (0.0, 2.0)
"""Seconds between the workers of one node."""
FOLLOW = (0.0, 10.0)
ASK = (2.0, 15.0)
LONGEST_WAIT = 3500 * SECOND
"""After an hour no worker is waited for any more."""


class SyncWait:
    """The workers of one node at the sync point of one world, for the so many-th time."""

    __slots__ = ("coordinator", "generation", "is_reached", "joined", "round", "since")

    def __init__(self, coordinator: str, round_: Round, generation: int, now: int) -> None:
        self.coordinator = coordinator
        self.round = round_
        self.generation = generation
        self.since = now
        self.joined: dict[int, None] = {}
        """Local ranks of those that have come."""
        self.is_reached = False


class SyncTraffic:
    """Owned by the simulation. Names are those of one journal: the next one begins without them."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._chance = random.Random(f"{simulation.plan.seed}/syncs")
        self._waits: dict[str, SyncWait] = {}
        """The newest of each agent process."""
        self._opened: dict[Round, int] = {}
        """How often the barrier was opened."""
        self._answered: dict[Round, int] = {}
        """How often that was answered."""
        self._promised: dict[str, BarrierOpen] = {}
        """What each agent process asked last, if it has to be answered with yes."""

    def stir(self) -> None:
        """Something is about to go wrong: be on the way to each other."""
        agents = [node.agent for node in self._sim.machines.nodes if node.agent is not None]
        speakers = [
            agent
            for agent in agents
            if agent.channel.is_attached and agent.sleep.since is None and agent.workers.is_training
        ]
        if not speakers:
            return
        agent = self._chance.choice(speakers)
        assert agent.workers.group is not None, "it trains"
        self._come(agent, agent.workers.group.world.coordinator)
        self._use_barrier(agent, self._chance.choice(speakers))

    # Sync points.

    def _come(self, agent: AgentPart, coordinator: str) -> None:
        if not agent.workers.runs(coordinator):
            return
        former = self._waits.get(agent.life)
        is_same = former is not None and former.coordinator == coordinator
        if former is not None and is_same and not former.is_reached:
            return
        assert agent.workers.group is not None, "its workers run"
        generation = former.generation + 1 if former is not None and is_same else 1
        wait = SyncWait(coordinator, agent.workers.group.world.round, generation, self._sim.events.now)
        self._waits[agent.life] = wait
        for local_rank in range(self._sim.shape.local_world_size):
            self._sim.events.after(span(self._chance, *APART), self._join, agent, wait, local_rank)
        self._sim.events.after(span(self._chance, *ASK), self._ask, agent, wait)

    def _is_there(self, agent: AgentPart, wait: SyncWait) -> bool:
        return agent.is_alive and self._waits.get(agent.life) is wait and agent.workers.runs(wait.coordinator)

    def _join(self, agent: AgentPart, wait: SyncWait, local_rank: int) -> None:
        if self._is_there(agent, wait) and local_rank not in wait.joined:
            wait.joined[local_rank] = None
            agent.outbox.tell_soon(
                JoinSync(
                    name=self._name(),
                    round=wait.round,
                    node=agent.id,
                    incarnation=agent.incarnation,
                    local_rank=local_rank,
                )
            )

    def _ask(self, agent: AgentPart, wait: SyncWait) -> None:
        """Until it is reached. The others are on their way, if they can."""
        sim = self._sim
        if wait.is_reached or not self._is_there(agent, wait):
            return
        if sim.ended_at is None and sim.troubles.calm_for() > sim.bound and sim.events.now - wait.since > sim.bound:
            raise Violation("sync", f"{agent.node.label} waits for {(sim.events.now - wait.since) / SECOND:.0f} s")
        agent.outbox.ask(SyncFinished(name=self._name(), round=wait.round, generation=wait.generation))
        for node in sim.machines.nodes:
            peer = node.agent
            if peer is not None and peer.workers.runs(wait.coordinator) and not self._has_come(peer, wait):
                sim.events.after(span(self._chance, *FOLLOW), self._come_after, peer, wait)
        sim.events.after(span(self._chance, *ASK), self._ask, agent, wait)

    def _come_after(self, agent: AgentPart, first: SyncWait) -> None:
        if not first.is_reached and not self._has_come(agent, first):
            self._come(agent, first.coordinator)

    def _has_come(self, agent: AgentPart, first: SyncWait) -> bool:
        wait = self._waits.get(agent.life)
        return wait is not None and wait.coordinator == first.coordinator and wait.generation >= first.generation

    def _check_reached(self, agent: AgentPart, wait: SyncWait) -> None:
        """All of its world have come, who are still part of it."""
        sim = self._sim
        if sim.masters.newest is None or not self._is_active(wait.round):
            return  # somebody was given up, and the others are let through
        job = sim.masters.newest.job
        for node in sim.machines.nodes:
            peer = node.agent
            if peer is None or not peer.workers.runs(wait.coordinator) or sim.events.now - wait.since > LONGEST_WAIT:
                continue
            known, other = job.state.nodes.live.get(peer.id), self._waits.get(peer.life)
            is_member = known is not None and known.incarnation == peer.incarnation and not known.finished_round
            has_come = (
                other is not None
                and other.coordinator == wait.coordinator
                and (other.generation, len(other.joined)) >= (wait.generation, sim.shape.local_world_size)
            )
            if is_member and not has_come:
                raise Violation("sync", f"{agent.node.label} goes on before {node.label} has come")

    def _is_active(self, round_: Round) -> bool:
        """Whether the job still counts on all members of that world."""
        master = self._sim.masters.newest
        rdzv = None if master is None else master.job.state.rendezvous
        return rdzv is not None and rdzv.is_active and rdzv.round == round_

    # Barriers.

    def _use_barrier(self, opener: AgentPart, other: AgentPart) -> None:
        """A worker opens it; a worker asks whether it is as open as all know, or already once more."""
        assert opener.workers.group is not None, "it trains"
        assert other.workers.group is not None, "it trains"
        round_ = opener.workers.group.world.round
        self._opened[round_] = self._opened.get(round_, 0) + 1
        opener.outbox.tell(
            NotifyBarrier(name=self._name(), round=round_, node=opener.id, incarnation=opener.incarnation)
        )
        round_ = other.workers.group.world.round
        promised = self._answered.get(round_, 0)
        is_sure = promised > 0 and self._chance.random() < 0.5
        generation = promised if is_sure else self._opened.get(round_, 0) + 1
        question = BarrierOpen(name=self._name(), round=round_, generation=generation)
        if is_sure:
            self._promised[other.life] = question
        other.outbox.ask(question)

    # What is answered.

    def answered(self, agent: AgentPart, command: AgentCommand, reply: Reply) -> None:
        """A command of an agent was answered, for the first or the second time."""
        if not isinstance(command, SyncCommand) or command.name != self._name():
            return
        match command, reply:
            case NotifyBarrier(round=round_), _:
                self._answered[round_] = min(self._answered.get(round_, 0) + 1, self._opened[round_])
            case JoinSync(round=round_), SyncJoined(generation=generation, is_late=is_late):
                wait = self._waits.get(agent.life)
                if wait is None or wait.round != round_ or not agent.workers.runs(wait.coordinator):
                    return  # it has finished meanwhile, or was stopped
                if self._sim.events.now - wait.since > LONGEST_WAIT:
                    return
                is_too_late = is_late and self._is_active(round_)
                if generation != wait.generation or is_too_late:
                    late = ", too late" if is_too_late else ""
                    raise Violation(
                        "sync", f"join {wait.generation} of {agent.node.label} counts as {generation}{late}"
                    )

    def refused(self, agent: AgentPart, command: AgentCommand) -> None:
        """Its world is over, or a master without its journal does not know it yet."""
        wait = self._waits.get(agent.life)
        if not isinstance(command, JoinSync) or command.name != self._name() or wait is None:
            return
        if wait.round == command.round and command.local_rank in wait.joined:
            del wait.joined[command.local_rank]
            self._sim.events.after(span(self._chance, *ASK), self._join, agent, wait, command.local_rank)

    def read(self, agent: AgentPart, query: Query, reply: Reply) -> None:
        match query, reply:
            case SyncFinished(round=round_, generation=generation), SyncState(is_reached=True):
                wait = self._waits.get(agent.life)
                if wait is not None and (wait.round, wait.generation) == (round_, generation) and not wait.is_reached:
                    wait.is_reached = True
                    if query.name == self._name():
                        self._check_reached(agent, wait)
            case BarrierOpen(round=round_, generation=generation), SyncState(is_reached=is_open):
                is_promised = self._promised.get(agent.life) is query
                if query.name == self._name():
                    self._check_barrier(round_, generation, is_open=is_open, is_promised=is_promised)

    def _check_barrier(self, round_: Round, generation: int, *, is_open: bool, is_promised: bool) -> None:
        opened = self._opened.get(round_, 0)
        if is_open and generation > opened:
            raise Violation("sync", f"the barrier of round {round_} is open for the {generation}th time, of {opened}")
        master = self._sim.masters.newest
        is_newest = master is not None and master.job.state.rendezvous.round == round_
        if is_promised and not is_open and is_newest:
            raise Violation("sync", f"the barrier of round {round_} was opened {generation} times and is not open")

    def _name(self) -> str:
        return f"{self._sim.masters.num_journals_lost}/step"

    def journal_lost(self) -> None:
        self._waits.clear()
        self._opened.clear()
        self._answered.clear()
        self._promised.clear()


def is_of_syncs(command: AgentCommand) -> bool:
    return isinstance(command, SyncCommand)
