"""
One fetch: get the snapshots that the workers of a round need from the other nodes, before the workers start.

Everything happens in threads, and everything ends: with the deadline, or when the caller says that it is not wanted any more. Nothing that
arrives later than that is put where a trainer would find it, because by then trainers save there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from dlrover.agent.replicas.config import ReplicaConfig
from dlrover.agent.replicas.editions import Edition, complete, editions, shards_of_node
from dlrover.agent.replicas.gf256_numpy import fastest_add
from dlrover.agent.replicas.parity_exchange import Connect, compute_image
from dlrover.agent.replicas.store import ReplicaStore, geometry_of
from dlrover.agent.replicas.wire import PeerConnection
from dlrover.host.ownership import make_private
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import DLRoverError, Rejected, Unavailable
from dlrover.protocol.messages.job import WorldSpec
from dlrover.protocol.messages.peers import Accepted, HeldList, ListHeld, Peer, Peers, PullSlot, SlotHeader
from dlrover.snapshot.image import read_head
from dlrover.snapshot.memory.mirror import ArrivingSlot, Fill, next_generation, own_path, read_transfer
from dlrover.snapshot.memory.segment_format import Geometry, Owner, SlotRecord, Sums

log = logging.getLogger("dlrover.agent")

NUM_LISTENERS = 16
"""Peers that are asked at a time what they hold."""
NUM_FETCHERS = 4


class SnapshotFetch:
    """Run once, by a thread of the caller."""

    def __init__(
        self,
        config: ReplicaConfig,
        world: WorldSpec,
        home: Path,
        *,
        connect: Connect,
        store: ReplicaStore,
        own_address: str,
    ) -> None:
        self._config, self._world, self._home = config, world, home
        self._connect, self._store, self._own_address = connect, store, own_address
        self._begun_at = time.monotonic()
        self._deadline = self._begun_at + config.fetch_limit
        self._gate = threading.Lock()
        self._is_over = False
        self.attempt = ""
        """Of the save that the workers will go on from; empty: none was found."""
        self.num_fetched = 0

    def run(self, peers: Peers) -> None:
        try:
            self._run(peers)
        finally:
            self.end()

    def end(self) -> None:
        """From here on nothing more arrives."""
        with self._gate:
            self._is_over = True

    def _run(self, peers: Peers) -> None:
        world, own_address = self._world, self._own_address
        told = self._listen(peers)
        told[own_address] = self._store.list()
        found = editions(told)
        needed = {
            each.num_shards: shards_of_node(each.num_shards, world.group_rank, world.group_world_size) for each in found
        }
        is_everybody_heard = len(told) == world.group_world_size
        if len(told) < min(world.group_world_size, len(peers.neighbours) + 1):
            log.warning(
                "only %d of %d nodes reported in time which snapshots they hold", len(told), world.group_world_size
            )
        for edition in complete(found, is_everybody_heard=is_everybody_heard, needed=needed):
            own = {
                item.shard for item in told[own_address].items if item.attempt == edition.attempt and not item.is_copy
            }
            missing = [shard for shard in needed[edition.num_shards] if shard not in own]
            if not missing or self._fetch_edition(edition, missing):
                self.attempt, self.num_fetched = edition.attempt, len(missing)
                return
            log.warning(
                "The snapshots of step %d in the nodes' memory are incomplete; an older step is tried.", edition.step
            )

    def _listen(self, peers: Peers) -> dict[str, HeldList]:
        """Who answers in time. No fetch waits for the others."""
        deadline = self._begun_at + self._config.ask_limit
        told: dict[str, HeldList] = {}

        def ask(peer: Peer) -> None:
            with self._connect(peer.address, deadline) as connection:
                connection.send(ListHeld(round=self._world.round))
                told[peer.address] = connection.receive(HeldList)

        pool = ThreadPoolExecutor(NUM_LISTENERS, thread_name_prefix="dlrover-ask")
        asked = [pool.submit(ask, peer) for peer in peers.neighbours]
        wait(asked, timeout=max(0.0, deadline - time.monotonic()))
        pool.shutdown(wait=False, cancel_futures=True)
        _note(asked)
        return dict(told)

    def _fetch_edition(self, edition: Edition, shards: Iterable[int]) -> bool:
        make_private(self._home.parent)
        make_private(self._home)
        pool = ThreadPoolExecutor(NUM_FETCHERS, thread_name_prefix="dlrover-fetch")
        fetched = [pool.submit(self._fetch_shard, edition, shard) for shard in shards]
        wait(fetched, timeout=max(0.0, self._deadline - time.monotonic()))
        pool.shutdown(wait=False, cancel_futures=True)
        _note(fetched)
        return all(future.done() and not future.cancelled() and future.exception() is None for future in fetched)

    def _fetch_shard(self, edition: Edition, shard: int) -> None:
        """From the first holder that gives it. Raises what the last one led to."""
        holders = edition.holders.get(shard, ())
        turn = self._world.group_rank % max(1, len(holders))  # many newcomers shall not all ask the same node
        trouble: Exception = Unavailable(f"no node has shard {shard} of step {edition.step}")
        for address in (*holders[turn:], *holders[:turn]):
            try:
                with self._connect(address, self._deadline) as connection:
                    self._receive(connection, edition, shard)
                return
            except (OSError, DLRoverError) as error:
                log.warning("shard %d of step %d could not be fetched from %s: %s", shard, edition.step, address, error)
                trouble = error
        if not edition.is_computable(shard):
            raise trouble
        self._compute(edition, shard)

    def _compute(self, edition: Edition, shard: int) -> None:
        """From parity and what the others of the group still have."""
        begun_at = time.monotonic()
        round_, deadline = self._world.round, self._deadline
        mapping = compute_image(
            edition, shard, round_, self._home, connect=self._connect, add=fastest_add(), deadline=deadline
        )
        with mapping, memoryview(mapping) as image:
            start, geometry, record, sums = read_head(image, shard, edition.attempt)

            def fill(view: memoryview) -> None:
                nonlocal start
                view[:] = image[start : start + view.nbytes]
                start += view.nbytes

            self._put(shard, geometry, record, sums, fill)
        took = time.monotonic() - begun_at
        log.info("shard %d of step %d was computed from parity in %.2f s", shard, edition.step, took)

    def _receive(self, connection: PeerConnection, edition: Edition, shard: int) -> None:
        begun_at = time.monotonic()
        connection.send(PullSlot(round=self._world.round, shard=shard, attempt=edition.attempt))
        header = connection.receive(SlotHeader)
        if (header.shard, header.attempt) != (shard, edition.attempt):
            raise Rejected(
                f"the other node sent shard {header.shard} instead of shard {shard}", code=ErrorCode.MALFORMED
            )
        geometry = geometry_of(header)
        record, sums = read_transfer(header.record, header.sums, geometry)
        self._put(shard, geometry, record, sums, connection.receive_into, lambda: connection.send(Accepted()))
        took = max(time.monotonic() - begun_at, 1e-9)
        log.info("received shard %d of step %d: %.0f MB/s", shard, edition.step, record.data_length / 1e6 / took)

    def _put(
        self,
        shard: int,
        geometry: Geometry,
        record: SlotRecord,
        sums: Sums,
        fill: Fill,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Where the trainer of that shard will look for it; nothing of it stays when it does not come whole, or too late.

        `begin` is called when there is room: getting it may take longer than a sender waits.
        """
        path = own_path(self._home, shard)
        owner = Owner(
            job=self._config.job,
            launch=self._home.name,
            node_rank=int(self._home.name.rsplit("-", 1)[1]),
            global_rank=shard,
            local_rank=-1,
            pid=os.getpid(),
        )

        def fill_while_wanted(view: memoryview) -> None:
            if self._is_over:
                raise Unavailable(
                    f"round {self._world.round} started without shard {shard}, because it did not arrive in time"
                )
            fill(view)

        sequence = int(path.name.rsplit(".", 2)[1])
        try:
            with ArrivingSlot(path, owner, sequence, geometry, 0) as arriving:
                begin()
                arriving.fill(record, sums, fill_while_wanted)
                with self._gate:
                    if self._is_over:
                        raise Unavailable(f"shard {shard} arrived too late")
                    arriving.complete(record, sums, next_generation(self._home, shard))
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _note(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        if future.done() and not future.cancelled() and (error := future.exception()) is not None:
            if not isinstance(error, OSError | DLRoverError):
                log.error("bug in DLRover in the exchange of snapshots", exc_info=error)
            else:
                log.info("another node could not deliver a snapshot: %s", error)
