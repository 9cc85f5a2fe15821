"""Nodes that exchange snapshots, without workers and master: real segments, real sockets on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import Any

import torch

from dlrover.agent.replicas.config import ReplicaConfig
from dlrover.agent.replicas.exchange import ReplicaExchange
from dlrover.protocol.messages.job import NodeId, NodeRank, Round, WorldSpec
from dlrover.protocol.messages.peers import AskPeers, Peer, Peers
from dlrover.snapshot.copy.copying import Copier
from dlrover.snapshot.memory.segment import Segment, SegmentWriter, SlotName, segment_paths
from dlrover.snapshot.memory.segment_format import Owner
from dlrover.snapshot.storage.persist import REQUEST, SaveRequest, encode_request, sum_slot
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import StateWriter, load_state
from tests.agent.lab import DEADLINE

JOB = "job"
TOKEN = "a token"


class Trainer:
    """Saves one shard."""

    def __init__(self, home: Path, shard: int) -> None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = Owner(job=JOB, launch="a", node_rank=0, global_rank=shard, local_rank=0, pid=os.getpid())
        self.shard = shard
        self._copier = Copier(1)
        self._segments = SegmentWriter(home, owner)
        self._writer = StateWriter(self._segments, self._copier)

    def save(
        self,
        step: int,
        *,
        num_shards: int,
        round_: int = 1,
        attempt: str = "",
        size: int = 1000,
        path: str = "file",
        **more: Any,
    ) -> SlotName:
        fields: dict[str, Any] = {
            "directory": "/nowhere",
            "target": str(step),
            "step": step,
            "attempt": attempt or f"save-{step}",
            "shard": self.shard,
            "num_shards": num_shards,
            "world_size": num_shards,
            "is_storage": False,
            "is_writer": True,
            "is_committer": False,
        }
        request = SaveRequest(**fields | more)
        name = self._writer.save(
            {"part": {"tensor": torch.arange(size) + step * 1000 + self.shard, "step": step}},
            step=step,
            round_=round_,
            paths={"part": path},
            extra={REQUEST: encode_request(request)},
        )
        assert name is not None
        assert sum_slot(name)
        return name

    def close(self) -> None:
        self._segments.close()
        self._copier.close()


class Lab:
    """Nodes in world order; each keeps the copies of the one before it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[int, ReplicaExchange] = {}
        self.homes: dict[int, Path] = {}
        self.trainers: list[Trainer] = []
        self.order: list[int] = []
        self.round = Round(1)
        self.taken = asyncio.Event()
        """Somebody has taken a copy or a piece."""
        self.strangers: list[Peer] = []
        """Who else is named as a neighbour."""
        self.numbered_from = 0
        """Greater: a master without its journal has given the nodes other numbers."""

    def start(self, node: int, **config: Any) -> ReplicaExchange:
        patient = {"stall": 10.0, "ask_limit": DEADLINE, "fetch_limit": DEADLINE, "parity_limit": DEADLINE}
        settings = {"copies": 1, **patient, **config}
        self.homes[node] = self.folder / f"job.launch.node-{node}"
        replicas = ReplicaExchange(
            ReplicaConfig(job=JOB, **settings),
            token=TOKEN,
            tls=None,
            host="127.0.0.1",
            home_for=lambda rank, node=node: self.homes[node],
            on_home=self.taken.set,
        )
        self.nodes[node] = replicas
        self.order.append(node)
        return replicas

    def trainer(self, node: int, shard: int) -> Trainer:
        trainer = Trainer(self.homes[node], shard)
        self.trainers.append(trainer)
        return trainer

    async def enter(self, node: int) -> None:
        position = self.order.index(node)
        world = WorldSpec(
            round=self.round,
            group_rank=position,
            group_world_size=len(self.order),
            first_global_rank=position,
            local_world_size=1,
            world_size=len(self.order),
            coordinator="127.0.0.1:1",
            restart_count=0,
        )
        await self.nodes[node].enter(world, node=NodeId(node), node_rank=NodeRank(node), ask=self._ask)

    async def push(self, node: int, name: SlotName) -> None:
        replicas = self.nodes[node]
        replicas.offer(name)
        await replicas._pushing[name.path]

    def lose(self, node: int) -> None:
        self.nodes.pop(node).close()
        self.order.remove(node)

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        for replicas in self.nodes.values():
            replicas.close()

    async def _ask(self, question: AskPeers, *, timeout: float) -> Peers:
        assert question.round == self.round
        position = self.order.index(int(question.node))
        others = [self.order[(position + step) % len(self.order)] for step in range(1, len(self.order))]
        peers = [self._peer(other) for other in others]
        has_parity = question.num_data > 0
        return Peers(
            round=self.round,
            keepers=tuple(peers[: question.copies]),
            group=tuple(self._peer(each) for each in self.order) if has_parity else (),
            neighbours=(*peers, *self.strangers),
            num_members=len(self.order),
        )

    def _peer(self, node: int) -> Peer:
        return Peer(NodeId(self.numbered_from + node), NodeRank(node), self.nodes[node].address)


def states_in(home: Path, shard: int) -> dict[int, Any]:
    """What a trainer could restore of a shard, by step: verified and unpickled."""
    found = {}
    copier = Copier(1)
    for path in segment_paths(home, shard):
        with Segment(path, private=True) as segment:
            for name in segment.complete_slots():
                pinned = segment.pin(name.slot, name.generation)
                assert pinned is not None
                with pinned:
                    assert pinned.verify(), "it has sums"
                    found[name.step] = load_state(pinned, copier, names=["part"])["part"]
    copier.close()
    return found


def is_right(state: Any, step: int, shard: int) -> bool:
    return state["step"] == step and torch.equal(state["tensor"][:3], torch.arange(3) + step * 1000 + shard)


class Meddler:
    """Stands between two agents and flips a bit at one offset of what the caller sends."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.offset = -1
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _run(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._relay, args=(caller, self.offset), daemon=True).start()

    def _relay(self, caller: socket.socket, offset: int) -> None:
        with caller, socket.create_connection(self._target) as called:
            back = threading.Thread(target=self._pump, args=(called, caller, -1))
            back.start()
            self._pump(caller, called, offset)
            back.join()

    def _pump(self, source: socket.socket, target: socket.socket, offset: int) -> None:
        position = 0
        try:
            while data := bytearray(source.recv(65536)):
                if position <= offset < position + len(data):
                    data[offset - position] ^= 1 << (offset % 8)
                position += len(data)
                target.sendall(data)
        except OSError:
            return
        finally:
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
