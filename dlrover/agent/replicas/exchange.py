"""
Snapshots in the memory of other nodes: a lost node does not take the only copy with it.

After each save, when its checksums are there, the agent pins the newest slot and sends it to the nodes that the master names for this round. The
slot stays pinned meanwhile: a trainer that saves faster than the network carries skips saves, rather than that the copies of different
nodes drift apart until no save is whole anywhere.

Before the workers of a round start, the agent looks whether what they need is here. If not (a new node, or ranks that moved), it asks the
other members what they hold, chooses the newest save of which every shard exists somewhere, and fetches its own ones. All of that
has a deadline, after which the workers start anyway and read storage.

Nothing here can fail a job.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dlrover.agent.checkpoints.saver import Saver
from dlrover.agent.config import AgentConfig
from dlrover.agent.relay import SnapshotRelay
from dlrover.agent.replicas.config import ReplicaConfig
from dlrover.agent.replicas.editions import editions, shards_of_node
from dlrover.agent.replicas.fetching import SnapshotFetch
from dlrover.agent.replicas.parity_exchange import ParityGroup, await_group, give_pieces
from dlrover.agent.replicas.store import ReplicaStore, header_of, meta_of
from dlrover.agent.replicas.wire import PeerConnection, PeerServer, RateLimit, Secret, be_nice, connect
from dlrover.host.edges import logged
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, DLRoverError, Rejected, Unavailable
from dlrover.protocol.messages.checkpoint import OpenSnapshots
from dlrover.protocol.messages.job import NodeId, NodeRank, Round, WorldSpec
from dlrover.protocol.messages.peers import AskPeers, Peer, Peers
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.segment import PinnedSlot, SlotName
from dlrover.snapshot.storage.persist import SaveRequest, pin_newest, read_request, release

log = logging.getLogger("dlrover.agent")

NUM_TRIES = 3
_PAUSE = 0.2
"""Seconds between two tries, roughly."""
_SAVES_UNTIL_TIDY = 2


class ReplicaExchange:
    """One per agent. `enter` and `offer` are called by the event loop; bytes are moved by threads."""

    def __init__(
        self,
        config: ReplicaConfig,
        *,
        token: str,
        tls: TlsConfig | None,
        host: str,
        ports: tuple[int, ...] = (),
        home_for: Callable[[NodeRank], Path],
        on_home: Callable[[], None] = lambda: None,
    ) -> None:
        """
        `home_for` names the node's directory of segments. `on_home` is told, by the event loop, that there is something in it.

        Raises OSError and ConfigError when we cannot listen.
        """
        self._config = config
        self._secret = Secret(token, config.job)
        self._tls = tls
        self._home_for = home_for
        self._on_home = on_home
        loop = asyncio.get_running_loop()
        self._store = ReplicaStore(config.job, lambda: _call(loop, on_home))
        self._server = PeerServer(host, self._secret, tls, self._store.serve, ports=ports, stall=config.stall)
        self.address = self._server.address
        self._rate = RateLimit(config.bytes_per_second)
        self._pusher = ThreadPoolExecutor(1, thread_name_prefix="dlrover-copies", initializer=be_nice)
        self._waiter = ThreadPoolExecutor(64, thread_name_prefix="dlrover-parity")
        self._ask: SnapshotRelay | None = None
        self._node = NodeId(-1)
        self._world: WorldSpec | None = None
        self._members: tuple[NodeId, ...] = ()
        self._peers: dict[int, Peers] = {}
        """Of this round, by number of copies."""
        self._offered: dict[str, SlotName] = {}
        """By segment: only the newest slot is worth it."""
        self._pushing: dict[str, asyncio.Task[None]] = {}
        """By segment."""
        self._is_free = threading.Event()
        """Cleared while something is fetched: that goes first."""
        self._is_free.set()
        self._num_pushed = 0
        """In this round."""
        self._protected: dict[int, PinnedSlot] = {}
        """By shard: the newest slot of ours that the whole group has protected by parity."""
        self._copied: dict[str, int | None] = {}
        """By segment of which others shall keep something: the newest step in this round of which they do."""
        self._told: set[str] = set()

    # Towards the agent.

    async def enter(self, world: WorldSpec, *, node: NodeId, node_rank: NodeRank, ask: SnapshotRelay) -> None:
        """Workers of this world are about to start here: have their snapshots ready, as far as that is possible in time."""
        with logged(log, "bug in DLRover while snapshots were fetched"):  # the workers must start whatever happens here
            try:
                await self._enter(world, node, node_rank, ask)
            except (OSError, DLRoverError) as error:
                log.warning("this node cannot fetch snapshots from other nodes in round %d: %s", world.round, error)

    def offer(self, name: SlotName) -> None:
        """A slot of this node is complete and summed."""
        self._offered[name.path] = name
        is_alone = self._world is None or self._world.group_world_size == 1
        if name.path not in self._pushing and not is_alone:
            self._pushing[name.path] = asyncio.create_task(self._push_offered(name.path), name="copies")

    @property
    def copied_step(self) -> int | None:
        """The newest step of which other nodes keep copies or parity of all our shards; None where no node is to keep them, or none does yet."""
        steps = [step for step in self._copied.values() if step is not None]
        return min(steps) if steps and len(steps) == len(self._copied) else None

    def close(self) -> None:
        self._server.close()
        self._is_free.set()
        for task in list(self._pushing.values()):
            task.cancel()
        for shard in list(self._protected):
            self._let_go(shard)
        for pool in (self._pusher, self._waiter):
            pool.shutdown(wait=False, cancel_futures=True)

    # Keeping copies elsewhere.

    async def _push_offered(self, path: str) -> None:
        try:
            while (name := self._offered.pop(path, None)) is not None:
                world = self._world
                assert world is not None, "nothing is pushed before the first round"
                with logged(log, "Step %d has no copy on another node because of a bug in DLRover.", name.step):
                    try:
                        await self._push(name)
                    except (OSError, DLRoverError) as error:
                        if world is not self._world:
                            log.info(
                                "step %d was not copied to another node, because round %d has ended: %s",
                                name.step,
                                world.round,
                                error,
                            )
                            continue
                        self._tell(f"{type(error).__name__}", f"step {name.step} has no copy on another node: {error}")
        finally:  # at once, and not when the task is seen to be done: an offer in between would wait for the next save
            self._pushing.pop(path, None)

    async def _push(self, name: SlotName) -> None:
        pinned = pin_newest(name.path, name.slot, name.generation)
        if pinned is None:
            return  # overwritten: the newer one is on its way to us
        try:
            request = read_request(decode_contents(pinned.sections()))
            if request is None or request.num_shards == 1:
                return  # every node has the same: nothing to copy
            copies = max(self._config.copies, request.replica_count)
            if copies or self._config.num_data:
                self._copied.setdefault(name.path, None)
            is_copied = copies > 0 and await self._copy(pinned, request, copies)
            is_protected = self._config.num_data > 0 and await self._protect(pinned, request)
        finally:
            if pinned not in self._protected.values():
                release(pinned)
        if is_copied or is_protected:
            self._told.clear()
            self._copied[name.path] = name.step
            if self._world is not None and pinned.record.round == self._world.round:
                # Not what a former round saved: its lost shards may be needed until this one has saved.
                self._num_pushed += 1
            if self._num_pushed == _SAVES_UNTIL_TIDY:
                self._store.tidy()

    async def _copy(self, pinned: PinnedSlot, request: SaveRequest, copies: int) -> bool:
        world = self._world
        assert world is not None, "nothing is pushed before the first round"
        peers = await self._peers_for(copies)
        if not peers.keepers:
            self._tell("no-keeper", "the job has no other node that can keep copies of this node's snapshots")
        for keeper in peers.keepers:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pusher, self._push_to, keeper, pinned, request, world.round)
        return bool(peers.keepers)

    async def _protect(self, pinned: PinnedSlot, request: SaveRequest) -> bool:
        """
        Parity needs the slots of those that are not lost. So the last save that the whole group has protected stays pinned until the
        next one has got so far; if that fails it is let go, because saving goes on.
        """
        world = self._world
        assert world is not None, "nothing is pushed before the first round"
        former = self._protected.get(request.shard)
        try:
            peers = await self._peers_for(self._config.copies)
            position = next((index for index, peer in enumerate(peers.group) if peer.address == self.address), -1)
            shards = shards_of_node(request.num_shards, world.group_rank, world.group_world_size)
            if position < 0 or request.shard not in shards:
                wanted = f"{self._config.num_data}+{self._config.num_parity}"
                self._tell(
                    "group",
                    f"parity {wanted} is not possible: the job has too few nodes, or the nodes have different "
                    "numbers of shards",
                )
                self._let_go(request.shard)
                return False
            group = ParityGroup(peers.group, position, self._config.num_parity)
            lane = shards.index(request.shard)
            begun_at = time.monotonic()
            deadline = begun_at + self._config.parity_limit
            give = functools.partial(
                give_pieces,
                *(pinned, request, lane, group, world.round),
                connect=self._connect,
                deadline=deadline,
                limit=self._rate,
                pause=self._wait_until_free,
            )
            wait_for_others = functools.partial(
                await_group,
                *(request, pinned.record.round, lane, group, world.round),
                connect=self._connect,
                store=self._store.parity,
                deadline=deadline,
                patience=self._config.stall / 2,
            )
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pusher, give)
            # In another thread: the other members may first do other shards of theirs.
            await loop.run_in_executor(self._waiter, wait_for_others)
        except Rejected as error:
            if error.code == ErrorCode.SUPERSEDED:
                return False
            self._let_go(request.shard)
            raise
        except BaseException:
            self._let_go(request.shard)
            raise
        self._protected[request.shard] = pinned
        if former is not None:
            release(former)
        log.info(
            "parity of step %d shard %d is complete after %.2f s",
            request.step,
            request.shard,
            time.monotonic() - begun_at,
        )
        return True

    def _let_go(self, shard: int) -> None:
        former = self._protected.pop(shard, None)
        if former is not None:
            release(former)

    def _push_to(self, keeper: Peer, pinned: PinnedSlot, request: SaveRequest, round_: Round) -> None:
        begun_at = time.monotonic()
        deadline = begun_at + self._config.push_limit
        for tries_left in reversed(range(NUM_TRIES)):
            try:
                with self._connect(keeper.address, deadline) as connection:
                    self._send_copy(connection, pinned, request, round_)
                break
            except (Unavailable, Rejected) as error:
                if isinstance(error, Rejected) and error.code == ErrorCode.STALE_GENERATION:
                    return  # it has this one, or a newer one
                is_passing = isinstance(error, Unavailable) or error.code in (
                    ErrorCode.NOT_YET,
                    ErrorCode.BUSY,
                    ErrorCode.UNAVAILABLE,
                )
                if not tries_left or not is_passing:
                    raise
                time.sleep(_PAUSE * random.uniform(0.5, 1.5))
        took = max(time.monotonic() - begun_at, 1e-9)
        log.info(
            "copied step %d shard %d to node rank %d: %.1f MB at %.0f MB/s",
            request.step,
            request.shard,
            keeper.node_rank,
            pinned.record.data_length / 1e6,
            pinned.record.data_length / 1e6 / took,
        )

    def _send_copy(self, connection: PeerConnection, pinned: PinnedSlot, request: SaveRequest, round_: Round) -> None:
        connection.send(header_of(pinned, request, round_))
        connection.await_consent()
        with meta_of(pinned) as meta:
            connection.send_bytes(meta)
        with pinned.data as data:
            connection.send_bytes(data, limit=self._rate, is_paused=self._wait_until_free)
        connection.await_consent()

    def _wait_until_free(self) -> None:
        """A restart that waits for bytes goes before copies of what is safe on this node anyway."""
        self._is_free.wait(self._config.stall / 2)

    # Getting back what another node keeps.

    async def _enter(self, world: WorldSpec, node: NodeId, node_rank: NodeRank, ask: SnapshotRelay) -> None:
        home = self._home_for(node_rank)
        self._ask, self._node, self._world = ask, node, world
        self._peers, self._num_pushed, self._copied = {}, 0, {}
        self._store.enter(world.round, home)
        former, self._members = self._members, (node,)
        if world.group_world_size == 1:
            for shard in list(self._protected):
                self._let_go(shard)
        if world.group_world_size == 1 or world.round == 1:
            return
        begun_at = time.monotonic()
        peers = await self._peers_for(self._config.copies)
        self._members = (node, *(peer.node for peer in peers.neighbours))
        if self._members == former and self._has_all(world):
            return  # the same nodes as before, each with its own
        self._is_free.clear()
        fetch = SnapshotFetch(
            self._config, world, home, connect=self._connect, store=self._store, own_address=self.address
        )
        pool = ThreadPoolExecutor(
            1, thread_name_prefix="dlrover-enter"
        )  # of its own: a former fetch that was given up may still wait for a peer
        try:
            await asyncio.get_running_loop().run_in_executor(pool, fetch.run, peers)
        finally:
            fetch.end()
            self._is_free.set()
            pool.shutdown(wait=False, cancel_futures=True)
        if fetch.num_fetched:
            self._on_home()
            took = time.monotonic() - begun_at
            log.warning("fetched %d snapshots from other nodes in %.2f s", fetch.num_fetched, took)
        self._offer_again(fetch.attempt)

    def _offer_again(self, attempt: str) -> None:
        """The plan of this round is another one: who keeps our newest may not have it yet."""
        assert self._store.holdings is not None, "entered above"
        for holding in self._store.holdings.all():
            if not holding.is_copy and holding.request.attempt == attempt:
                self.offer(holding.name)

    async def _peers_for(self, copies: int) -> Peers:
        assert self._ask is not None, "asked before the first round"
        assert self._world is not None, "asked before the first round"
        if copies not in self._peers:
            question = AskPeers(
                node=self._node,
                round=self._world.round,
                copies=copies,
                num_data=self._config.num_data,
                num_parity=self._config.num_parity,
            )
            reply = await self._ask(question, timeout=self._config.ask_limit)
            assert isinstance(reply, Peers), f"the master answered {type(reply).__name__}"
            self._peers[copies] = reply
        return self._peers[copies]

    def _has_all(self, world: WorldSpec) -> bool:
        """Whether the newest save that is here is here with all shards of this node."""
        own = editions({"": self._store.list()})
        if not own:
            return False
        needed = shards_of_node(own[0].num_shards, world.group_rank, world.group_world_size)
        return bool(needed) and set(needed) <= set(own[0].holders)

    def _connect(self, address: str, deadline: float) -> PeerConnection:
        return connect(address, self._secret, self._tls, deadline=deadline, stall=self._config.stall)

    def _tell(self, key: str, message: str) -> None:
        """Once, until copies are kept again."""
        if key in self._told:
            log.info("%s", message)
        else:
            self._told.add(key)
            log.warning("%s. Training continues.", message.rstrip("."))


def open_replicas(config: AgentConfig, token: str, saver: Saver) -> ReplicaExchange | None:
    """The exchange of a node with others, joined to its saver. None, with a word why, where there can be none."""
    if not token:
        log.info(
            "Snapshots are not exchanged with other nodes, because the job has no token. Set DLROVER_JOB_TOKEN "
            "to the same secret on all nodes."
        )
        return None
    homes: list[str] = []

    def home_for(node_rank: NodeRank) -> Path:
        homes[:] = [saver.home_for(node_rank)]
        return Path(homes[0])

    num_data, num_parity = config.snapshot_parity
    settings = ReplicaConfig(
        job=config.job_name,
        copies=config.snapshot_copies,
        num_data=num_data,
        num_parity=num_parity,
        bytes_per_second=config.snapshot_bandwidth * 1e6,
    )
    try:
        replicas = ReplicaExchange(
            settings,
            token=token,
            tls=config.tls,
            host=config.host,
            ports=config.host_ports,
            home_for=home_for,
            on_home=lambda: saver.on_open(OpenSnapshots(home=homes[0])),
        )
    except (OSError, ConfigError) as error:
        is_wanted = config.snapshot_copies or num_data
        log.log(
            logging.WARNING if is_wanted else logging.INFO, "snapshots are not exchanged with other nodes: %s", error
        )
        return None
    saver.sums.on_summed = replicas.offer
    return replicas


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return  # the agent has ended
