"""
A stranger without the job's token who floods one port of this machine, for `strangers.py` and for tests.

    python benchmarks/floods.py KIND 127.0.0.1:PORT --seconds 10 [--source 127.0.0.2] [--connections 4]

The flood is bounded in time and in connections and only ever goes to the loopback. It ends at once when its standard input ends, so it never
outlives who started it. It prints a line when it has its first connection, and JSON at its end: how many connections and streams it has opened, and how
many were closed on it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from virtual_agents import (
    DATA,
    FIRST_WINDOW_BYTES,
    FLAG_ACK,
    FLAG_END_HEADERS,
    FLAG_END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    header_block,
)

from dlrover.protocol.rpc.transport import ASK_METHOD, SERVICE

BATCH = 256
"""Streams that one write opens."""
BODY = b"\0" + (4 * 1024 * 1024).to_bytes(4, "big") + bytes(4 * 1024 * 1024)
"""A message of 4 MiB, the most that a master reads."""
PIECE = 16_384
TRICKLE_PERIOD = 0.5
"""Seconds between two bytes of a slow one."""
RETURN_PERIOD = 0.02
"""Seconds without an answer after which a stranger comes again."""
MAX_CONNECTIONS = 8_000
REQUEST_HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


@dataclass
class Count:
    connections: int = 0
    streams: int = 0
    body_bytes: int = 0
    closed: int = 0
    """Connections that the other side has ended."""
    refused: int = 0
    """Connections that never came to be."""


@dataclass
class Flood:
    kind: str
    host: str
    port: int
    source: str
    ends_at: float
    count: Count = field(default_factory=Count)

    async def connection(self) -> None:
        """One place of the flood: a connection after another until the end."""
        loop = asyncio.get_running_loop()
        while time.monotonic() < self.ends_at:
            try:
                async with asyncio.timeout_at(loop.time() + self.ends_at - time.monotonic()):
                    _, stranger = await loop.create_connection(
                        lambda: KINDS[self.kind](self), self.host, self.port, local_addr=(self.source, 0)
                    )
                    self.count.connections += 1
                    if self.count.connections == 1:
                        print("flooding", flush=True)
                    try:
                        await stranger.run()
                    finally:
                        stranger.transport.abort()
                self.count.closed += 1
            except TimeoutError:
                return
            except OSError:
                self.count.refused += 1
                await asyncio.sleep(0.01)


class Stranger(asyncio.Protocol):
    """Says nothing, and stays."""

    transport: asyncio.Transport

    def __init__(self, flood: Flood) -> None:
        self.flood = flood
        self.closed = asyncio.Event()
        self.has_room = asyncio.Event()
        self.has_room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self.has_room.set()

    def pause_writing(self) -> None:
        self.has_room.clear()

    def resume_writing(self) -> None:
        self.has_room.set()

    async def run(self) -> None:
        """Until the other side ends the connection, or we are cancelled."""
        await self.closed.wait()


class Settled(Stranger):
    """Shakes hands as HTTP/2 does, answers pings, and asks nothing."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.received = bytearray()
        self.transport.write(PREFACE + frame(SETTINGS, 0, 0, b""))

    def data_received(self, data: bytes) -> None:
        received = self.received
        received += data
        while len(received) >= 9 and len(received) >= 9 + int.from_bytes(received[:3], "big"):
            length = int.from_bytes(received[:3], "big")
            kind, flags, stream = received[3], received[4], int.from_bytes(received[5:9], "big")
            payload = bytes(received[9 : 9 + length])
            del received[: 9 + length]
            if kind in (PING, SETTINGS) and not flags & FLAG_ACK:
                self.transport.write(frame(kind, FLAG_ACK, 0, payload if kind == PING else b""))
            self.take(kind, flags, stream, payload)

    def take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """One frame of the server."""

    def head(self, stream: int) -> bytes:
        self.flood.count.streams += 1
        return frame(HEADERS, FLAG_END_HEADERS, stream, HEAD)


class Trickled(Stranger):
    """A handshake of HTTP/2, byte by byte."""

    async def run(self) -> None:
        for byte in PREFACE * 1000:
            self.transport.write(bytes((byte,)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TRICKLE_PERIOD):
                    await self.closed.wait()
                    return


class HalfRequest(Stranger):
    """Half the head of a request of HTTP/1.1, then a byte now and then."""

    async def run(self) -> None:
        self.transport.write(REQUEST_HEAD)
        while not self.closed.is_set():
            self.transport.write(b"x")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TRICKLE_PERIOD):
                    await self.closed.wait()


class Opener(Settled):
    """Opens streams as fast as it can."""

    tail = staticmethod(lambda stream: b"")

    async def run(self) -> None:
        stream = 1
        while not self.closed.is_set():
            batch = bytearray()  # a few hundred streams in one write
            for _ in range(BATCH):
                batch += self.head(stream) + self.tail(stream)
                stream += 2
            if not self.transport.is_closing():
                self.transport.write(batch)
            await asyncio.sleep(0)  # for the answers
            await self.has_room.wait()


