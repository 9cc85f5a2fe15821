"""A stage for stories of nodes: agents between a real `Job` and workers that do what the test says."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dlrover.agent.agent import Agent
from dlrover.agent.config import AgentResult
from dlrover.agent.seams import AgentPatience
from dlrover.agent.workers.group import PortOffer
from dlrover.protocol.messages.job import (
    JobTerms,
    JoinRendezvous,
    Limits,
    RestartPolicy,
)
from tests.agent.lab import make_config
from tests.agent.loopback import DEADLINE, LoopbackChannel, LoopbackMaster, News, StandInNode

PATIENCE = AgentPatience(heartbeat=0.005, lease=60.0, farewell=5.0, finished=0.01, first_connection=0.0)
GRACE = 600.0
_PORTS_OF_EACH = 250
_FIRST_PORT = 30_000 + _PORTS_OF_EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 11)
_PORTS = range(_FIRST_PORT, _FIRST_PORT + _PORTS_OF_EACH)
"""Between those that agents take (see `PortOffer`) and those from which outgoing connections come."""


class Life:
    """One agent process of a node."""

    def __init__(
        self,
        master: LoopbackMaster,
        scratch: Path,
        *,
        patience: AgentPatience | None = PATIENCE,
        warm_up: Callable[[float], Awaitable[None]] | None = None,
        on_leaving: Callable[[], None] | None = None,
        has_whole_state: Callable[[], bool] | None = None,
        **changes: Any,
    ) -> None:
        self._news = master.news
        self.workers = StandInNode(master.news)
        self.step: int | None = None
        config = make_config(scratch, "train.py", **({"master_grace": GRACE} | changes))
        self._agent = Agent(
            config,
            token="",
            local_world_size=2,
            build_group=self.workers.build,
            step=lambda: self.step,
            connect=master.connect,
            patience=patience,
            warm_up=warm_up,
            on_leaving=on_leaving,
            has_whole_state=has_whole_state,
        )
        self.told_to_end = self._agent.told_to_end
        self.channel: LoopbackChannel = master.channels[-1]
        self.task = asyncio.create_task(self._agent.run())
        self.task.add_done_callback(lambda _: master.news.tell())

    async def result(self) -> AgentResult:
        async with asyncio.timeout(DEADLINE):
            return await self.task

    async def looks(self) -> None:
        """Until the agent has had a few turns: whatever it wanted to do about the news it has done."""
        enough = self.channel.num_looks + 4
        await self._news.until(lambda: self.channel.num_looks >= enough)

    async def die(self) -> None:
        """As after SIGKILL: nobody is told."""
        self.channel.cut()
        self.task.cancel()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(self.task, return_exceptions=True)


class Stage:
    def __init__(self, scratch: Path) -> None:
        self.master = LoopbackMaster(News())
        self.lives: list[Life] = []
        self._scratch = scratch

    @property
    def until(self) -> Any:
        return self.master.news.until

    def begin(self, launch: str = "a", *, nodes: int = 1, **changes: Any) -> Life:
        """Start the agent of a node, called by its launch."""
        terms = JobTerms(
            limits=Limits(min_nodes=nodes, max_nodes=nodes), restarts=changes.pop("restarts", RestartPolicy())
        )
        life = Life(self.master, self._scratch, **({"launch": launch, "terms": terms} | changes))
        self.lives.append(life)
        return life

    def offers(self) -> list[str]:
        return [join.offer for join in self.master.heard_of(JoinRendezvous)]


def free_ports(count: int) -> tuple[int, ...]:
    """They stay free until the test takes them: neither the kernel nor an agent takes one by chance, nor another process of the tests."""
    free: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        try:
            PortOffer.bind("127.0.0.1", [port]).release()
        except OSError:
            continue
        free.append(port)
        if len(free) == count:
            break
    return tuple(free)
