"""
Thousands of agents in one process: each with its own connection to the master, its own stream and its own numbering.

The master under test is the real one and cannot tell them from others. The clients are as light as they can be, because they share the
machine with it: HTTP/2 is spoken here by hand, only as much of it as one gRPC stream needs. With grpcio as the client, half of what is
measured would be the client; and we see every byte that crosses the wire.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dlrover.protocol.codec import decode_from_master, encode_frame
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.frames import Ack, Answer, Beat, FromAgent, Push, Refusal, Request
from dlrover.protocol.messages.job import (
    AgentCommand,
    Attach,
    Attached,
    Desired,
    Heartbeat,
    Incarnation,
    JobTerms,
    Join,
    JoinRendezvous,
    NodeId,
    NodeRank,
    Query,
    Reply,
    Round,
    Run,
    WorldSpec,
)
from dlrover.protocol.rpc.client import Backoff
from dlrover.protocol.rpc.transport import AGENT_METHOD, SERVICE, call_metadata

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8
FLAG_ACK = FLAG_END_STREAM = 0x1
FLAG_END_HEADERS = 0x4
INITIAL_WINDOW_SIZE = 0x4
FIRST_WINDOW_BYTES = 65_535
WIDE_WINDOW_BYTES = 2**31 - 1
"""What we allow the master to send: all it wants, so that we never have to say so again."""
STREAM = 1
_NOBODY = NodeId(-1)
_UNBORN = Incarnation(0)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def grpc_message(payload: bytes) -> bytes:
    return b"\0" + len(payload).to_bytes(4, "big") + payload


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    """HPACK without its table and without Huffman codes: each name and value as it is."""
    return b"".join(
        b"\0" + hpack_integer(len(name)) + name.encode() + hpack_integer(len(value)) + value.encode()
        for name, value in headers
    )


def hpack_integer(number: int) -> bytes:
    """With a prefix of seven bits, as lengths have it."""
    if number < 127:
        return bytes((number,))
    data = bytearray((127,))
    number -= 127
    while number >= 128:
        data.append(number % 128 + 128)
        number //= 128
    data.append(number)
    return bytes(data)


class Http2Stream(asyncio.Protocol):
    """One connection with one gRPC stream on it."""

    def __init__(self, opening: bytes, *, on_message: Callable[[bytes], None], on_closed: Callable[[], None]) -> None:
        self._opening = opening
        self._on_message = on_message
        self._on_closed = on_closed
        self._received = bytearray()
        self._message = bytearray()
        self._unsent = bytearray()
        self._windows = {0: FIRST_WINDOW_BYTES, STREAM: FIRST_WINDOW_BYTES}
        self._stream_window_setting = FIRST_WINDOW_BYTES
        self._transport: asyncio.Transport | None = None
        self._is_closed = False
        self.num_bytes_sent = 0
        self.num_bytes_received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        wide = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + WIDE_WINDOW_BYTES.to_bytes(4, "big")
        more = (WIDE_WINDOW_BYTES - FIRST_WINDOW_BYTES).to_bytes(4, "big")
        self._write(PREFACE + frame(SETTINGS, 0, 0, wide) + frame(WINDOW_UPDATE, 0, 0, more) + self._opening)

    def send(self, payload: bytes) -> None:
        self._unsent += grpc_message(payload)
        self._send_allowed()

    def data_received(self, data: bytes) -> None:
        self.num_bytes_received += len(data)
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= 9:
            length = int.from_bytes(received[begin : begin + 3], "big")
            if len(received) - begin < 9 + length:
                break
            kind, flags = received[begin + 3], received[begin + 4]
            stream = int.from_bytes(received[begin + 5 : begin + 9], "big")
            payload = bytes(received[begin + 9 : begin + 9 + length])
            begin += 9 + length
            self._take(kind, flags, stream, payload)
        del received[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_closed()

    def close(self) -> None:
        """By ourselves: nobody is told."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._message += payload
            while len(self._message) >= 5:
                length = int.from_bytes(self._message[1:5], "big")
                if len(self._message) < 5 + length:
                    break
                whole = bytes(self._message[5 : 5 + length])
                del self._message[: 5 + length]
                self._on_message(whole)
        elif kind == PING and not flags & FLAG_ACK:
            self._write(frame(PING, FLAG_ACK, 0, payload))
        elif kind == SETTINGS and not flags & FLAG_ACK:
            self._follow_settings(payload)
            self._write(frame(SETTINGS, FLAG_ACK, 0, b""))
        elif kind == WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")
            self._send_allowed()
        if kind in (RST_STREAM, GOAWAY) or (kind in (DATA, HEADERS) and flags & FLAG_END_STREAM):
            assert self._transport is not None
            self._transport.abort()  # leads to connection_lost

    def _follow_settings(self, payload: bytes) -> None:
        for begin in range(0, len(payload), 6):
            name = int.from_bytes(payload[begin : begin + 2], "big")
            if name == INITIAL_WINDOW_SIZE:
                value = int.from_bytes(payload[begin + 2 : begin + 6], "big")
                self._windows[STREAM] += value - self._stream_window_setting
                self._stream_window_setting = value

    def _send_allowed(self) -> None:
        size_bytes = min(len(self._unsent), *self._windows.values(), 16_384)
        while size_bytes > 0:
            self._write(frame(DATA, 0, STREAM, bytes(self._unsent[:size_bytes])))
            del self._unsent[:size_bytes]
            self._windows[0] -= size_bytes
            self._windows[STREAM] -= size_bytes
            size_bytes = min(len(self._unsent), *self._windows.values(), 16_384)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._is_closed:
            self.num_bytes_sent += len(data)
            self._transport.write(data)


