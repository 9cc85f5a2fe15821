"""
What plugins are asked for while the loop goes on.

Where a node is and in which order nodes stand, users' plug-ins may know, and they may take their time. What they answer
comes to the loop as an attach that names its place, or as a command with the order; the turn never waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from msgspec.structs import replace

from dlrover.master.journal.durable_job import DurableJob
from dlrover.master.loop.inbox import Inbox
from dlrover.master.loop.request import Work
from dlrover.master.loop.streams import AgentLine
from dlrover.master.topology_plugins import NodeTopologyMeta, TopologyPlugins
from dlrover.protocol.messages.job import Attach, NodesOrdered


class PluginAnswers:
    def __init__(self, topology: TopologyPlugins, durable: DurableJob, inbox: Inbox) -> None:
        self._topology = topology
        self._durable = durable
        self._inbox = inbox
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_order_old = False

    @property
    def time_limit(self) -> float:
        """Seconds for one answer."""
        return self._topology.time_limit

    def run(self, asked: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(asked)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._topology.close()

    def place_and_attach(self, line: AgentLine, id_: int, attach: Attach) -> None:
        """Where the node is belongs to what it says of itself: an agent may have to be asked first."""
        place = attach.place or self._topology.known_place(attach.node_ip or attach.host)
        if place is not None:
            self._inbox.offer(Work(replace(attach, place=place), line=line, id=id_))
        else:
            self.run(self._ask_for_place(line, id_, attach))

    async def _ask_for_place(self, line: AgentLine, id_: int, attach: Attach) -> None:
        place = await self._topology.place_of(attach.node_ip or attach.host)
        if line.is_open:
            self._inbox.offer(Work(replace(attach, place=place), line=line, id=id_))

    def is_order_missing(self, attach: Attach) -> bool:
        """Whether it has just brought a node whose place in the order is unknown. It may have been refused."""
        if not self._topology.has_sorter:
            return False
        nodes = self._durable.job.state.nodes
        node = nodes.of_launch(attach.launch)
        return not attach.incarnation and node is not None and nodes.is_connected(node.id)

    def ask_for_order(self) -> None:
        """One question at a time; if the nodes changed meanwhile it is asked again."""
        if self._topology.has_sorter and not self._is_order_old:
            self._is_order_old = True
            self.run(self._order_nodes())

    async def _order_nodes(self) -> None:
        while True:
            nodes = self._nodes_to_sort()
            ranks = await self._topology.order(nodes)
            if nodes == self._nodes_to_sort() or not self._topology.has_sorter:
                break
        self._is_order_old = False
        self._inbox.put(Work(NodesOrdered(ranks=ranks)))

    def _nodes_to_sort(self) -> list[NodeTopologyMeta]:
        live = sorted(self._durable.job.state.nodes.live.values(), key=lambda node: node.rank)
        return [
            NodeTopologyMeta(
                node_id=node.id,
                node_rank=node.rank,
                process_num=node.local_world_size,
                node_ip=node.node_ip or node.host,
                asw=node.place[-1] if node.place else "",
                psw=node.place[0] if len(node.place) > 1 else "",
                node_group=node.group,
            )
            for node in live
        ]
