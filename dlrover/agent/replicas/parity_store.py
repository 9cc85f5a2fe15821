"""
The parities that this node holds for its group.

Pieces of the members' images arrive one by one and are added to the parity of their stripe; it counts when all columns are in. Until all
members have seen that the whole group has got so far, the parity of the save before stays: a loss in between is made good from that one.
So there are two parities of each kind at most, the newest whole one and the one that grows.

A piece is added only when it is here and verified, because a sum cannot be taken back.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from dlrover.agent.replicas.wire import PeerConnection
from dlrover.host.ownership import make_private
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.peers import (
    LARGEST_GROUP,
    Accepted,
    AwaitParity,
    HeldParity,
    Piece,
    PieceHeader,
    PullPiece,
)
from dlrover.snapshot.memory.checksum import algorithm_of, best_algorithm, checksum_function
from dlrover.snapshot.memory.room import find_room
from dlrover.snapshot.parity import Add, coefficient, piece_range, table

log = logging.getLogger("dlrover.agent")

HEAD_BYTES = 4096
_BLOCK_BYTES = 256 * 1024
MOST_PULLED_BYTES = 32 * 1024 * 1024
"""In one answer."""
_MOST_LANES = 4096
_NAME = re.compile(r"parity-(\d+)-(\d+)-(\d+)\.(\d+)\.[0-9A-Za-z_-]+\.whole")

Place = tuple[int, int, int]
"""Lane, stripe and row."""


class ParityFile:
    """The parity of one stripe of one save, whole or growing."""

    def __init__(self, path: Path, held: HeldParity) -> None:
        self.path, self.held = path, held
        self.arrived: dict[int, tuple[int, int]] = {}
        self.lock = threading.Lock()
        self.length = 0

    @property
    def age(self) -> tuple[int, int, int]:
        return self.held.made_in, self.held.round, self.held.step


class ParityStore:
    """Used by the threads of the peer server."""

    def __init__(self, add: Callable[[], Add], on_taken: Callable[[], None] | None = None) -> None:
        """`add` gives the arithmetic, when it is needed for the first time."""
        self._add = add
        self._on_taken = on_taken or (lambda: None)
        self._home: Path | None = None
        self._growing: dict[Place, ParityFile] = {}
        self._whole: dict[Place, list[ParityFile]] = {}
        """Oldest first."""
        self._changed = threading.Condition()

    def enter(self, home: Path) -> None:
        if home == self._home:
            return
        with self._changed:
            self._home, self._growing, self._whole = home, {}, {}
            for path in home.glob("parity-*"):
                file = _read(path) if _NAME.fullmatch(path.name) else None
                if file is None:
                    path.unlink(missing_ok=True)  # of an agent that was killed while it grew
                else:
                    self._whole.setdefault(_place(file.held), []).append(file)
            for files in self._whole.values():
                files.sort(key=lambda file: file.age)

    def list(self) -> tuple[HeldParity, ...]:
        with self._changed:
            return tuple(file.held for files in self._whole.values() for file in files)

    def tidy(self, round_: int) -> None:
        with self._changed:
            for place, files in list(self._whole.items()):
                old = [file for file in files if file.held.made_in < round_]
                self._whole[place] = [file for file in files if file not in old]
                for file in old:
                    file.path.unlink(missing_ok=True)

    def take(self, connection: PeerConnection, header: PieceHeader) -> None:
        _check(header)
        file = self._file_for(header)
        connection.send(Accepted())
        piece = bytearray(header.length)
        connection.receive_into(memoryview(piece))
        if checksum_function(algorithm_of(header.algorithm))(memoryview(piece)) != header.crc:
            raise Rejected("A piece is damaged: it arrived with a different checksum.", code=ErrorCode.CORRUPT)
        with file.lock:
            if header.column not in file.arrived:
                try:
                    self._grow(file, header, piece)
                except BaseException:
                    self._give_up(file)
                    raise
        self._publish(file)
        self._on_taken()
        connection.send(Accepted())

    def wait_for(self, request: AwaitParity) -> None:
        """Raises Rejected when the parity does not become whole in time."""
        place, ends_at = (request.lane, request.stripe, request.row), time.monotonic() + request.patience
        age = (int(request.round), request.saved_in, request.step)
        with self._changed:
            while not self._is_whole(place, request.attempt, request.round):
                growing = self._growing.get(place)
                newest = max((file.age for file in (*self._whole.get(place, ()), growing) if file), default=age)
                if newest > age:
                    raise Rejected("The group already protects a newer save.", code=ErrorCode.SUPERSEDED)
                left = ends_at - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise Rejected("The parity is not complete yet.", code=ErrorCode.NOT_YET)

    def give(self, connection: PeerConnection, request: PullPiece) -> None:
        place = (request.lane, request.stripe, request.row)
        with self._changed:
            found = [
                file
                for file in self._whole.get(place, ())
                if (file.held.attempt, file.held.made_in) == (request.attempt, request.made_in)
            ]
        if not found or not 0 <= request.length <= MOST_PULLED_BYTES or request.start < 0:
            raise Rejected("This node does not hold that parity any more.", code=ErrorCode.NOT_HERE)
        descriptor = os.open(found[0].path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, request.length, HEAD_BYTES + request.start)
        finally:
            os.close(descriptor)
        send_piece(connection, data)

    def _is_whole(self, place: Place, attempt: str, made_in: int) -> bool:
        files = self._whole.get(place, ())
        return any((file.held.attempt, file.held.made_in) == (attempt, made_in) for file in files)

    def _file_for(self, header: PieceHeader) -> ParityFile:
        """The one that grows, begun anew for a newer save. Raises Rejected for what is old or here already."""
        if self._home is None:
            raise Rejected("This node has not joined a round yet.", code=ErrorCode.NOT_YET)
        held = _held_of(header)
        place = _place(held)
        file = ParityFile(self._home / f"{_stem(held)}.growing", held)
        with self._changed:
            growing, whole = self._growing.get(place), self._whole.get(place, [])
            newest = max([each.age for each in (*whole, *((growing,) if growing else ()))], default=(-1, -1, -1))
            if any((each.held.attempt, each.age) == (held.attempt, file.age) for each in whole):
                raise Rejected("This node already holds all of that parity.", code=ErrorCode.HAVE_IT)
            if growing is not None and (growing.held.attempt, growing.age) == (held.attempt, file.age):
                if header.column in growing.arrived:
                    raise Rejected("This node already holds that piece.", code=ErrorCode.HAVE_IT)
                if growing.held.num_data != held.num_data:
                    raise Rejected("The members of the group use different group sizes.", code=ErrorCode.MALFORMED)
                return growing
            if file.age <= newest:
                raise Rejected("This node already protects a newer save.", code=ErrorCode.STALE_GENERATION)
            if growing is not None:
                growing.path.unlink(missing_ok=True)
            for old in whole[:-1]:
                old.path.unlink(missing_ok=True)
            self._whole[place] = whole[-1:]
            self._growing[place] = file
            self._changed.notify_all()
            make_private(self._home.parent)
            make_private(self._home)
            file.path.unlink(missing_ok=True)
            return file

    def _grow(self, file: ParityFile, header: PieceHeader, piece: bytearray) -> None:
        """What is added to nothing is written: pages that were never touched need not be cleared first."""
        add, factor = self._add(), coefficient(header.row, header.column)
        descriptor = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        common = min(file.length, len(piece))
        try:
            if common:
                with mmap.mmap(descriptor, HEAD_BYTES + common) as mapping, memoryview(mapping) as view:
                    add(view[HEAD_BYTES:], memoryview(piece)[:common], factor)
            if len(piece) > common:
                find_room(len(piece) - common, file.path.parent)
                _append(descriptor, memoryview(piece)[common:], factor, HEAD_BYTES + common)
                file.length = len(piece)
        finally:
            os.close(descriptor)
        file.arrived[header.column] = (header.shard, header.image_bytes)

    def _give_up(self, file: ParityFile) -> None:
        """Half a piece cannot be taken out again."""
        with self._changed:
            if self._growing.get(_place(file.held)) is file:
                del self._growing[_place(file.held)]
            file.path.unlink(missing_ok=True)

    def _publish(self, file: ParityFile) -> None:
        """When the last column is in, the parity counts."""
        with self._changed:
            place = _place(file.held)
            if len(file.arrived) < file.held.num_data or self._growing.get(place) is not file:
                return
            columns = tuple(file.arrived[column] for column in range(file.held.num_data))
            file.held = replace(file.held, columns=columns)
            body = msgspec.msgpack.encode(file.held)
            head = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
            assert len(head) <= HEAD_BYTES, f"a head of {len(head)} bytes"
            descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, head, 0)
            finally:
                os.close(descriptor)
            final = file.path.with_suffix(".whole")
            os.rename(file.path, final)
            file.path = final
            del self._growing[place]
            self._whole.setdefault(place, []).append(file)
            self._changed.notify_all()


def _append(descriptor: int, rest: memoryview, factor: int, offset: int) -> None:
    for start in range(0, rest.nbytes, _BLOCK_BYTES):
        block = rest[start : start + _BLOCK_BYTES]
        content = block if factor == 1 else bytes(block).translate(table(factor))
        done = 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done:], offset + start + done)


def send_piece(connection: PeerConnection, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    algorithm = best_algorithm()
    connection.send(Piece(length=view.nbytes, crc=checksum_function(algorithm)(view), algorithm=algorithm))
    connection.send_bytes(view)


def _check(header: PieceHeader) -> None:
    numbers = (header.row, header.stripe, header.column, header.num_data)
    is_sane = all(0 <= number < LARGEST_GROUP for number in numbers) and 0 <= header.lane < _MOST_LANES
    if not is_sane or header.column >= header.num_data or header.image_bytes < 1:
        raise Rejected("The piece names a group that cannot exist.", code=ErrorCode.MALFORMED)
    begin, end = piece_range(header.image_bytes, header.num_data, header.column)
    if header.length != end - begin or not re.fullmatch(r"[0-9A-Za-z_-]{1,100}", header.attempt):
        raise Rejected("The length of the piece does not fit its image.", code=ErrorCode.MALFORMED)


def _held_of(header: PieceHeader) -> HeldParity:
    return HeldParity(
        attempt=header.attempt,
        step=header.step,
        round=header.saved_in,
        num_shards=header.num_shards,
        made_in=header.round,
        lane=header.lane,
        stripe=header.stripe,
        row=header.row,
        num_data=header.num_data,
        columns=(),
    )


def _place(held: HeldParity) -> Place:
    return held.lane, held.stripe, held.row


def _stem(held: HeldParity) -> str:
    return f"parity-{held.lane:04d}-{held.stripe:03d}-{held.row:03d}.{held.made_in:06d}.{held.attempt}"


_DECODER = msgspec.msgpack.Decoder(HeldParity)


def _read(path: Path) -> ParityFile | None:
    """None: it cannot be used."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        length = int.from_bytes(head[:4], "little")
        body = head[8 : 8 + length]
        if zlib.crc32(body) != int.from_bytes(head[4:8], "little"):
            return None
        found = ParityFile(path, _DECODER.decode(body))
        found.length = path.stat().st_size - HEAD_BYTES
        return found
    except (OSError, msgspec.MsgspecError):
        return None
