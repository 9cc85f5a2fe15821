"""
What this node keeps for others and gives to others: the served side of the exchange of snapshots between agents.

A copy is taken only from the present round, only if it is newer than what is here, and only whole: bytes that differ from their sums are
refused, and the older copy stays. Everything runs in the threads of the peer server.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from dlrover.agent.replicas.gf256_numpy import fastest_add
from dlrover.agent.replicas.holdings import Holdings
from dlrover.agent.replicas.parity_store import MOST_PULLED_BYTES, ParityStore, send_piece
from dlrover.agent.replicas.wire import PeerConnection, be_nice
from dlrover.host.ownership import make_private
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import DLRoverError, Rejected, Unavailable
from dlrover.protocol.messages.identity import Round
from dlrover.protocol.messages.peers import (
    Accepted,
    AwaitParity,
    HeldList,
    ListHeld,
    PieceHeader,
    PullPiece,
    PullSlot,
    Refused,
    SlotHeader,
)
from dlrover.snapshot.image import Image
from dlrover.snapshot.memory.mirror import ArrivingSlot, copy_path, copy_paths, read_transfer, remove_copies
from dlrover.snapshot.memory.segment import PinnedSlot, Segment
from dlrover.snapshot.memory.segment_format import (
    Geometry,
    Owner,
    SegmentInvalid,
    SlotRecord,
    encode_record,
    encode_sums,
)
from dlrover.snapshot.storage.persist import SaveRequest, release

log = logging.getLogger("dlrover.agent")

Request = ListHeld | SlotHeader | PullSlot | PieceHeader | AwaitParity | PullPiece

NUM_COPIES = 2
"""Slots of a mirror: while one is filled the other stays whole."""


class ReplicaStore:
    """`enter` tells it the round and where the node's snapshots are; before that it has nothing and takes nothing."""

    def __init__(self, job: str, on_taken: Callable[[], None] | None = None) -> None:
        """`on_taken` hears of each copy, in some thread."""
        self._job = job
        self.parity = ParityStore(fastest_add, on_taken)
        self._on_taken = on_taken or (lambda: None)
        self.round = Round(0)
        self._holdings: Holdings | None = None
        self._taking = threading.Lock()
        """For deciding about a copy; not for its bytes."""
        self._in_work: set[int] = set()

    def enter(self, round_: Round, home: Path) -> None:
        if self._holdings is None or self._holdings.home != home:
            self._holdings = Holdings(home)
            self.parity.enter(home)
        self.round = round_

    @property
    def holdings(self) -> Holdings | None:
        return self._holdings

    def serve(self, connection: PeerConnection) -> None:
        """Requests of one peer, one after the other, until it goes."""
        images = _Images(self)
        try:
            self._serve(connection, images)
        finally:
            images.close()

    def _serve(self, connection: PeerConnection, images: _Images) -> None:
        while True:
            request = connection.receive(ListHeld, SlotHeader, PullSlot, PieceHeader, AwaitParity, PullPiece)
            assert isinstance(request, Request), "nothing else comes through"
            if isinstance(request, SlotHeader | PieceHeader):
                be_nice()
            try:
                self._check(request.round)
                match request:
                    case ListHeld():
                        connection.send(self.list())
                    case SlotHeader():
                        self._take(connection, request)
                    case PullSlot():
                        self._give(connection, request)
                    case PieceHeader():
                        self.parity.take(connection, request)
                    case AwaitParity():
                        self.parity.wait_for(request)
                        connection.send(Accepted())
                    case PullPiece(shard=-1):
                        self.parity.give(connection, request)
                    case PullPiece():
                        images.give(connection, request)
            except (DLRoverError, OSError) as error:
                if isinstance(error, Unavailable) and error.retry_after is None:
                    raise
                code = error.code if isinstance(error, Rejected | Unavailable) else ErrorCode.INTERNAL
                log.info("a request of another node was rejected: %s", error)
                connection.send(Refused(code=code, message=str(error)))
                if isinstance(request, SlotHeader):
                    return  # its bytes may be on their way: they are not messages

    def list(self) -> HeldList:
        if self._holdings is None:
            return HeldList()
        return HeldList(items=tuple(holding.told() for holding in self._holdings.all()), parity=self.parity.list())

    def tidy(self) -> None:
        """No node refreshed these in this round, and all nodes have saved since it began: their keeper is another node now."""
        if self._holdings is None:
            return
        self.parity.tidy(self.round)
        for path in copy_paths(self._holdings.home):
            try:
                with Segment(path) as segment:
                    rounds = [name.round for name in segment.complete_slots()]
            except (SegmentInvalid, FileNotFoundError):
                continue
            if rounds and max(rounds) < self.round:
                path.unlink(missing_ok=True)

    def _check(self, round_: Round) -> None:
        if round_ < self.round:
            raise Rejected(
                f"The other node is in round {round_}, but this node is in round {self.round}.",
                code=ErrorCode.STALE_ROUND,
            )

    def _give(self, connection: PeerConnection, request: PullSlot) -> None:
        found = None if self._holdings is None else self._holdings.pin(request.shard, request.attempt)
        if found is None:
            raise Rejected(
                f"This node does not hold shard {request.shard} of that save any more.", code=ErrorCode.NOT_HERE
            )
        pinned, about = found
        try:
            send_slot(connection, pinned, about, self.round)
        finally:
            release(pinned)

    def _take(self, connection: PeerConnection, header: SlotHeader) -> None:
        if self._holdings is None:
            raise Rejected("This node has not joined a round yet.", code=ErrorCode.NOT_YET)
        geometry = geometry_of(header)
        record, sums = read_transfer(header.record, header.sums, geometry)
        geometry = Geometry(num_slots=NUM_COPIES, meta_bytes=geometry.meta_bytes, data_bytes=geometry.data_bytes)
        home, path = self._holdings.home, copy_path(self._holdings.home, header.shard, header.sequence)
        with self._taking:
            if header.shard in self._in_work:
                raise Rejected(f"Another copy of shard {header.shard} is arriving already.", code=ErrorCode.BUSY)
            slot = self._choose_slot(header, record, path)
            self._in_work.add(header.shard)
        try:
            make_private(home.parent)
            make_private(home)
            with ArrivingSlot(path, self._owner(header.shard), header.sequence, geometry, slot) as arriving:
                connection.send(Accepted())
                arriving.fill(record, sums, connection.receive_into)
                arriving.complete(record, sums)
            remove_copies(home, header.shard, but=path)
        finally:
            self._in_work.discard(header.shard)
        self._on_taken()
        connection.send(Accepted())

    def _choose_slot(self, header: SlotHeader, record: SlotRecord, path: Path) -> int:
        """The one that does not hold the newest copy. Raises Rejected when the copy is not newer than what is here."""
        assert self._holdings is not None
        newest = self._holdings.newest_copy(header.shard)
        if newest is None:
            return 0
        if (record.round, record.generation) <= (newest.round, newest.generation):
            raise Rejected(
                f"This node already holds generation {newest.generation} of round {newest.round} of shard "
                f"{header.shard}, so generation {record.generation} of round {record.round} is not needed.",
                code=ErrorCode.STALE_GENERATION,
            )
        if record.generation <= newest.generation:
            remove_copies(
                self._holdings.home, header.shard
            )  # the node began anew: its numbers mean nothing beside the old ones
            return 0
        return 1 - newest.slot if newest.path == str(path) and newest.slot < NUM_COPIES else 0

    def _owner(self, shard: int) -> Owner:
        return Owner(job=self._job, launch="copy", node_rank=-1, global_rank=shard, local_rank=-1, pid=os.getpid())


