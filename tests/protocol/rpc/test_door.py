"""What has not shown the token is refused on its headers, has few streams and connections, and does not stay. What has is not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest

from dlrover.protocol.codec import QUESTION, VERDICT
from dlrover.protocol.messages.frames import Answer
from dlrover.protocol.messages.job import Ping, Pong, StopJob
from dlrover.protocol.rpc.client import ask
from dlrover.protocol.rpc.door import MAX_OF_ADDRESS, place_of
from dlrover.protocol.rpc.server import MasterServer
from dlrover.protocol.rpc.transport import AGENT_METHOD, ASK_METHOD, MAX_STREAMS, SERVICE, call_metadata, open_channel
from tests.floods import STRANGER
from tests.protocol.conftest import TOKEN, Agent, PlainDesk, Serve

DEADLINE = 60.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


class Silent:
    """A connection of a stranger."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def closed(self) -> None:
        """By the other side."""
        async with asyncio.timeout(DEADLINE):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65_536):
                    pass


@contextlib.asynccontextmanager
async def strangers(address: str, count: int, *, say: bytes = b"") -> AsyncIterator[list[Silent]]:
    host, port = address.rsplit(":", 1)
    opened = []
    try:
        for _ in range(count):
            opened.append(Silent(*await asyncio.open_connection(host, int(port), local_addr=(STRANGER, 0))))
            opened[-1].writer.write(say)
        yield opened
    finally:
        for each in opened:
            each.writer.transport.abort()


async def test_a_call_without_a_token_is_refused_before_its_body_comes(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel:
        call = channel.stream_unary(f"/{SERVICE}/{ASK_METHOD}")(metadata=call_metadata("wrong"))
        assert await asyncio.wait_for(call.code(), DEADLINE) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_method_that_there_is_not_is_refused_like_any_other(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE):
        for token, code in ((TOKEN, grpc.StatusCode.UNIMPLEMENTED), ("wrong", grpc.StatusCode.UNAUTHENTICATED)):
            for path in (f"/{SERVICE}/Nothing", "/grpc.health.v1.Health/Check"):
                call = channel.stream_unary(path)(metadata=call_metadata(token))
                assert await call.code() is code


async def test_an_end_instead_of_a_question_gets_a_clear_status(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel:
        call = channel.stream_unary(f"/{SERVICE}/{ASK_METHOD}")(metadata=call_metadata(TOKEN))
        await call.done_writing()
        assert await asyncio.wait_for(call.code(), DEADLINE) is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_is_compressed_is_not_expanded(serve: Serve) -> None:
    """The oldest gRPC that we allow expands a megabyte to a gigabyte before it looks at the limit."""
    _, address = await serve()
    question = QUESTION.encode(StopJob(message="x" * 100_000))
    async with open_channel(address, None) as channel:
        method = channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}")
        assert isinstance(VERDICT.decode(await method(question, metadata=call_metadata(TOKEN))), Answer)
        with pytest.raises(grpc.aio.AioRpcError, match="malformed"):
            await method(question, metadata=call_metadata(TOKEN), compression=grpc.Compression.Gzip)


async def test_a_connection_has_sixteen_streams(serve: Serve) -> None:
    _, address = await serve()
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE):
        open_stream = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")
        streams = [open_stream(metadata=call_metadata(TOKEN)) for _ in range(2 * MAX_STREAMS)]
        served = {asyncio.ensure_future(stream.initial_metadata()) for stream in streams}
        while sum(each.done() for each in served) < MAX_STREAMS:
            await asyncio.wait([each for each in served if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(await ask(address, Ping(), token=TOKEN, timeout=DEADLINE), Pong)
        assert sum(each.done() for each in served) == MAX_STREAMS == 16
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*served, return_exceptions=True)


async def test_who_shows_no_token_is_sent_away_and_who_has_stays(
    serve: Serve, desk: PlainDesk, connect: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    """Silent ones, half handshakes and whole ones; also where one socket listens for IPv4 and IPv6."""
    _, address = await serve()
    wide = MasterServer(token=TOKEN)
    both = f"127.0.0.1:{wide.bind('::' if socket.has_ipv6 else '0.0.0.0', 0)}"
    await wide.start(desk)
    try:
        agents = [connect(each) for each in (address, both)]
        for agent in agents:
            await agent.attached()
        async with contextlib.AsyncExitStack() as stack:
            opened = []
            for place in (address, both):
                for say in (b"", PREFACE[:5], PREFACE + NO_SETTINGS):
                    opened += await stack.enter_async_context(strangers(place, 1, say=say))
            await asyncio.gather(*(each.closed() for each in opened))
        assert "reason=silent" in caplog.text
        assert all(agent.attachments.empty() for agent in agents), "an agent had to come again"
        assert all(agent.channel.outage() == 0.0 for agent in agents)
    finally:
        await wide.stop()


async def test_an_address_has_few_connections_and_a_refused_one_none(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """All are closed in the end; that these were too many is told long before they count as silent."""
    _, address = await serve()
    async with strangers(address, MAX_OF_ADDRESS + 10) as opened:
        closing = [asyncio.ensure_future(each.closed()) for each in opened]
        while sum(each.done() for each in closing) < 10:
            await asyncio.wait([each for each in closing if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        assert "reason=too-many-of-address" in caplog.text
        for each in closing:
            each.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
    async with open_channel(address, None) as channel, asyncio.timeout(DEADLINE):
        method = channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}")
        with pytest.raises(grpc.aio.AioRpcError, match="token is missing or wrong"):
            await method(QUESTION.encode(Ping()), metadata=call_metadata("wrong"))
        while channel.get_state() is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


async def test_a_restarted_master_has_room_for_the_agents_that_it_expects(desk: PlainDesk) -> None:
    """All come at once from one address and are slow to speak; as many connections of strangers would be too many."""
    server = MasterServer(token=TOKEN)
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start(desk, num_expected=20)
    try:
        async with strangers(address, MAX_OF_ADDRESS + 20) as slow, strangers(address, 30) as more:
            closing = [asyncio.ensure_future(each.closed()) for each in (*slow, *more)]
            while sum(each.done() for each in closing) < 10:
                await asyncio.wait([each for each in closing if not each.done()], return_when=asyncio.FIRST_COMPLETED)
            assert isinstance(await ask(address, Ping(), token=TOKEN, timeout=DEADLINE), Pong)
            assert sum(each.done() for each in closing) == 10, "twice as many more as agents are expected"
            for each in closing:
                each.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
    finally:
        await server.stop()


async def test_refusals_are_told_ever_more_rarely(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    _, address = await serve()
    caplog.set_level(logging.INFO)
    async with open_channel(address, None) as channel:
        method = channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}")
        for _ in range(40):
            with pytest.raises(grpc.aio.AioRpcError):
                await method(QUESTION.encode(Ping()), metadata=call_metadata("wrong"), wait_for_ready=True)
    assert caplog.text.count("strangers refused") <= 6
    assert caplog.text.count("connections of strangers closed") <= 6


@pytest.mark.parametrize(
    ("peer", "place"),
    [
        ("ipv4:10.0.0.1:80", ("10.0.0.1", 80)),
        ("ipv6:%5B2001:db8::1%5D:80", ("2001:db8::1", 80)),
        ("ipv6:%5Bfe80::1%25eth0%5D:80", ("fe80::1%eth0", 80)),
        ("unknown", ("", 0)),
    ],
)
def test_every_name_of_a_peer_is_understood(peer: str, place: tuple[str, int]) -> None:
    assert place_of(peer) == place
