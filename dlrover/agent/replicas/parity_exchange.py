"""
What a member of a parity group does: gives the pieces of its image to those that hold the parities, and computes the image of a lost member.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from dlrover.agent.replicas.editions import Edition, Rows
from dlrover.agent.replicas.parity_store import ParityStore
from dlrover.agent.replicas.wire import PeerConnection, RateLimit
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import DLRoverError, Rejected, Unavailable
from dlrover.protocol.messages.identity import Round
from dlrover.protocol.messages.peers import Accepted, AwaitParity, Peer, Piece, PieceHeader, PullPiece
from dlrover.snapshot.image import Image
from dlrover.snapshot.memory.checksum import Corrupt, algorithm_of, best_algorithm, checksum_function, joint_checksum
from dlrover.snapshot.memory.room import find_room
from dlrover.snapshot.memory.segment import PinnedSlot
from dlrover.snapshot.parity import Add, holders_of, piece_range, rebuild, stripes_of
from dlrover.snapshot.storage.persist import SaveRequest

log = logging.getLogger("dlrover.agent")

PULL_BYTES = 16 * 1024 * 1024
_NUM_TRIES = 3
_PAUSE = 0.2
"""Seconds between two tries, roughly."""

Connect = Callable[[str, float], PeerConnection]


class ParityGroup(Struct, frozen=True):
    members: tuple[Peer, ...]
    position: int
    """Our own."""
    num_parity: int

    @property
    def num_data(self) -> int:
        return len(self.members) - self.num_parity


def give_pieces(
    pinned: PinnedSlot,
    request: SaveRequest,
    lane: int,
    group: ParityGroup,
    round_: Round,
    *,
    connect: Connect,
    deadline: float,
    limit: RateLimit | None = None,
    pause: Callable[[], None] | None = None,
) -> None:
    """Raises Unavailable and Rejected; the code `superseded` when the others have gone on to a newer save."""
    image = Image(pinned, request)
    lines = ParityConnections(connect, deadline)
    try:
        for each in stripes_of(group.position, len(group.members), group.num_parity):
            begin, end = piece_range(image.num_bytes, group.num_data, each.piece)
            parts = list(image.read(begin, end))
            algorithm = best_algorithm()
            crc = joint_checksum(parts, algorithm)
            for row, holder in enumerate(each.holders):
                header = PieceHeader(
                    round=round_,
                    attempt=request.attempt,
                    step=request.step,
                    saved_in=pinned.record.round,
                    num_shards=request.num_shards,
                    lane=lane,
                    stripe=each.stripe,
                    row=row,
                    column=each.piece,
                    num_data=group.num_data,
                    shard=request.shard,
                    image_bytes=image.num_bytes,
                    length=end - begin,
                    crc=crc,
                    algorithm=algorithm,
                )
                address = group.members[holder].address
                lines.insist(address, functools.partial(_send_piece, header, parts, limit, pause))
    finally:
        lines.close()
        image.close()


def await_group(
    request: SaveRequest,
    saved_in: int,
    lane: int,
    group: ParityGroup,
    round_: Round,
    *,
    connect: Connect,
    store: ParityStore,
    deadline: float,
    patience: float,
) -> None:
    """Until the whole group has given its pieces: from then on a loss can be made good. Raises as `give_pieces` does."""
    lines = ParityConnections(connect, deadline)
    places = [
        (holder, stripe, row)
        for stripe in range(len(group.members))
        for row, holder in enumerate(holders_of(stripe, len(group.members), group.num_parity))
    ]
    try:
        for holder, stripe, row in places:
            question = AwaitParity(
                round=round_,
                attempt=request.attempt,
                lane=lane,
                stripe=stripe,
                row=row,
                saved_in=saved_in,
                step=request.step,
                patience=patience,
            )
            own = store if holder == group.position else None
            _await_parity(question, group.members[holder].address, own, lines, deadline)
    finally:
        lines.close()


def compute_image(
    edition: Edition, shard: int, round_: Round, home: Path, *, connect: Connect, add: Add, deadline: float
) -> mmap.mmap:
    """The image of a lost shard, in memory of its own that goes with the mapping. Raises Unavailable, Rejected, Corrupt."""
    stripes = edition.stripes_of(shard)
    if not stripes:
        raise Unavailable(f"too few parity pieces are left to compute shard {shard} of step {edition.step}")
    image_bytes = next(size for number, size in stripes[0][0][1].columns if number == shard)
    find_room(image_bytes, home)
    path = home / f".image-{shard:05d}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()
        os.posix_fallocate(descriptor, 0, image_bytes)
        image = mmap.mmap(descriptor, image_bytes)
    finally:
        os.close(descriptor)
    lines = ParityConnections(connect, deadline)
    sources = _Sources(edition, round_, lines)
    try:
        with ThreadPoolExecutor(len(stripes[0][0][1].columns), thread_name_prefix="dlrover-pull") as pool:
            for rows in stripes:
                _compute_piece(image, edition, shard, rows, sources, add, pool)
    finally:
        lines.close()
    return image


class ParityConnections:
    """Connections of one piece of work, opened once to each peer."""

    def __init__(self, connect: Connect, deadline: float) -> None:
        self._connect, self._deadline = connect, deadline
        self._open: dict[str, PeerConnection] = {}

    def to(self, address: str) -> PeerConnection:
        if address not in self._open:
            self._open[address] = self._connect(address, self._deadline)
        return self._open[address]

    def drop(self, address: str) -> None:
        connection = self._open.pop(address, None)
        if connection is not None:
            connection.close()

    def insist(self, address: str, work: Callable[[PeerConnection], None]) -> None:
        """A peer that is too busy to answer may do so the next time; one that is gone says so at once."""
        for tries_left in reversed(range(_NUM_TRIES)):
            try:
                work(self.to(address))
                return
            except Unavailable:
                self.drop(address)
                if not tries_left:
                    raise
                time.sleep(_PAUSE * random.uniform(0.5, 1.5))

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()


class _Sources:
    """Each node that has a part of what is to be computed."""

    def __init__(self, edition: Edition, round_: Round, lines: ParityConnections) -> None:
        self._edition, self._round, self._lines = edition, round_, lines
        self._locks: dict[str, threading.Lock] = {}
        """One question at a time to each."""

    def column(self, shard: int, start: int, end: int) -> bytearray:
        """A range of the image of a shard that a node has."""
        if start >= end:
            return bytearray()
        trouble: DLRoverError = Unavailable(f"no node has shard {shard}")
        for address in self._edition.holders[shard]:
            try:
                return self._pull(
                    address,
                    PullPiece(
                        round=self._round, attempt=self._edition.attempt, shard=shard, start=start, length=end - start
                    ),
                )
            except DLRoverError as error:
                trouble = error
        raise trouble

    def parity(self, rows: Rows, row: int, start: int, length: int) -> bytearray:
        address, held = rows[row]
        return self._pull(
            address,
            PullPiece(
                round=self._round,
                attempt=held.attempt,
                made_in=held.made_in,
                lane=held.lane,
                stripe=held.stripe,
                row=held.row,
                start=start,
                length=length,
            ),
        )

    def _pull(self, address: str, request: PullPiece) -> bytearray:
        with self._locks.setdefault(address, threading.Lock()):
            try:
                connection = self._lines.to(address)
                connection.send(request)
                piece = connection.receive(Piece)
                if piece.length > request.length:
                    raise Rejected("the other node sent more than was requested", code=ErrorCode.MALFORMED)
                data = bytearray(piece.length)
                connection.receive_into(memoryview(data))
            except Unavailable:
                self._lines.drop(address)
                raise
        if checksum_function(algorithm_of(piece.algorithm))(memoryview(data)) != piece.crc:
            raise Corrupt("A piece is damaged: it arrived with a different checksum.")
        return data


def _compute_piece(
    image: mmap.mmap, edition: Edition, shard: int, rows: Rows, sources: _Sources, add: Add, pool: ThreadPoolExecutor
) -> None:
    """Block by block, from all sources at a time."""
    columns, num_data = rows[0][1].columns, rows[0][1].num_data
    wanted = next(number for number, (each, _) in enumerate(columns) if each == shard)
    missing = edition.missing(rows)
    begin, end = piece_range(columns[wanted][1], num_data, wanted)
    for start in range(0, end - begin, PULL_BYTES):
        length = min(PULL_BYTES, end - begin - start)
        pulled = {}
        for number, (other, size) in enumerate(columns):
            if number not in missing:
                first, last = piece_range(size, num_data, number)
                ends = min(first + start, last), min(first + start + length, last)
                pulled[number] = pool.submit(sources.column, other, *ends)
        rest = {
            rows[index][1].row: pool.submit(sources.parity, rows, index, start, length) for index in range(len(missing))
        }
        known = {number: future.result() for number, future in pulled.items()}
        parities = {row: future.result() for row, future in rest.items()}
        block = rebuild(length, known, parities, missing, wanted, add=add)
        image[begin + start : begin + start + length] = bytes(block)


def _send_piece(
    header: PieceHeader,
    parts: list[memoryview],
    limit: RateLimit | None,
    pause: Callable[[], None] | None,
    connection: PeerConnection,
) -> None:
    try:
        connection.send(header)
        connection.await_consent()
    except Rejected as error:
        if error.code == ErrorCode.HAVE_IT:
            return
        if error.code == ErrorCode.STALE_GENERATION:
            raise Rejected(str(error), code=ErrorCode.SUPERSEDED) from error
        raise
    for part in parts:
        connection.send_bytes(part, limit=limit, is_paused=pause)
    connection.await_consent()


def _ask_for_parity(question: AwaitParity, connection: PeerConnection) -> None:
    connection.send(question)
    connection.receive(Accepted)


def _await_parity(
    question: AwaitParity, address: str, own: ParityStore | None, lines: ParityConnections, deadline: float
) -> None:
    """In short questions, so that a peer that hangs is noticed."""
    while True:
        try:
            if own is not None:
                own.wait_for(question)
            else:
                lines.insist(address, functools.partial(_ask_for_parity, question))
            return
        except Rejected as error:
            if error.code != ErrorCode.NOT_YET:
                raise
            if time.monotonic() >= deadline:
                raise Unavailable("the other members of the group did not protect this save in time") from error