class _Images:
    """What one peer reads pieces of: one image at a time, pinned until it wants another."""

    def __init__(self, store: ReplicaStore) -> None:
        self._store = store
        self._key = (-1, "")
        self._pinned: PinnedSlot | None = None
        self._image: Image | None = None

    def give(self, connection: PeerConnection, request: PullPiece) -> None:
        if (request.shard, request.attempt) != self._key:
            self._open(request)
        assert self._image is not None, "opened above"
        begin, end = request.start, request.start + request.length
        if not 0 <= begin <= end <= self._image.num_bytes or request.length > MOST_PULLED_BYTES:
            raise Rejected(f"The image has {self._image.num_bytes} bytes.", code=ErrorCode.MALFORMED)
        send_piece(connection, b"".join(self._image.read(begin, end)))

    def close(self) -> None:
        if self._image is not None:
            self._image.close()
        if self._pinned is not None:
            release(self._pinned)
        self._image, self._pinned, self._key = None, None, (-1, "")

    def _open(self, request: PullPiece) -> None:
        self.close()
        holdings = self._store.holdings
        found = None if holdings is None else holdings.pin(request.shard, request.attempt)
        if found is None:
            raise Rejected(
                f"This node does not hold shard {request.shard} of that save any more.", code=ErrorCode.NOT_HERE
            )
        self._pinned, about = found
        self._image = Image(self._pinned, about)
        self._key = (request.shard, request.attempt)


def geometry_of(header: SlotHeader) -> Geometry:
    return Geometry(num_slots=header.num_slots, meta_bytes=header.meta_bytes, data_bytes=header.data_bytes)


def header_of(pinned: PinnedSlot, request: SaveRequest, round_: Round) -> SlotHeader:
    sums = pinned.sums()
    if sums is None:
        raise Rejected("The snapshot has no checksums yet.", code=ErrorCode.NOT_YET)
    geometry = pinned.segment.geometry
    return SlotHeader(
        round=round_,
        shard=request.shard,
        attempt=request.attempt,
        num_shards=request.num_shards,
        sequence=pinned.segment.prelude.sequence,
        num_slots=geometry.num_slots,
        meta_bytes=geometry.meta_bytes,
        data_bytes=geometry.data_bytes,
        slot=pinned.slot,
        record=encode_record(pinned.record),
        sums=encode_sums(pinned.record.generation, sums),
    )


def send_slot(connection: PeerConnection, pinned: PinnedSlot, request: SaveRequest, round_: Round) -> None:
    """Header, metadata, data: the answer to a pull."""
    connection.send(header_of(pinned, request, round_))
    connection.await_consent()
    with meta_of(pinned) as meta:
        connection.send_bytes(meta)
    with pinned.data as data:
        connection.send_bytes(data)


def meta_of(pinned: PinnedSlot) -> memoryview:
    start = pinned.segment.geometry.meta_at(pinned.slot)
    return pinned.segment.view[start : start + pinned.record.meta_length]
