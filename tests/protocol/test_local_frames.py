from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from dlrover.protocol.errors import Rejected
from dlrover.protocol.local_frames import (
    HEADER,
    FrameBuffer,
    pack,
    read_frame,
    receive_frame,
    send_frame,
)
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_frames_and_descriptors_arrive_together(pair: Pair) -> None:
    reader, writer = os.pipe()
    send_frame(pair[0], b"take this", [writer])
    send_frame(pair[0], b"")
    os.close(writer)
    first = receive_frame(pair[1])
    assert first is not None
    payload, (received,) = first
    assert payload == b"take this"
    assert not os.get_inheritable(received)
    os.write(received, b"x")
    os.close(received)
    assert os.read(reader, 2) == b"x"
    os.close(reader)
    assert receive_frame(pair[1]) == (b"", [])
    pair[0].close()
    assert receive_frame(pair[1]) is None


def test_a_frame_that_breaks_off_is_an_error(pair: Pair) -> None:
    pair[0].sendall(HEADER.pack(10) + b"half")
    pair[0].close()
    with pytest.raises(ConnectionResetError):
        receive_frame(pair[1])


def test_oversized_frames_are_refused_on_both_sides(pair: Pair) -> None:
    with pytest.raises(Rejected, match="longer than the limit"):
        pack(b"x" * (MAX_MESSAGE_BYTES + 1))
    pair[0].sendall(HEADER.pack(2**31))
    with pytest.raises(Rejected, match="A message of 2147483648 bytes"):
        receive_frame(pair[1])
    with pytest.raises(Rejected):
        FrameBuffer().feed(HEADER.pack(2**31))


def test_a_buffer_cuts_frames_wherever_the_bytes_are_split() -> None:
    stream = pack(b"one") + pack(b"") + pack(b"three")
    for size in (1, 2, 5, len(stream)):
        buffer = FrameBuffer()
        frames = [f for start in range(0, len(stream), size) for f in buffer.feed(stream[start : start + size])]
        assert frames == [b"one", b"", b"three"]


async def test_reading_frames_asynchronously() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(pack(b"one") + pack(b"")[:2])
    assert await read_frame(reader) == b"one"
    reader.feed_data(pack(b"")[2:] + HEADER.pack(5) + b"bro")
    assert await read_frame(reader) == b""
    reader.feed_eof()
    assert await read_frame(reader) is None
