"""
The whole way of a worker's request, without a worker: a real master process, and a node in a thread.

The node has what an agent has on this way (channel, relay, socket) and nothing else; the test is its worker.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from dlrover.agent.relay import Relay
from dlrover.agent.workers.socket import WorkerSocket
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    Desired,
    Heartbeat,
    Incarnation,
    JobTerms,
    Join,
    JoinRendezvous,
    NodeId,
    Round,
    Run,
    WorldSpec,
)
from dlrover.protocol.rpc.client import AgentChannel
from dlrover.trainer.agent_link import AgentLink
from dlrover.trainer.environment import WorkerEnvironment
from tests.master.conftest import TOKEN, MasterProcess

T = TypeVar("T")


class StoreLab:
    def __init__(self, directory: Path, *, num_workers: int = 1) -> None:
        self._num_workers = num_workers
        self._runtime = tempfile.mkdtemp(prefix="dlr-")  # a unix socket's name must be short
        self._node, self._incarnation = NodeId(-1), Incarnation(0)
        self._num_attached = 0
        self._world: WorldSpec | None = None
        self._is_running = threading.Event()
        self._links: list[AgentLink] = []
        self.socket: WorkerSocket
        self.master = MasterProcess(directory)
        self.master.start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node")
        self._thread.start()
        self.run(self._begin())
        assert self._is_running.wait(30), "no world within 30 s"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        self.master.close()
        shutil.rmtree(self._runtime)

    @property
    def where(self) -> WorkerEnvironment:
        assert self._world is not None
        return WorkerEnvironment(agent_socket=self.socket.path, round=self._world.round, local_rank=0)

    @property
    def life(self) -> tuple[NodeId, Incarnation, int]:
        """The node, and on which of its streams it is."""
        return self._node, self._incarnation, self._num_attached

    def link(self, local_rank: int = 0) -> AgentLink:
        self._links.append(AgentLink(replace(self.where, local_rank=local_rank)))
        return self._links[-1]

    def restart_socket(self) -> None:
        """As an agent that went and came back."""
        self.run(self._open_socket(is_again=True))

    def restart_master(self) -> Future[None]:
        """Killed when this returns; serving again when the future is done."""
        self.master.kill()
        started: Future[None] = Future()

        def start() -> None:
            self.master.start()
            started.set_result(None)

        threading.Thread(target=start).start()
        return started

    async def _begin(self) -> None:
        self._channel = AgentChannel(
            self.master.address,
            token=TOKEN,
            tls=None,
            attach=self._attach,
            on_attached=self._on_attached,
            on_desired=self._on_desired,
        )
        self._relay = Relay(self._channel.call, lambda: (self._node, self._incarnation), self._channel.observe)
        await self._open_socket()
        self._running = asyncio.ensure_future(self._channel.run())
        self._beating = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        """The suite may take longer than a master waits for a silent node."""
        while True:
            self._channel.beat(Heartbeat(node=self._node, incarnation=self._incarnation))
            await asyncio.sleep(5)

    async def _open_socket(self, *, is_again: bool = False) -> None:
        if is_again:
            await self.socket.close()
        self.socket = await WorkerSocket.open(self._runtime)
        self.socket.relay_to(self._relay)
        if self._world is not None:
            self.socket.open_round(self._world.round)

    async def _end(self) -> None:
        self._beating.cancel()
        await self.socket.close()
        await self._channel.close()
        await asyncio.wait({self._running}, timeout=10)

    def _attach(self) -> Attach:
        return Attach(
            launch="launch",
            host="host",
            terms=JobTerms(),
            local_world_size=self._num_workers,
            incarnation=self._incarnation,
            running_round=Round(0) if self._world is None else self._world.round,
            life="life",
        )

    def _on_attached(self, attached: Attached) -> None:
        self._node, self._incarnation = attached.node, attached.incarnation
        self._num_attached += 1

    def _on_desired(self, desired: Desired) -> None:
        match desired.wish:
            case Join(round=number):
                self._joining = asyncio.ensure_future(self._join(number))
            case Run(world=world):
                self._world = world
                self.socket.open_round(world.round)
                self._is_running.set()

    async def _join(self, number: Round) -> None:
        join = JoinRendezvous(
            node=self._node,
            incarnation=self._incarnation,
            round=number,
            local_world_size=self._num_workers,
            offer=f"host:{number}",
        )
        await self._channel.call(join, timeout=30)
