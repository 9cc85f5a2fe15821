"""A master's loop without decisions, behind a real server on a real port: what the wire is tested against."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
import pytest_asyncio

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # hostile bytes are expected here; C-core would log each of them

from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.codec import Question, Unreadable
from dlrover.protocol.messages.frames import Ack, Answer, Beat, FromAgent, Push, Refusal, Request
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    Desired,
    Done,
    Incarnation,
    JobTerms,
    Micros,
    NodeId,
    NodeRank,
    Pong,
    Reply,
    Wait,
)
from dlrover.protocol.rpc.client import AgentChannel
from dlrover.protocol.rpc.server import AgentStream, MasterServer

TOKEN = "s3cret-ü"


class PlainLoop:
    """Attaches everybody, answers Done, remembers what came. `answers` and `reply` may be set to decide otherwise."""

    def __init__(self) -> None:
        self.master_epoch = 1
        self.streams: list[AgentStream] = []
        self.attaches: list[Attach] = []
        self.requests: list[Request] = []
        self.seen: asyncio.Queue[FromAgent | Unreadable | str] = asyncio.Queue()
        self.answers: Callable[[Request], Answer | Refusal | None] = lambda r: Answer(id=r.id, body=Done())
        self.reply: Reply | None = None
        """To who asks once, without a stream; None: a `Pong`."""

    def receive(self, stream: AgentStream, parcels: Sequence[FromAgent | Unreadable]) -> None:
        for parcel in parcels:
            match parcel:
                case Request(body=Attach() as attach):
                    self.attaches.append(attach)
                    self.streams.append(stream)
                    stream.send(Answer(id=parcel.id, body=self.attached()))
                case Request():
                    self.requests.append(parcel)
                    if (answer := self.answers(parcel)) is not None:
                        stream.send(answer)
                case Unreadable():
                    stream.send(Refusal(id=parcel.id, code=parcel.code, message=parcel.message))
                case Ack() | Beat():
                    pass
            self.seen.put_nowait(parcel)

    def closed(self, stream: AgentStream) -> None:
        if stream in self.streams:
            self.streams.remove(stream)
        self.seen.put_nowait("closed")

    async def ask(self, question: Question) -> Reply:
        return Pong(job_name="job", master_epoch=self.master_epoch) if self.reply is None else self.reply

    def attached(self) -> Attached:
        return Attached(
            node=NodeId(7),
            node_rank=NodeRank(0),
            incarnation=Incarnation(1),
            master_epoch=self.master_epoch,
            job_name="job",
            now=Micros(1),
            desired=self.desired(1),
        )

    def desired(self, number: int) -> Desired:
        return Desired(number, self.master_epoch, Wait(f"level {number}"))

    def push(self, number: int) -> None:
        for stream in self.streams:
            stream.send(Push(self.desired(number)))

    async def until(self, kind: type | str) -> FromAgent | Unreadable | str:
        async with asyncio.timeout(30):
            while True:
                seen = await self.seen.get()
                if seen == kind or (isinstance(kind, type) and isinstance(seen, kind)):
                    return seen


class Agent:
    """An agent that only keeps what its channel told it."""

    def __init__(self, address: str, *, token: str = TOKEN, tls: TlsConfig | None = None) -> None:
        self.attachments: asyncio.Queue[Attached] = asyncio.Queue()
        self.levels: asyncio.Queue[Desired] = asyncio.Queue()
        self.channel = AgentChannel(
            address,
            token=token,
            tls=tls,
            attach=lambda: Attach(launch="l", host="h", terms=JobTerms(), local_world_size=1),
            on_attached=self.attachments.put_nowait,
            on_desired=self.levels.put_nowait,
        )
        self.running = asyncio.ensure_future(self.channel.run())

    async def attached(self) -> Attached:
        """The next attach, or what ended the channel."""
        waiting = asyncio.ensure_future(self.attachments.get())
        await asyncio.wait({waiting, self.running}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if self.running.done():
            waiting.cancel()
            self.running.result()
        return await asyncio.wait_for(waiting, 0.1)

    async def leave(self) -> None:
        await self.channel.close()
        await asyncio.wait({self.running}, timeout=10)


@pytest.fixture
def master_loop() -> PlainLoop:
    return PlainLoop()


Serve = Callable[..., Awaitable[tuple[MasterServer, str]]]


@pytest_asyncio.fixture
async def serve(master_loop: PlainLoop, reserved_port: int) -> AsyncIterator[Serve]:
    servers: list[MasterServer] = []

    async def start(
        port: int = reserved_port, *, token: str = TOKEN, tls: TlsConfig | None = None
    ) -> tuple[MasterServer, str]:
        server = MasterServer(token=token, tls=tls)
        bound = server.bind("127.0.0.1", port)
        await server.start(master_loop)
        servers.append(server)
        return server, f"127.0.0.1:{bound}"

    yield start
    for server in servers:
        await server.stop()


@pytest_asyncio.fixture
async def connect() -> AsyncIterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def start(address: str, **options: object) -> Agent:
        agents.append(Agent(address, **options))  # type: ignore[arg-type]
        return agents[-1]

    yield start
    for agent in agents:
        await agent.leave()
