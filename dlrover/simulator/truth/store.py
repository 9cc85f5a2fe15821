"""
Traffic on the key-value store, and what has to be true of it.

Just before something goes wrong some agents count, race for a value and read, so that their commands are under way when
it happens and are sent again afterwards. Every add counts once: two adds never get the same number, no number is greater
than what was ever asked for, and nothing that a worker was told or has read is missing under a later master.
"""

from __future__ import annotations

import random

from dlrover.core.job import Job
from dlrover.protocol.messages.job import AgentCommand, Query, Reply, Round
from dlrover.protocol.messages.kv import KvAdd, KvCommand, KvCompareSet, KvGet, KvNumber, KvSet, KvValues
from dlrover.simulator.parts import AgentPart, SimulationPart
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import span

NUM_SPEAKERS = 2
"""Agents that use the store at each fault."""


class StoreTraffic:
    """Owned by the simulation. Keys are those of one journal: the next one begins without them."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._chance = random.Random(f"{simulation.plan.seed}/store")
        self._num_journals = 1
        self._issued: dict[str, int] = {}
        """Adds, and exchanges, that were asked for."""
        self._numbers: dict[str, dict[int, None]] = {}
        """What adds were answered with."""
        self._won: dict[str, int] = {}
        """Exchanges that were answered with success."""
        self._seen: dict[str, int] = {}
        """The greatest number that a worker was told or has read."""
        self._lock = b""
        """The newest value of the lock that any worker knows."""

    def stir(self) -> None:
        """Something is about to go wrong: be in the middle of something."""
        agents = [node.agent for node in self._sim.machines.nodes if node.agent is not None]
        speakers = [agent for agent in agents if agent.can_speak]
        for _ in range(min(NUM_SPEAKERS, len(speakers))):
            agent = self._chance.choice(speakers)
            if agent.sleep.since is None:
                self._speak(agent)

    def _speak(self, agent: AgentPart) -> None:
        shared, own = self._key("all"), self._key(agent.life)
        for key in (shared, own):
            self._count(key)
            agent.outbox.tell(KvAdd(node=agent.id, incarnation=agent.incarnation, key=key, amount=1))
        self._sim.events.after(span(self._chance, 0.0, 0.006), agent.outbox.ask, KvGet(keys=(shared,)))
        match self._chance.randrange(2):
            case 0:
                key = self._key("lock")
                self._count(key)
                number = int(self._lock.partition(b":")[0] or 0) + 1
                mine = f"{number}:{agent.life}:{self._issued[key]}".encode()
                agent.outbox.tell(
                    KvCompareSet(
                        node=agent.id, incarnation=agent.incarnation, key=key, expected=self._lock, desired=mine
                    )
                )
            case _:
                items = {f"{own}/name": agent.life.encode()}
                agent.outbox.tell(KvSet(node=agent.id, incarnation=agent.incarnation, items=items))

    def _key(self, name: str) -> str:
        return f"{self._num_journals}/{name}"

    def _is_of_this_journal(self, key: str) -> bool:
        return key.startswith(f"{self._num_journals}/")

    def _count(self, key: str) -> None:
        self._issued[key] = self._issued.get(key, 0) + 1

    def answered(self, command: AgentCommand, reply: Reply) -> None:
        """A command of an agent was answered, for the first or the second time."""
        match command, reply:
            case KvAdd(key=key), KvNumber(number=number):
                if number > self._issued[key]:
                    raise Violation("KV", f"{self._issued[key]} adds to {key} gave {number}")
                if number in self._numbers.setdefault(key, {}) and self._is_of_this_journal(key):
                    raise Violation("KV", f"two adds to {key} were answered with {number}")
                self._numbers[key][number] = None
                self._see(key, number)
            case KvCompareSet(key=key, desired=desired), KvValues(values=(value,)):
                if self._is_of_this_journal(key):
                    self._lock = value
                    self._won[key] = self._won.get(key, 0) + (value == desired)

    def read(self, query: Query, reply: Reply) -> None:
        match query, reply:
            case KvGet(keys=(key,)), KvValues(values=(value,)):
                self._see(key, int(value))

    def _see(self, key: str, number: int) -> None:
        if self._is_of_this_journal(key):
            self._seen[key] = max(number, self._seen.get(key, 0))

    def check(self, job: Job) -> None:
        """Of a master that begins, and at the end: everything that any worker knows is there, and nothing was counted twice."""
        room = job.state.kv.rooms.get(Round(0))
        values = {} if room is None else room.values
        for key, seen in self._seen.items():
            if int(values.get(key, b"0")) < seen:
                raise Violation("KV", f"{key} is {values.get(key)!r}, and a worker was told {seen}")
        for key, value in values.items():
            if key not in self._issued:
                continue
            number = int(value.partition(b":")[0])
            if number > self._issued[key]:
                raise Violation("KV", f"{key} is {value!r} after {self._issued[key]} commands")
            if number < max(len(self._numbers.get(key, ())), self._won.get(key, 0)) and self._is_of_this_journal(key):
                raise Violation("KV", f"{key} is {value!r}, and more commands were answered")

    def journal_lost(self) -> None:
        self._num_journals += 1
        self._seen.clear()
        self._lock = b""


def is_of_the_store(command: AgentCommand) -> bool:
    return isinstance(command, KvCommand)
