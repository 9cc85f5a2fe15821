"""
Frames over unix sockets: how processes of one node talk to each other.

A frame is four bytes of length and a payload; descriptors travel with the first byte of a frame (SCM_RIGHTS). Written
by hand because the training process must not hold a gRPC channel (a forked DataLoader worker of it can hang), and
because the agent's first lines need it before anything larger than the standard library is imported: asyncio stays a
name for the type checker.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    import asyncio

HEADER = struct.Struct("!I")
MAX_DESCRIPTORS = 16


def pack(payload: bytes) -> bytes:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise Rejected(
            f"A message of {len(payload)} bytes is longer than the limit of {MAX_MESSAGE_BYTES}.", ErrorCode.TOO_LARGE
        )
    return HEADER.pack(len(payload)) + payload


class FrameBuffer:
    """Cuts a stream of bytes into frames, however the bytes arrive."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._data += data
        frames = []
        while len(self._data) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._data)
            check_length(length)
            if len(self._data) < HEADER.size + length:
                break
            frames.append(bytes(self._data[HEADER.size : HEADER.size + length]))
            del self._data[: HEADER.size + length]
        return frames


def check_length(length: int) -> None:
    if length > MAX_MESSAGE_BYTES:
        raise Rejected(
            f"A message of {length} bytes is longer than the limit of {MAX_MESSAGE_BYTES}.", ErrorCode.TOO_LARGE
        )


def send_some(sock: socket.socket, data: bytes | memoryview, descriptors: Sequence[int] = ()) -> int:
    """One `sendmsg`; how many bytes went. Descriptors belong to the first byte: give them only with the first piece."""
    if not descriptors:
        return sock.send(data)
    assert len(descriptors) <= MAX_DESCRIPTORS, f"{len(descriptors)} descriptors in one frame"
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    return sock.sendmsg([data], [rights])


def send_frame(sock: socket.socket, payload: bytes, descriptors: Sequence[int] = ()) -> None:
    """Blocks until the whole frame is in the socket."""
    data = memoryview(pack(payload))
    sent = send_some(sock, data, descriptors)
    while sent < len(data):
        sent += sock.send(data[sent:])


def receive_frame(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """Blocks for one frame and its descriptors (close-on-exec); None when the peer has hung up between two frames."""
    descriptors: list[int] = []
    try:
        header = _receive_exactly(sock, HEADER.size, descriptors)
        if header is None:
            return None
        (length,) = HEADER.unpack(header)
        check_length(length)
        payload = _receive_exactly(sock, length, descriptors)
        if payload is None:
            raise ConnectionResetError("the other side closed the connection in the middle of a message")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return payload, descriptors


def _receive_exactly(sock: socket.socket, size: int, descriptors: list[int]) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece, rights, _flags, _address = socket.recv_fds(sock, size - len(data), MAX_DESCRIPTORS)
        for descriptor in rights:
            os.set_inheritable(descriptor, False)
            descriptors.append(descriptor)
        if not piece:
            if data:
                raise ConnectionResetError("the other side closed the connection in the middle of a message")
            return None
        data += piece
    return bytes(data)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame, or None when the peer has hung up (in the middle of a frame as well: nothing usable came)."""
    header = await reader.read(HEADER.size)
    while 0 < len(header) < HEADER.size:
        more = await reader.read(HEADER.size - len(header))
        if not more:
            return None
        header += more
    if not header:
        return None
    (length,) = HEADER.unpack(header)
    check_length(length)
    payload = b""
    while len(payload) < length:
        piece = await reader.read(length - len(payload))
        if not piece:
            return None
        payload += piece
    return payload