def opening_headers(address: str, token: str) -> bytes:
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{SERVICE}/{AGENT_METHOD}"),
        (":authority", address),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    for name, value in call_metadata(token):
        text = base64.b64encode(value).decode().rstrip("=") if isinstance(value, bytes) else value
        headers.append((name, text))
    return frame(HEADERS, FLAG_END_HEADERS, STREAM, header_block(headers))


@dataclass(eq=False)
class VirtualAgent:
    """Attaches, joins when it is told to, acknowledges what it is told, and comes back when the master does."""

    address: str
    index: int
    terms: JobTerms
    token: str = ""
    local_world_size: int = 8
    node: NodeId = _NOBODY
    incarnation: Incarnation = _UNBORN
    desired: Desired | None = None
    is_attached: bool = False
    attached_at: float = 0.0
    runs_at: float = 0.0
    """When the newest wish to run came, by the monotonic clock; 0.0: none yet."""
    push_bytes: int = 0
    """Size of the newest message that carried a wish to run."""
    num_held: int = 0
    """How often the master said: later."""
    num_lost: int = 0
    """Connections that the master ended, or that failed."""
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever a level or an attachment came; for who waits to clear."""

    def __post_init__(self) -> None:
        self._stream: Http2Stream | None = None
        self._former_bytes = [0, 0]
        self._last_id = 0
        self._last_sequence = 0
        self._waiting: dict[int, tuple[Request, asyncio.Future[Reply]]] = {}
        self._unsettled: dict[int, None] = {}
        self._backoff = Backoff()
        self._retry: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.world: WorldSpec | None = None

    async def connect(self) -> None:
        """One attempt; the attach is on its way when it returns. Raises OSError."""
        self._host, _, port = self.address.rpartition(":")
        loop = asyncio.get_running_loop()
        stream = Http2Stream(
            opening_headers(self.address, self.token), on_message=self._on_message, on_closed=self._on_closed
        )
        await loop.create_connection(lambda: stream, self._host, int(port))
        self._stream = stream
        self._send(self._presentation())

    def join(self) -> asyncio.Future[Reply]:
        """As the newest wish says."""
        assert self.desired is not None, f"agent {self.index} has not attached"
        assert isinstance(self.desired.wish, Join), f"agent {self.index} shall not join: {self.desired}"
        number = self.desired.wish.round
        host = f"10.{self.index >> 16}.{self.index >> 8 & 255}.{self.index & 255}"
        command = JoinRendezvous(
            node=self.node,
            incarnation=self.incarnation,
            round=number,
            local_world_size=self.local_world_size,
            offer=f"{host}:{20_000 + number}",
        )
        return self.call(command)

    def call(self, body: AgentCommand | Query) -> asyncio.Future[Reply]:
        is_query = isinstance(body, Query)
        self._last_id += 1
        sequence = 0 if is_query else self._last_sequence + 1
        if not is_query:
            self._last_sequence = sequence
            self._unsettled[sequence] = None
        answered = 0 if is_query else next(iter(self._unsettled)) - 1
        request = Request(id=self._last_id, body=body, sequence=sequence, answered=answered)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = (request, answer)
        self._send(request)
        return answer

    def beat(self, step: int | None = None) -> None:
        self._send(Beat(Heartbeat(node=self.node, incarnation=self.incarnation, step=step)))

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._stream is not None:
            self._stream.close()

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Sent and received, over all its connections."""
        sent, received = self._former_bytes
        if self._stream is not None:
            sent += self._stream.num_bytes_sent
            received += self._stream.num_bytes_received
        return sent, received

    def _presentation(self) -> Request:
        is_running = self.world is not None
        return Request(
            id=0,
            body=Attach(
                launch=f"launch-{self.index}",
                host=f"10.{self.index >> 16}.{self.index >> 8 & 255}.{self.index & 255}",
                terms=self.terms,
                local_world_size=self.local_world_size,
                node_rank=NodeRank(self.index),
                incarnation=self.incarnation,
                running_round=self.world.round if self.world is not None else Round(0),
                life=f"life-{self.index}",
                master_epoch=0 if self.desired is None else self.desired.master_epoch,
                world=self.world if is_running else None,
            ),
        )

    def _send(self, parcel: FromAgent) -> None:
        assert self._stream is not None, "connect first"
        self._stream.send(encode_frame([parcel]))

    def _on_message(self, data: bytes) -> None:
        for parcel in decode_from_master(data):
            match parcel:
                case Answer(id=0, body=Attached() as attached):
                    self._accept(attached, len(data))
                case Answer(id=number, body=body):
                    self._settle(number).set_result(body)
                case Refusal(id=number, retry_after=None):
                    if number == 0:
                        raise AssertionError(f"agent {self.index} may not attach: {parcel.message}")
                    self._settle(number).set_exception(Rejected(parcel.message, code=parcel.code))
                case Refusal(id=number, retry_after=float() as pause):
                    self.num_held += 1
                    again = self._presentation() if number == 0 else self._waiting[number][0]
                    loop = asyncio.get_running_loop()
                    self._retry = loop.call_later(pause * random.uniform(1.0, 2.0), self._send, again)
                case Push(desired=desired):
                    self._obey(desired, len(data))

    def _accept(self, attached: Attached, size_bytes: int) -> None:
        self.node, self.incarnation = attached.node, attached.incarnation
        self.is_attached = True
        self.attached_at = time.monotonic()
        self._backoff.reset()
        self._obey(attached.desired, size_bytes)
        for request, _ in list(self._waiting.values()):
            self._send(request)

    def _obey(self, desired: Desired, size_bytes: int) -> None:
        self.desired = desired
        if isinstance(desired.wish, Run):
            self.runs_at = time.monotonic()
            self.push_bytes = size_bytes
            self.world = desired.wish.world
        self._send(Ack(desired.number))
        self.has_news.set()

    def _settle(self, number: int) -> asyncio.Future[Reply]:
        request, answer = self._waiting.pop(number)
        self._unsettled.pop(request.sequence, None)
        return answer

    def _on_closed(self) -> None:
        self.is_attached = False
        self.num_lost += 1
        if self._stream is not None:
            self._former_bytes[0] += self._stream.num_bytes_sent
            self._former_bytes[1] += self._stream.num_bytes_received
            self._stream = None
        if self._retry is not None:
            self._retry.cancel()
        self._retry = asyncio.get_running_loop().call_later(self._backoff.pause(), self._come_back)

    def _come_back(self) -> None:
        self._connecting = asyncio.ensure_future(self._try_to_come_back())

    async def _try_to_come_back(self) -> None:
        try:
            await self.connect()
        except OSError:
            self._retry = asyncio.get_running_loop().call_later(self._backoff.pause(), self._come_back)


