"""HTTP/2 written by hand: callers that send what no gRPC library would, and as fast as the other side allows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from dlrover.protocol.rpc.transport import SERVICE, call_metadata
from tests.floods import STRANGER

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
FIRST_WINDOW = 65_535
INITIAL_WINDOW_SIZE = 4
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_PIECE = 16_384


def frame(kind: int, stream: int, payload: bytes, *, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def message(data: bytes, *, is_compressed: bool = False) -> bytes:
    """As gRPC puts it into a body."""
    return bytes((is_compressed,)) + len(data).to_bytes(4, "big") + data


def call(stream: int, address: str, method: str, token: str) -> bytes:
    """What opens it."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{SERVICE}/{method}"),
        (":authority", address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("grpc-encoding", "gzip"),  # of messages that say that they are compressed
    ]
    for name, value in call_metadata(token):
        headers.append((name, base64.b64encode(value).decode() if isinstance(value, bytes) else value))
    block = b"".join(
        b"\x00" + b"".join(bytes((len(word),)) + word.encode() for word in header) for header in headers
    )  # none of them indexed, all shorter than 127 bytes
    return frame(HEADERS, stream, block, flags=_END_HEADERS)


@dataclass
class Call:
    body: bytes
    granted: int
    """Bytes that the other side was ever ready to take of it."""
    num_sent: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Pourer:
    """A connection whose calls send as much of their bodies as the other side takes."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.calls: dict[int, Call] = {}
        self._address = address
        self._reader, self._writer = reader, writer
        self._room = self._first = FIRST_WINDOW
        writer.write(PREFACE + NO_SETTINGS)

    def call(self, method: str, token: str, body: bytes) -> Call:
        stream = 2 * len(self.calls) + 1
        self._writer.write(call(stream, self._address, method, token))
        self.calls[stream] = Call(body, self._first)
        return self.calls[stream]

    async def run(self) -> None:
        """Until the other side closes the connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                self._pour()
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(head[3], head[4], int.from_bytes(head[5:], "big"), payload)

    def _pour(self) -> None:
        for stream, each in self.calls.items():
            while not each.over.is_set():
                size = min(self._room, each.granted - each.num_sent, len(each.body) - each.num_sent, _PIECE)
                if size <= 0:
                    break
                self._writer.write(frame(DATA, stream, each.body[each.num_sent : each.num_sent + size]))
                each.num_sent += size
                self._room -= size

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind in (SETTINGS, PING) and not flags & _ACK:
            self._writer.write(frame(kind, 0, payload if kind == PING else b"", flags=_ACK))
        if kind == SETTINGS:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == INITIAL_WINDOW_SIZE:
                    self._widen(int.from_bytes(payload[at + 2 : at + 6], "big"))
        elif kind == WINDOW_UPDATE and stream:
            self.calls[stream].granted += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE:
            self._room += int.from_bytes(payload, "big")
        elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & _END_STREAM):
            self.calls[stream].over.set()

    def _widen(self, first: int) -> None:
        for each in self.calls.values():
            each.granted += first - self._first
        self._first = first


@contextlib.asynccontextmanager
async def pouring(address: str) -> AsyncIterator[Pourer]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(STRANGER, 0))
    try:
        yield Pourer(address, reader, writer)
    finally:
        writer.transport.abort()