class Resetter(Opener):
    """Opens streams and resets each at once."""

    tail = staticmethod(lambda stream: frame(RST_STREAM, 0, stream, (8).to_bytes(4, "big")))


class HalfBodies(Settled):
    """Questions whose bodies of 4 MiB never end: of each, as much is sent as the other side takes but for the last byte."""

    num_streams = 16

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.window = FIRST_WINDOW_BYTES
        self.first_window = FIRST_WINDOW_BYTES
        self.windows: dict[int, int] = {}  # of the streams, by number
        self.num_sent: dict[int, int] = {}
        self.next = 1
        super().connection_made(transport)
        for _ in range(self.num_streams):
            self.open()

    def open(self) -> None:
        stream, self.next = self.next, self.next + 2
        self.transport.write(self.head(stream))
        self.windows[stream] = self.first_window
        self.num_sent[stream] = 0

    def send(self) -> None:
        if self.transport.is_closing():
            return
        for stream, window in self.windows.items():
            while (size := min(self.window, window, len(BODY) - 1 - self.num_sent[stream], PIECE)) > 0:
                begin = self.num_sent[stream]
                self.transport.write(frame(DATA, 0, stream, BODY[begin : begin + size]))
                self.flood.count.body_bytes += size
                self.num_sent[stream] += size
                self.window -= size
                window -= size
            self.windows[stream] = window

    def take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == INITIAL_WINDOW_SIZE:
                    value = int.from_bytes(payload[at + 2 : at + 6], "big")
                    for each in self.windows:
                        self.windows[each] += value - self.first_window
                    self.first_window = value
        elif kind == WINDOW_UPDATE and not stream:
            self.window += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE and stream in self.windows:
            self.windows[stream] += int.from_bytes(payload, "big")
        elif (kind == RST_STREAM or flags & FLAG_END_STREAM) and self.windows.pop(stream, None) is not None:
            self.open()
        self.send()


class Returning(HalfBodies):
    """The same, and goes as soon as a question is not answered, to come again at once."""

    async def run(self) -> None:
        num_streams = -1
        while num_streams != self.next and not self.closed.is_set():
            num_streams = self.next
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETURN_PERIOD):
                    await self.closed.wait()


KINDS: dict[str, Callable[[Flood], Stranger]] = {
    "reset": Resetter,
    "open": Opener,
    "bodies": HalfBodies,
    "returning": Returning,
    "idle": Stranger,
    "settled": Settled,
    "handshakes": Trickled,
    "requests": HalfRequest,
}
USUAL_CONNECTIONS = {
    "reset": 1,
    "open": 1,
    "bodies": 10,
    "returning": 10,
    "idle": 4_000,
    "settled": 4_000,
    "handshakes": 1_000,
    "requests": 300,
}
HEAD = header_block(
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{SERVICE}/{ASK_METHOD}"),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
)


async def flood(kind: str, address: str, *, seconds: float, source: str, connections: int) -> Count:
    host, _, port = address.rpartition(":")
    assert ipaddress.ip_address(host).is_loopback, f"{host}: floods stay on this machine"
    assert ipaddress.ip_address(source).is_loopback, f"{source}: floods stay on this machine"
    flooding = Flood(kind, host, int(port), source, time.monotonic() + seconds)
    places = [asyncio.ensure_future(flooding.connection()) for _ in range(min(connections, MAX_CONNECTIONS))]
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    with contextlib.suppress(PermissionError):  # a file, as in a shell's background: nobody can end it early
        loop.add_reader(sys.stdin, lambda: over.set() if not sys.stdin.buffer.read1(1) else None)
    ending = asyncio.ensure_future(over.wait())
    await asyncio.wait([ending, asyncio.ensure_future(asyncio.wait(places))], return_when=asyncio.FIRST_COMPLETED)
    for place in places:
        place.cancel()
    await asyncio.gather(*places, return_exceptions=True)
    return flooding.count


def main() -> None:
    parser = argparse.ArgumentParser(description="Flood a port of this machine as a stranger would.")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("address", help="HOST:PORT on the loopback")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--source", default="127.0.0.2", help="the stranger's own address")
    parser.add_argument("--connections", type=int, default=0, help="at a time; 0: as usual for the kind")
    options = parser.parse_args()
    count = asyncio.run(
        flood(
            options.kind,
            options.address,
            seconds=min(options.seconds, 60.0),
            source=options.source,
            connections=options.connections or USUAL_CONNECTIONS[options.kind],
        )
    )
    print(json.dumps(asdict(count)), flush=True)


if __name__ == "__main__":
    main()
