"""
An agent without workers: the real stream to the master and the real socket for workers, so that the public clients can be measured.

    python relay_agent.py MASTER RUNTIME_DIR [WORKERS]

It joins the job as its only node, opens the socket, prints one line of JSON and relays until standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys

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
    Run,
)
from dlrover.protocol.rpc.client import AgentChannel

HEARTBEAT = 5.0


class RelayAgent:
    def __init__(self, address: str, num_workers: int = 16) -> None:
        self._num_workers = num_workers
        self.node, self.incarnation = NodeId(-1), Incarnation(0)
        self.levels: asyncio.Queue[Desired] = asyncio.Queue()
        self.channel = AgentChannel(
            address,
            token="",
            tls=None,
            attach=self._attach,
            on_attached=self._on_attached,
            on_desired=self.levels.put_nowait,
        )

    async def serve(self, runtime_dir: str) -> None:
        running = asyncio.ensure_future(self.channel.run())
        world = await self._meet()
        socket = await WorkerSocket.open(runtime_dir)
        socket.open_round(world.world.round)
        socket.relay_to(Relay(self.channel.call, lambda: (self.node, self.incarnation)))
        print(json.dumps({"socket": socket.path, "round": world.world.round}), flush=True)
        over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        while not over.done():
            self.channel.beat(Heartbeat(node=self.node, incarnation=self.incarnation))
            await asyncio.wait({over, running}, timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        await socket.close()
        await self.channel.close()
        await running

    async def _meet(self) -> Run:
        async with asyncio.timeout(30):
            while True:
                wish = (await self.levels.get()).wish
                if isinstance(wish, Run):
                    return wish
                if isinstance(wish, Join):
                    join = JoinRendezvous(
                        node=self.node,
                        incarnation=self.incarnation,
                        round=wish.round,
                        local_world_size=self._num_workers,
                        offer="127.0.0.1:1",
                    )
                    await self.channel.call(join, timeout=30)

    def _attach(self) -> Attach:
        return Attach(
            launch="relay",
            host="127.0.0.1",
            terms=JobTerms(),
            local_world_size=self._num_workers,
            incarnation=self.incarnation,
        )

    def _on_attached(self, attached: Attached) -> None:
        self.node, self.incarnation = attached.node, attached.incarnation


if __name__ == "__main__":
    asyncio.run(RelayAgent(sys.argv[1], *map(int, sys.argv[3:4])).serve(sys.argv[2]))
