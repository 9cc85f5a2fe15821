"""Savers of several nodes joined to a real core, without a wire: what they tell is applied at once, what they ask waits."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from dlrover.core.outcome import NotYet
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.checkpoint import AnyCheckpointCommand, AwaitSaveDuties, CheckpointCommand
from dlrover.protocol.messages.job import LookAgain, Reply
from tests.agent.lab import DEADLINE
from tests.core.scene import Scene, terms


class CoreInHand:
    """A master with as many nodes as names, all in one world."""

    def __init__(self, *names: str, min_nodes: int = 0) -> None:
        self.scene = Scene(terms(min_nodes or len(names), len(names)))
        self.scene.gather(*names)
        self.told: list[AnyCheckpointCommand] = []
        self.is_away = False
        self._changed: dict[str, asyncio.Event] = {}
        self._told = asyncio.Event()

    def relay_of(self, name: str) -> Relay:
        return Relay(self, name)

    def apply(self, name: str, command: AnyCheckpointCommand) -> Reply:
        agent = self.scene.agents[name]
        self.told.append(command)
        self._told.set()
        outcome = self.scene.send(name, replace(command, node=agent.node, incarnation=agent.incarnation))
        for effect in outcome.effects:
            if isinstance(effect, LookAgain):
                self.wake(*effect.topics)
        return outcome.reply

    async def until_told(self, kind: type) -> None:
        while not any(isinstance(command, kind) for command in self.told):
            self._told.clear()
            await asyncio.wait_for(self._told.wait(), DEADLINE)

    def go_away(self) -> None:
        self.is_away = True
        self.wake(*list(self._changed))

    def wake(self, *topics: str) -> None:
        for topic in topics:
            self._changed.setdefault(topic, asyncio.Event()).set()

    async def answer(self, name: str, query: AwaitSaveDuties) -> Reply:
        agent = self.scene.agents[name]
        while True:
            if self.is_away:
                raise Unavailable("away")
            answer = self.scene.job.ask(replace(query, node=agent.node, incarnation=agent.incarnation))
            if not isinstance(answer, NotYet):
                return answer
            changed = self._changed[answer.topics[0]] = asyncio.Event()
            await asyncio.wait_for(changed.wait(), DEADLINE)

    def kinds(self) -> list[str]:
        return [type(command).__name__ for command in self.told]


class Relay:
    """As the relay of one node's agent."""

    def __init__(self, core: CoreInHand, name: str) -> None:
        self._core = core
        self._name = name

    async def __call__(self, request: AnyCheckpointCommand | AwaitSaveDuties, *, timeout: float) -> Reply:
        await asyncio.sleep(0)
        if self._core.is_away:
            raise Unavailable("away")
        if isinstance(request, CheckpointCommand):
            return self._core.apply(self._name, request)
        return await self._core.answer(self._name, request)