async def connect_all(
    agents: Iterable[VirtualAgent], *, at_a_time: int = 128, speakers: int = 128, timeout: float = 300.0
) -> None:
    """Until each of them is attached. Not all connect in the same instant: the kernel's queue for new connections is short."""
    waiting = iter(agents)
    turn = asyncio.Semaphore(speakers)

    async def connect_some() -> None:
        for agent in waiting:
            async with turn:
                await agent.connect()
            while not agent.is_attached:
                agent.has_news.clear()
                await agent.has_news.wait()

    async with asyncio.timeout(timeout):
        await asyncio.gather(*(connect_some() for _ in range(at_a_time)))


async def all_run(agents: Iterable[VirtualAgent], *, timeout: float) -> float:
    """When the last of them had its place in the world of the newest round."""
    newest = 0.0
    async with asyncio.timeout(timeout):
        for agent in agents:
            while agent.desired is None or not isinstance(agent.desired.wish, Run):
                agent.has_news.clear()
                await agent.has_news.wait()
            newest = max(newest, agent.runs_at)
    return newest


async def join_all(agents: Iterable[VirtualAgent], *, at_a_time: int = 128, timeout: float = 300.0) -> None:
    waiting = iter(agents)

    async def join_some() -> None:
        for agent in waiting:
            await agent.join()

    async with asyncio.timeout(timeout):
        await asyncio.gather(*(join_some() for _ in range(at_a_time)))


@contextlib.asynccontextmanager
async def beating(agents: Sequence[VirtualAgent], *, every: float = 5.0) -> AsyncIterator[None]:
    """Heartbeats of all of them, evenly spread: a master that hears nothing for 40 s would give them up, and rightly."""

    async def beat() -> None:
        turns = 50
        while True:
            for turn in range(turns):
                for agent in agents[turn::turns]:
                    if agent.is_attached:
                        agent.beat()
                await asyncio.sleep(every / turns)

    task = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
